from __future__ import annotations

import itertools
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from cocoon.guest.v1 import process_service_pb2 as pb
from cocoonsandbox import APIError, Client, ProtocolError, Sandbox, SandboxTimeout
from cocoonsandbox import process as process_module
from tests.unit.sdk_py.conftest import SANDBOX_ID, SANDBOX_TOKEN, Script, exited, stderr, stdout


def serve_until_cancelled(context: grpc.ServicerContext, ended: threading.Event) -> None:
    """Makes `ended` say that the call is over, whoever ended it."""
    context.add_callback(ended.set)


def echo(requests: Iterator[Any], context: grpc.ServicerContext) -> Iterator[Any]:
    """A `cat`: sends every byte of its input back."""
    for request in requests:
        if request.WhichOneof("message") == "stdin":
            yield stdout(request.stdin.data)
    yield exited(0)


def test_start_carries_everything_that_was_asked(script: Script, sandbox: Sandbox) -> None:
    sandbox.run(["a", "b c", ""], cwd="/tmp", env={"K": "v"}, user="sandbox", timeout=1.5)
    start = script.of("Exec")[0].request.start
    assert (list(start.argv), start.cwd, dict(start.env), start.user) == (
        ["a", "b c", ""], "/tmp", {"K": "v"}, "sandbox",
    )  # fmt: skip
    assert (start.timeout.ToNanoseconds(), start.stdin) == (1_500_000_000, False)


def test_start_without_a_timeout_has_none(script: Script, sandbox: Sandbox) -> None:
    sandbox.run(["true"])
    assert not script.of("Exec")[0].request.start.HasField("timeout")


def test_output_goes_to_its_callback_as_bytes_and_in_order(script: Script, sandbox: Sandbox) -> None:
    script.on_exec = lambda requests, context: iter(
        [pb.ExecResponse(started=pb.ExecStarted(pid=7)), stdout(b"a"), stderr(b"x"), stdout(b"b"), exited(3)]
    )
    seen: list[tuple[str, bytes]] = []
    code = sandbox.run(
        ["p"], on_stdout=lambda data: seen.append(("out", data)), on_stderr=lambda d: seen.append(("err", d))
    )
    assert (code, seen) == (3, [("out", b"a"), ("err", b"x"), ("out", b"b")])
    assert sandbox.run(["p"]) == 3


@pytest.mark.parametrize(
    ("name", "code"),
    [("SIGHUP", 129), ("SIGKILL", 137), ("SIGUSR1", 138), ("SIGSEGV", 139), ("SIGTERM", 143), ("SIGSYS", 159),
     ("SIGRTMIN", 162), ("SIGRTMIN+3", 165), ("SIGRTMAX", 192)],
)  # fmt: skip
def test_death_by_signal_is_128_and_its_number(
    script: Script, sandbox: Sandbox, name: str, code: int
) -> None:
    script.on_exec = lambda requests, context: iter([exited(signal=name)])
    assert sandbox.run(["p"]) == code


@pytest.mark.parametrize("ended", [exited(signal="SIGNOPE"), exited()])
def test_exit_in_an_unknown_way_is_a_protocol_error(
    script: Script, sandbox: Sandbox, ended: pb.ExecResponse
) -> None:
    script.on_exec = lambda requests, context: iter([ended])
    with pytest.raises(ProtocolError):
        sandbox.run(["p"])


def test_messages_of_a_newer_guest_are_passed_over(script: Script, sandbox: Sandbox) -> None:
    script.on_exec = lambda requests, context: iter([pb.ExecResponse(), stdout(b"a"), exited(0)])
    assert sandbox.exec("p") == "a"


def test_sandbox_that_goes_away_is_not_an_exit_status(script: Script, sandbox: Sandbox) -> None:
    gone = exited(signal="SIGKILL", reason=pb.EXIT_REASON_SANDBOX_GONE)
    script.on_exec = lambda requests, context: iter([gone])
    with pytest.raises(APIError) as caught:
        sandbox.run(["p"])
    assert caught.value.status == 404


def test_stream_that_ends_without_an_exit_is_a_protocol_error(script: Script, sandbox: Sandbox) -> None:
    script.on_exec = lambda requests, context: iter([stdout(b"half")])
    with pytest.raises(ProtocolError, match="without an exit"):
        sandbox.run(["p"])


# Time


@pytest.mark.parametrize("timeout", [0, -1, -0.0, float("nan"), float("inf")])
def test_timeout_that_is_no_positive_number_is_refused_without_a_call(
    script: Script, sandbox: Sandbox, timeout: float
) -> None:
    with pytest.raises(ValueError, match="positive"):
        sandbox.run(["p"], timeout=timeout)
    assert script.of("Exec") == []


