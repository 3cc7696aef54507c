"""Who is let in, by the contract's rules."""

from __future__ import annotations

from typing import Any

import pytest

from cocoon_rpc.errors import SandboxNotFoundError, TokenRejectedError
from nodeagent.api.access import Access, Principal
from nodeagent.claims.ids import token_sha256

ROOT, OWN = "the-root-token-of-it", "a-sandbox-token"
OWNER = Principal(root=False, sandbox_id="sb_x")
CLAIM = "/cocoon.node.v1.SandboxService/Claim"
GET = "/cocoon.node.v1.SandboxService/Get"
EXEC = "/cocoon.guest.v1.ProcessService/Exec"


def access(root: str | None = ROOT) -> Access:
    return Access(root, {token_sha256(OWN): "sb_x"}.get)


def bearing(*tokens: str) -> Any:
    return tuple(("authorization", f"Bearer {token}") for token in tokens)


@pytest.mark.parametrize(
    ("token", "method", "who"),
    [
        (ROOT, CLAIM, Principal(root=True)),
        (ROOT, GET, Principal(root=True)),
        (OWN, CLAIM, None),
        (OWN, GET, OWNER),
        (OWN, EXEC, OWNER),
        (ROOT + "x", CLAIM, None),
        ("", CLAIM, None),
        ("\udcff", GET, None),
    ],
)
def test_token_and_rule_decide(token: str, method: str, who: Principal | None) -> None:
    if who is None:
        with pytest.raises(TokenRejectedError) as caught:
            access().admit(bearing(token), method)
        assert caught.value.metadata == {}
    else:
        assert access().admit(bearing(token), method) == who


@pytest.mark.parametrize(
    "metadata",
    [
        (),
        bearing(ROOT, ROOT),
        bearing(ROOT, OWN),
        (("authorization", ROOT),),
        (("authorization", f"bearer {ROOT}"),),
        (("authorization", f"Basic {ROOT}"),),
        (("authorization", b"Bearer " + ROOT.encode()),),
        (("x-authorization", f"Bearer {ROOT}"),),
    ],
)
def test_anything_but_one_bearer_token_is_nobody(metadata: Any) -> None:
    assert access().principal(metadata) is None


def test_without_a_root_token_everybody_here_is_root_but_a_wrong_token_is_nobody() -> None:
    assert access(None).principal(()) == Principal(root=True)
    assert access(None).principal(bearing(OWN)) == OWNER
    assert access(None).principal(bearing("wrong")) is None


def test_a_sandbox_token_opens_its_own_sandbox_only() -> None:
    OWNER.require("sb_x")
    Principal(root=True).require("sb_y")
    with pytest.raises(SandboxNotFoundError, match="sandboxes/sb_y"):
        OWNER.require("sb_y")
