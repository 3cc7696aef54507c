"""A pool keeps its guests, one pop at a time, through failures of making them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from cocoon_rpc.errors import NodeAtCapacityError, ProvisionFailedError
from nodeagent.model import Image, Net, PoolKey, Size
from nodeagent.pool import pool as pool_module
from nodeagent.pool.pool import GoldenStatus, Pool
from nodeagent.pool.pools import Pools
from nodeagent.pool.provision import Provisioner
from nodeagent.pool.target import FAILURE_STREAK
from nodeagent.telemetry.metrics import Metrics
from tests.framework.fake_engine import IMAGE, FakeClock, FakeEngine

KEY = PoolKey("rt", Net.NONE, Size.SMALL)
FAILURE = ProvisionFailedError(stage="boot", cause="scripted")


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.002)


async def settled(engine: FakeEngine) -> int:
    """Returns how many machines were asked for, once no more are."""
    while True:
        before = len(engine.asked)
        await asyncio.sleep(0.05)
        if len(engine.asked) == before:
            return before


class Bench:
    def __init__(self, directory: Path, *, snapshots: bool = False, concurrency: int = 4) -> None:
        self.directory = directory
        self.clock, self.metrics = FakeClock(), Metrics()
        self.engine = FakeEngine(snapshots=snapshots)
        self.snapshots, self.concurrency = snapshots, concurrency

    @asynccontextmanager
    async def running(self, target: int) -> AsyncIterator[Pool]:
        """Runs a node's pools with one declared; leaving proves that nothing is left."""
        provisioner = Provisioner(self.engine, self.directory / "machines", self.clock, self.metrics)  # type: ignore[arg-type]
        self.pools = Pools(
            provisioner,
            await self.engine.prepare(),
            goldens=self.directory / "goldens",
            concurrency=self.concurrency,
            clock=self.clock,
            metrics=self.metrics,
        )
        self.pools.set([(KEY, IMAGE, target)])
        pool = self.pools.get(KEY)
        assert pool is not None
        async with asyncio.TaskGroup() as group:
            task = group.create_task(self.pools.run())
            yield pool
            task.cancel()
        assert self.engine.live == set()
        assert list((self.directory / "machines").iterdir()) == []
        assert list((self.directory / "goldens").iterdir()) == []


async def test_fills_to_its_target_and_refills_after_a_pop(directory: Path) -> None:
    bench = Bench(directory)
    async with bench.running(3) as pool:
        await until(lambda: pool.warm == 3)
        assert pool.golden_status is GoldenStatus.UNSUPPORTED
        guest = pool.pop()
        assert guest is not None
        assert pool.warm == 2
        await until(lambda: pool.warm == 3)
        assert await settled(bench.engine) == 4
        assert guest.machine in bench.engine.live, "a popped guest is its taker's"
        await guest.close()


async def test_pop_of_an_empty_pool_is_none_and_never_gives_one_guest_twice(directory: Path) -> None:
    bench = Bench(directory)
    async with bench.running(5) as pool:
        await until(lambda: pool.warm == 5)
        guests = [pool.pop() for _ in range(6)]
        assert guests[5] is None
        assert len({id(g) for g in guests[:5]}) == 5
        for guest in guests[:5]:
            assert guest is not None
            await guest.close()


async def test_clones_come_from_one_golden(directory: Path) -> None:
    bench = Bench(directory, snapshots=True)
    async with bench.running(2) as pool:
        await until(lambda: pool.warm == 2)
        assert pool.golden_status is GoldenStatus.READY
        assert bench.engine.asked == ["golden", "clone", "clone"]


