"""From an image or a golden to a guest that has answered, or to nothing at all."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from cocoon_rpc.errors import NodeAtCapacityError, ProvisionFailedError
from nodeagent.model import Size, Tier
from nodeagent.pool import provision
from nodeagent.pool.provision import Provisioner
from nodeagent.telemetry.metrics import Metrics
from tests.framework.fake_engine import IMAGE, FakeClock, FakeEngine


class Bench:
    def __init__(self, directory: Path) -> None:
        self.engine = FakeEngine(snapshots=True)
        self.machines = directory / "machines"
        self.metrics = Metrics()
        self.provisioner = Provisioner(self.engine, self.machines, FakeClock(), self.metrics)  # type: ignore[arg-type]

    def failures(self, stage: str) -> float | None:
        return self.metrics.registry.get_sample_value("cocoon_provision_failures_total", {"stage": stage})

    def assert_empty(self) -> None:
        assert self.engine.live == set()
        assert list(self.machines.iterdir()) == []


@pytest.fixture
def bench(directory: Path) -> Bench:
    return Bench(directory)


async def test_each_guest_has_an_identity_of_its_own(bench: Bench, directory: Path) -> None:
    golden = await bench.provisioner.golden(IMAGE, Size.SMALL, directory / "goldens" / "g")
    bench.assert_empty()
    guests = [await bench.provisioner.clone(golden), await bench.provisioner.clone(golden)]
    guests.append(await bench.provisioner.cold(IMAGE, Size.SMALL))
    assert [g.tier for g in guests] == [Tier.CLONE, Tier.CLONE, Tier.COLD]
    identities = [machine.identity for machine in bench.engine.live]
    assert all(identities)
    assert len({i.machine_id for i in identities if i}) == 3
    assert len({i.generation for i in identities if i}) == 3
    assert {i.hostname for i in identities if i} == {g.machine.machine_id for g in guests}
    for guest in guests:
        await guest.close()
        await guest.close()
    bench.assert_empty()


async def test_a_guest_that_cannot_renew_its_identity_is_destroyed(bench: Bench) -> None:
    bench.engine.refuse_identity = True
    with pytest.raises(ProvisionFailedError, match="entropy: scripted"):
        await bench.provisioner.cold(IMAGE, Size.SMALL)
    bench.assert_empty()
    assert bench.failures("identity") == 1


async def test_a_silent_guest_is_given_up(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(provision, "COLD_LIMIT_S", 0.2)
    bench.engine.answering.clear()
    with pytest.raises(ProvisionFailedError, match="probe"):
        await bench.provisioner.cold(IMAGE, Size.SMALL)
    bench.assert_empty()
    assert bench.failures("probe") == 1


async def test_a_machine_that_dies_is_not_waited_for(bench: Bench) -> None:
    bench.engine.answering.clear()
    async with asyncio.timeout(10), asyncio.TaskGroup() as group:

        async def kill_it() -> None:
            while not bench.engine.live:
                await asyncio.sleep(0.005)
            for machine in bench.engine.live:
                machine.die()

        group.create_task(kill_it())
        with pytest.raises(ProvisionFailedError, match="the machine ended before"):
            await bench.provisioner.cold(IMAGE, Size.SMALL)
    bench.assert_empty()


@pytest.mark.parametrize("verb", ["cold", "golden"])
async def test_cancellation_leaves_no_machine(bench: Bench, directory: Path, verb: str) -> None:
    bench.engine.answering.clear()
    async with asyncio.timeout(10), asyncio.TaskGroup() as group:
        work = (
            bench.provisioner.cold(IMAGE, Size.SMALL)
            if verb == "cold"
            else bench.provisioner.golden(IMAGE, Size.SMALL, directory / "goldens" / "g")
        )
        task = group.create_task(work)
        while not bench.engine.live:
            await asyncio.sleep(0.005)
        task.cancel()
        await asyncio.wait({task})
        assert task.cancelled()
    bench.assert_empty()
    assert list((directory / "goldens").iterdir()) == []


async def test_an_engines_refusal_is_counted_and_passed_on(bench: Bench) -> None:
    bench.engine.failures.append(NodeAtCapacityError(resource="disk", cause="full"))
    with pytest.raises(NodeAtCapacityError):
        await bench.provisioner.cold(IMAGE, Size.SMALL)
    assert bench.failures("cold") == 1
    bench.assert_empty()
