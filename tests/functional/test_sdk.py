"""The SDK against a real node, on both engines."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

import grpc
import pytest

from cocoonsandbox import APIError, Client, ExitError, Sandbox, SandboxTimeout, SilkdError
from tests.framework.node import NodeProcess

MIB = 2**20


@pytest.fixture(scope="module")
def client(node_any: NodeProcess) -> Iterator[Client]:
    """A client of the node with its root token."""
    with Client(node_any.address, node_any.root_token) as made:
        yield made


@pytest.fixture(scope="module")
def sandbox(client: Client) -> Iterator[Sandbox]:
    """One sandbox that the tests of this file share."""
    with client.new("rt", ttl_seconds=3600) as made:
        yield made


def ids(client: Client) -> set[str]:
    return {entry["name"].removeprefix("sandboxes/") for entry in client.sandboxes()}


def counting(client: Client, sandbox: Sandbox, pattern: str) -> int:
    """How many processes in the guest have a command line that contains the pattern."""
    lines = sandbox.exec("ps", "-eo", "args=").splitlines()
    return sum(pattern in line for line in lines)


# Claims


def test_claim_tells_its_tier_isolation_time_and_lease(client: Client) -> None:
    with client.new("rt", ttl_seconds=60, claim_ref="job-7") as sandbox:
        assert sandbox.tier in {"warm", "clone", "cold"}
        assert sandbox.isolation in {"vm_hardware", "vm_emulated", "none"}
        assert 0 < sandbox.provision_seconds < 60
        assert sandbox.template_digest is not None
        assert sandbox.template_digest.startswith("sha256:")
        assert sandbox.deadline is not None
        assert abs(sandbox.deadline - datetime.now(UTC) - timedelta(seconds=60)) < timedelta(seconds=30)
        (entry,) = [e for e in client.sandboxes() if e["name"] == f"sandboxes/{sandbox.id}"]
        assert (entry["claim_ref"], entry["template_digest"]) == ("job-7", sandbox.template_digest)


def test_leaving_the_block_gives_the_sandbox_back(client: Client) -> None:
    with client.new("rt") as sandbox:
        assert sandbox.id in ids(client)
    assert sandbox.id not in ids(client)
    with pytest.raises(APIError) as caught:
        sandbox.exec("true")
    assert caught.value.status in {401, 404}
    sandbox.close()


def test_failed_block_gives_the_sandbox_back_and_keeps_its_error(client: Client) -> None:
    with pytest.raises(ZeroDivisionError), client.new("rt") as sandbox:
        raise ZeroDivisionError
    assert sandbox.id not in ids(client)


def test_lost_claim_reply_costs_no_second_sandbox(
    client: Client, node_any: NodeProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first reply is thrown away on the client's side; the repeat gets the same sandbox."""
    before = ids(client)
    seen: list[str] = []
    unary = grpc._channel._UnaryUnaryMultiCallable.__call__

    class Lost(grpc.RpcError):
        def code(self) -> grpc.StatusCode:
            return grpc.StatusCode.UNAVAILABLE

        def details(self) -> str:
            return "connection reset"

        def trailing_metadata(self) -> tuple[()]:
            return ()

    def lose_first(self: object, request: object, **options: object) -> object:
        answer = unary(self, request, **options)
        if hasattr(request, "template"):
            seen.append(answer.sandbox.name)
            if len(seen) == 1:
                raise Lost
        return answer

    monkeypatch.setattr(grpc._channel._UnaryUnaryMultiCallable, "__call__", lose_first)
    with client.new("rt") as sandbox:
        assert seen == [f"sandboxes/{sandbox.id}"] * 2
        assert ids(client) - before == {sandbox.id}
        assert sandbox.exec("echo", "here") == "here\n"


def test_info_shows_engine_pools_and_templates(client: Client) -> None:
    info = client.info()
    assert info["engine"]["name"] in {"qemu", "local"}
    assert "rt" in [pool["spec"]["template"] for pool in info["pools"]]
    assert {"base", "rt"} <= {entry["template"] for entry in info["templates"]}


