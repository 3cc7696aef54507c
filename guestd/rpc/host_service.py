"""HostService: see the contract for what each method promises."""

from __future__ import annotations

import asyncio
import contextlib
import os
from concurrent.futures import Executor

from cocoon.guest.host.v1 import host_service_pb2 as pb
from cocoon.guest.host.v1 import host_service_pb2_grpc
from cocoon_rpc.errors import IdentityRenewalFailedError, InvalidFieldError
from cocoon_rpc.interceptors import Context
from guestd import __version__
from guestd.identity import Identity, Renewer

RENEWAL_LIMIT_S = 4.0
_SYNC_LIMIT_S = 10.0


class HostService(host_service_pb2_grpc.HostServiceServicer):
    """What the node alone asks."""

    def __init__(self, renewer: Renewer, executor: Executor, power_off: asyncio.Event) -> None:
        """Takes who renews, an executor with one thread of its own, and the event that ends guestd.

        One thread: a renewal whose caller went away is over before the next begins. Its
        own: a tenant can keep any number of threads busy with files that never answer.
        """
        self._renewer = renewer
        self._executor = executor
        self._power_off = power_off
        self._generation = 0
        self._lock = asyncio.Lock()

    async def Probe(self, request: pb.ProbeRequest, context: Context) -> pb.ProbeResponse:
        """Says that the guest is alive."""
        return pb.ProbeResponse(
            guestd_version=__version__, kernel_release=os.uname().release, generation=self._generation
        )

    async def RenewIdentity(
        self, request: pb.RenewIdentityRequest, context: Context
    ) -> pb.RenewIdentityResponse:
        """Gives the guest a new identity, once for each generation."""
        identity = Identity(
            generation=request.generation,
            entropy=request.entropy,
            machine_id=request.machine_id,
            hostname=request.hostname,
            wall_ns=request.wall_time.seconds * 10**9 + request.wall_time.nanos,
        )
        identity.check()
        async with self._lock:
            if identity.generation < self._generation:
                raise InvalidFieldError(field="generation", rule=f"must be at least {self._generation}")
            if identity.generation > self._generation:
                await self._renew(identity)
                self._generation = identity.generation
        return pb.RenewIdentityResponse(generation=self._generation)

    async def _renew(self, identity: Identity) -> None:
        try:
            async with asyncio.timeout(RENEWAL_LIMIT_S):
                loop = asyncio.get_running_loop()
                await loop.run_in_executor(self._executor, self._renewer.renew, identity)
        except TimeoutError:
            cause = f"not done within {RENEWAL_LIMIT_S:.0f} s"
            raise IdentityRenewalFailedError(step=self._renewer.step, cause=cause) from None

    async def Shutdown(self, request: pb.ShutdownRequest, context: Context) -> pb.ShutdownResponse:
        """Syncs the disks, answers, and powers off; a disk that hangs delays it by 10 s at most."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_SYNC_LIMIT_S):
                await asyncio.get_running_loop().run_in_executor(self._executor, os.sync)
        self._power_off.set()
        return pb.ShutdownResponse()
