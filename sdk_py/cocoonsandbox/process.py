"""Running programs in a sandbox: one call, its input and its output."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import grpc
from google.protobuf.duration_pb2 import Duration

from cocoon.guest.v1 import process_service_pb2 as pb
from cocoon.guest.v1 import process_service_pb2_grpc
from cocoonsandbox.errors import ProtocolError, SandboxTimeout, from_guest

_CHUNK = 256 * 1024
# The guest ends the program at its timeout; the client waits a little longer for
# the output and the exit before it gives the connection up.
_TIMEOUT_SLACK_S = 10.0

Metadata = tuple[tuple[str, str], ...]
Input = bytes | Iterable[bytes]
OnBytes = Callable[[bytes], object]


def run(
    channel: grpc.Channel,
    metadata: Metadata,
    argv: Sequence[str],
    *,
    cwd: str,
    env: Mapping[str, str] | None,
    user: str,
    stdin: Input,
    on_stdout: OnBytes | None,
    on_stderr: OnBytes | None,
    timeout: float | None,
) -> int:
    """Runs a program to its end; returns its status (128 + n for signal n).

    Raises:
        ValueError: timeout is not positive.
        SandboxTimeout: the time passed; the guest has killed the whole group.
        SilkdError, APIError, ProtocolError: as their names say.
    """
    if timeout is not None and timeout <= 0:
        raise ValueError("timeout must be positive")
    start = pb.ExecStart(argv=list(argv), cwd=cwd, env=dict(env or {}), user=user, stdin=stdin != b"")
    if timeout is not None:
        start.timeout.CopyFrom(Duration(seconds=int(timeout), nanos=int(timeout % 1 * 1e9)))
    ended = threading.Event()
    requests = _requests(start, stdin, ended)
    limit = None if timeout is None else timeout + _TIMEOUT_SLACK_S
    call = process_service_pb2_grpc.ProcessServiceStub(channel).Exec(
        requests, metadata=metadata, timeout=limit
    )
    try:
        return _follow(call, on_stdout, on_stderr, timeout)
    except grpc.RpcError as error:
        if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
            raise SandboxTimeout(f"exec: no end within {timeout} s") from error
        raise from_guest("exec", error) from error
    finally:
        # Whatever ends this, a callback that raised included, ends the program.
        ended.set()
        call.cancel()


def _follow(
    responses: Iterable[pb.ExecResponse],
    on_stdout: OnBytes | None,
    on_stderr: OnBytes | None,
    timeout: float | None,
) -> int:
    for response in responses:
        kind = response.WhichOneof("message")
        if kind == "stdout" and on_stdout is not None:
            on_stdout(response.stdout.data)
        elif kind == "stderr" and on_stderr is not None:
            on_stderr(response.stderr.data)
        elif kind == "exit":
            if response.exit.reason == pb.EXIT_REASON_TIMEOUT:
                raise SandboxTimeout(f"exec: killed after {timeout} s")
            return _status(response.exit)
    raise ProtocolError("exec: the stream ended without an exit")


def _status(ended: pb.Exit) -> int:
    if ended.WhichOneof("status") == "code":
        return ended.code
    with contextlib.suppress(KeyError):
        return 128 + signal.Signals[ended.signal]
    return -1


def _requests(start: pb.ExecStart, stdin: Input, ended: threading.Event) -> Iterator[pb.ExecRequest]:
    """Yields what the client says; grpc takes it from a thread of its own."""
    yield pb.ExecRequest(start=start)
    if not start.stdin:
        return
    for piece in (stdin,) if isinstance(stdin, (bytes, bytearray, memoryview)) else stdin:
        view = memoryview(piece)
        for at in range(0, len(view), _CHUNK):
            if ended.is_set():
                return
            yield pb.ExecRequest(stdin=pb.ExecStdin(data=bytes(view[at : at + _CHUNK])))
    yield pb.ExecRequest(stdin_close=pb.ExecStdinClose())
