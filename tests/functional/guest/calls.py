"""Calls to a guest, as short as tests want them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc.aio
import pytest

from cocoon.guest.v1 import file_service_pb2 as files_pb
from cocoon.guest.v1 import file_service_pb2_grpc, process_service_pb2_grpc
from cocoon.guest.v1 import process_service_pb2 as pb
from cocoon_rpc.errors import CocoonError, from_rpc_error
from nodeagent.pool.provision import Guest

LIMIT_S = 60.0
CHUNK = 256 * 1024


@dataclass
class Result:
    """What an exec sent, checked on the way: started first, offsets right, exit last."""

    started: int = 0
    stdout: bytes = b""
    stderr: bytes = b""
    exit: pb.Exit = field(default_factory=pb.Exit)

    @property
    def text(self) -> str:
        """Standard output without the last newline."""
        return self.stdout.decode().rstrip("\n")


@asynccontextmanager
async def exec_call(guest: Guest, start: pb.ExecStart | None = None) -> AsyncIterator[Any]:
    """An open Exec call; cancelled in the end."""
    call = process_service_pb2_grpc.ProcessServiceStub(guest.link.channel).Exec(timeout=LIMIT_S)
    try:
        if start is not None:
            await call.write(pb.ExecRequest(start=start))
        yield call
    finally:
        call.cancel()


async def responses(call: Any) -> AsyncIterator[pb.ExecResponse]:
    """What is left of a call, by `read`, so that single reads may come before."""
    while (response := await call.read()) is not grpc.aio.EOF:
        yield response


async def drain(call: Any) -> list[pb.ExecResponse]:
    """Reads what is left of a call. Raises: AioRpcError: the call failed."""
    return [response async for response in responses(call)]


async def collect(call: Any) -> Result:
    """Reads a call to its end."""
    result, out, err = Result(), bytearray(), bytearray()
    seen = []
    async for response in responses(call):
        kind = response.WhichOneof("message")
        seen.append(kind)
        if kind == "started":
            result.started = response.started.pid
        elif kind == "exit":
            result.exit = response.exit
        else:
            part, whole = getattr(response, kind), out if kind == "stdout" else err
            assert part.offset == len(whole)
            assert 0 < len(part.data) <= CHUNK
            whole += part.data
    result.stdout, result.stderr = bytes(out), bytes(err)
    assert seen[0] == "started"
    assert [kind for kind in seen if kind in {"started", "exit"}] == ["started", "exit"]
    assert seen[-1] == "exit"
    return result


async def run(guest: Guest, *argv: str, stdin: bytes | None = None, **start: Any) -> Result:
    """Runs a program to its end; `stdin` is sent and closed."""
    first = pb.ExecStart(argv=argv, stdin=stdin is not None, **start)
    async with exec_call(guest, first) as call:
        try:
            async with asyncio.TaskGroup() as group:
                reading = group.create_task(collect(call))
                for at in range(0, len(stdin or b""), CHUNK):
                    await call.write(pb.ExecRequest(stdin=pb.ExecStdin(data=stdin[at : at + CHUNK])))
                if stdin is not None:
                    await call.write(pb.ExecRequest(stdin_close=pb.ExecStdinClose()))
        except BaseExceptionGroup as failed:
            raise failed.exceptions[0] from None
        return reading.result()


async def shell(guest: Guest, script: str, **start: Any) -> str:
    """Runs a script that must succeed; returns what it printed."""
    result = await run(guest, "sh", "-c", script, **start)
    assert result.exit.code == 0, (script, result)
    assert result.exit.WhichOneof("status") == "code", (script, result)
    return result.text


async def python(guest: Guest, script: str, *arguments: str, user: str = "") -> str:
    """Runs a Python script in the guest that must succeed; returns what it printed."""
    result = await run(guest, "python3", "-I", "-c", script, *arguments, user=user)
    assert result.exit == pb.Exit(code=0, reason=pb.EXIT_REASON_EXITED), result
    return result.text


@contextmanager
def refused(expected: type[CocoonError], /, **metadata: str) -> Iterator[None]:
    """Expects a call to be refused with this typed error."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        yield
    error = from_rpc_error(caught.value)
    assert type(error) is expected, repr(error)
    facts = {key: error.metadata[key] for key in metadata}
    assert facts == metadata


