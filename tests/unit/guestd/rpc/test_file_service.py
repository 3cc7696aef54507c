"""Files over gRPC: the messages' rules, and nothing left of a call that was cut short."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from cocoon.guest.v1 import file_service_pb2 as pb
from cocoon.guest.v1 import file_service_pb2_grpc
from cocoon_rpc import errors
from guestd.files.write import AtomicFile
from guestd.rpc import file_service
from guestd.rpc.file_service import FileService
from tests.framework.leaks import open_fds

_MIB = 1024 * 1024


@pytest.fixture
async def stub(serve: Any) -> AsyncIterator[Any]:
    """A client of a FileService with one thread, so that its work has an order."""
    with ThreadPoolExecutor(1) as executor:
        service = FileService(executor)

        def add(server: grpc.aio.Server) -> None:
            file_service_pb2_grpc.add_FileServiceServicer_to_server(service, server)

        async with serve(add) as channel:
            yield file_service_pb2_grpc.FileServiceStub(channel)


async def _read(stub: Any, path: Path, **fields: Any) -> list[pb.ReadResponse]:
    return [r async for r in stub.Read(pb.ReadRequest(path=str(path), **fields), timeout=20)]


def _content(responses: list[pb.ReadResponse]) -> bytes:
    return b"".join(r.chunk.data for r in responses)


def _write(path: Path, *chunks: bytes, done: bool = True, **start: Any) -> Iterator[pb.WriteRequest]:
    yield pb.WriteRequest(start=pb.WriteStart(path=str(path), **start))
    offset = 0
    for data in chunks:
        yield pb.WriteRequest(chunk=pb.FileChunk(data=data, offset=offset))
        offset += len(data)
    if done:
        yield pb.WriteRequest(done=pb.WriteDone())


async def _refusal(call: Any) -> Any:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return errors.from_rpc_error(caught.value)


async def _until(what: Any) -> None:
    async with asyncio.timeout(5):
        while not what():
            await asyncio.sleep(0.01)


async def test_read_is_start_then_chunks_in_order_then_done(stub: Any, tmp_path: Path) -> None:
    path = tmp_path / "file"
    content = os.urandom(2 * _MIB + 7)
    path.write_bytes(content)
    path.chmod(0o640)
    os.utime(path, ns=(0, 1_700_000_000_123_456_789))
    first, *chunks, last = await _read(stub, path)
    assert (first.start.size_bytes, first.start.mode) == (len(content), 0o640)
    assert first.start.modify_time.ToNanoseconds() == 1_700_000_000_123_456_789
    assert last.done.sent_bytes == len(content)
    assert _content(chunks) == content
    offset = 0
    for response in chunks:
        assert response.chunk.offset == offset
        assert 0 < len(response.chunk.data) <= 256 * 1024
        offset += len(response.chunk.data)


@pytest.mark.parametrize("size", [0, 1, 1000])
@pytest.mark.parametrize("offset", [0, 1, 999, 1000, 2**63 - 1, 2**63, 2**64 - 1])
@pytest.mark.parametrize("length", [None, 0, 5, 2**63, 2**64 - 1])
async def test_read_of_any_part_is_that_slice(
    stub: Any, tmp_path: Path, size: int, offset: int, length: int | None
) -> None:
    path = tmp_path / "file"
    content = os.urandom(size)
    path.write_bytes(content)
    responses = await _read(stub, path, offset=offset, **({} if length is None else {"length": length}))
    expected = content[offset:] if length is None else content[offset : offset + length]
    assert _content(responses) == expected
    assert responses[-1].done.sent_bytes == len(expected)


async def test_read_of_a_file_without_size_goes_to_its_end(stub: Any) -> None:
    path = Path("/proc/version")
    responses = await _read(stub, path)
    assert responses[0].start.size_bytes == 0
    assert _content(responses) == path.read_bytes()
    assert _content(await _read(stub, path, offset=2**64 - 1)) == b""


async def test_read_that_is_cancelled_closes_the_file(stub: Any, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(64 * _MIB))

    def ours() -> int:
        return sum(os.path.realpath(fd) == str(path) for fd in Path("/proc/self/fd").iterdir())

    call = stub.Read(pb.ReadRequest(path=str(path)))
    await call.read()
    assert ours() == 1
    call.cancel()
    await _until(lambda: ours() == 0)


async def test_read_that_is_cancelled_while_the_file_opens_closes_it(
    stub: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    path.touch()
    begun, release = threading.Event(), threading.Event()
    opened: list[int] = []
    real_open = file_service.open_regular

    def slow(name: bytes) -> int:
        begun.set()
        release.wait(10)
        opened.append(real_open(name))
        return opened[0]

    monkeypatch.setattr(file_service, "open_regular", slow)
    call = stub.Read(pb.ReadRequest(path=str(path)))
    await asyncio.to_thread(begun.wait, 10)
    before = open_fds()
    call.cancel()
    release.set()
    await _until(lambda: opened and not _is_open(opened[0]))
    assert open_fds() <= before


def _is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


async def test_write_that_is_cancelled_in_the_middle_never_touches_another_file(
    stub: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A descriptor closed under a thread that still writes would be somebody else's by then."""
    begun, release = threading.Event(), threading.Event()
    states: list[bool] = []
    real = AtomicFile.append

    def slow(self: AtomicFile, data: bytes) -> None:
        begun.set()
        release.wait(10)
        states.append(_is_open(self._fd))
        real(self, data)

    monkeypatch.setattr(AtomicFile, "append", slow)
    call = stub.Write(_write(tmp_path / "file", bytes(_MIB), done=False))
    await asyncio.to_thread(begun.wait, 10)
    call.cancel()
    release.set()
    await _until(lambda: states and not list(tmp_path.iterdir()))
    assert states == [True]


