"""Claims: the only place where a sandbox begins and ends.

A warm claim is a pop, one write to the journal and two dictionary entries; it
waits for no disk sync, no fork and no other node. Clones and boots run in this
manager's scope, so that a caller who hangs up does not leave half a claim: with a
request_id the answer waits for the repeat, without one it is released.
"""

from __future__ import annotations

import asyncio
import hashlib
import sqlite3
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import structlog

from cocoon.types.v1 import sandbox_pb2
from cocoon_rpc.errors import (
    ClaimLimitReachedError,
    LaneUnavailableError,
    NodeAtCapacityError,
    NodeStoppingError,
    ProvisionFailedError,
    RequestIdReusedError,
    SandboxNotFoundError,
)
from cocoon_rpc.scope import complete
from nodeagent.claims import ids
from nodeagent.claims.leases import LeaseQueue, granted_ttl_ns
from nodeagent.claims.state import Event, State, step
from nodeagent.clock import Clock
from nodeagent.images import ImageStore
from nodeagent.journal.store import ClaimRecord, EndReason, Journal
from nodeagent.model import Image, Isolation, Net, PoolKey, Tier
from nodeagent.pool.pool import Pool
from nodeagent.pool.pools import Pools
from nodeagent.pool.provision import Guest, Provisioner
from nodeagent.telemetry.metrics import Metrics

REMEMBER_NS = 24 * 3600 * 10**9
_CHECKPOINT_S = 30.0
_log = structlog.get_logger()


@dataclass(frozen=True)
class ClaimAsk:
    """A checked request for a sandbox."""

    key: PoolKey
    ttl_ns: int
    request_id: str = ""
    claim_ref: str = ""
    metadata: Mapping[str, str] = field(default_factory=dict)

    @cached_property
    def content_sha256(self) -> bytes:
        """What two requests of one request_id must share."""
        parts = [str(self.key), str(self.ttl_ns), self.claim_ref, *map(repr, sorted(self.metadata.items()))]
        return hashlib.sha256("\0".join(parts).encode("utf-8", "surrogatepass")).digest()


@dataclass(eq=False, slots=True)
class Claim:
    """A live claim and its guest."""

    record: ClaimRecord
    guest: Guest
    state: State = State.RUNNING

    @property
    def name(self) -> str:
        """`sandboxes/{id}`."""
        return f"sandboxes/{self.record.id}"


@dataclass(frozen=True, slots=True)
class Granted:
    """A claim with its token, which is nowhere else."""

    claim: Claim
    token: str


_Outcome = Granted | Exception


