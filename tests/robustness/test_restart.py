"""What clients of a node that died or stops are told."""

from __future__ import annotations

import asyncio
import uuid
from pathlib import Path

import grpc
import grpc.aio
import pytest

from cocoon.guest.v1 import guest_service_pb2, guest_service_pb2_grpc
from cocoon.node.v1 import sandbox_service_pb2 as pb
from cocoon.node.v1 import sandbox_service_pb2_grpc
from cocoon_rpc.auth import guest_metadata
from cocoon_rpc.errors import CocoonError, from_rpc_error
from tests.framework.leaks import mounts_naming
from tests.framework.node import ROOT_TOKEN, NodeProcess, node_config

pytestmark = pytest.mark.root

ROOT = (("authorization", f"Bearer {ROOT_TOKEN}"),)


def configuration(directory: Path) -> str:
    token = directory / "token"
    token.touch(mode=0o600)
    token.write_text(ROOT_TOKEN)
    return node_config(directory / "data", "local", (), token)


async def claim(channel: grpc.aio.Channel, request_id: str = "") -> pb.ClaimResponse:
    stub = sandbox_service_pb2_grpc.SandboxServiceStub(channel)
    request = pb.ClaimRequest(template="rt", request_id=request_id)
    answer: pb.ClaimResponse = await stub.Claim(request, metadata=ROOT, timeout=60)
    return answer


async def test_a_killed_nodes_claim_is_gone_for_good_and_the_node_works(tmp_path: Path) -> None:
    config, request_id = configuration(tmp_path), str(uuid.uuid4())
    first = NodeProcess(tmp_path, config)
    first.__enter__()
    try:
        async with grpc.aio.insecure_channel(first.address) as channel:
            lost = await claim(channel, request_id)
    finally:
        first.kill()
    with NodeProcess(tmp_path, config) as second:
        assert mounts_naming(str(tmp_path)) == []
        async with grpc.aio.insecure_channel(second.address) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await claim(channel, request_id)
            error = from_rpc_error(caught.value)
            assert isinstance(error, CocoonError)
            assert error.reason_name() == "SANDBOX_NOT_FOUND"
            # Its owner may still tidy up, and does not see an error.
            sandboxes = sandbox_service_pb2_grpc.SandboxServiceStub(channel)
            own = (("authorization", f"Bearer {lost.token}"),)
            await sandboxes.Release(pb.ReleaseRequest(name=lost.sandbox.name), metadata=own)
            fresh = await claim(channel)
            guests = guest_service_pb2_grpc.GuestServiceStub(channel)
            metadata = guest_metadata(fresh.sandbox.name.removeprefix("sandboxes/"), fresh.token)
            info = await guests.GetInfo(guest_service_pb2.GetInfoRequest(), metadata=metadata, timeout=30)
            assert info.hostname.startswith("m-")


async def outcome(channel: grpc.aio.Channel) -> str:
    try:
        await claim(channel)
    except grpc.aio.AioRpcError as error:
        return error.code().name
    return "granted"


async def test_claims_under_way_when_the_node_stops_are_granted_or_refused(tmp_path: Path) -> None:
    # Leaving the block proves that nothing is left of those that were granted, too.
    with NodeProcess(tmp_path, configuration(tmp_path)) as node:
        async with grpc.aio.insecure_channel(node.address) as channel, asyncio.TaskGroup() as group:
            tasks = [group.create_task(outcome(channel)) for _ in range(8)]
            async with asyncio.timeout(30):
                while not list((tmp_path / "data" / "machines").iterdir()):
                    await asyncio.sleep(0.005)
                node.process.terminate()
                answers = await asyncio.gather(*tasks)
    assert set(answers) <= {"granted", "UNAVAILABLE", "CANCELLED"}, answers
