"""Writing what a program reads: only as fast as it is taken."""

from __future__ import annotations

import asyncio
import os

from guestd.process.spawn import Process

_WAITING = 4


class InputWriter:
    """Feeds a program's standard input; `run` is its scope.

    Four messages (at most 4 MiB) may wait, so that a signal behind them is seen while
    the program reads nothing. What comes after the program closed its input is dropped.
    """

    def __init__(self, process: Process) -> None:
        """Takes the program; its input is closed at the end of `run`'s work."""
        self._process = process
        self._waiting: asyncio.Queue[bytes | None] = asyncio.Queue(_WAITING)
        self._discarding = False

    async def put(self, data: bytes | None) -> None:
        """Appends input, None for its end; waits while too much waits."""
        if not self._discarding:
            await self._waiting.put(data)

    def discard(self) -> None:
        """Drops what waits and what comes: nobody reads it any more."""
        self._discarding = True
        while not self._waiting.empty():
            self._waiting.get_nowait()

    async def run(self) -> None:
        """Writes until the end of the input."""
        while (data := await self._waiting.get()) is not None:
            await self._write(data)
        self._process.close_stdin()

    async def _write(self, data: bytes) -> None:
        view = memoryview(data)
        while view and self._process.stdin is not None:
            try:
                view = view[os.write(self._process.stdin, view) :]
            except BlockingIOError:
                await _writable(self._process.stdin)
            except OSError:
                self._process.close_stdin()


async def _writable(fd: int) -> None:
    loop = asyncio.get_running_loop()
    ready = asyncio.Event()
    loop.add_writer(fd, ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_writer(fd)
