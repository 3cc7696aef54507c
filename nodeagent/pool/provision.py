"""From an image or a golden to a guest that has answered: the only way to one.

A guest is ready when it has renewed its identity and answered a call since
(decision 10); whatever fails on the way, the machine is killed and one typed
error is raised.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from cocoon_rpc.errors import CocoonError, GuestUnreachableError, ProvisionFailedError
from cocoon_rpc.scope import complete
from nodeagent.clock import Clock
from nodeagent.engine.base import Engine, Golden, Machine, MachineSpec
from nodeagent.guestlink.link import GuestLink
from nodeagent.guestlink.probe import Identity, renew_identity, wait_ready
from nodeagent.model import Image, Size, Tier
from nodeagent.telemetry.metrics import Metrics

COLD_LIMIT_S = 90.0
CLONE_LIMIT_S = 15.0
_T = TypeVar("_T")


@dataclass(eq=False, slots=True)
class Guest:
    """A machine whose guest has answered, with the link to it. Owned by whoever holds it."""

    machine: Machine
    link: GuestLink
    image: Image
    size: Size
    tier: Tier
    """How it was made: CLONE or COLD."""
    closing: bool = False
    """Set when its end is wanted, so that its death is no news."""

    async def close(self) -> None:
        """Ends link and machine; nothing is left. Idempotent, completes under cancellation."""
        self.closing = True
        await complete(self._close())

    async def _close(self) -> None:
        try:
            await self.link.close()
        finally:
            await self.machine.kill()


class Provisioner:
    """Makes guests with one engine, in one directory."""

    def __init__(self, engine: Engine, machines: Path, clock: Clock, metrics: Metrics) -> None:
        """Takes the engine (prepared) and the directory of machine directories (there)."""
        self._engine = engine
        self._machines = machines
        self._clock = clock
        self._metrics = metrics
        self._generation = 0

    async def cold(self, image: Image, size: Size) -> Guest:
        """Boots a guest from its image.

        Raises: ProvisionFailedError, NodeAtCapacityError, ImageMissingError.
        """
        spec = self._spec(image, size)
        return await self._guest(lambda: self._engine.boot(spec), spec, Tier.COLD, COLD_LIMIT_S)

    async def clone(self, golden: Golden) -> Guest:
        """Clones a guest from a golden. Raises: as `cold`."""
        spec = self._spec(golden.image, golden.size)
        return await self._guest(lambda: self._engine.clone(golden, spec), spec, Tier.CLONE, CLONE_LIMIT_S)

    async def golden(self, image: Image, size: Size, directory: Path) -> Golden:
        """Boots a machine, waits for its guest and captures it. Raises: as `cold`.

        The golden has no identity: every clone gets its own.
        """
        spec = replace(self._spec(image, size), capturable=True)
        machine = await self._step("boot", self._engine.boot(spec))
        try:
            await self._connect(machine, spec, COLD_LIMIT_S, identify=False)
        except BaseException:
            await complete(machine.kill())
            raise
        # From here the engine owns the machine: capture ends it, whatever happens.
        return await self._step("capture", self._engine.capture(machine, directory))

    def _spec(self, image: Image, size: Size) -> MachineSpec:
        machine_id = "m-" + "".join(secrets.choice("abcdefghijklmnopqrstuvwxyz234567") for _ in range(16))
        return MachineSpec(machine_id, image, size, self._machines / machine_id)

    async def _guest(
        self, make: Callable[[], Awaitable[Machine]], spec: MachineSpec, tier: Tier, limit_s: float
    ) -> Guest:
        machine = await self._step(tier.value, make())
        try:
            link = await self._connect(machine, spec, limit_s, identify=True)
        except BaseException:
            await complete(machine.kill())
            raise
        assert link is not None
        return Guest(machine, link, spec.image, spec.size, tier)

    async def _connect(
        self, machine: Machine, spec: MachineSpec, limit_s: float, *, identify: bool
    ) -> GuestLink | None:
        """Opens the link and waits for the guest; without `identify` the link is closed again."""
        link = GuestLink(machine.lane, spec.directory / "link.sock")
        keep = False
        try:
            await link.open()
            await _while_alive(machine, self._converse(link, spec, limit_s, identify=identify))
            keep = identify
        finally:
            if not keep:
                await complete(link.close())
        return link if keep else None

    async def _converse(self, link: GuestLink, spec: MachineSpec, limit_s: float, *, identify: bool) -> None:
        await self._step("probe", wait_ready(link.channel, timeout=limit_s))
        if identify:
            identity = Identity.fresh(self._next_generation(), spec.machine_id)
            await self._step("identity", renew_identity(link.channel, identity, timeout=CLONE_LIMIT_S))

    def _next_generation(self) -> int:
        self._generation = max(self._generation + 1, self._clock.wall_ns())
        return self._generation

    async def _step(self, stage: str, work: Awaitable[_T]) -> _T:
        """Awaits one step; counts a failure and names the stage in it."""
        try:
            return await work
        except GuestUnreachableError as error:
            self._metrics.provision_failures.labels(stage).inc()
            raise ProvisionFailedError(stage=stage, cause=error.message) from error
        except CocoonError:
            self._metrics.provision_failures.labels(stage).inc()
            raise


async def _while_alive(machine: Machine, work: Coroutine[Any, Any, None]) -> None:
    """Awaits work that only makes sense while the machine lives: no waiting for the dead."""

    async def death() -> None:
        await machine.wait()
        raise ProvisionFailedError(stage="probe", cause="the machine ended before its guest answered")

    try:
        async with asyncio.TaskGroup() as group:
            watch = group.create_task(death())
            await work
            watch.cancel()
    except BaseExceptionGroup as failed:
        raise failed.exceptions[0] from None
