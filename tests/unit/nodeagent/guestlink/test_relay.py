"""Guest calls pass unchanged, but for what the guest must not see."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from cocoon.guest.v1 import (
    file_service_pb2,
    file_service_pb2_grpc,
    guest_service_pb2,
    guest_service_pb2_grpc,
    process_service_pb2,
    process_service_pb2_grpc,
)
from cocoon_rpc import errors
from cocoon_rpc.auth import guest_metadata
from cocoon_rpc.errors import CocoonError, SandboxNotFoundError, from_rpc_error
from cocoon_rpc.interceptors import ErrorInterceptor
from nodeagent.guestlink.relay import GuestRelay

TOKEN = "the-token-of-the-sandbox"
METADATA = (*guest_metadata("sb_x", TOKEN), ("x-trace", "abc"))


class GuestSide(
    guest_service_pb2_grpc.GuestServiceServicer,
    file_service_pb2_grpc.FileServiceServicer,
    process_service_pb2_grpc.ProcessServiceServicer,
):
    """A guest that says what it got."""

    def __init__(self) -> None:
        self.metadata: dict[str, Any] = {}
        self.left: float | None = None
        self.began, self.cancelled = asyncio.Event(), asyncio.Event()

    def _look(self, context: Any) -> None:
        self.metadata = dict(context.invocation_metadata())
        self.left = context.time_remaining()

    async def GetInfo(self, request: Any, context: Any) -> guest_service_pb2.GetInfoResponse:
        self._look(context)
        if dict(context.invocation_metadata()).get("x-hang"):
            try:
                self.began.set()
                await asyncio.Event().wait()
            finally:
                self.cancelled.set()
        return guest_service_pb2.GetInfoResponse(hostname="guest")

    async def Read(self, request: Any, context: Any) -> AsyncIterator[file_service_pb2.ReadResponse]:
        self._look(context)
        if request.path == "/odd":
            context.set_trailing_metadata((("x-why", "odd"),))
            await context.abort(grpc.StatusCode.DATA_LOSS, "lost \u00fc")
        if request.path == "/typed":
            raise errors.FileNotFoundError(path="/typed")
        for _ in range(3):
            yield file_service_pb2.ReadResponse(chunk=file_service_pb2.FileChunk(data=b"x" * 65536))

    async def Write(self, requests: Any, context: Any) -> file_service_pb2.WriteResponse:
        size = 0
        async for request in requests:
            size += len(request.chunk.data)
        return file_service_pb2.WriteResponse(size_bytes=size)

    async def Exec(self, requests: Any, context: Any) -> AsyncIterator[process_service_pb2.ExecResponse]:
        try:
            async for request in requests:
                self.began.set()
                data = request.stdin.data
                yield process_service_pb2.ExecResponse(stdout=process_service_pb2.ExecOutput(data=data))
            yield process_service_pb2.ExecResponse(stdout=process_service_pb2.ExecOutput(data=b"end"))
        finally:
            self.cancelled.set()


class Relayed:
    def __init__(self, guest: GuestSide, channel: grpc.aio.Channel) -> None:
        self.guest, self.channel = guest, channel
        self.guests = guest_service_pb2_grpc.GuestServiceStub(channel)
        self.files = file_service_pb2_grpc.FileServiceStub(channel)
        self.processes = process_service_pb2_grpc.ProcessServiceStub(channel)


@asynccontextmanager
async def serving(path: Path, guest: GuestSide | None, relay: GuestRelay | None) -> AsyncIterator[None]:
    server = grpc.aio.server(interceptors=(ErrorInterceptor(),))
    if guest is not None:
        guest_service_pb2_grpc.add_GuestServiceServicer_to_server(guest, server)
        file_service_pb2_grpc.add_FileServiceServicer_to_server(guest, server)
        process_service_pb2_grpc.add_ProcessServiceServicer_to_server(guest, server)
    if relay is not None:
        server.add_generic_rpc_handlers((relay,))
    server.add_insecure_port(f"unix:{path}")
    await server.start()
    yield
    await server.stop(None)


@pytest.fixture
async def relayed(directory: Path) -> AsyncIterator[Relayed]:
    guest = GuestSide()
    async with (
        serving(directory / "g", guest, None),
        grpc.aio.insecure_channel(f"unix:{directory}/g") as inner,
        serving(directory / "n", None, GuestRelay(lambda _: ("sandboxes/sb_x", inner))),
        grpc.aio.insecure_channel(f"unix:{directory}/n") as outer,
    ):
        yield Relayed(guest, outer)


async def test_the_guest_never_sees_a_token(relayed: Relayed) -> None:
    await relayed.guests.GetInfo(guest_service_pb2.GetInfoRequest(), metadata=METADATA)
    assert relayed.guest.metadata["x-trace"] == "abc"
    assert not {"authorization", "cocoon-sandbox-id"} & set(relayed.guest.metadata)
    assert TOKEN not in repr(relayed.guest.metadata)
    _ = [r async for r in relayed.files.Read(file_service_pb2.ReadRequest(path="/f"), metadata=METADATA)]
    assert TOKEN not in repr(relayed.guest.metadata)


async def test_bytes_are_passed_without_being_understood(relayed: Relayed) -> None:
    call = relayed.channel.unary_unary("/cocoon.guest.v1.GuestService/GetInfo")
    unknown_field = b"\xaa\xf7\xff\x7f\x03new"
    answer = await call(unknown_field, metadata=METADATA)
    assert guest_service_pb2.GetInfoResponse.FromString(answer).hostname == "guest"


async def test_all_four_kinds_of_calls_pass(relayed: Relayed) -> None:
    read = [r async for r in relayed.files.Read(file_service_pb2.ReadRequest(path="/f"), metadata=METADATA)]
    assert [len(r.chunk.data) for r in read] == [65536] * 3

    async def write() -> AsyncIterator[file_service_pb2.WriteRequest]:
        for _ in range(4):
            yield file_service_pb2.WriteRequest(chunk=file_service_pb2.FileChunk(data=b"x" * 1000))

    assert (await relayed.files.Write(write(), metadata=METADATA)).size_bytes == 4000

    async def talk() -> AsyncIterator[process_service_pb2.ExecRequest]:
        for data in (b"a", b"b"):
            yield process_service_pb2.ExecRequest(stdin=process_service_pb2.ExecStdin(data=data))

    said = [r.stdout.data async for r in relayed.processes.Exec(talk(), metadata=METADATA)]
    assert said == [b"a", b"b", b"end"]


async def test_code_text_and_trailing_metadata_of_a_failure_pass(relayed: Relayed) -> None:
    call = relayed.files.Read(file_service_pb2.ReadRequest(path="/odd"), metadata=METADATA)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call.read()
    assert (caught.value.code(), caught.value.details()) == (grpc.StatusCode.DATA_LOSS, "lost \u00fc")
    assert ("x-why", "odd") in tuple(caught.value.trailing_metadata() or ())


async def test_typed_errors_pass_whole(relayed: Relayed) -> None:
    call = relayed.files.Read(file_service_pb2.ReadRequest(path="/typed"), metadata=METADATA)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call.read()
    error = from_rpc_error(caught.value)
    assert isinstance(error, errors.FileNotFoundError)
    assert error.metadata == {"path": "/typed"}


async def test_a_cancelled_stream_ends_in_the_guest(relayed: Relayed) -> None:
    async def endless() -> AsyncIterator[process_service_pb2.ExecRequest]:
        yield process_service_pb2.ExecRequest(stdin=process_service_pb2.ExecStdin(data=b"a"))
        await asyncio.Event().wait()

    call = relayed.processes.Exec(endless(), metadata=METADATA)
    async with asyncio.timeout(10):
        assert (await call.read()).stdout.data == b"a"
        call.cancel()
        await relayed.guest.cancelled.wait()


async def test_a_cancelled_unary_call_ends_in_the_guest(relayed: Relayed) -> None:
    call = relayed.guests.GetInfo(
        guest_service_pb2.GetInfoRequest(), metadata=(*METADATA, ("x-hang", "1")), timeout=30
    )
    async with asyncio.timeout(10):
        await relayed.guest.began.wait()
        call.cancel()
        await relayed.guest.cancelled.wait()
    assert relayed.guest.left is not None
    assert relayed.guest.left < 31, "the deadline goes along (the wire rounds it up)"


async def test_no_deadline_stays_none(relayed: Relayed) -> None:
    await relayed.guests.GetInfo(guest_service_pb2.GetInfoRequest(), metadata=METADATA)
    assert relayed.guest.left is None or relayed.guest.left > 10**8


async def failure(call: Any) -> CocoonError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    error = from_rpc_error(caught.value)
    assert isinstance(error, CocoonError)
    return error


async def test_a_guest_that_is_gone_is_unreachable(directory: Path) -> None:
    async with (
        grpc.aio.insecure_channel(f"unix:{directory}/none") as inner,
        serving(directory / "n", None, GuestRelay(lambda _: ("sandboxes/sb_x", inner))),
        grpc.aio.insecure_channel(f"unix:{directory}/n") as outer,
    ):
        here = Relayed(GuestSide(), outer)
        error = await failure(here.guests.GetInfo(guest_service_pb2.GetInfoRequest(), metadata=METADATA))
        assert (error.reason_name(), "sandboxes/sb_x" in str(error.metadata)) == ("GUEST_UNREACHABLE", True)
        call = here.files.Read(file_service_pb2.ReadRequest(path="/f"), metadata=METADATA)
        assert (await failure(call.read())).reason_name() == "GUEST_UNREACHABLE"


async def test_what_the_route_refuses_never_reaches_a_guest(directory: Path) -> None:
    def route(metadata: Any) -> Any:
        raise SandboxNotFoundError(sandbox=f"sandboxes/{dict(metadata)['cocoon-sandbox-id']}")

    async with (
        serving(directory / "n", None, GuestRelay(route)),
        grpc.aio.insecure_channel(f"unix:{directory}/n") as outer,
    ):
        here = Relayed(GuestSide(), outer)
        error = await failure(here.guests.GetInfo(guest_service_pb2.GetInfoRequest(), metadata=METADATA))
        assert error.reason_name() == "SANDBOX_NOT_FOUND"


@pytest.mark.parametrize(
    "method",
    [
        "/cocoon.guest.host.v1.HostService/Shutdown",
        "/cocoon.guest.v1.ProcessService/Nope",
        "/cocoon.guest.v1.ProcessService",
        "/cocoon.node.v1.SandboxService/Claim",
    ],
)
async def test_other_methods_are_refused(relayed: Relayed, method: str) -> None:
    error = await failure(relayed.channel.unary_unary(method)(b"", metadata=METADATA))
    assert (error.reason_name(), error.metadata["method"]) == ("METHOD_NOT_RELAYED", method)


@pytest.mark.parametrize("method", ["/grpc.health.v1.Health/Check", "/grpc.reflection.v1.ServerReflection/X"])
async def test_grpcs_own_services_are_left_to_grpc_and_reach_no_guest(directory: Path, method: str) -> None:
    looked_up: list[object] = []

    def route(metadata: object) -> tuple[str, grpc.aio.Channel]:
        looked_up.append(metadata)
        raise errors.SandboxNotFoundError(sandbox="sandboxes/sb_x")

    async with (
        serving(directory / "n", None, GuestRelay(route)),
        grpc.aio.insecure_channel(f"unix:{directory}/n") as outer,
    ):
        for call in (outer.unary_unary(method)(b""), outer.stream_stream(method)(iter([b""])).read()):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call
            assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
    assert looked_up == []