@pytest.mark.parametrize("timeout", [1e-12, 0.1, 1.9999999999, 86_400.0])
def test_timeout_is_never_rounded_to_zero_or_down(timeout: float) -> None:
    span = process_module._duration(timeout)
    assert span.ToNanoseconds() >= max(1, int(timeout * 1e9))
    assert span.ToNanoseconds() <= timeout * 1e9 + 1


def test_timeout_in_the_guest_keeps_the_output_and_is_typed(script: Script, sandbox: Sandbox) -> None:
    killed = exited(signal="SIGKILL", reason=pb.EXIT_REASON_TIMEOUT)
    script.on_exec = lambda requests, context: iter([stdout(b"partial"), killed])
    seen: list[bytes] = []
    with pytest.raises(SandboxTimeout, match="killed after 2"):
        sandbox.run(["sleep", "9"], on_stdout=seen.append, timeout=2)
    assert seen == [b"partial"]


def test_guest_that_forgets_the_timeout_is_given_up(
    script: Script, sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_module, "_TIMEOUT_SLACK_S", 0.1)
    ended = threading.Event()

    def hang(requests: Iterator[Any], context: grpc.ServicerContext) -> Iterator[Any]:
        serve_until_cancelled(context, ended)
        yield stdout(b"x")
        ended.wait(20)

    script.on_exec = hang
    with pytest.raises(SandboxTimeout):
        sandbox.run(["p"], timeout=0.1)
    assert ended.wait(10)


# Input


def test_no_input_means_no_stdin(script: Script, sandbox: Sandbox) -> None:
    sandbox.run(["p"], stdin=b"")
    (start,) = script.of("Exec")[0].requests
    assert not start.start.stdin


@pytest.mark.parametrize("size", [1, 256 * 1024, 256 * 1024 + 1, 3 * 2**20 + 7])
def test_input_arrives_byte_for_byte_in_chunks_of_at_most_256_kib(
    script: Script, sandbox: Sandbox, size: int
) -> None:
    script.on_exec = echo
    data = os.urandom(size)
    seen = bytearray()
    assert sandbox.run(["cat"], stdin=data, on_stdout=seen.extend) == 0
    assert seen == data
    requests = script.of("Exec")[0].requests
    assert max(len(request.stdin.data) for request in requests) <= 256 * 1024
    assert requests[0].start.stdin
    assert requests[-1].WhichOneof("message") == "stdin_close"


@pytest.mark.parametrize("stdin", [bytearray(b"abc"), memoryview(b"abc"), [b"a", b"", b"bc"], iter([b"abc"])])
def test_input_may_be_any_bytes_or_an_iterable_of_them(script: Script, sandbox: Sandbox, stdin: Any) -> None:
    script.on_exec = echo
    seen = bytearray()
    sandbox.run(["cat"], stdin=stdin, on_stdout=seen.extend)
    assert seen == b"abc"


def test_empty_iterable_opens_and_closes_stdin(script: Script, sandbox: Sandbox) -> None:
    script.on_exec = echo
    assert sandbox.run(["cat"], stdin=iter(())) == 0
    kinds = [request.WhichOneof("message") for request in script.of("Exec")[0].requests]
    assert kinds == ["start", "stdin_close"]


def test_input_that_depends_on_the_output_does_not_deadlock(script: Script, sandbox: Sandbox) -> None:
    """A conversation: each piece of input waits for the answer to the one before."""
    script.on_exec = echo
    answers: list[bytes] = []
    came = threading.Semaphore(0)

    def ask() -> Iterator[bytes]:
        for number in range(5):
            yield b"%d" % number
            assert came.acquire(timeout=10)

    def answer(data: bytes) -> None:
        answers.append(data)
        came.release()

    assert sandbox.run(["cat"], stdin=ask(), on_stdout=answer) == 0
    assert answers == [b"0", b"1", b"2", b"3", b"4"]


def test_program_that_does_not_read_its_input_ends_the_call(script: Script, sandbox: Sandbox) -> None:
    script.on_exec = lambda requests, context: iter([exited(0)])
    endless = itertools.repeat(b"x" * 65536)
    assert sandbox.run(["true"], stdin=endless) == 0


def test_input_that_is_still_waited_for_does_not_hold_the_call(script: Script, sandbox: Sandbox) -> None:
    release = threading.Event()

    def silent() -> Iterator[bytes]:
        release.wait(20)
        yield b""

    script.on_exec = lambda requests, context: iter([exited(0)])
    try:
        began = time.monotonic()
        assert sandbox.run(["true"], stdin=silent()) == 0
        assert time.monotonic() - began < 5
    finally:
        release.set()


@pytest.mark.parametrize("bad", ["text", [1]])
def test_input_of_another_type_is_the_callers_type_error(script: Script, sandbox: Sandbox, bad: Any) -> None:
    ended = threading.Event()

    def wait(requests: Iterator[Any], context: grpc.ServicerContext) -> Iterator[Any]:
        serve_until_cancelled(context, ended)
        yield from echo(requests, context)

    script.on_exec = wait
    with pytest.raises(TypeError):
        sandbox.run(["cat"], stdin=bad)
    assert ended.wait(10)