async def test_a_failed_golden_is_tried_again(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(directory, snapshots=True)
    bench.engine.failures.append(FAILURE)
    monkeypatch.setattr(pool_module, "GOLDEN_RETRY_S", 0.2)
    async with bench.running(1) as pool:
        await until(lambda: pool.golden_status is GoldenStatus.FAILED)
        assert "scripted" in pool.last_error
        assert pool.paused_s > 0
        bench.clock.now += 1
        await until(lambda: pool.warm == 1)
        assert pool.golden_status is GoldenStatus.READY
        assert pool.last_error == ""


async def test_failures_in_a_row_make_it_wait(directory: Path) -> None:
    bench = Bench(directory)
    bench.engine.failures = [FAILURE] * FAILURE_STREAK
    async with bench.running(1) as pool:
        await until(lambda: pool.paused_s > 0)
        assert await settled(bench.engine) == FAILURE_STREAK
        assert (pool.warm, pool.refilling) == (0, 0)
        bench.clock.now += 1
        pool.retarget(1)
        await until(lambda: pool.warm == 1)
        assert pool.paused_s == 0


async def test_a_streak_of_failures_is_probed_by_one_machine(directory: Path) -> None:
    bench = Bench(directory)
    bench.engine.failures = [FAILURE] * FAILURE_STREAK
    async with bench.running(4) as pool:
        await until(lambda: pool.paused_s > 0)
        tried = await settled(bench.engine)
        bench.engine.failures = []
        bench.engine.answering.clear()
        bench.clock.now += 60
        pool.retarget(4)
        await until(lambda: pool.refilling > 0)
        assert await settled(bench.engine) == tried + 1
        bench.engine.answering.set()
        await until(lambda: pool.warm == 4)


async def test_an_unexpected_error_does_not_end_the_pool(directory: Path) -> None:
    bench = Bench(directory)
    bench.engine.failures = [ZeroDivisionError("a secret path")]
    async with bench.running(1) as pool:
        await until(lambda: pool.warm == 1)
        assert pool.last_error == ""
    assert bench.engine.asked == ["boot", "boot"]


async def test_no_room_parks_all_pools_for_a_while(directory: Path) -> None:
    bench = Bench(directory)
    bench.engine.failures = [NodeAtCapacityError(resource="disk", cause="full")]
    async with bench.running(1) as pool:
        await until(lambda: bench.pools.capacity.parked)
        assert "disk" in bench.pools.capacity.cause
        assert pool.paused_s == pytest.approx(30)
        other = PoolKey("rt", Net.NONE, Size.LARGE)
        bench.pools.set([(KEY, IMAGE, 1), (other, IMAGE, 1)])
        assert await settled(bench.engine) == 1
        bench.clock.now += 29
        pool.retarget(1)
        assert await settled(bench.engine) == 1
        bench.clock.now += 2
        pool.retarget(1)
        await until(lambda: pool.warm == 1)
        assert not bench.pools.capacity.parked
        assert bench.pools.capacity.cause == ""


async def test_a_dead_warm_machine_is_replaced_and_never_handed_out(directory: Path) -> None:
    bench = Bench(directory)
    async with bench.running(1) as pool:
        await until(lambda: pool.warm == 1)
        (dead,) = bench.engine.live
        dead.die()
        await until(lambda: pool.warm == 1 and dead not in bench.engine.live)
        guest = pool.pop()
        assert guest is not None
        assert guest.machine is not dead
        assert not dead.spec.directory.exists()
        assert bench.metrics.registry.get_sample_value("cocoon_machine_deaths_total") == 1
        await guest.close()


async def test_a_lower_target_trims(directory: Path) -> None:
    bench = Bench(directory)
    async with bench.running(3) as pool:
        await until(lambda: pool.warm == 3)
        bench.pools.set([(KEY, IMAGE, 1)])
        await until(lambda: len(bench.engine.live) == 1)
        assert pool.warm == 1


async def test_an_undeclared_pool_drains_and_a_new_image_replaces_it(directory: Path) -> None:
    bench = Bench(directory, snapshots=True)
    async with bench.running(2) as pool:
        await until(lambda: pool.warm == 2)
        image = Image("rt", "sha256:" + "1" * 64, ())
        bench.pools.set([(KEY, image, 1)])
        await until(lambda: (p := bench.pools.get(KEY)) is not None and p.warm == 1)
        assert {m.spec.image for m in bench.engine.live} == {image}
        bench.pools.set([])
        await until(lambda: bench.engine.live == set())
        assert bench.pools.list() == []


async def test_no_more_machines_are_made_at_a_time_than_there_are_slots(directory: Path) -> None:
    bench = Bench(directory, concurrency=2)
    bench.engine.answering.clear()
    async with bench.running(5) as pool:
        await until(lambda: len(bench.engine.live) == 2)
        assert await settled(bench.engine) == 2
        assert pool.refilling == 5
        bench.engine.answering.set()
        await until(lambda: pool.warm == 5)


async def test_cancelling_a_pool_in_the_middle_of_a_refill_leaves_no_machine(directory: Path) -> None:
    bench = Bench(directory)
    bench.engine.answering.clear()
    async with bench.running(3):
        await until(lambda: len(bench.engine.live) == 3)


async def test_a_digest_finds_the_pool_of_another_name(directory: Path) -> None:
    bench = Bench(directory)
    async with bench.running(0) as pool:
        assert bench.pools.by_digest(IMAGE, PoolKey(IMAGE.digest, Net.NONE, Size.SMALL)) is pool
        assert bench.pools.by_digest(IMAGE, PoolKey(IMAGE.digest, Net.NONE, Size.LARGE)) is None


async def test_a_node_that_stops_while_a_pool_drains_leaves_nothing(directory: Path) -> None:
    bench = Bench(directory, snapshots=True)
    async with bench.running(3) as pool:
        await until(lambda: pool.warm == 3)
        bench.pools.set([])
        # The draining has begun, and now its scope is cancelled too.
        await until(lambda: len(bench.engine.live) < 3)
