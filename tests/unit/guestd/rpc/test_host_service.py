"""The host's verbs: once for each generation, in bounded time, and never half."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import grpc.aio
import pytest
from google.protobuf.timestamp_pb2 import Timestamp

from cocoon.guest.host.v1 import host_service_pb2 as pb
from cocoon.guest.host.v1 import host_service_pb2_grpc
from cocoon_rpc.errors import IdentityRenewalFailedError, InvalidFieldError, from_rpc_error
from guestd import __version__
from guestd.identity import Identity, Renewer, Step
from guestd.rpc import host_service
from guestd.rpc.host_service import HostService

Stub = Any
Host = Callable[[list[Step]], AbstractAsyncContextManager[tuple[Stub, asyncio.Event]]]


@pytest.fixture
def host(serve: Any) -> Host:
    """A HostService with these steps, and the event of its power-off."""

    @asynccontextmanager
    async def serving(steps: list[Step]) -> AsyncIterator[tuple[Stub, asyncio.Event]]:
        power_off = asyncio.Event()
        with ThreadPoolExecutor(1) as executor:
            service = HostService(Renewer(steps), executor, power_off)

            def add(server: grpc.aio.Server) -> None:
                host_service_pb2_grpc.add_HostServiceServicer_to_server(service, server)

            async with serve(add) as channel:
                yield host_service_pb2_grpc.HostServiceStub(channel), power_off

    return serving


def _request(generation: int = 1, **fields: Any) -> pb.RenewIdentityRequest:
    whole = {
        "generation": generation,
        "entropy": bytes(64),
        "machine_id": "0" * 32,
        "hostname": "sb-1",
        "wall_time": Timestamp(seconds=1_700_000_000, nanos=7),
        **fields,
    }
    return pb.RenewIdentityRequest(**whole)


async def _refusal(call: Any) -> Any:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return from_rpc_error(caught.value)


async def test_renewal_runs_the_steps_once_for_each_generation(host: Host) -> None:
    seen: list[Identity] = []
    async with host([("note", seen.append)]) as (stub, _):
        for generation in (3, 3, 4):
            assert (await stub.RenewIdentity(_request(generation))).generation == generation
        assert (await stub.Probe(pb.ProbeRequest())).generation == 4
    assert [identity.generation for identity in seen] == [3, 4]
    assert seen[0] == Identity(3, bytes(64), "0" * 32, "sb-1", 1_700_000_000 * 10**9 + 7)


async def test_renewal_of_an_older_generation_is_refused(host: Host) -> None:
    seen: list[Identity] = []
    async with host([("note", seen.append)]) as (stub, _):
        await stub.RenewIdentity(_request(5))
        error = await _refusal(stub.RenewIdentity(_request(4)))
    assert type(error) is InvalidFieldError
    assert error.metadata["field"] == "generation"
    assert len(seen) == 1


@pytest.mark.parametrize(
    ("field", "fields"),
    [
        ("generation", {"generation": 0}),
        ("entropy", {"entropy": b""}),
        ("entropy", {"entropy": bytes(31)}),
        ("entropy", {"entropy": bytes(513)}),
        ("machine_id", {"machine_id": "0" * 31}),
        ("machine_id", {"machine_id": "A" * 32}),
        ("machine_id", {"machine_id": "0" * 32 + "\n"}),
        ("hostname", {"hostname": "a-"}),
        ("hostname", {"hostname": "a" * 64}),
        ("hostname", {"hostname": "a\n"}),
        ("hostname", {"hostname": "a.b"}),
        ("wall_time", {"wall_time": None}),
        ("wall_time", {"wall_time": Timestamp(seconds=-1)}),
    ],
)
async def test_renewal_with_a_bad_field_changes_nothing(
    host: Host, field: str, fields: dict[str, Any]
) -> None:
    seen: list[Identity] = []
    async with host([("note", seen.append)]) as (stub, _):
        error = await _refusal(stub.RenewIdentity(_request(**fields)))
    assert type(error) is InvalidFieldError
    assert error.metadata["field"] == field
    assert seen == []


async def test_renewal_that_fails_is_not_done_and_names_its_step(host: Host) -> None:
    def fail(identity: Identity) -> None:
        raise OSError(28, "No space left on device")

    async with host([("first", lambda _: None), ("second", fail), ("third", lambda _: None)]) as (stub, _):
        for _ in range(2):
            error = await _refusal(stub.RenewIdentity(_request()))
            assert type(error) is IdentityRenewalFailedError
            assert error.metadata["step"] == "second"
            assert "No space left" in error.metadata["cause"]
        assert (await stub.Probe(pb.ProbeRequest())).generation == 0


async def test_renewal_that_hangs_fails_in_time_and_names_its_step(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_service, "RENEWAL_LIMIT_S", 0.2)
    release = threading.Event()
    async with host([("first", lambda _: None), ("stuck", lambda _: release.wait() and None)]) as (stub, _):
        try:
            error = await _refusal(stub.RenewIdentity(_request(), timeout=10))
        finally:
            release.set()
        assert type(error) is IdentityRenewalFailedError
        assert error.metadata["step"] == "stuck"
        assert (await stub.Probe(pb.ProbeRequest())).generation == 0


async def test_renewal_whose_caller_left_is_over_before_the_next_begins(host: Host) -> None:
    begun, release = threading.Event(), threading.Event()
    order: list[str] = []

    def step(identity: Identity) -> None:
        order.append(f"begin {identity.generation}")
        begun.set()
        release.wait(10)
        order.append(f"end {identity.generation}")

    async with host([("step", step)]) as (stub, _):
        first = stub.RenewIdentity(_request(1))
        await asyncio.to_thread(begun.wait, 10)
        first.cancel()
        async with asyncio.TaskGroup() as group:
            second = group.create_task(_answer(stub.RenewIdentity(_request(2), timeout=10)))
            await asyncio.wait({second}, timeout=0.2)
            assert order == ["begin 1"]
            release.set()
        assert second.result().generation == 2
    assert order == ["begin 1", "end 1", "begin 2", "end 2"]


async def _answer(call: Any) -> Any:
    return await call


async def test_probe_says_what_answers(host: Host) -> None:
    async with host([]) as (stub, _):
        response = await stub.Probe(pb.ProbeRequest())
    assert response == pb.ProbeResponse(
        guestd_version=__version__, kernel_release=os.uname().release, generation=0
    )


async def test_shutdown_syncs_before_it_answers(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    synced = threading.Event()
    monkeypatch.setattr(os, "sync", synced.set)
    async with host([]) as (stub, power_off):
        await stub.Shutdown(pb.ShutdownRequest())
        assert synced.is_set()
        assert power_off.is_set()


async def test_shutdown_is_not_held_by_a_disk_that_hangs(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    release = threading.Event()
    monkeypatch.setattr(os, "sync", release.wait)
    monkeypatch.setattr(host_service, "_SYNC_LIMIT_S", 0.2)
    async with host([]) as (stub, power_off):
        try:
            await stub.Shutdown(pb.ShutdownRequest(), timeout=10)
            assert power_off.is_set()
        finally:
            release.set()