def test_input_that_fails_ends_the_program_and_is_raised(script: Script, sandbox: Sandbox) -> None:
    ended = threading.Event()
    kinds: list[str] = []

    def note(requests: Iterator[Any], context: grpc.ServicerContext) -> Iterator[Any]:
        serve_until_cancelled(context, ended)
        kinds.extend(request.WhichOneof("message") for request in requests)
        yield exited(0)

    def broken() -> Iterator[bytes]:
        yield b"first"
        raise OSError("the disk is gone")

    script.on_exec = note
    with pytest.raises(OSError, match="the disk is gone"):
        sandbox.run(["cat"], stdin=broken())
    assert ended.wait(10)
    assert "stdin_close" not in kinds


# Endings


@pytest.mark.parametrize("stream", ["on_stdout", "on_stderr"])
def test_callback_that_raises_ends_the_program_and_is_raised(
    script: Script, sandbox: Sandbox, stream: str
) -> None:
    ended = threading.Event()

    def endless(requests: Iterator[Any], context: grpc.ServicerContext) -> Iterator[Any]:
        serve_until_cancelled(context, ended)
        while context.is_active():
            yield stdout(b"x")
            yield stderr(b"x")

    def stop(data: bytes) -> None:
        raise LookupError("enough")

    script.on_exec = endless
    with pytest.raises(LookupError, match="enough"):
        sandbox.run(["yes"], **{stream: stop})
    assert ended.wait(10)
    script.on_exec = lambda requests, context: iter([exited(0)])
    assert sandbox.run(["true"]) == 0


def test_client_that_closes_ends_its_calls(script: Script, client: Client) -> None:
    ended = threading.Event()

    def hang(requests: Iterator[Any], context: grpc.ServicerContext) -> Iterator[Any]:
        serve_until_cancelled(context, ended)
        yield stdout(b"x")
        ended.wait(20)

    script.on_exec = hang
    with pytest.raises(APIError) as caught:
        client.new("rt").run(["p"], on_stdout=lambda data: client.close())
    assert caught.value.status == 0
    assert ended.wait(10)


def test_server_that_stops_ends_the_call_with_a_typed_error(script: Script, sandbox: Sandbox) -> None:
    ended = threading.Event()

    def hang(requests: Iterator[Any], context: grpc.ServicerContext) -> Iterator[Any]:
        serve_until_cancelled(context, ended)
        yield stdout(b"x")
        ended.wait(20)

    script.on_exec = hang
    stopping: list[threading.Event] = []
    with pytest.raises(APIError) as caught:
        sandbox.run(["p"], on_stdout=lambda data: stopping.append(script.server.stop(None)))
    assert caught.value.status == 0
    assert ended.wait(10)


DYING_SERVER = """
import os, sys
from concurrent.futures import ThreadPoolExecutor
import grpc
from cocoon.guest.v1 import process_service_pb2 as pb, process_service_pb2_grpc
from cocoon.node.v1 import sandbox_service_pb2, sandbox_service_pb2_grpc
from cocoon.types.v1 import sandbox_pb2

class Node(process_service_pb2_grpc.ProcessServiceServicer, sandbox_service_pb2_grpc.SandboxServiceServicer):
    def Get(self, request, context):
        return sandbox_service_pb2.GetResponse(sandbox=sandbox_pb2.Sandbox(name=request.name))
    def Exec(self, requests, context):
        next(requests)
        yield pb.ExecResponse(stdout=pb.ExecOutput(data=b"last words"))
        sys.stdin.read(1)
        os._exit(1)

server = grpc.server(ThreadPoolExecutor(2))
process_service_pb2_grpc.add_ProcessServiceServicer_to_server(Node(), server)
sandbox_service_pb2_grpc.add_SandboxServiceServicer_to_server(Node(), server)
print(server.add_insecure_port("127.0.0.1:0"), flush=True)
server.start()
server.wait_for_termination()
"""


def test_server_that_dies_in_the_middle_is_a_typed_error(tmp_path: Path) -> None:
    program = tmp_path / "dying.py"
    program.write_text(DYING_SERVER)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(
        [sys.executable, str(program)], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as server:
        assert server.stdin is not None
        assert server.stdout is not None
        said: list[bytes] = []

        def hear(data: bytes) -> None:
            said.append(data)
            server.stdin.write(b"x")
            server.stdin.flush()

        with Client(f"127.0.0.1:{int(server.stdout.readline())}", timeout=10) as client:
            sandbox = client.attach(client._addr, SANDBOX_ID, SANDBOX_TOKEN)
            with pytest.raises(APIError) as caught:
                sandbox.run(["p"], on_stdout=hear)
        assert said == [b"last words"]
        assert caught.value.status == 0
        assert server.wait(10) == 1
