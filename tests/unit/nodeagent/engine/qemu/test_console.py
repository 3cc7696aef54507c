"""The console against a writer that may be anything: a guest is hostile."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator

import pytest

from nodeagent.engine.child import pair
from nodeagent.engine.qemu import console as subject
from nodeagent.engine.qemu.console import Console

Ends = tuple[Console, socket.socket]


@pytest.fixture
async def ends() -> AsyncIterator[Ends]:
    """A console and the guest's end of it."""
    ours, guest = pair()
    console = Console(ours)
    with guest:
        yield console, guest
        console.close()


@pytest.mark.parametrize(
    ("printed", "line"),
    [
        (b"", ""),
        (b"\r\n \r\n", ""),
        (b"one\r\ntwo\r\n\r\n", "two"),
        (b"one\r\nunfinished", "unfinished"),
        (b"\x1b]0;evil\x07\x1b[2Jtext\r\n", "]0;evil[2Jtext"),
        (b"\xff\xfe ok\n", "\ufffd\ufffd ok"),
        (b"a" * 1000 + b"end\n", "a" * 297 + "end"),
        (b"\x1b\x07\x00\n", ""),
    ],
)
async def test_last_line_is_printable_and_bounded(ends: Ends, printed: bytes, line: str) -> None:
    console, guest = ends
    guest.sendall(printed)
    assert console.last_line() == line


async def test_last_words_are_kept_after_death_and_close(ends: Ends) -> None:
    console, guest = ends
    guest.sendall(b"booting\r\n")
    assert console.last_line() == "booting"
    guest.sendall(b"fatal: no disk\r\n")
    guest.close()
    console.close()
    console.close()
    assert console.last_line() == "fatal: no disk"


async def test_guest_that_prints_without_end_waits_and_goes_on(ends: Ends) -> None:
    """It is read in the background, in steps, and only the end is kept."""
    console, guest = ends
    guest.setblocking(False)
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(20):
        for number in range(40):
            await loop.sock_sendall(guest, b"x" * 50_000 + b"\nline %d\n" % number)
    assert console.last_line() == "line 39"
    assert len(console._kept) <= 8192


async def test_ended_console_is_read_no_more(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    """A closed socket is readable for ever; who listens to that does nothing else."""
    reads: list[bool] = []
    read = Console._read
    monkeypatch.setattr(Console, "_read", lambda console: reads.append(read(console)) or reads[-1])
    monkeypatch.setattr(subject, "_PAUSE_S", 0)
    console, guest = ends
    guest.sendall(b"bye\n")
    guest.close()
    for _ in range(100):
        await asyncio.sleep(0)
    assert reads == [True, False]
    assert console.last_line() == "bye"
