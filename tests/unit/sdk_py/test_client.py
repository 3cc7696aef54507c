from __future__ import annotations

import socket
import threading
import time
import uuid
from typing import Any

import grpc
import pytest

from cocoon.node.v1 import node_service_pb2, pool_service_pb2, sandbox_service_pb2
from cocoon.types.v1 import sandbox_pb2
from cocoon_rpc.errors import ClaimLimitReachedError, NodeStoppingError
from cocoonsandbox import APIError, Client, SandboxError, SandboxTimeout
from cocoonsandbox import client as client_module
from tests.unit.sdk_py.conftest import ROOT_TOKEN, SANDBOX_ID, SANDBOX_TOKEN, Script, refuse


def test_new_sends_what_was_asked_with_the_root_token_and_a_uuid(script: Script, client: Client) -> None:
    client.new("rt", "egress", "2xlarge", 90, "job-7")
    (call,) = script.of("Claim")
    assert call.metadata["authorization"] == f"Bearer {ROOT_TOKEN}"
    request = call.request
    assert uuid.UUID(request.request_id).version == 4
    assert (request.template, request.net, request.size) == (
        "rt", sandbox_pb2.NET_EGRESS, sandbox_pb2.SIZE_2XLARGE,
    )  # fmt: skip
    assert (request.ttl.seconds, request.claim_ref) == (90, "job-7")


def test_new_has_the_defaults_of_the_contract(script: Script, client: Client) -> None:
    client.new("rt")
    request = script.of("Claim")[0].request
    assert (request.net, request.size) == (sandbox_pb2.NET_NONE, sandbox_pb2.SIZE_SMALL)
    assert (request.ttl.ToNanoseconds(), request.claim_ref) == (0, "")


def test_new_returns_the_facts_of_the_reply(client: Client) -> None:
    sandbox = client.new("rt")
    assert (sandbox.id, sandbox.token) == (SANDBOX_ID, SANDBOX_TOKEN)
    assert (sandbox.tier, sandbox.isolation) == ("warm", "vm_emulated")
    assert sandbox.provision_seconds == pytest.approx(0.00025)
    assert sandbox.template_digest == "sha256:" + "0" * 64


@pytest.mark.parametrize("arguments", [{"net": "lan"}, {"size": "tiny"}, {"net": ""}, {"size": "SMALL"}])
def test_new_refuses_a_lane_or_size_that_does_not_exist_without_a_call(
    script: Script, client: Client, arguments: dict[str, str]
) -> None:
    with pytest.raises(ValueError, match="one of"):
        client.new("rt", **arguments)
    assert script.calls == []


def test_client_without_a_token_sends_none(script: Script) -> None:
    with Client(script.address) as client:
        client.new("rt")
    assert "authorization" not in script.of("Claim")[0].metadata


def test_claim_whose_reply_got_lost_is_asked_for_again_under_the_same_id(
    script: Script, client: Client
) -> None:
    def lose_two(request: Any, context: grpc.ServicerContext) -> Any:
        if len(script.of("Claim")) <= 2:
            context.abort(grpc.StatusCode.UNAVAILABLE, "connection reset")
        return script.granted()

    script.on_claim = lose_two
    assert client.new("rt").id == SANDBOX_ID
    claims = [call.request for call in script.of("Claim")]
    assert len(claims) == 3
    assert claims[0] == claims[1] == claims[2]


@pytest.mark.parametrize("refusal", [ClaimLimitReachedError(limit=1), NodeStoppingError(node="nodes/a")])
def test_claim_that_the_node_refused_is_not_repeated(script: Script, client: Client, refusal: Any) -> None:
    script.on_claim = lambda request, context: refuse(context, refusal)
    with pytest.raises(APIError) as caught:
        client.new("rt")
    assert caught.value.reason == refusal.reason_name()
    assert len(script.of("Claim")) == 1


def test_two_claims_have_different_request_ids(script: Script, client: Client) -> None:
    client.new("rt")
    client.new("rt")
    first, second = script.of("Claim")
    assert first.request.request_id != second.request.request_id


