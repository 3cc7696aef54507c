"""Feeding a program: in order, to the end, and never in the way of what comes behind."""

from __future__ import annotations

import asyncio
import os

import pytest

from guestd.process.command import prepare
from guestd.process.input import InputWriter
from guestd.process.spawn import Process, spawn


def _start(*argv: str) -> Process:
    return spawn(prepare(argv, cwd="/", env={}, user="", stdin=True))


async def test_input_arrives_whole_and_ends() -> None:
    process = _start("sha256sum")
    writer = InputWriter(process)
    async with asyncio.timeout(10), asyncio.TaskGroup() as group:
        group.create_task(writer.run())
        for _ in range(16):
            await writer.put(bytes(256 * 1024))
        await writer.put(None)
        await process.wait()
    # 4 MiB of zeros.
    assert os.read(process.stdout, 64) == b"bb9f8df61474d25e71fa00722318cd387396ca1736605e1248821cc0de3d3af8"
    assert await process.end(kill_group=False) == 0


async def test_input_waits_while_the_program_reads_nothing() -> None:
    process = _start("sleep", "300")
    writer = InputWriter(process)
    async with asyncio.TaskGroup() as group:
        running = group.create_task(writer.run())
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                for _ in range(100):
                    await writer.put(bytes(256 * 1024))
        assert not running.done()
        running.cancel()
    await process.end(kill_group=True)


async def test_input_is_dropped_once_the_program_ended() -> None:
    process = _start("true")
    await asyncio.wait_for(process.wait(), 10)
    writer = InputWriter(process)
    async with asyncio.timeout(10), asyncio.TaskGroup() as group:
        group.create_task(writer.run())
        for _ in range(100):
            await writer.put(bytes(256 * 1024))
        await writer.put(None)
    assert process.stdin is None
    await process.end(kill_group=False)
