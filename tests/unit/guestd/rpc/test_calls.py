"""A stop waits for the clean-up of calls, and not for ever."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc.aio

from cocoon.guest.v1 import guest_service_pb2 as pb
from cocoon.guest.v1 import guest_service_pb2_grpc
from cocoon_rpc.interceptors import ErrorInterceptor
from guestd.rpc.calls import OpenCalls


class _Slow(guest_service_pb2_grpc.GuestServiceServicer):
    """Takes its time to clean up."""

    def __init__(self) -> None:
        self.begun, self.may_end, self.ended = asyncio.Event(), asyncio.Event(), False

    async def GetInfo(self, request: pb.GetInfoRequest, context: Any) -> pb.GetInfoResponse:
        try:
            self.begun.set()
            await asyncio.Event().wait()
        finally:
            await self.may_end.wait()
            self.ended = True
        return pb.GetInfoResponse()


async def test_calls_are_open_until_their_clean_up_is_done(tmp_path_factory: Any) -> None:
    calls, slow = OpenCalls(), _Slow()
    server = grpc.aio.server(interceptors=(ErrorInterceptor(calls),))
    guest_service_pb2_grpc.add_GuestServiceServicer_to_server(slow, server)
    address = f"unix:{tmp_path_factory.mktemp('s') / 's'}"
    server.add_insecure_port(address)
    await server.start()
    async with grpc.aio.insecure_channel(address) as channel:
        call = guest_service_pb2_grpc.GuestServiceStub(channel).GetInfo(pb.GetInfoRequest())
        await asyncio.wait_for(slow.begun.wait(), 10)
        call.cancel()
        await calls.wait_none(0.1)
        assert not slow.ended
        slow.may_end.set()
        async with asyncio.timeout(10):
            await calls.wait_none(60)
        assert slow.ended
    await server.stop(None)


async def test_calls_are_not_waited_for_when_there_are_none() -> None:
    async with asyncio.timeout(10):
        await OpenCalls().wait_none(60)