async def test_write_puts_the_whole_file_in_place(stub: Any, tmp_path: Path) -> None:
    path = tmp_path / "file"
    parts = [os.urandom(n) for n in (1, _MIB, 0, 256 * 1024, 3)]
    response = await stub.Write(_write(path, *parts, mode=0o600))
    assert response.size_bytes == len(b"".join(parts))
    assert path.read_bytes() == b"".join(parts)
    assert path.stat().st_mode & 0o7777 == 0o600


@pytest.mark.parametrize(
    ("requests", "kind", "facts"),
    [
        ([], errors.StreamStartRequiredError, {}),
        ([pb.WriteRequest()], errors.StreamStartRequiredError, {"got": "nothing"}),
        ([pb.WriteRequest(done=pb.WriteDone())], errors.StreamStartRequiredError, {"got": "done"}),
        (["start", "start"], errors.StreamMessageUnexpectedError, {"got": "start"}),
        (["start", pb.WriteRequest()], errors.StreamMessageUnexpectedError, {"got": "nothing"}),
        (["start"], errors.StreamMessageUnexpectedError, {"got": "end of stream"}),
        (
            ["start", pb.WriteRequest(chunk=pb.FileChunk(data=b"x", offset=1))],
            errors.InvalidFieldError,
            {"field": "chunk.offset"},
        ),
        (
            ["start", pb.WriteRequest(chunk=pb.FileChunk(data=bytes(_MIB + 1)))],
            errors.InvalidFieldError,
            {"field": "chunk.data"},
        ),
        (
            [pb.WriteRequest(start=pb.WriteStart(path="/tmp/x", mode=0o10000))],
            errors.InvalidFieldError,
            {"field": "start.mode"},
        ),
        (
            [pb.WriteRequest(start=pb.WriteStart())],
            errors.InvalidFieldError,
            {"field": "start.path"},
        ),
    ],
)
async def test_write_that_breaks_a_rule_changes_nothing(
    stub: Any, tmp_path: Path, requests: list[Any], kind: type[Exception], facts: dict[str, str]
) -> None:
    path = tmp_path / "file"
    path.write_text("old")
    start = pb.WriteRequest(start=pb.WriteStart(path=str(path)))
    error = await _refusal(stub.Write(iter([start if r == "start" else r for r in requests])))
    assert type(error) is kind
    assert {key: error.metadata[key] for key in facts} == facts
    assert path.read_text() == "old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]
