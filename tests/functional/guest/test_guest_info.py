"""GuestService.GetInfo on a real guest."""

from __future__ import annotations

from cocoon.guest.v1 import guest_service_pb2 as pb
from cocoon.guest.v1 import guest_service_pb2_grpc, process_service_pb2
from nodeagent.pool.provision import Guest
from tests.functional.guest.calls import exec_call, shell


async def _info(guest: Guest) -> pb.GetInfoResponse:
    stub = guest_service_pb2_grpc.GuestServiceStub(guest.link.channel)
    info: pb.GetInfoResponse = await stub.GetInfo(pb.GetInfoRequest(), timeout=20)
    return info


async def test_info_says_what_the_guest_itself_says(guest_any: Guest) -> None:
    info = await _info(guest_any)
    assert info.kernel_release == await shell(guest_any, "uname -r")
    assert info.hostname == await shell(guest_any, "uname -n")
    assert info.os == await shell(guest_any, ". /etc/os-release; echo $PRETTY_NAME")
    assert info.guestd_version


async def test_info_uptime_grows(guest_any: Guest) -> None:
    first, second = (await _info(guest_any)).uptime, (await _info(guest_any)).uptime
    assert 0 < first.ToNanoseconds() < second.ToNanoseconds()


async def test_info_counts_running_programs(guest_any: Guest) -> None:
    start = process_service_pb2.ExecStart(argv=["sleep", "300"])
    async with exec_call(guest_any, start) as first, exec_call(guest_any, start) as second:
        for call in (first, second):
            assert (await call.read()).HasField("started")
        assert (await _info(guest_any)).processes == 2
        await second.write(
            process_service_pb2.ExecRequest(signal=process_service_pb2.ExecSignal(signal="TERM"))
        )
        assert (await second.read()).HasField("exit")
        assert (await _info(guest_any)).processes == 1
