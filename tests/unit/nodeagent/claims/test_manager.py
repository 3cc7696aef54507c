"""Claims: granted once, ended once, remembered; with scripted machines and a clock of our own."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from cocoon_rpc.errors import (
    ClaimLimitReachedError,
    LaneUnavailableError,
    NodeAtCapacityError,
    NodeStoppingError,
    ProvisionFailedError,
    RequestIdReusedError,
    SandboxNotFoundError,
    SandboxStateConflictError,
)
from nodeagent.claims.ids import token_sha256
from nodeagent.claims.manager import REMEMBER_NS, ClaimAsk, ClaimManager
from nodeagent.claims.state import State
from nodeagent.images import ImageStore
from nodeagent.journal.store import EndReason, Journal
from nodeagent.model import Image, Isolation, Net, PoolKey, Size, Tier
from nodeagent.pool.pools import Pools
from nodeagent.pool.provision import Provisioner
from nodeagent.telemetry.metrics import Metrics
from tests.framework.fake_engine import IMAGE, FakeClock, FakeEngine

KEY = PoolKey("rt", Net.NONE, Size.SMALL)
MINUTE_NS = 60 * 10**9


class OneImage(ImageStore):
    def resolve(self, template: str) -> Image:
        return IMAGE


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.002)


def ask(**fields: Any) -> ClaimAsk:
    return ClaimAsk(**{"key": KEY, "ttl_ns": MINUTE_NS, **fields})


class Node:
    """A manager over scripted machines."""

    def __init__(
        self, directory: Path, *, warm: int = 0, snapshots: bool = False, max_claims: int = 0
    ) -> None:
        self.directory, self.warm = directory, warm
        self.clock, self.metrics = FakeClock(), Metrics()
        self.engine = FakeEngine(snapshots=snapshots)
        self.snapshots, self.max_claims = snapshots, max_claims

    @asynccontextmanager
    async def running(self) -> AsyncIterator[ClaimManager]:
        """Runs it; leaving proves that no machine is left."""
        self.journal = Journal(self.directory / "journal.db")
        provisioner = Provisioner(self.engine, self.directory / "machines", self.clock, self.metrics)  # type: ignore[arg-type]
        self.pools = Pools(
            provisioner,
            await self.engine.prepare(),
            goldens=self.directory / "goldens",
            concurrency=4,
            clock=self.clock,
            metrics=self.metrics,
        )
        claims = ClaimManager(
            node_id="node-1",
            max_claims=self.max_claims,
            isolation=Isolation.NONE,
            pools=self.pools,
            provisioner=provisioner,
            images=OneImage(self.directory),
            journal=self.journal,
            clock=self.clock,
            metrics=self.metrics,
        )
        claims.recover()
        if self.warm or self.snapshots:
            self.pools.set([(KEY, IMAGE, self.warm)])
        try:
            async with asyncio.TaskGroup() as group:
                started = asyncio.Event()
                tasks = [
                    group.create_task(self.pools.run()),
                    group.create_task(claims.run(started=started)),
                ]
                await started.wait()
                await until(lambda: all(p.warm == self.warm for p in self.pools.list()))
                if self.snapshots:
                    await until(lambda: all(p.golden is not None for p in self.pools.list()))
                yield claims
                for task in reversed(tasks):
                    task.cancel()
        finally:
            self.journal.close()
        assert self.engine.live == set()
        assert list((self.directory / "machines").iterdir()) == []

    def ended(self, reason: EndReason) -> float:
        value = self.metrics.registry.get_sample_value("cocoon_claims_ended_total", {"reason": reason.value})
        return value or 0.0


async def test_tiers_are_warm_then_clone_and_cold_without_a_golden(directory: Path) -> None:
    node = Node(directory, warm=1, snapshots=True)
    async with node.running() as claims:
        node.engine.answering.clear()  # no refill meanwhile
        first = await claims.claim(ask())
        node.engine.answering.set()
        assert first.claim.record.tier is Tier.WARM
        other = await claims.claim(ask(key=PoolKey("rt", Net.NONE, Size.LARGE)))
        assert other.claim.record.tier is Tier.COLD
        node.pools.set([(KEY, IMAGE, 0)])
        await until(lambda: node.pools.list()[0].warm == 0 and node.pools.list()[0].refilling == 0)
        second = await claims.claim(ask())
        assert second.claim.record.tier is Tier.CLONE
        assert claims.list() == [first.claim, other.claim, second.claim]
        machines = {c.guest.machine.machine_id for c in claims.list()}
        assert len(machines) == 3


async def test_a_token_is_known_by_its_hash_only(directory: Path) -> None:
    node = Node(directory)
    async with node.running() as claims:
        granted = await claims.claim(ask())
        sandbox_id = granted.claim.record.id
        assert claims.owner_of(token_sha256(granted.token)) == sandbox_id
        assert claims.owner_of(token_sha256(granted.token + "x")) is None
        assert granted.token not in repr(granted.claim)
        files = b"".join(p.read_bytes() for p in directory.glob("journal.db*"))
        assert sandbox_id.encode() in files
        assert granted.token.encode() not in files


async def test_release_ends_a_claim_once(directory: Path) -> None:
    node = Node(directory)
    async with node.running() as claims:
        granted = await claims.claim(ask())
        sandbox_id = granted.claim.record.id
        await asyncio.gather(*(claims.release(sandbox_id) for _ in range(3)))
        await claims.release(sandbox_id)
        assert (node.ended(EndReason.RELEASED), node.engine.live) == (1, set())
        assert node.journal.end_of(sandbox_id) is EndReason.RELEASED
        with pytest.raises(SandboxNotFoundError):
            claims.get(sandbox_id)
        with pytest.raises(SandboxNotFoundError):
            await claims.release("sb_" + "a" * 26)
        assert claims.owner_of(token_sha256(granted.token)) == sandbox_id, "its owner may release again"


async def test_one_request_id_is_one_sandbox(directory: Path) -> None:
    node = Node(directory)
    async with node.running() as claims:
        request_id = str(uuid.uuid4())
        answers = await asyncio.gather(*(claims.claim(ask(request_id=request_id)) for _ in range(5)))
        assert len({id(a.claim) for a in answers}) == len({a.token for a in answers}) == 1
        assert len(node.engine.asked) == 1
        for other in (ask(request_id=request_id, ttl_ns=1), ask(request_id=request_id, metadata={"a": "b"})):
            with pytest.raises(RequestIdReusedError):
                await claims.claim(other)
        await claims.release(answers[0].claim.record.id)
        with pytest.raises(SandboxNotFoundError):
            await claims.claim(ask(request_id=request_id))
    async with node.running() as claims:
        with pytest.raises(SandboxNotFoundError):
            await claims.claim(ask(request_id=request_id))
        with pytest.raises(RequestIdReusedError):
            await claims.claim(ask(request_id=request_id, ttl_ns=1))


async def test_a_warm_claims_request_id_is_one_sandbox_too(directory: Path) -> None:
    node = Node(directory, warm=2)
    async with node.running() as claims:
        request_id = str(uuid.uuid4())
        answers = [await claims.claim(ask(request_id=request_id)) for _ in range(2)]
        assert answers[0] is answers[1]
        assert answers[0].claim.record.tier is Tier.WARM
        assert claims.claimed == 1


async def test_a_failed_claims_request_id_can_be_tried_again(directory: Path) -> None:
    node = Node(directory)
    node.engine.failures = [ProvisionFailedError(stage="boot", cause="scripted")]
    async with node.running() as claims:
        request_id = str(uuid.uuid4())
        with pytest.raises(ProvisionFailedError):
            await claims.claim(ask(request_id=request_id))
        assert (await claims.claim(ask(request_id=request_id))).token


async def test_a_cancelled_claim_leaves_no_machine(directory: Path) -> None:
    node = Node(directory)
    async with node.running() as claims, asyncio.TaskGroup() as group:
        node.engine.answering.clear()
        task = group.create_task(claims.claim(ask()))
        await until(lambda: bool(node.engine.live))
        task.cancel()
        await until(lambda: not node.engine.live)
        assert claims.claimed == 0


async def test_a_cancelled_claim_with_a_request_id_goes_on_for_its_repeat(directory: Path) -> None:
    node = Node(directory)
    async with node.running() as claims, asyncio.TaskGroup() as group:
        node.engine.answering.clear()
        wanted = ask(request_id=str(uuid.uuid4()))
        task = group.create_task(claims.claim(wanted))
        await until(lambda: bool(node.engine.live))
        task.cancel()
        await asyncio.wait({task})
        node.engine.answering.set()
        assert (await claims.claim(wanted)).token
        assert len(node.engine.asked) == 1


async def test_the_limit_holds_under_concurrent_claims(directory: Path) -> None:
    node = Node(directory, max_claims=2)
    async with node.running() as claims:
        answers = await asyncio.gather(*(claims.claim(ask()) for _ in range(5)), return_exceptions=True)
        refused = [a for a in answers if isinstance(a, ClaimLimitReachedError)]
        assert (len(refused), claims.claimed) == (3, 2)
        await claims.release(claims.list()[0].record.id)
        assert (await claims.claim(ask())).token


async def test_no_room_is_said_with_when_to_come_back(directory: Path) -> None:
    node = Node(directory)
    node.engine.failures = [NodeAtCapacityError(resource="disk", cause="full")]
    async with node.running() as claims:
        with pytest.raises(NodeAtCapacityError) as caught:
            await claims.claim(ask())
        assert caught.value.retry_after == pytest.approx(30)
        assert node.pools.capacity.parked


async def test_a_lease_that_ends_takes_the_machine(directory: Path) -> None:
    node = Node(directory)
    async with node.running() as claims:
        await claims.claim(ask(ttl_ns=10**7))
        keeps = await claims.claim(ask(ttl_ns=MINUTE_NS))
        node.clock.now += 1
        await until(lambda: claims.claimed == 1)
        assert claims.list() == [keeps.claim]
        await until(lambda: len(node.engine.live) == 1)
        assert node.ended(EndReason.EXPIRED) == 1


async def test_a_machine_that_dies_fails_its_claim_until_released(directory: Path) -> None:
    node = Node(directory)
    async with node.running() as claims:
        granted = await claims.claim(ask())
        (machine,) = node.engine.live
        machine.die()
        await until(lambda: granted.claim.state is State.FAILED)
        with pytest.raises(SandboxStateConflictError):
            claims.called(granted.claim.record.id)
        assert claims.get(granted.claim.record.id) is granted.claim
        await claims.release(granted.claim.record.id)
        assert node.engine.live == set()
        assert node.metrics.registry.get_sample_value("cocoon_machine_deaths_total") == 1


async def test_egress_is_refused_before_a_machine_is_made(directory: Path) -> None:
    node = Node(directory)
    async with node.running() as claims:
        with pytest.raises(LaneUnavailableError):
            await claims.claim(ask(key=PoolKey("rt", Net.EGRESS, Size.SMALL)))
        assert node.engine.asked == []


async def test_a_claim_that_cannot_be_recorded_leaves_no_machine(directory: Path) -> None:
    node = Node(directory, warm=1)
    async with node.running() as claims:
        node.journal._db.execute("DROP TABLE claims")
        with pytest.raises(ProvisionFailedError, match="journal"):
            await claims.claim(ask())
        assert claims.claimed == 0
        await until(lambda: node.pools.list()[0].warm == 1 and len(node.engine.live) == 1)


async def test_stopping_ends_all_claims_and_says_so(directory: Path) -> None:
    node = Node(directory, warm=1)
    async with node.running() as claims:
        await asyncio.gather(*(claims.claim(ask()) for _ in range(3)))
    assert node.ended(EndReason.STOPPED) == 3
    with pytest.raises(NodeStoppingError):
        await claims.claim(ask())
    journal = Journal(directory / "journal.db")
    assert journal.live_claims() == []
    journal.close()


async def test_claims_of_a_killed_node_are_lost_and_remembered(directory: Path) -> None:
    node = Node(directory)
    async with node.running() as claims:
        granted = await claims.claim(ask())
        record = granted.claim.record
    journal = Journal(directory / "journal.db")
    journal._db.execute("UPDATE claims SET end_ns=NULL, end_reason=NULL")
    journal.close()
    async with node.running() as claims:
        assert node.ended(EndReason.LOST) == 1
        assert claims.list() == []
        assert claims.owner_of(record.token_sha256) == record.id
        await claims.release(record.id)


async def test_ended_claims_are_forgotten_after_a_day(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nodeagent.claims.manager._CHECKPOINT_S", 0.01)
    node = Node(directory)
    async with node.running() as claims:
        request_id = str(uuid.uuid4())
        gone = await claims.claim(ask(request_id=request_id))
        lives = await claims.claim(ask(ttl_ns=86400 * 10**9))
        await claims.release(gone.claim.record.id)
        node.clock.now += REMEMBER_NS / 1e9 - 10
        await asyncio.sleep(0.05)
        assert claims.owner_of(token_sha256(gone.token)) is not None
        node.clock.now += 20
        await until(lambda: claims.owner_of(token_sha256(gone.token)) is None)
        with pytest.raises(SandboxNotFoundError):
            await claims.release(gone.claim.record.id)
        assert (await claims.claim(ask(request_id=request_id))).claim is not gone.claim
        assert claims.owner_of(token_sha256(lives.token)) is not None