@pytest.mark.parametrize(
    ("arguments", "status", "reason"),
    [
        ({"template": "nope"}, 404, "TEMPLATE_NOT_FOUND"),
        ({"template": "../rt"}, 400, "INVALID_FIELD"),
        ({"template": ""}, 400, "INVALID_FIELD"),
        ({"template": "rt", "net": "egress"}, 409, "LANE_UNAVAILABLE"),
        ({"template": "rt", "ttl_seconds": -1}, 400, "INVALID_FIELD"),
        ({"template": "rt", "ttl_seconds": 86_401}, 400, "INVALID_FIELD"),
    ],
)
def test_claim_of_what_cannot_be_is_a_typed_error(
    client: Client, arguments: dict[str, object], status: int, reason: str
) -> None:
    before = ids(client)
    with pytest.raises(APIError) as caught:
        client.new(**arguments)
    assert (caught.value.status, caught.value.reason) == (status, reason)
    assert ids(client) == before


# Tokens


@pytest.mark.parametrize("token", ["", "wrong-token-of-the-tests"])
def test_wrong_root_token_is_401_without_detail(node_any: NodeProcess, token: str) -> None:
    with Client(node_any.address, token) as stranger:
        for call in (stranger.info, stranger.sandboxes, lambda: stranger.new("rt")):
            with pytest.raises(APIError) as caught:
                call()
            assert (caught.value.status, caught.value.reason) == (401, "TOKEN_REJECTED")
            assert caught.value.metadata == {}


def test_foreign_sandbox_and_unknown_sandbox_look_the_same(
    client: Client, sandbox: Sandbox, node_any: NodeProcess
) -> None:
    with client.new("rt") as other:
        errors = []
        for sandbox_id in (sandbox.id, "sb_" + "a" * 26):
            foreign = client.attach(node_any.address, sandbox_id, other.token)
            with pytest.raises(APIError) as caught:
                foreign.exec("true")
            said = str(caught.value).replace(sandbox_id, "<id>")
            errors.append((caught.value.status, caught.value.reason, said, sorted(caught.value.metadata)))
        assert errors[0] == errors[1]


def test_attached_handle_works_with_id_and_token_alone(
    client: Client, sandbox: Sandbox, node_any: NodeProcess
) -> None:
    with Client(node_any.address) as tenant:
        attached = tenant.attach(node_any.address, sandbox.id, sandbox.token)
        assert attached.exec("hostname") == sandbox.exec("hostname")
        assert (attached.deadline, attached.tier) == (sandbox.deadline, sandbox.tier)


# Programs


def test_exec_honours_cwd_env_user_and_stdin(sandbox: Sandbox) -> None:
    out = sandbox.exec(
        "sh", "-c", 'pwd; echo "$GREETING"; id -un; cat', cwd="/tmp", env={"GREETING": "grüß dich"},
        user="sandbox", stdin="沙箱".encode(),
    )  # fmt: skip
    assert out == "/tmp\ngrüß dich\nsandbox\n沙箱"


def test_exec_of_a_failing_program_is_an_exit_error(sandbox: Sandbox) -> None:
    with pytest.raises(ExitError) as caught:
        sandbox.exec("sh", "-c", "echo out; echo err >&2; exit 7")
    assert (caught.value.code, caught.value.stdout, caught.value.stderr) == (7, "out\n", "err\n")


def test_death_by_signal_is_128_and_its_number(sandbox: Sandbox) -> None:
    assert sandbox.run(["sh", "-c", "kill -9 $$"]) == 137
    assert sandbox.run(["sh", "-c", "kill -TERM $$"]) == 143


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"argv": ["no-such-program"]}, "PROGRAM_NOT_FOUND"),
        ({"argv": ["/etc/passwd"]}, "PROGRAM_NOT_EXECUTABLE"),
        ({"argv": ["true"], "cwd": "/nope"}, "CWD_NOT_USABLE"),
        ({"argv": ["true"], "cwd": "relative"}, "INVALID_FIELD"),
        ({"argv": ["true"], "user": "nobody-here"}, "USER_NOT_FOUND"),
        ({"argv": []}, "INVALID_FIELD"),
        ({"argv": ["a\0b"]}, "INVALID_FIELD"),
    ],
)
def test_program_that_cannot_start_is_the_guests_bad_request(
    sandbox: Sandbox, arguments: dict[str, object], reason: str
) -> None:
    with pytest.raises(SilkdError) as caught:
        sandbox.run(**arguments)
    assert (caught.value.kind, caught.value.reason) == ("bad_request", reason)


