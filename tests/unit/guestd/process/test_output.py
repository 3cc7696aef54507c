"""Reading pipes: in order, only as fast as it is taken, and with an end."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator

import pytest

from guestd.process import output
from guestd.process.output import CHUNK, OutputReader


class Pipe:
    def __init__(self) -> None:
        self.read, self.write = os.pipe()
        os.set_blocking(self.read, False)

    def say(self, data: bytes) -> None:
        os.write(self.write, data)

    def end(self) -> None:
        os.close(self.write)
        self.write = -1

    def close(self) -> None:
        for fd in (self.read, self.write):
            if fd >= 0:
                os.close(fd)


@pytest.fixture
def pipes() -> Iterator[tuple[Pipe, Pipe]]:
    both = Pipe(), Pipe()
    yield both
    for pipe in both:
        pipe.close()


def _reader(pipes: tuple[Pipe, Pipe], ended: bool = False) -> OutputReader:
    return OutputReader({"out": pipes[0].read, "err": pipes[1].read}, lambda: ended)


async def _all(reader: OutputReader) -> list[tuple[str, bytes]]:
    async with asyncio.timeout(10):
        return [part async for part in reader.chunks()]


async def test_output_ends_when_every_pipe_does(pipes: tuple[Pipe, Pipe]) -> None:
    out, err = pipes
    out.say(b"a")
    err.say(b"b")
    out.end()
    err.end()
    assert await _all(_reader(pipes)) == [("out", b"a"), ("err", b"b")]


async def test_output_that_comes_later_is_waited_for(pipes: tuple[Pipe, Pipe]) -> None:
    out, err = pipes

    def later() -> None:
        out.say(b"late")
        out.end()
        err.end()

    asyncio.get_running_loop().call_later(0.02, later)
    assert await _all(_reader(pipes)) == [("out", b"late")]


async def test_output_is_not_read_ahead(pipes: tuple[Pipe, Pipe]) -> None:
    out, _ = pipes
    out.say(b"first")
    chunks = _reader(pipes).chunks()
    assert await anext(chunks) == ("out", b"first")
    out.say(b"second")
    await asyncio.sleep(0)
    assert os.read(out.read, 100) == b"second"
    await chunks.aclose()


async def test_output_comes_in_bounded_chunks(pipes: tuple[Pipe, Pipe]) -> None:
    import fcntl

    out, err = pipes
    fcntl.fcntl(out.write, fcntl.F_SETPIPE_SZ, 2 * CHUNK)
    out.say(bytes(CHUNK + 5))
    out.end()
    err.end()
    assert [len(data) for _, data in await _all(_reader(pipes))] == [CHUNK, 5]


async def test_output_held_open_after_the_end_is_left_after_a_grace(
    pipes: tuple[Pipe, Pipe], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output, "DRAIN_GRACE_S", 0.1)
    pipes[0].say(b"before")
    begun = asyncio.get_running_loop().time()
    assert await _all(_reader(pipes, ended=True)) == [("out", b"before")]
    assert 0.1 <= asyncio.get_running_loop().time() - begun < 5


async def test_output_that_never_stops_after_the_end_is_left_after_a_grace(
    pipes: tuple[Pipe, Pipe], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output, "DRAIN_GRACE_S", 0.1)
    pipes[0].say(b"x")
    async with asyncio.timeout(10):
        async for _, data in _reader(pipes, ended=True).chunks():
            pipes[0].say(data)


async def test_output_looks_at_the_end_again_when_poked(
    pipes: tuple[Pipe, Pipe], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output, "DRAIN_GRACE_S", 0.05)
    ended = False
    reader = OutputReader({"out": pipes[0].read}, lambda: ended)
    async with asyncio.TaskGroup() as group:
        reading = group.create_task(_all(reader))
        await asyncio.sleep(0.01)
        assert not reading.done()
        ended = True
        reader.poke()
    assert reading.result() == []


async def test_output_cancelled_while_waiting_watches_nothing(pipes: tuple[Pipe, Pipe]) -> None:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            async for _ in _reader(pipes).chunks():
                pass
    for pipe in pipes:
        assert not asyncio.get_running_loop().remove_reader(pipe.read)
