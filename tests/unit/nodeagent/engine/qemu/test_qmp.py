"""The monitor against a scripted QEMU at the other end of a socket pair."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from nodeagent.engine.child import pair
from nodeagent.engine.qemu import qmp
from nodeagent.engine.qemu.qmp import Monitor, MonitorError
from tests.framework.leaks import open_fds

GREETING = {
    "QMP": {"version": {"qemu": {"major": 7, "minor": 2, "micro": 0}, "package": ""}, "capabilities": []}
}


class Peer:
    """QEMU's end: reads commands, writes what the script says."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._heard = ""

    def say(self, message: dict[str, Any]) -> None:
        self._writer.write(json.dumps(message).encode() + b"\r\n")

    def write(self, data: bytes) -> None:
        self._writer.write(data)

    async def hear(self) -> dict[str, Any]:
        """Returns the next command. Commands end where their JSON does; no newline is promised."""
        while True:
            with contextlib.suppress(json.JSONDecodeError):
                heard, end = json.JSONDecoder().raw_decode(self._heard)
                self._heard = self._heard[end:].lstrip()
                assert isinstance(heard, dict)
                return heard
            data = await self._reader.read(4096)
            assert data, "the monitor went away"
            self._heard += data.decode()

    async def greet(self) -> None:
        self.say(GREETING)
        assert (await self.hear())["execute"] == "qmp_capabilities"
        self.say({"return": {}})

    async def answer(self, **answer: Any) -> dict[str, Any]:
        """Answers the next command; returns it without its id."""
        command = await self.hear()
        self.say({**answer, "id": command.pop("id")})
        return command

    async def until_closed(self) -> None:
        await self._reader.read()


Script = Callable[[Peer], Awaitable[None]]


@asynccontextmanager
async def scripted(script: Script) -> AsyncIterator[tuple[Monitor, Any]]:
    """A monitor to be opened on the socket; what the script asserts fails the test."""
    ours, theirs = pair()

    async def play() -> None:
        reader, writer = await asyncio.open_connection(sock=theirs)
        try:
            await script(Peer(reader, writer))
        finally:
            writer.close()

    async with asyncio.timeout(10), asyncio.TaskGroup() as group:
        group.create_task(play())
        monitor = Monitor("m-test")
        try:
            yield monitor, ours
        finally:
            await monitor.close()


@pytest.fixture
def short_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(qmp, "LIMIT_S", 0.2)


async def test_command_returns_its_answer() -> None:
    async def script(peer: Peer) -> None:
        await peer.greet()
        said = await peer.answer(**{"return": {"status": "running"}})
        assert said == {"execute": "query-status"}
        said = await peer.answer(**{"return": "text"})
        assert said == {"execute": "ringbuf-read", "arguments": {"device": "console", "size": 5}}
        await peer.until_closed()

    async with scripted(script) as (monitor, sock):
        await monitor.open(sock)
        assert await monitor.execute("query-status") == {"status": "running"}
        assert await monitor.execute("ringbuf-read", device="console", size=5) == "text"


async def test_events_between_are_no_answers() -> None:
    async def script(peer: Peer) -> None:
        await peer.greet()
        peer.say({"event": "STOP", "timestamp": {"seconds": 1, "microseconds": 2}})
        await peer.answer(**{"return": {}})
        await peer.until_closed()

    async with scripted(script) as (monitor, sock):
        await monitor.open(sock)
        assert await monitor.execute("stop") == {}


async def test_refused_command_says_why() -> None:
    async def script(peer: Peer) -> None:
        await peer.greet()
        await peer.answer(error={"class": "GenericError", "desc": "No space left on device"})
        await peer.answer(**{"return": {}})
        await peer.until_closed()

    async with scripted(script) as (monitor, sock):
        await monitor.open(sock)
        with pytest.raises(MonitorError, match=r"^xen-save-devices-state: No space left on device$"):
            await monitor.execute("xen-save-devices-state", filename="/full")
        assert await monitor.execute("cont") == {}, "the monitor goes on"


@pytest.mark.usefixtures("short_limit")
async def test_command_without_answer_is_bounded() -> None:
    async def script(peer: Peer) -> None:
        await peer.greet()
        await peer.hear()
        await peer.until_closed()

    async with scripted(script) as (monitor, sock):
        await monitor.open(sock)
        with pytest.raises(MonitorError, match=r"^stop: TimeoutError$"):
            await monitor.execute("stop")


async def test_peer_that_ends_during_a_command_is_an_error() -> None:
    async def script(peer: Peer) -> None:
        await peer.greet()
        await peer.hear()

    async with scripted(script) as (monitor, sock):
        await monitor.open(sock)
        with pytest.raises(MonitorError, match=r"^cont: "):
            await monitor.execute("cont")
        with pytest.raises(MonitorError):
            await monitor.execute("cont")


@pytest.mark.usefixtures("short_limit")
@pytest.mark.parametrize("spoken", [b"", b'{"QMP": {', json.dumps(GREETING).encode() + b"\r\n"])
async def test_peer_that_falls_silent_before_it_is_open_is_an_error(spoken: bytes) -> None:
    async def script(peer: Peer) -> None:
        peer.write(spoken)
        await peer.until_closed()

    async with scripted(script) as (monitor, sock):
        with pytest.raises(MonitorError, match=r"^no monitor: TimeoutError$"):
            await monitor.open(sock)
        assert sock.fileno() == -1


@pytest.mark.parametrize(
    "spoken", [b"", b"qemu: could not open disk\r\n", b"\0\xff\r\n", b'{"return": {}}\r\n']
)
async def test_peer_that_does_not_greet_is_an_error_of_one_line(spoken: bytes) -> None:
    async def script(peer: Peer) -> None:
        peer.write(spoken)

    async with scripted(script) as (monitor, sock):
        with pytest.raises(MonitorError, match=r"^no monitor: ") as caught:
            await monitor.open(sock)
        assert sock.fileno() == -1
        assert len(str(caught.value).splitlines()) == 1


async def test_open_and_close_leave_no_fd() -> None:
    async def script(peer: Peer) -> None:
        await peer.greet()
        await peer.until_closed()

    before = open_fds()
    for _ in range(3):
        async with scripted(script) as (monitor, sock):
            await monitor.open(sock)
            await monitor.close()
            await monitor.close()
    assert open_fds() == before
