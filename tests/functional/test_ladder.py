"""Every rung of the ladder holds."""

from cocoon.guest.v1 import guest_service_pb2, guest_service_pb2_grpc
from nodeagent.pool.provision import Guest
from tests.framework.node import NodeProcess


async def test_guest_answers_on_both_engines(guest_any: Guest) -> None:
    stub = guest_service_pb2_grpc.GuestServiceStub(guest_any.link.channel)
    info = await stub.GetInfo(guest_service_pb2.GetInfoRequest())
    assert info.hostname == guest_any.machine.machine_id
    assert "bookworm" in info.os


def test_node_serves_on_both_engines(node_any: NodeProcess) -> None:
    assert node_any.address.startswith("127.0.0.1:")