async def until(what: Callable[[], Any], *, limit_s: float = 5.0) -> None:
    """Polls an async condition, bounded."""
    async with asyncio.timeout(limit_s):
        while not await what():
            await asyncio.sleep(0.02)


async def alive(guest: Guest, pid: int) -> bool:
    """Says whether a process is there and no zombie."""
    result = await run(guest, "sh", "-c", f"grep -q '^State:[[:space:]][^Z]' /proc/{pid}/status")
    return result.exit.code == 0


async def gone(guest: Guest, pid: int, *, limit_s: float = 5.0) -> None:
    """Waits until a process is no more."""

    async def absent() -> bool:
        return not await alive(guest, pid)

    await until(absent, limit_s=limit_s)


def files(guest: Guest) -> Any:
    """The guest's FileService."""
    return file_service_pb2_grpc.FileServiceStub(guest.link.channel)


def path_of(path: str | bytes) -> dict[str, Any]:
    """The path fields of a request."""
    return {"path": path} if isinstance(path, str) else {"raw_path": path}


async def read(guest: Guest, path: str | bytes, **request: Any) -> bytes:
    """Reads a file; checks order and offsets."""
    start, content, done = await read_all(guest, path, **request)
    assert start is not None
    assert done == len(content)
    return content


async def read_all(guest: Guest, path: str | bytes, **request: Any) -> tuple[files_pb.ReadStart, bytes, int]:
    """Returns start, content and the count of the end."""
    offset = request.get("offset", 0)
    content, seen, start, done = bytearray(), [], files_pb.ReadStart(), -1
    call = files(guest).Read(files_pb.ReadRequest(**path_of(path), **request), timeout=LIMIT_S)
    try:
        async for response in call:
            kind = response.WhichOneof("message")
            seen.append(kind)
            if kind == "start":
                start = response.start
            elif kind == "done":
                done = response.done.sent_bytes
            else:
                assert response.chunk.offset == offset + len(content)
                content += response.chunk.data
    finally:
        call.cancel()
    assert seen[0] == "start"
    assert seen[-1] == "done"
    assert set(seen[1:-1]) <= {"chunk"}
    return start, bytes(content), done


def write_requests(
    path: str | bytes, content: bytes, *, done: bool = True, **start: Any
) -> Iterable[files_pb.WriteRequest]:
    """The messages of a whole write."""
    yield files_pb.WriteRequest(start=files_pb.WriteStart(**path_of(path), **start))
    for at in range(0, len(content), CHUNK):
        yield files_pb.WriteRequest(chunk=files_pb.FileChunk(data=content[at : at + CHUNK], offset=at))
    if done:
        yield files_pb.WriteRequest(done=files_pb.WriteDone())


async def write(guest: Guest, path: str | bytes, content: bytes, **start: Any) -> int:
    """Writes a file; returns the size it was told."""
    return await send_write(guest, *write_requests(path, content, **start), half_close=True)


async def begin_write(guest: Guest, path: str | bytes, **start: Any) -> None:
    """Sends only the start of a write, which is to be refused."""
    await send_write(guest, files_pb.WriteRequest(start=files_pb.WriteStart(**path_of(path), **start)))


async def send_write(guest: Guest, *requests: files_pb.WriteRequest, half_close: bool = False) -> int:
    """Sends a write as it is; returns the size it was told.

    To see a refusal, end with the message that is refused: what grpc.aio is still
    sending when the status comes turns the status into its own INTERNAL.
    """
    call = files(guest).Write(timeout=LIMIT_S)
    try:
        for request in requests:
            await call.write(request)
        if half_close:
            await call.done_writing()
        response = await call
    finally:
        call.cancel()
    size: int = response.size_bytes
    return size
