"""A scripted engine: machines are gRPC servers in this process, on unix sockets of their own."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import grpc.aio

from cocoon.guest.host.v1 import host_service_pb2 as pb
from cocoon.guest.host.v1 import host_service_pb2_grpc
from cocoon_rpc.errors import CapabilityMissingError, IdentityRenewalFailedError
from cocoon_rpc.interceptors import ErrorInterceptor
from cocoon_rpc.scope import complete
from nodeagent.engine.base import EngineFacts, Golden, MachineSpec
from nodeagent.guestlink.lanes import UnixLane
from nodeagent.model import Accelerator, Image, Isolation

IMAGE = Image("rt", "sha256:" + "0" * 64, ())


class FakeClock:
    """Time that stands until it is told to go on."""

    def __init__(self) -> None:
        self.now = 1000.0

    def wall_ns(self) -> int:
        return 10**18 + int(self.now * 1e9)

    def monotonic(self) -> float:
        return self.now


class FakeMachine(host_service_pb2_grpc.HostServiceServicer):
    """A machine and its guest."""

    pid = 0

    def __init__(self, engine: FakeEngine, spec: MachineSpec) -> None:
        self.spec = spec
        self.machine_id = spec.machine_id
        self.lane = UnixLane(spec.directory / "g")
        self.identity: pb.RenewIdentityRequest | None = None
        self._engine = engine
        self._ended = asyncio.Event()
        self._server = grpc.aio.server(interceptors=(ErrorInterceptor(),))
        host_service_pb2_grpc.add_HostServiceServicer_to_server(self, self._server)
        self._server.add_insecure_port(f"unix:{self.lane.path}")

    async def start(self) -> None:
        await self._server.start()

    async def Probe(self, request: pb.ProbeRequest, context: object) -> pb.ProbeResponse:
        await self._engine.answering.wait()
        return pb.ProbeResponse(guestd_version="fake")

    async def RenewIdentity(
        self, request: pb.RenewIdentityRequest, context: object
    ) -> pb.RenewIdentityResponse:
        if self._engine.refuse_identity:
            raise IdentityRenewalFailedError(step="entropy", cause="scripted")
        self.identity = request
        return pb.RenewIdentityResponse(generation=request.generation)

    async def pause(self) -> None:
        return

    async def resume(self) -> None:
        return

    async def wait(self) -> None:
        await self._ended.wait()

    async def console(self) -> str:
        return ""

    def die(self) -> None:
        """Ends unasked: the directory stays, as after a crash."""
        self._ended.set()

    async def kill(self) -> None:
        await complete(self._kill())

    async def _kill(self) -> None:
        self._ended.set()
        await self._server.stop(None)
        shutil.rmtree(self.spec.directory, ignore_errors=True)
        self._engine.live.discard(self)


class FakeEngine:
    """Makes them; `failures` are raised first, one for each machine asked for."""

    def __init__(self, *, snapshots: bool) -> None:
        self.snapshots = snapshots
        self.live: set[FakeMachine] = set()
        self.asked: list[str] = []
        self.failures: list[Exception] = []
        self.answering = asyncio.Event()
        self.answering.set()
        self.refuse_identity = False

    async def prepare(self) -> EngineFacts:
        return EngineFacts("fake", "1", Accelerator.NONE, Isolation.NONE, self.snapshots)

    async def boot(self, spec: MachineSpec) -> FakeMachine:
        return await self._make("golden" if spec.capturable else "boot", spec)

    async def clone(self, golden: Golden, spec: MachineSpec) -> FakeMachine:
        if not self.snapshots:
            raise CapabilityMissingError(capability="clone", engine="fake")
        assert golden.directory.is_dir()
        return await self._make("clone", spec)

    async def capture(self, machine: FakeMachine, directory: Path) -> Golden:
        await machine.kill()
        if not self.snapshots:
            raise CapabilityMissingError(capability="capture", engine="fake")
        directory.mkdir()
        return Golden(directory, machine.spec.image, machine.spec.size)

    async def reap(self, directory: Path) -> None:
        shutil.rmtree(directory, ignore_errors=True)

    async def _make(self, verb: str, spec: MachineSpec) -> FakeMachine:
        self.asked.append(verb)
        if self.failures:
            raise self.failures.pop(0)
        spec.directory.mkdir()
        machine = FakeMachine(self, spec)
        self.live.add(machine)
        try:
            await complete(machine.start())
        except BaseException:
            await complete(machine.kill())
            raise
        return machine
