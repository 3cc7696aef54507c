"""Reading what a program writes: only as fast as it is taken."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable

CHUNK = 256 * 1024
DRAIN_GRACE_S = 2.0


class OutputReader:
    """Reads several pipes by name until all are at their end.

    Nothing is read ahead: a pipe is watched only while `chunks` waits, so a slow
    taker fills the pipe and holds the program.
    """

    def __init__(self, pipes: dict[str, int], ended: Callable[[], bool]) -> None:
        """Takes the pipes (non-blocking; not owned) and whether the program has ended."""
        self._pipes = dict(pipes)
        self._ended = ended
        self._wake = asyncio.Event()

    def poke(self) -> None:
        """Makes a waiting `chunks` look at `ended` again."""
        self._wake.set()

    async def chunks(self) -> AsyncIterator[tuple[str, bytes]]:
        """Yields (name, bytes) in the order read.

        Ends when every pipe is at its end; or, once the program has ended and a
        child keeps a pipe open, when nothing came for the rest of a grace of 2 s.
        """
        loop = asyncio.get_running_loop()
        grace_end: float | None = None
        while self._pipes:
            self._wake.clear()
            moved = False
            for name, fd in list(self._pipes.items()):
                try:
                    data = os.read(fd, CHUNK)
                except BlockingIOError:
                    continue
                moved = True
                if data:
                    yield name, data
                else:
                    del self._pipes[name]
            if self._ended():
                grace_end = grace_end or loop.time() + DRAIN_GRACE_S
                if loop.time() >= grace_end:
                    return
            if not moved and self._pipes:
                await self._wait(grace_end)

    async def _wait(self, until: float | None) -> None:
        loop = asyncio.get_running_loop()
        watched = list(self._pipes.values())
        for fd in watched:
            loop.add_reader(fd, self._wake.set)
        try:
            async with asyncio.timeout_at(until):
                await self._wake.wait()
        except TimeoutError:
            pass
        finally:
            for fd in watched:
                loop.remove_reader(fd)
