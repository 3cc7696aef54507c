"""Clean-up that cancellation cannot cut short."""

from __future__ import annotations

import asyncio

import pytest

from cocoon_rpc.scope import complete


async def test_cancelled_caller_still_completes_the_work() -> None:
    begun, go_on, done = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def work() -> None:
        begun.set()
        await go_on.wait()
        done.set()

    async with asyncio.TaskGroup() as group:
        caller = group.create_task(complete(work()))
        await begun.wait()
        caller.cancel()
        await asyncio.sleep(0)
        assert not caller.done()
        go_on.set()
        await asyncio.wait({caller})
        assert caller.cancelled()
    assert done.is_set()


async def test_errors_of_the_work_are_raised() -> None:
    async def work() -> None:
        raise ValueError("x")

    with pytest.raises(ValueError, match="x"):
        await complete(work())