def test_claim_gives_up_on_a_node_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "_UNREACHABLE_LIMIT_S", 0.2)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        began = time.monotonic()
        with Client(address, timeout=60) as client, pytest.raises(APIError) as caught:
            client.new("rt")
    assert caught.value.status == 0
    assert time.monotonic() - began < 10


def test_claim_ends_at_its_deadline(script: Script, client: Client) -> None:
    done = threading.Event()
    script.on_claim = lambda request, context: done.wait(20)
    try:
        with pytest.raises(SandboxTimeout):
            client.new("rt", deadline=time.monotonic() + 0.2)
        with pytest.raises(SandboxTimeout):
            client.new("rt", deadline=time.monotonic() - 1)
    finally:
        done.set()
    assert len(script.of("Claim")) == 1


def test_claim_retries_end_at_the_deadline(script: Script, client: Client) -> None:
    script.on_claim = lambda request, context: context.abort(grpc.StatusCode.UNAVAILABLE, "gone")
    began = time.monotonic()
    with pytest.raises(APIError):
        client.new("rt", deadline=began + 0.3)
    assert time.monotonic() - began < 5
    assert len(script.of("Claim")) > 1


@pytest.mark.parametrize("missing", ["name", "token"])
def test_claim_reply_without_a_sandbox_is_an_error(script: Script, client: Client, missing: str) -> None:
    reply = script.granted()
    (reply.sandbox if missing == "name" else reply).ClearField(missing)
    script.on_claim = lambda request, context: reply
    with pytest.raises(APIError) as caught:
        client.new("rt")
    assert caught.value.status == 0


def test_sandboxes_reads_every_page(script: Script, client: Client) -> None:
    def page(request: Any, context: grpc.ServicerContext) -> Any:
        index = int(request.page_token or 0)
        return sandbox_service_pb2.ListResponse(
            sandboxes=[sandbox_pb2.Sandbox(name=f"sandboxes/{index}")],
            next_page_token=str(index + 1) if index < 2 else "",
        )

    script.on_list = page
    found = client.sandboxes()
    assert [entry["name"] for entry in found] == ["sandboxes/0", "sandboxes/1", "sandboxes/2"]
    assert found[0]["tier"] == "CLAIM_TIER_UNSPECIFIED"
    assert all(call.metadata["authorization"] == f"Bearer {ROOT_TOKEN}" for call in script.of("List"))


def test_info_is_the_nodes_answer_zeros_included(script: Script, client: Client) -> None:
    pool = pool_service_pb2.Pool(spec=pool_service_pb2.PoolSpec(template="rt"))
    script.on_info = lambda request, context: node_service_pb2.GetInfoResponse(name="nodes/a", pools=[pool])
    info = client.info()
    assert (info["name"], info["claimed"], info["pools"][0]["warm"]) == ("nodes/a", 0, 0)


@pytest.mark.parametrize("arguments", [{"timeout": 0}, {"timeout": -1}, {"keep_alive": -1}])
def test_client_refuses_times_that_are_none(arguments: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="timeout"):
        Client("a:1", **arguments)


def test_client_never_shows_its_token(client: Client) -> None:
    assert ROOT_TOKEN not in f"{client!r} {client}"


def test_closed_client_says_so(client: Client) -> None:
    client.close()
    client.close()
    with pytest.raises(SandboxError, match="closed"):
        client.info()


def test_silent_node_ends_at_the_clients_timeout(script: Script) -> None:
    done = threading.Event()
    script.on_info = lambda request, context: done.wait(20)
    try:
        with Client(script.address, timeout=0.2) as client, pytest.raises(SandboxTimeout):
            client.info()
    finally:
        done.set()


def test_client_serves_many_threads(script: Script, client: Client) -> None:
    found: list[str] = []

    def work() -> None:
        found.extend(client.new("rt").id for _ in range(20))

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(found) == 160
    assert len({call.request.request_id for call in script.of("Claim")}) == 160