class ClaimManager:
    """All claims of a node. `run` is its scope."""

    def __init__(
        self,
        *,
        node_id: str,
        max_claims: int,
        isolation: Isolation,
        pools: Pools,
        provisioner: Provisioner,
        images: ImageStore,
        journal: Journal,
        clock: Clock,
        metrics: Metrics,
    ) -> None:
        """Takes what it needs; serves claims once `run` has started."""
        self._node_id = node_id
        self._hint = ids.node_hint(node_id)
        self._max_claims = max_claims
        self._isolation = isolation
        self._pools = pools
        self._provisioner = provisioner
        self._images = images
        self._journal = journal
        self._clock = clock
        self._metrics = metrics
        self._claims: dict[str, Claim] = {}
        self._by_token: dict[bytes, str] = {}
        self._leases = LeaseQueue(clock)
        self._answers: dict[str, tuple[bytes, asyncio.Future[_Outcome]]] = {}
        # Slow claims under way, as marks of their own.
        self._making: set[object] = set()
        self._group: asyncio.TaskGroup | None = None

    def recover(self) -> None:
        """Ends in the journal what a former agent left live; call before `run`."""
        now = self._clock.wall_ns()
        for record in self._journal.live_claims():
            self._journal.end_claim(record.id, EndReason.LOST, now)
            self._metrics.claims_ended.labels(EndReason.LOST.value).inc()
            _log.warning("claim_lost", sandbox=record.id)
        self._by_token = {token: sandbox_id for sandbox_id, token in self._journal.ended_tokens()}

    async def run(self, *, started: asyncio.Event) -> None:
        """Serves claims until cancelled; then ends them all and forgets nothing."""
        try:
            async with asyncio.TaskGroup() as group:
                self._group = group
                group.create_task(self._leases.run(self._expire))
                group.create_task(self._keep_journal())
                started.set()
        finally:
            self._group = None
            await complete(self._stop())

    async def _stop(self) -> None:
        for claim in list(self._claims.values()):
            await self._end(claim, Event.STOP, EndReason.STOPPED)

    # -- looking

    @property
    def claimed(self) -> int:
        """Live claims."""
        return len(self._claims)

    def list(self) -> list[Claim]:
        """Returns live claims, oldest first."""
        return list(self._claims.values())

    def get(self, sandbox_id: str) -> Claim:
        """Returns a live claim. Raises: SandboxNotFoundError."""
        claim = self._claims.get(sandbox_id)
        if claim is None:
            raise SandboxNotFoundError(sandbox=f"sandboxes/{sandbox_id}")
        return claim

    def owner_of(self, token_sha256: bytes) -> str | None:
        """Returns the sandbox that a token is for, live or ended in the last day."""
        return self._by_token.get(token_sha256)

    def called(self, sandbox_id: str) -> Claim:
        """Returns the claim that a guest call is for.

        Raises: SandboxNotFoundError, SandboxStateConflictError.
        """
        claim = self.get(sandbox_id)
        claim.state = step(claim.name, claim.state, Event.CALL)
        return claim

    # -- claiming

    async def claim(self, ask: ClaimAsk) -> Granted:
        """Grants a sandbox; see SandboxService.Claim for rules and errors."""
        began = self._clock.monotonic()
        group = self._group
        if group is None:
            raise NodeStoppingError(node=f"nodes/{self._node_id}")
        ttl_ns = granted_ttl_ns(ask.ttl_ns)
        if ask.request_id:
            known = self._answers.get(ask.request_id)
            content = ask.content_sha256
            if known is None:
                self._refuse_spent(ask.request_id, content)
            else:
                return await self._repeat(ask, content, *known)
        granted = self._claim_warm(ask, ttl_ns, began)
        if granted is not None:
            return granted
        # Marked here and not in the task, so that claims of one moment see each other.
        mark = object()
        self._making.add(mark)
        work = group.create_task(_outcome(self._claim_slow(ask, ttl_ns, began, mark)))
        work.add_done_callback(lambda _: self._making.discard(mark))
        if ask.request_id:
            self._answers[ask.request_id] = (ask.content_sha256, work)
            return await self._answer(ask, work)
        try:
            return _unwrap(await asyncio.shield(work))
        except asyncio.CancelledError:
            # Nobody can ask for this one again.
            work.cancel()
            raise

    async def _repeat(
        self, ask: ClaimAsk, content: bytes, first: bytes, work: asyncio.Future[_Outcome]
    ) -> Granted:
        if content != first:
            raise RequestIdReusedError(request_id=ask.request_id)
        return await self._answer(ask, work)

    async def _answer(self, ask: ClaimAsk, work: asyncio.Future[_Outcome]) -> Granted:
        outcome = await asyncio.shield(work)
        if not isinstance(outcome, Granted):
            # A failed claim left nothing: the id may be tried again.
            self._answers.pop(ask.request_id, None)
        granted = _unwrap(outcome)
        if granted.claim.record.id not in self._claims:
            raise SandboxNotFoundError(sandbox=granted.claim.name)
        return granted

    def _refuse_spent(self, request_id: str, content: bytes) -> None:
        """Refuses an id whose sandbox is gone: the first answer cannot be given any more."""
        record = self._journal.request(request_id)
        if record is None:
            return
        if record.content_sha256 != content:
            raise RequestIdReusedError(request_id=request_id)
        raise SandboxNotFoundError(sandbox=f"sandboxes/{record.sandbox_id}")

    def _claim_warm(self, ask: ClaimAsk, ttl_ns: int, began: float) -> Granted | None:
        """Grants a warm guest without waiting; None if there is none."""
        if ask.key.net is not Net.NONE:
            raise LaneUnavailableError(net=sandbox_pb2.NET_EGRESS)
        self._check_room()
        pool = self._pools.get(ask.key)
        guest = pool.pop() if pool else None
        return self._grant(ask, guest, Tier.WARM, ttl_ns, began) if guest else None

    async def _claim_slow(self, ask: ClaimAsk, ttl_ns: int, began: float, mark: object) -> Granted:
        """Grants a clone if there is a golden, else a cold boot."""
        try:
            image, pool = self._image_and_pool(ask.key)
            guest = pool.pop() if pool else None
            if guest is not None:
                return self._grant(ask, guest, Tier.WARM, ttl_ns, began)
            if pool is not None and pool.golden is not None:
                guest = await self._provisioner.clone(pool.golden)
            else:
                guest = await self._provisioner.cold(image, ask.key.size)
        except NodeAtCapacityError as error:
            self._pools.capacity.exhausted(error)
            error.retry_after = self._pools.capacity.pause_s
            raise
        finally:
            # From here to the grant nothing waits: it is counted once.
            self._making.discard(mark)
        self._pools.capacity.succeeded()
        return self._grant(ask, guest, guest.tier, ttl_ns, began)

    def _image_and_pool(self, key: PoolKey) -> tuple[Image, Pool | None]:
        pool = self._pools.get(key)
        if pool is not None:
            return pool.image, pool
        image = self._images.resolve(key.template)
        return image, self._pools.by_digest(image, key)

    def _check_room(self) -> None:
        if self._max_claims and len(self._claims) + len(self._making) >= self._max_claims:
            raise ClaimLimitReachedError(limit=self._max_claims)

    def _grant(self, ask: ClaimAsk, guest: Guest, tier: Tier, ttl_ns: int, began: float) -> Granted:
        """Makes a guest a claim: journal first, then memory. No waiting in here."""
        group = self._group
        assert group is not None, "claims are granted inside the scope only"
        token, now = ids.new_token(), self._clock.wall_ns()
        provisioned = self._clock.monotonic() - began
        record = ClaimRecord(
            id=ids.new_sandbox_id(self._hint),
            token_sha256=ids.token_sha256(token),
            machine_id=guest.machine.machine_id,
            template=ask.key.template,
            digest=guest.image.digest,
            net=ask.key.net,
            size=ask.key.size,
            tier=tier,
            isolation=self._isolation,
            provision_ns=int(provisioned * 1e9),
            claim_ns=now,
            expire_ns=now + ttl_ns,
            claim_ref=ask.claim_ref,
            metadata=dict(ask.metadata),
        )
        try:
            self._journal.add_claim(record, ask.request_id, ask.content_sha256 if ask.request_id else b"")
        except sqlite3.Error as error:
            # Not recorded, so not granted; the guest has been nobody's and goes.
            group.create_task(guest.close())
            raise ProvisionFailedError(stage="journal", cause=str(error)) from error
        claim = Claim(record, guest)
        granted = Granted(claim, token)
        self._claims[record.id] = claim
        self._by_token[record.token_sha256] = record.id
        self._leases.add(record.id, self._clock.monotonic() + ttl_ns / 1e9)
        if ask.request_id and ask.request_id not in self._answers:
            answer: asyncio.Future[_Outcome] = asyncio.get_running_loop().create_future()
            answer.set_result(granted)
            self._answers[ask.request_id] = (ask.content_sha256, answer)
        group.create_task(self._watch(claim))
        self._metrics.claim_seconds.labels(tier.value).observe(provisioned)
        return granted

    # -- ending

    async def release(self, sandbox_id: str) -> None:
        """Ends a claim; a second release of one that ended is fine.

        Raises: SandboxNotFoundError: there never was one.
        """
        claim = self._claims.get(sandbox_id)
        if claim is not None:
            await self._end(claim, Event.RELEASE, EndReason.RELEASED)
        elif self._journal.end_of(sandbox_id) is None:
            raise SandboxNotFoundError(sandbox=f"sandboxes/{sandbox_id}")

    async def _expire(self, sandbox_id: str) -> None:
        claim = self._claims.get(sandbox_id)
        if claim is not None:
            _log.info("lease_ended", sandbox=sandbox_id)
            await self._end(claim, Event.EXPIRE, EndReason.EXPIRED)

    async def _end(self, claim: Claim, event: Event, reason: EndReason) -> None:
        """Takes a claim out of the books, then its machine down."""
        if claim.state is not State.GONE:
            claim.state = step(claim.name, claim.state, event)
            self._journal.end_claim(claim.record.id, reason, self._clock.wall_ns())
            del self._claims[claim.record.id]
            self._metrics.claims_ended.labels(reason.value).inc()
        await claim.guest.close()

    async def _watch(self, claim: Claim) -> None:
        """Marks a claim failed when its machine dies unasked."""
        await claim.guest.machine.wait()
        if not claim.guest.closing and claim.state is State.RUNNING:
            claim.state = step(claim.name, claim.state, Event.DIE)
            self._metrics.machine_deaths.inc()
            _log.warning("machine_died", sandbox=claim.record.id, machine=claim.record.machine_id)

    async def _keep_journal(self) -> None:
        """Moves the journal's log along and forgets what is a day old."""
        while True:
            await asyncio.sleep(_CHECKPOINT_S)
            await self._journal.checkpoint()
            for sandbox_id in self._journal.forget_before(self._clock.wall_ns() - REMEMBER_NS):
                self._by_token = {t: s for t, s in self._by_token.items() if s != sandbox_id}
            live = self._claims
            self._answers = {
                request_id: (content, work)
                for request_id, (content, work) in self._answers.items()
                if not work.done() or _is_live(work, live)
            }


async def _outcome(work: Coroutine[Any, Any, Granted]) -> _Outcome:
    """Returns what the work returned or raised, so that a failed claim does not end the scope."""
    try:
        return await work
    except Exception as error:  # noqa: BLE001 - handed to the caller, who raises it
        return error


def _unwrap(outcome: _Outcome) -> Granted:
    if isinstance(outcome, Exception):
        raise outcome
    return outcome


def _is_live(work: asyncio.Future[_Outcome], live: Mapping[str, Claim]) -> bool:
    outcome = None if work.cancelled() else work.result()
    return isinstance(outcome, Granted) and outcome.claim.record.id in live
