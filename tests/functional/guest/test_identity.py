"""HostService.RenewIdentity on a real guest: once for each generation, and two clones are two machines."""

from __future__ import annotations

import asyncio
import secrets
from typing import Any

import pytest
from google.protobuf.timestamp_pb2 import Timestamp

from cocoon.guest.host.v1 import host_service_pb2 as pb
from cocoon.guest.host.v1 import host_service_pb2_grpc
from cocoon_rpc import errors
from nodeagent.pool.provision import Guest
from tests.functional.guest.calls import refused, run, shell

IDENTITY = "cat /etc/machine-id; uname -n; cat /etc/hostname; cat /run/cocoon/generation"


def _stub(guest: Guest) -> Any:
    return host_service_pb2_grpc.HostServiceStub(guest.link.channel)


async def _request(guest: Guest, *, newer: int, **fields: Any) -> pb.RenewIdentityRequest:
    """A valid request for a generation `newer` than the one in force."""
    now = (await _stub(guest).Probe(pb.ProbeRequest(), timeout=20)).generation
    seconds = int(await shell(guest, "date +%s"))
    whole: dict[str, Any] = {
        "generation": now + newer,
        "entropy": secrets.token_bytes(32),
        "machine_id": secrets.token_hex(16),
        "hostname": "renewed-" + secrets.token_hex(2),
        # The clock's own time: on an engine that shares it nothing may move.
        "wall_time": Timestamp(seconds=seconds),
    }
    return pb.RenewIdentityRequest(**{**whole, **fields})


async def _renew(guest: Guest, request: pb.RenewIdentityRequest) -> int:
    return (await _stub(guest).RenewIdentity(request, timeout=20)).generation


async def test_renewal_changes_who_the_guest_is(guest_any: Guest) -> None:
    request = await _request(guest_any, newer=1)
    assert await _renew(guest_any, request) == request.generation
    assert (await shell(guest_any, IDENTITY)).split() == [
        request.machine_id, request.hostname, request.hostname, str(request.generation),
    ]  # fmt: skip
    assert (await _stub(guest_any).Probe(pb.ProbeRequest(), timeout=20)).generation == request.generation


async def test_renewal_with_the_same_generation_does_nothing(guest_any: Guest) -> None:
    before = await shell(guest_any, IDENTITY)
    request = await _request(guest_any, newer=0)
    assert await _renew(guest_any, request) == request.generation
    assert await shell(guest_any, IDENTITY) == before


async def test_renewal_with_an_older_generation_is_refused(guest_any: Guest) -> None:
    before = await shell(guest_any, IDENTITY)
    request = await _request(guest_any, newer=-1)
    with refused(errors.InvalidFieldError, field="generation"):
        await _renew(guest_any, request)
    assert await shell(guest_any, IDENTITY) == before


BAD: list[tuple[str, Any]] = [
    ("generation", 0),
    ("entropy", b""),
    ("entropy", bytes(31)),
    ("entropy", bytes(513)),
    ("machine_id", ""),
    ("machine_id", "A" * 32),
    ("machine_id", "a" * 31),
    ("machine_id", "a" * 32 + "\n"),
    ("hostname", ""),
    ("hostname", "-a"),
    ("hostname", "a.b"),
    ("hostname", "a" * 64),
    ("wall_time", None),
    ("wall_time", Timestamp()),
    ("wall_time", Timestamp(seconds=-1)),
]


async def test_renewal_with_a_bad_field_is_refused_and_changes_nothing(guest_any: Guest) -> None:
    before = await shell(guest_any, IDENTITY)
    for field, value in BAD:
        request = await _request(guest_any, newer=1, **{field: value})
        with refused(errors.InvalidFieldError, field=field):
            await _renew(guest_any, request)
    assert await shell(guest_any, IDENTITY) == before


@pytest.mark.vm
async def test_renewal_sets_the_clock_of_a_machine(vm_guest: Guest) -> None:
    there = int(await shell(vm_guest, "date +%s")) + 86_400
    await _renew(vm_guest, await _request(vm_guest, newer=1, wall_time=Timestamp(seconds=there)))
    assert there <= int(await shell(vm_guest, "date +%s")) < there + 30


async def test_two_guests_differ_in_identity_and_randomness(guest_any: Guest, bench_any: Any) -> None:
    """Also where both are clones of one golden, whose random generator they share."""
    other = await bench_any.guest()
    try:
        for command in (["cat", "/etc/machine-id"], ["uname", "-n"], ["head", "-c32", "/dev/urandom"]):
            first, second = await asyncio.gather(run(guest_any, *command), run(other, *command))
            assert first.stdout
            assert second.stdout
            assert first.stdout != second.stdout
    finally:
        await other.close()
