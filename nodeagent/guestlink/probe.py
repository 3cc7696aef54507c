"""The first talk with a guest: is it there, and its new identity."""

from __future__ import annotations

import asyncio
import secrets
import time
from dataclasses import dataclass

import grpc
import grpc.aio
from google.protobuf.timestamp_pb2 import Timestamp

from cocoon.guest.host.v1 import host_service_pb2 as pb
from cocoon.guest.host.v1 import host_service_pb2_grpc
from cocoon_rpc.errors import CocoonError, GuestUnreachableError, ProvisionFailedError, from_rpc_error

_ENTROPY_BYTES = 64


@dataclass(frozen=True, slots=True)
class Identity:
    """What makes a guest itself. Random parts come from the host's kernel."""

    generation: int
    machine_id: str
    hostname: str
    entropy: bytes

    @classmethod
    def fresh(cls, generation: int, hostname: str) -> Identity:
        """Returns a new identity."""
        return cls(generation, secrets.token_hex(16), hostname, secrets.token_bytes(_ENTROPY_BYTES))

    def __repr__(self) -> str:
        """Says nothing about the entropy."""
        return f"Identity({self.generation}, {self.machine_id}, {self.hostname})"


async def wait_ready(channel: grpc.aio.Channel, *, timeout: float) -> pb.ProbeResponse:
    """Waits for the guest's first answer.

    grpc waits for a connection; one that breaks under the call (guestd restarts, or a
    lane comes back) is tried again here.

    Raises:
        GuestUnreachableError: none came within `timeout` seconds.
    """
    stub = host_service_pb2_grpc.HostServiceStub(channel)
    clock = asyncio.get_running_loop().time
    deadline = clock() + timeout
    while True:
        try:
            response: pb.ProbeResponse = await stub.Probe(
                pb.ProbeRequest(), timeout=max(deadline - clock(), 0), wait_for_ready=True
            )
            return response
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.UNAVAILABLE or clock() >= deadline:
                raise GuestUnreachableError(
                    f"no answer within {timeout:.0f} s ({error.code().name})"
                ) from error


async def renew_identity(channel: grpc.aio.Channel, identity: Identity, *, timeout: float) -> None:
    """Gives the guest its identity.

    Raises:
        ProvisionFailedError: it could not take it; destroy the machine.
    """
    now = time.time_ns()
    request = pb.RenewIdentityRequest(
        generation=identity.generation,
        entropy=identity.entropy,
        machine_id=identity.machine_id,
        hostname=identity.hostname,
        wall_time=Timestamp(seconds=now // 10**9, nanos=now % 10**9),
    )
    stub = host_service_pb2_grpc.HostServiceStub(channel)
    try:
        await stub.RenewIdentity(request, timeout=timeout)
    except grpc.aio.AioRpcError as error:
        known = from_rpc_error(error)
        cause = known.message if isinstance(known, CocoonError) else f"{error.code().name}"
        raise ProvisionFailedError(stage="identity", cause=cause) from error
