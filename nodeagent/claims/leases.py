"""Lease rules (pure) and the queue of ends."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Awaitable, Callable

from cocoon_rpc.errors import InvalidFieldError
from nodeagent.clock import Clock

DEFAULT_TTL_NS = 5 * 60 * 10**9
LONGEST_TTL_NS = 24 * 3600 * 10**9


def granted_ttl_ns(asked_ns: int) -> int:
    """Returns the length of a lease in nanoseconds; 0 asks for the default.

    Raises:
        InvalidFieldError: negative or above 24 hours.
    """
    if asked_ns < 0:
        raise InvalidFieldError(field="ttl", rule="must not be negative")
    if asked_ns > LONGEST_TTL_NS:
        raise InvalidFieldError(field="ttl", rule="must be at most 24 hours (86400 s)")
    return asked_ns or DEFAULT_TTL_NS


class LeaseQueue:
    """Calls back when leases end. Ends are on the monotonic clock: a wall clock that steps ends nothing."""

    def __init__(self, clock: Clock) -> None:
        """Starts empty."""
        self._clock = clock
        self._ends: list[tuple[float, str]] = []
        self._changed = asyncio.Event()

    def add(self, sandbox_id: str, end: float) -> None:
        """Adds a lease that ends at `end` (monotonic seconds)."""
        heapq.heappush(self._ends, (end, sandbox_id))
        if self._ends[0][1] == sandbox_id:
            self._changed.set()

    async def run(self, expire: Callable[[str], Awaitable[None]]) -> None:
        """Calls `expire` for each lease that ends, until cancelled.

        Leases of sandboxes that are gone already come too; the callee ignores them.
        """
        async with asyncio.TaskGroup() as group:
            while True:
                self._changed.clear()
                now = self._clock.monotonic()
                while self._ends and self._ends[0][0] <= now:
                    _, sandbox_id = heapq.heappop(self._ends)
                    group.create_task(_await(expire(sandbox_id)))
                delay = self._ends[0][0] - now if self._ends else None
                try:
                    async with asyncio.timeout(delay):
                        await self._changed.wait()
                except TimeoutError:
                    pass


async def _await(work: Awaitable[None]) -> None:
    await work
