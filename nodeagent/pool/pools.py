"""All pools of a node: declared as a set, looked up by key."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from pathlib import Path

import structlog

from nodeagent.clock import Clock
from nodeagent.engine.base import EngineFacts
from nodeagent.model import Image, PoolKey
from nodeagent.pool.capacity import Capacity
from nodeagent.pool.pool import Pool
from nodeagent.pool.provision import Provisioner
from nodeagent.telemetry.metrics import Metrics

_log = structlog.get_logger()


class Pools:
    """The node's pools. `run` is their scope: they live and end in it."""

    def __init__(
        self,
        provisioner: Provisioner,
        facts: EngineFacts,
        *,
        goldens: Path,
        concurrency: int,
        clock: Clock,
        metrics: Metrics,
    ) -> None:
        """Makes the empty set."""
        self.capacity = Capacity(clock)
        self.slots = asyncio.Semaphore(concurrency)
        self._provisioner = provisioner
        self._facts = facts
        self._goldens = goldens
        self._clock = clock
        self._metrics = metrics
        self._pools: dict[PoolKey, Pool] = {}
        self._changed = asyncio.Event()

    def get(self, key: PoolKey) -> Pool | None:
        """Returns the pool of a key."""
        return self._pools.get(key)

    def by_digest(self, image: Image, key: PoolKey) -> Pool | None:
        """Returns a pool that makes the same machines under another name."""
        for pool in self._pools.values():
            if (pool.image.digest, pool.key.net, pool.key.size) == (image.digest, key.net, key.size):
                return pool
        return None

    def list(self) -> list[Pool]:
        """Returns the pools, sorted by template, net and size."""
        return sorted(
            self._pools.values(), key=lambda p: (p.key.template, p.key.net.value, p.key.size.memory_bytes)
        )

    def set(self, wanted: Iterable[tuple[PoolKey, Image, int]]) -> None:
        """Declares the pools: new ones start, changed ones adapt, others drain.

        A pool whose image is not the same any more is replaced as a whole.
        """
        declared = {key: (image, target) for key, image, target in wanted}
        for key, pool in list(self._pools.items()):
            if key not in declared or declared[key][0].digest != pool.image.digest:
                del self._pools[key]
                self._changed.set()
        for key, (image, target) in declared.items():
            if key in self._pools:
                self._pools[key].retarget(target)
                continue
            self._pools[key] = Pool(
                key,
                image,
                target,
                provisioner=self._provisioner,
                snapshots=self._facts.snapshots,
                goldens=self._goldens,
                slots=self.slots,
                capacity=self.capacity,
                clock=self._clock,
                metrics=self._metrics,
            )
            self._changed.set()

    async def run(self) -> None:
        """Runs the declared pools until cancelled; then all are drained."""
        running: dict[Pool, asyncio.Task[None]] = {}
        async with asyncio.TaskGroup() as group:
            while True:
                self._changed.clear()
                current = set(self._pools.values())
                for pool in set(running) - current:
                    task = running.pop(pool)
                    task.cancel()
                    # The next pool of this key uses the same golden directory.
                    await asyncio.wait({task})
                    _log.info("pool_drained", pool=str(pool.key))
                for pool in current - set(running):
                    running[pool] = group.create_task(pool.run())
                await self._changed.wait()
