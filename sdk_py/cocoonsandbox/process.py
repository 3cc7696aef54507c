"""Running programs in a sandbox: one call, its input and its output."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import grpc
from google.protobuf.duration_pb2 import Duration

from cocoon.guest.v1 import process_service_pb2 as pb
from cocoon.guest.v1 import process_service_pb2_grpc
from cocoonsandbox.errors import APIError, ProtocolError, SandboxTimeout, from_guest

_CHUNK = 256 * 1024
# The guest ends the program at its timeout; the client waits a little longer for
# the output and the exit before it gives the connection up.
_TIMEOUT_SLACK_S = 10.0
# Numbers 1 to 31 of Linux: the guest's, whatever system this client runs on.
_SIGNALS = (
    "HUP INT QUIT ILL TRAP ABRT BUS FPE KILL USR1 SEGV USR2 PIPE ALRM TERM STKFLT CHLD CONT STOP TSTP TTIN "
    "TTOU URG XCPU XFSZ VTALRM PROF WINCH IO PWR SYS"
)
_RTMIN, _RTMAX = 34, 64

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
        ValueError: timeout is not a positive number.
        SandboxTimeout: the time passed; the guest has killed the whole group.
        SilkdError, APIError, ProtocolError: as their names say.
        Exception: what a callback or the input's iterator raised.
    """
    start = pb.ExecStart(argv=list(argv), cwd=cwd, env=dict(env or {}), user=user, stdin=stdin != b"")
    limit = None
    if timeout is not None:
        if not 0 < timeout < math.inf:
            raise ValueError(f"timeout must be a positive number of seconds, not {timeout}")
        start.timeout.CopyFrom(_duration(timeout))
        limit = timeout + _TIMEOUT_SLACK_S
    stub = process_service_pb2_grpc.ProcessServiceStub(channel)
    feed = _Feed(start, stdin)
    call = stub.Exec(feed.requests(), metadata=metadata, timeout=limit)
    feed.call.set_result(call)
    try:
        return _follow(call, on_stdout, on_stderr, timeout)
    except grpc.RpcError as error:
        if feed.failure is not None:
            raise feed.failure from None
        if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
            raise SandboxTimeout(f"exec: no end within {timeout} s, nor word from the guest") from error
        raise from_guest("exec", error) from error
    finally:
        # Whatever ends this, a callback that raised included, ends the program.
        call.cancel()


@dataclass
class _Feed:
    """What the client says; grpc iterates it in a thread of its own, so input never blocks output."""

    start: pb.ExecStart
    stdin: Input
    call: Future[grpc.Call] = field(default_factory=Future)
    failure: Exception | None = None

    def requests(self) -> Iterator[pb.ExecRequest]:
        """Yields start, the input in chunks, and its end."""
        yield pb.ExecRequest(start=self.start)
        if not self.start.stdin:
            return
        try:
            yield from self._input()
        except Exception as error:  # noqa: BLE001 - raised again by the caller's thread
            # Half-closing now would look like the end of the input.
            self.failure = error
            self.call.result().cancel()
        else:
            yield pb.ExecRequest(stdin_close=pb.ExecStdinClose())

    def _input(self) -> Iterator[pb.ExecRequest]:
        whole = isinstance(self.stdin, (bytes, bytearray, memoryview))
        pieces: Iterable[bytes] = (self.stdin,) if whole else self.stdin  # type: ignore[assignment]
        for piece in pieces:
            view = memoryview(piece)
            for at in range(0, len(view), _CHUNK):
                yield pb.ExecRequest(stdin=pb.ExecStdin(data=bytes(view[at : at + _CHUNK])))


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
            if response.exit.reason == pb.EXIT_REASON_SANDBOX_GONE:
                raise APIError("exec", 404, "the sandbox went away while the program ran")
            return _status(response.exit)
    raise ProtocolError("exec: the stream ended without an exit")


def _status(ended: pb.Exit) -> int:
    if ended.WhichOneof("status") == "code":
        return ended.code
    return 128 + _signal_number(ended.signal)


def _signal_number(name: str) -> int:
    """Returns the number of `SIGKILL`, `SIGRTMIN+3` and the like. Raises: ProtocolError."""
    short = name.removeprefix("SIG")
    known = _SIGNALS.split()
    if short in known:
        return known.index(short) + 1
    real_time = re.fullmatch(r"RT(MIN|MAX)(?:\+(\d{1,2}))?", short)
    if real_time is None:
        raise ProtocolError(f"exec: the program ended in a way this client does not know: {name!r}")
    return (_RTMIN if real_time[1] == "MIN" else _RTMAX) + int(real_time[2] or 0)


def _duration(seconds: float) -> Duration:
    """Returns a positive span, rounded up to whole nanoseconds: never zero."""
    whole = int(seconds)
    nanos = min(math.ceil((seconds - whole) * 1e9), 999_999_999)
    return Duration(seconds=whole, nanos=nanos)
