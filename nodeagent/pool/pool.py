"""One warm pool: its golden, its warm guests, and the loop that keeps them.

`run` is the only task that makes things; `pop` is what a claim calls, and it
neither waits nor forks. Every pop kicks the loop, so a refill starts with the pop
and not with a tick.
"""

from __future__ import annotations

import asyncio
import enum
import hashlib
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path

import structlog

from cocoon_rpc.errors import CocoonError, NodeAtCapacityError
from cocoon_rpc.scope import complete
from nodeagent.clock import Clock
from nodeagent.engine.base import Golden
from nodeagent.model import Image, PoolKey
from nodeagent.pool.capacity import Capacity
from nodeagent.pool.provision import Guest, Provisioner
from nodeagent.pool.target import GOLDEN_RETRY_S, Backoff, shortfall
from nodeagent.telemetry.metrics import Metrics

# Starting a machine holds the event loop for some milliseconds; the reply to the
# claim that made it necessary goes first (0.3 ms of a claim's 1.7 otherwise).
_REPLY_FIRST_S = 0.005
_log = structlog.get_logger()


class GoldenStatus(enum.Enum):
    """Where a pool's golden is."""

    BUILDING = "building"
    READY = "ready"
    FAILED = "failed"
    UNSUPPORTED = "unsupported"


class Pool:
    """The warm pool of one key. Owns its guests until they are popped."""

    def __init__(
        self,
        key: PoolKey,
        image: Image,
        target: int,
        *,
        provisioner: Provisioner,
        snapshots: bool,
        goldens: Path,
        slots: asyncio.Semaphore,
        capacity: Capacity,
        clock: Clock,
        metrics: Metrics,
    ) -> None:
        """Takes what pools share: provisioner, slots (machines made at a time), capacity."""
        self.key = key
        self.image = image
        self.target = target
        self.golden: Golden | None = None
        self.golden_status = GoldenStatus.BUILDING if snapshots else GoldenStatus.UNSUPPORTED
        self.refilling = 0
        self.last_error = ""
        self._provisioner = provisioner
        unique = hashlib.sha256(f"{key}|{image.digest}".encode()).hexdigest()[:16]
        self._golden_directory = goldens / f"{key.size.label}-{unique}"
        self._slots = slots
        self._capacity = capacity
        self._clock = clock
        self._metrics = metrics
        self._warm: list[Guest] = []
        self._kick = asyncio.Event()
        self._backoff = Backoff()
        self._paused_until = 0.0

    @property
    def warm(self) -> int:
        """Guests ready to be claimed."""
        return len(self._warm)

    @property
    def paused_s(self) -> float:
        """Seconds until refilling goes on; 0 when nothing holds it."""
        return max(self._paused_until - self._clock.monotonic(), self._capacity.pause_s, 0.0)

    def pop(self) -> Guest | None:
        """Takes the newest warm guest (its pages are the likeliest to be in memory)."""
        if not self._warm:
            return None
        guest = self._warm.pop()
        asyncio.get_running_loop().call_later(_REPLY_FIRST_S, self._kick.set)
        return guest

    def retarget(self, target: int) -> None:
        """Changes how many guests to keep; the loop fills or trims."""
        self.target = target
        self._kick.set()

    async def run(self) -> None:
        """Keeps golden and guests until cancelled; then destroys both.

        Errors of making machines end in `last_error`, the log and a pause, never here.
        """
        try:
            async with asyncio.TaskGroup() as group:
                while True:
                    self._kick.clear()
                    await self._trim()
                    if self.golden_status is not GoldenStatus.UNSUPPORTED and self.golden is None:
                        await self._pause()
                        await self._build_golden()
                        continue
                    if self.paused_s == 0:
                        for _ in range(self._to_start()):
                            self.refilling += 1
                            group.create_task(self._refill(group))
                    await self._wait_for_kick()
        finally:
            # Whole, whoever cancels meanwhile: a pool that drains may be in a node that stops.
            await complete(self._drain())

    async def _drain(self) -> None:
        warm, self._warm = self._warm, []
        for guest in warm:
            await guest.close()
        self.golden = None
        await asyncio.to_thread(shutil.rmtree, self._golden_directory, ignore_errors=True)

    def _to_start(self) -> int:
        wanted = shortfall(target=self.target, warm=self.warm, refilling=self.refilling)
        # After a streak of failures one machine at a time is the probe.
        return min(wanted, 1 - self.refilling) if self._backoff.pause_s else wanted

    async def _wait_for_kick(self) -> None:
        pause = self.paused_s
        try:
            async with asyncio.timeout(pause if pause > 0 else None):
                await self._kick.wait()
        except TimeoutError:
            pass

    async def _pause(self) -> None:
        while self.paused_s > 0:
            await asyncio.sleep(self.paused_s)

    async def _trim(self) -> None:
        while self.warm > self.target:
            await self._warm.pop().close()

    async def _build_golden(self) -> None:
        self.golden_status = GoldenStatus.BUILDING
        started = self._clock.monotonic()
        await asyncio.to_thread(shutil.rmtree, self._golden_directory, ignore_errors=True)

        async def build() -> None:
            self.golden = await self._provisioner.golden(self.image, self.key.size, self._golden_directory)

        if await self._made(build):
            self.golden_status = GoldenStatus.READY
            _log.info("golden_ready", pool=str(self.key), seconds=self._clock.monotonic() - started)
        else:
            self.golden_status = GoldenStatus.FAILED
            self._paused_until = self._clock.monotonic() + GOLDEN_RETRY_S

    async def _refill(self, group: asyncio.TaskGroup) -> None:
        async def add() -> None:
            if self.golden is None:
                guest = await self._provisioner.cold(self.image, self.key.size)
            else:
                guest = await self._provisioner.clone(self.golden)
            self._warm.append(guest)
            group.create_task(self._watch(guest))

        try:
            if await self._made(add):
                self._backoff = self._backoff.succeeded()
            else:
                self._backoff = self._backoff.failed()
                self._paused_until = self._clock.monotonic() + self._backoff.pause_s
        finally:
            self.refilling -= 1
            self._kick.set()

    async def _made(self, make: Callable[[], Awaitable[None]]) -> bool:
        """Makes something in a slot; a failure is noted and said in the return value."""
        try:
            async with self._slots:
                await make()
        except CocoonError as error:
            self.last_error = error.message
            if isinstance(error, NodeAtCapacityError):
                self._capacity.exhausted(error)
            _log.warning(
                "provision_failed", pool=str(self.key), reason=error.reason_name(), cause=error.message
            )
            return False
        except Exception as error:  # noqa: BLE001 - a bug must not end the pool; the log has it
            self.last_error = "internal error; see the node's log"
            _log.exception("provision_failed", pool=str(self.key), error=str(error))
            return False
        self.last_error = ""
        self._capacity.succeeded()
        return True

    async def _watch(self, guest: Guest) -> None:
        """Takes a guest that dies while it is warm out of the pool."""
        await guest.machine.wait()
        if guest in self._warm:
            self._warm.remove(guest)
            self._metrics.machine_deaths.inc()
            _log.warning("warm_machine_died", pool=str(self.key), machine=guest.machine.machine_id)
            await guest.close()
            self._kick.set()
