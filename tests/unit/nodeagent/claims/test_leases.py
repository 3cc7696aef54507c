"""Leases: their length and their end."""

from __future__ import annotations

import asyncio

import pytest

from cocoon_rpc.errors import InvalidFieldError
from nodeagent.claims.leases import DEFAULT_TTL_NS, LONGEST_TTL_NS, LeaseQueue, granted_ttl_ns


def test_length_of_a_lease() -> None:
    assert granted_ttl_ns(0) == DEFAULT_TTL_NS == 300 * 10**9
    assert granted_ttl_ns(LONGEST_TTL_NS) == 86400 * 10**9
    for wrong in (-1, LONGEST_TTL_NS + 1):
        with pytest.raises(InvalidFieldError):
            granted_ttl_ns(wrong)


async def test_leases_end_in_their_order_and_a_shorter_one_overtakes() -> None:
    class Clock:
        now = 0.0

        def wall_ns(self) -> int:
            return 0

        def monotonic(self) -> float:
            return self.now

    clock, ended, seen = Clock(), [], asyncio.Event()

    async def expire(sandbox_id: str) -> None:
        ended.append(sandbox_id)
        seen.set()

    queue = LeaseQueue(clock)
    queue.add("long", 1000.0)
    async with asyncio.TaskGroup() as group:
        runner = group.create_task(queue.run(expire))
        await asyncio.sleep(0)
        clock.now = 5.0
        queue.add("short", 5.0)
        async with asyncio.timeout(5):
            await seen.wait()
        assert ended == ["short"]
        runner.cancel()
