from __future__ import annotations

import grpc
import pytest

from cocoon_rpc.errors import (
    CocoonError,
    GuestUnreachableError,
    NodeAtCapacityError,
    ProgramNotFoundError,
    SandboxNotFoundError,
)
from cocoonsandbox import APIError, Client, ExitError, Sandbox, SandboxError, SandboxTimeout, SilkdError
from tests.unit.sdk_py.conftest import Script, refuse

STATUS = {
    "INVALID_ARGUMENT": 400, "UNAUTHENTICATED": 401, "PERMISSION_DENIED": 403, "NOT_FOUND": 404,
    "ALREADY_EXISTS": 409, "FAILED_PRECONDITION": 409, "RESOURCE_EXHAUSTED": 429, "INTERNAL": 500,
    "UNIMPLEMENTED": 501, "UNAVAILABLE": 503,
}  # fmt: skip
# What a node says about a guest call by itself.
NODE_SAYS = {
    "TOKEN_REJECTED", "SANDBOX_NOT_FOUND", "SANDBOX_STATE_CONFLICT", "GUEST_UNREACHABLE", "NODE_STOPPING",
    "METHOD_NOT_RELAYED",
}  # fmt: skip


@pytest.mark.parametrize("reason", sorted(CocoonError.REASONS))
def test_node_error_of_each_reason_becomes_an_api_error(script: Script, client: Client, reason: str) -> None:
    sent = CocoonError.REASONS[reason](retry_after=1.5)
    script.on_info = lambda request, context: refuse(context, sent)
    with pytest.raises(APIError) as caught:
        client.info()
    error = caught.value
    assert error.status == (502 if reason == "GUEST_UNREACHABLE" else STATUS[sent.code.name])
    assert (error.verb, error.reason, error.retry_after) == ("info", reason, 1.5)
    assert error.message == sent.message
    assert error.metadata == sent.metadata
    assert reason in str(error)


@pytest.mark.parametrize("reason", sorted(CocoonError.REASONS))
def test_guest_error_of_each_reason_is_the_guests_or_the_nodes(
    script: Script, sandbox: Sandbox, reason: str
) -> None:
    sent = CocoonError.REASONS[reason]()
    script.on_exec = lambda requests, context: refuse(context, sent)
    with pytest.raises(SandboxError) as caught:
        sandbox.exec("true")
    expected = APIError if reason in NODE_SAYS else SilkdError
    assert type(caught.value) is expected
    assert caught.value.reason == reason


@pytest.mark.parametrize(
    ("sent", "kind"),
    [
        (ProgramNotFoundError(program="nope"), "bad_request"),
        (CocoonError.REASONS["FILE_NOT_FOUND"](path="/nope"), "not_found"),
        (CocoonError.REASONS["FILE_NOT_REGULAR"](path="/dev/null", kind="device"), "bad_request"),
        (CocoonError.REASONS["FILE_ACCESS_DENIED"](path="/x"), "bad_request"),
        (CocoonError.REASONS["FILE_SYSTEM_FULL"](path="/x"), "internal"),
        (CocoonError.REASONS["INTERNAL"](incident_id="1"), "internal"),
    ],
    ids=lambda value: value if isinstance(value, str) else value.reason_name(),
)
def test_guest_error_has_the_kind_of_its_code_and_its_facts(
    script: Script, sandbox: Sandbox, sent: CocoonError, kind: str
) -> None:
    script.on_read = lambda request, context: refuse(context, sent)
    with pytest.raises(SilkdError) as caught:
        sandbox.read_file("/x")
    assert caught.value.kind == kind
    assert caught.value.metadata == sent.metadata


def test_guest_that_does_not_know_the_verb_is_unimplemented(script: Script, sandbox: Sandbox) -> None:
    script.on_read = lambda request, context: context.abort(grpc.StatusCode.UNIMPLEMENTED, "no such method")
    with pytest.raises(SilkdError) as caught:
        sandbox.read_file("/x")
    assert caught.value.kind == "unimplemented"


@pytest.mark.parametrize(
    ("code", "status"), [("UNAVAILABLE", 0), ("UNKNOWN", 0), ("INTERNAL", 500), ("UNAUTHENTICATED", 401)]
)
def test_status_without_a_reason_keeps_its_meaning(
    script: Script, client: Client, code: str, status: int
) -> None:
    script.on_info = lambda request, context: context.abort(grpc.StatusCode[code], "a proxy says so")
    with pytest.raises(APIError) as caught:
        client.info()
    assert (caught.value.status, caught.value.reason) == (status, "")
    assert "a proxy says so" in str(caught.value)


def test_timeout_is_also_pythons_own() -> None:
    assert issubclass(SandboxTimeout, TimeoutError)
    assert issubclass(SandboxTimeout, SandboxError)


def test_facts_are_in_the_error(script: Script, client: Client) -> None:
    script.on_claim = lambda request, context: refuse(
        context, NodeAtCapacityError(resource="disk", cause="none left", retry_after=30.0)
    )
    with pytest.raises(APIError, match="none left") as caught:
        client.new("rt")
    assert caught.value.metadata == {"resource": "disk", "cause": "none left"}
    assert caught.value.retry_after == 30.0


def test_exit_error_shows_the_end_of_stderr_only() -> None:
    error = ExitError(3, "x" * 10_000 + "the reason\n", "out")
    assert str(error).endswith("the reason")
    assert len(str(error)) < 600
    assert (error.code, error.stdout) == (3, "out")
    assert str(ExitError(137, "")) == "exit status 137"


@pytest.mark.parametrize("sent", [SandboxNotFoundError(sandbox="sandboxes/x"), GuestUnreachableError()])
def test_errors_never_hold_a_token(script: Script, sandbox: Sandbox, sent: CocoonError) -> None:
    script.on_exec = lambda requests, context: refuse(context, sent)
    with pytest.raises(APIError) as caught:
        sandbox.exec("true")
    assert sandbox.token not in f"{caught.value!r} {caught.value} {vars(caught.value)}"
