"""FileService: see the contract for what each method promises.

What can block on a disk runs in a small executor; content is moved a mebibyte at a
time there, so that a large file costs few hand-overs.
"""

from __future__ import annotations

import asyncio
import os
import stat
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Executor
from contextlib import asynccontextmanager
from typing import TypeVar

from google.protobuf.timestamp_pb2 import Timestamp

from cocoon.guest.v1 import file_service_pb2 as pb
from cocoon.guest.v1 import file_service_pb2_grpc
from cocoon_rpc.errors import InvalidFieldError, StreamMessageUnexpectedError
from cocoon_rpc.interceptors import Context
from cocoon_rpc.scope import complete
from cocoon_rpc.streams import first_start
from guestd.files.paths import checked_path, open_regular, typed
from guestd.files.write import AtomicFile

_BLOCK = 1024 * 1024
_CHUNK = 256 * 1024
_LONGEST_CHUNK = 1024 * 1024
# Past the end of any file; from 2**63 on the kernel takes no offset.
_FAR = 2**62
_T = TypeVar("_T")


class FileService(file_service_pb2_grpc.FileServiceServicer):
    """Reads and writes files as root."""

    def __init__(self, executor: Executor) -> None:
        """Takes the executor for blocking calls."""
        self._executor = executor

    async def Read(self, request: pb.ReadRequest, context: Context) -> AsyncIterator[pb.ReadResponse]:
        """Streams a regular file."""
        path = checked_path(request.path, request.raw_path)
        async with self._held(os.close, open_regular, path) as fd:
            facts = os.fstat(fd)
            yield pb.ReadResponse(start=_start(facts))
            offset, sent = request.offset, 0
            # Files of /proc say 0 and have content: only their end ends them.
            end = facts.st_size or (0 if offset >= _FAR else None)
            if request.HasField("length"):
                wanted = offset + request.length
                end = wanted if end is None else min(end, wanted)
            while end is None or offset < end:
                size = _BLOCK if end is None else min(_BLOCK, end - offset)
                block = await self._run(_read_at, fd, size, offset, path)
                if not block:
                    break
                for at in range(0, len(block), _CHUNK):
                    data = block[at : at + _CHUNK]
                    yield pb.ReadResponse(chunk=pb.FileChunk(data=data, offset=offset + at))
                offset += len(block)
                sent += len(block)
            yield pb.ReadResponse(done=pb.ReadDone(sent_bytes=sent))

    async def Write(
        self, request_iterator: AsyncIterator[pb.WriteRequest], context: Context
    ) -> pb.WriteResponse:
        """Writes a whole file atomically."""
        start: pb.WriteStart = await first_start(request_iterator)
        path = checked_path(start.path, start.raw_path, "start.")
        mode = start.mode if start.HasField("mode") else None
        if mode is not None and mode > 0o7777:
            raise InvalidFieldError(field="start.mode", rule="must be at most 07777 (octal)")
        async with self._held(AtomicFile.close, AtomicFile, path, mode) as file:
            await self._fill(file, request_iterator)
            await self._run(file.commit)
            return pb.WriteResponse(size_bytes=file.size)

    async def _fill(self, file: AtomicFile, requests: AsyncIterator[pb.WriteRequest]) -> None:
        """Appends chunks until `done`; a mebibyte at a time reaches the disk."""
        waiting: list[bytes] = []
        size = 0
        async for request in requests:
            kind = request.WhichOneof("message")
            if kind == "chunk":
                data = request.chunk.data
                if request.chunk.offset != file.size + size:
                    raise InvalidFieldError(field="chunk.offset", rule=f"must be {file.size + size}")
                if len(data) > _LONGEST_CHUNK:
                    raise InvalidFieldError(field="chunk.data", rule="must be at most 1 MiB")
                waiting.append(data)
                size += len(data)
                if size >= _BLOCK:
                    await self._run(file.append, b"".join(waiting))
                    waiting, size = [], 0
            elif kind == "done":
                if size:
                    await self._run(file.append, b"".join(waiting))
                return
            else:
                raise StreamMessageUnexpectedError(
                    got=kind or "nothing", rule="chunks follow start, then done"
                )
        raise StreamMessageUnexpectedError(got="end of stream", rule="done comes last; nothing was changed")

    @asynccontextmanager
    async def _held(
        self, release: Callable[[_T], None], acquire: Callable[..., _T], *arguments: object
    ) -> AsyncIterator[_T]:
        """Holds what `acquire` opened; releases it, also if the call was cancelled while it opened."""
        opening = asyncio.get_running_loop().run_in_executor(self._executor, acquire, *arguments)
        try:
            yield await complete(_result(opening))
        finally:
            if opening.exception() is None:
                await self._run(release, opening.result())

    async def _run(self, work: Callable[..., _T], *arguments: object) -> _T:
        """Runs what can block, to its end: a cancelled call closes nothing that is still in use."""
        running = asyncio.get_running_loop().run_in_executor(self._executor, work, *arguments)
        return await complete(_result(running))


async def _result(future: asyncio.Future[_T]) -> _T:
    return await future


def _read_at(fd: int, size: int, offset: int, path: bytes) -> bytes:
    try:
        return os.pread(fd, size, offset)
    except OSError as error:
        raise typed(error, path) from error


def _start(facts: os.stat_result) -> pb.ReadStart:
    seconds, nanos = divmod(facts.st_mtime_ns, 10**9)
    return pb.ReadStart(
        size_bytes=facts.st_size,
        mode=stat.S_IMODE(facts.st_mode),
        modify_time=Timestamp(seconds=seconds, nanos=nanos),
    )