def test_run_streams_both_outputs_byte_for_byte(sandbox: Sandbox) -> None:
    data = os.urandom(2 * MIB + 7)
    out, err = bytearray(), bytearray()
    code = sandbox.run(
        ["sh", "-c", "tee /dev/stderr; exit 3"], stdin=data, on_stdout=out.extend, on_stderr=err.extend
    )
    assert code == 3
    assert out == data
    assert err == data


def test_timeout_kills_the_group_and_keeps_what_was_written(client: Client, sandbox: Sandbox) -> None:
    seen = bytearray()
    began = time.monotonic()
    with pytest.raises(SandboxTimeout):
        sandbox.run(["sh", "-c", "echo partial; sleep 4711 & sleep 4711"], on_stdout=seen.extend, timeout=1.0)
    assert time.monotonic() - began < 8
    assert seen == b"partial\n"
    assert counting(client, sandbox, "sleep 4711") == 0


def test_callback_that_raises_kills_the_group(client: Client, sandbox: Sandbox) -> None:
    def stop(data: bytes) -> None:
        raise LookupError

    with pytest.raises(LookupError):
        sandbox.run(["sh", "-c", "echo go; sleep 4712 & sleep 4712"], on_stdout=stop)
    deadline = time.monotonic() + 5
    while counting(client, sandbox, "sleep 4712"):
        assert time.monotonic() < deadline, "the group outlived its call"


def test_release_ends_a_running_program_with_a_typed_error(client: Client) -> None:
    with client.new("rt") as sandbox:
        with pytest.raises(APIError) as caught:
            sandbox.run(["sh", "-c", "echo go; sleep 600"], on_stdout=lambda data: sandbox.close())
        assert caught.value.status in {0, 404, 502, 503}


def test_many_threads_share_a_sandbox(sandbox: Sandbox) -> None:
    answers: list[str] = []
    threads = [
        threading.Thread(target=lambda n=n: answers.append(sandbox.exec("echo", str(n)))) for n in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(answers) == [f"{n}\n" for n in range(8)]


# Files


@pytest.mark.parametrize("size", [0, 1, MIB, 8 * MIB])
def test_file_comes_back_as_it_was_written(sandbox: Sandbox, size: int) -> None:
    data = os.urandom(size)
    sandbox.write_file("/root/data", data)
    assert sandbox.read_file("/root/data") == data
    assert sandbox.exec("stat", "-c", "%s", "/root/data") == f"{size}\n"


def test_text_and_mode_reach_the_guest(sandbox: Sandbox) -> None:
    sandbox.write_file("/root/run me", "#!/bin/sh\necho 'ça va'\n", mode=0o755)
    assert sandbox.exec("/root/run me") == "ça va\n"
    assert sandbox.exec("stat", "-c", "%a %U", "/root/run me") == "755 root\n"


@pytest.mark.parametrize(
    ("path", "kind", "reason"),
    [
        ("/nope", "not_found", "FILE_NOT_FOUND"),
        ("/etc", "bad_request", "FILE_NOT_REGULAR"),
        ("/dev/zero", "bad_request", "FILE_NOT_REGULAR"),
        ("relative", "bad_request", "INVALID_FIELD"),
        ("/a\0b", "bad_request", "INVALID_FIELD"),
        ("", "bad_request", "INVALID_FIELD"),
    ],
)
def test_read_of_what_is_no_file_is_typed(sandbox: Sandbox, path: str, kind: str, reason: str) -> None:
    with pytest.raises(SilkdError) as caught:
        sandbox.read_file(path)
    assert (caught.value.kind, caught.value.reason) == (kind, reason)


def test_write_without_a_parent_is_typed(sandbox: Sandbox) -> None:
    with pytest.raises(SilkdError) as caught:
        sandbox.write_file("/nope/x", b"x")
    assert (caught.value.kind, caught.value.reason) == ("not_found", "FILE_NOT_FOUND")
