from __future__ import annotations

import logging
import time
from datetime import UTC, datetime

import grpc
import pytest

from cocoon.node.v1 import sandbox_service_pb2
from cocoon_rpc.errors import InternalError, SandboxNotFoundError
from cocoonsandbox import APIError, Client, ExitError, Sandbox
from tests.unit.sdk_py.conftest import (
    ROOT_TOKEN,
    SANDBOX_ID,
    SANDBOX_TOKEN,
    Script,
    exited,
    refuse,
    stderr,
    stdout,
)


def test_leaving_the_block_releases_with_the_sandboxs_own_token(script: Script, client: Client) -> None:
    with client.new("rt") as sandbox:
        assert script.of("Release") == []
    (call,) = script.of("Release")
    assert call.request.name == f"sandboxes/{sandbox.id}"
    assert call.metadata["authorization"] == f"Bearer {SANDBOX_TOKEN}"


def test_release_of_a_sandbox_that_is_gone_is_fine(script: Script, client: Client) -> None:
    script.on_release = lambda request, context: refuse(context, SandboxNotFoundError(sandbox=request.name))
    with client.new("rt") as sandbox:
        pass
    sandbox.close()
    assert len(script.of("Release")) == 2


def test_release_failure_is_raised_after_a_clean_block(script: Script, client: Client) -> None:
    script.on_release = lambda request, context: refuse(context, InternalError(incident_id="1"))
    with pytest.raises(APIError) as caught, client.new("rt"):
        pass
    assert (caught.value.verb, caught.value.status) == ("release", 500)


def test_release_failure_never_hides_the_error_of_the_block(
    script: Script, client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    script.on_release = lambda request, context: refuse(context, InternalError(incident_id="1"))
    with (
        caplog.at_level(logging.WARNING, "cocoonsandbox"),
        pytest.raises(ZeroDivisionError),
        client.new("rt"),
    ):
        raise ZeroDivisionError
    assert len(script.of("Release")) == 1
    assert "release_failed" in caplog.text
    assert SANDBOX_ID in caplog.text
    assert SANDBOX_TOKEN not in caplog.text


def test_closed_client_does_not_hide_the_error_of_the_block(client: Client) -> None:
    with pytest.raises(ZeroDivisionError), client.new("rt"):
        client.close()
        raise ZeroDivisionError


def test_sdk_never_configures_logging() -> None:
    logger = logging.getLogger("cocoonsandbox")
    assert (logger.handlers, logger.level, logger.propagate) == ([], logging.NOTSET, True)


def test_repr_never_shows_the_token(sandbox: Sandbox) -> None:
    assert SANDBOX_TOKEN not in f"{sandbox!r} {sandbox}"
    assert SANDBOX_ID in repr(sandbox)


@pytest.mark.parametrize("zone", ["UTC", "Asia/Tokyo", "America/New_York"])
def test_deadline_is_the_same_instant_in_every_time_zone(
    client: Client, monkeypatch: pytest.MonkeyPatch, zone: str
) -> None:
    monkeypatch.setenv("TZ", zone)
    time.tzset()
    try:
        assert client.new("rt").deadline == datetime.fromtimestamp(1_800_000_000, UTC)
    finally:
        monkeypatch.undo()
        time.tzset()


def test_tier_and_isolation_unknown_to_this_sdk_are_tolerated(script: Script, client: Client) -> None:
    reply = script.granted()
    reply.sandbox.tier = 99
    reply.sandbox.isolation = 99
    script.on_claim = lambda request, context: reply
    sandbox = client.new("rt")
    assert (sandbox.tier, sandbox.isolation) == ("99", "99")


def test_guest_calls_go_to_the_guest_endpoint_with_id_and_sandbox_token(
    script: Script, client: Client
) -> None:
    reply = script.granted()
    with Client(script.address, ROOT_TOKEN) as other:
        reply.sandbox.guest_endpoint = script.address.replace("127.0.0.1", "localhost")
        script.on_claim = lambda request, context: reply
        other.new("rt").exec("true")
    (call,) = script.of("Exec")
    assert call.metadata["cocoon-sandbox-id"] == SANDBOX_ID
    assert call.metadata["authorization"] == f"Bearer {SANDBOX_TOKEN}"
    reply.sandbox.guest_endpoint = "127.0.0.1:1"
    with pytest.raises(APIError) as caught:
        client.new("rt").exec("true")
    assert caught.value.status == 0


def test_attached_handle_asks_once_where_guest_calls_go(script: Script, client: Client) -> None:
    attached = client.attach(script.address, SANDBOX_ID, SANDBOX_TOKEN)
    assert script.calls == []
    assert (attached.deadline, attached.tier, attached.owner) == (None, "", script.address)
    attached.exec("true")
    attached.exec("true")
    (asked,) = script.of("Get")
    assert asked.metadata["authorization"] == f"Bearer {SANDBOX_TOKEN}"
    assert attached.tier == "warm"
    assert len(script.of("Exec")) == 2


def test_attached_handle_of_a_sandbox_that_is_gone_says_so(script: Script, client: Client) -> None:
    script.on_get = lambda request, context: refuse(context, SandboxNotFoundError(sandbox=request.name))
    attached = client.attach(script.address, SANDBOX_ID, SANDBOX_TOKEN)
    with pytest.raises(APIError) as caught:
        attached.read_file("/x")
    assert (caught.value.status, caught.value.reason) == (404, "SANDBOX_NOT_FOUND")


def test_attached_handle_can_release_without_asking(script: Script, client: Client) -> None:
    client.attach(script.address, SANDBOX_ID, SANDBOX_TOKEN).close()
    assert [call.method for call in script.calls] == ["Release"]


def test_exec_returns_stdout_with_characters_cut_across_chunks(script: Script, sandbox: Sandbox) -> None:
    text = "naïve 沙箱 🏜️\n" * 100
    data = text.encode()
    script.on_exec = lambda requests, context: iter(
        [*(stdout(data[at : at + 1]) for at in range(len(data))), exited(0)]
    )
    assert sandbox.exec("cat") == text


def test_exec_replaces_what_is_not_utf8(script: Script, sandbox: Sandbox) -> None:
    script.on_exec = lambda requests, context: iter([stdout(b"a\xff\xfeb"), exited(0)])
    assert sandbox.exec("cat") == "a\N{REPLACEMENT CHARACTER}\N{REPLACEMENT CHARACTER}b"


def test_exec_of_a_failing_program_raises_with_all_it_wrote(script: Script, sandbox: Sandbox) -> None:
    script.on_exec = lambda requests, context: iter([stdout(b"half"), stderr(b"no such luck\n"), exited(7)])
    with pytest.raises(ExitError, match="exit status 7: no such luck") as caught:
        sandbox.exec("false")
    error = caught.value
    assert (error.code, error.stderr, error.stdout) == (7, "no such luck\n", "half")


def test_run_refuses_one_string_for_argv(script: Script, sandbox: Sandbox) -> None:
    with pytest.raises(TypeError, match="sequence of words"):
        sandbox.run("ls -l")
    assert script.of("Exec") == []


def test_release_is_bounded_when_the_node_is_silent(
    script: Script, sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cocoonsandbox.sandbox._RELEASE_LIMIT_S", 0.2)

    def hang(request: object, context: grpc.ServicerContext) -> sandbox_service_pb2.ReleaseResponse:
        while context.is_active():
            time.sleep(0.01)
        return sandbox_service_pb2.ReleaseResponse()

    script.on_release = hang
    with pytest.raises(TimeoutError):
        sandbox.close()
