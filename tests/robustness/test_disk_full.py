"""A full disk parks the pool, is said in GetInfo, and is forgotten when there is room."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import Iterator
from pathlib import Path

import grpc
import grpc.aio
import pytest

from cocoon.node.v1 import (
    node_service_pb2,
    node_service_pb2_grpc,
    pool_service_pb2,
    pool_service_pb2_grpc,
    sandbox_service_pb2_grpc,
)
from cocoon.node.v1 import sandbox_service_pb2 as pb
from cocoon.types.v1 import sandbox_pb2
from cocoon_rpc.errors import NodeAtCapacityError, from_rpc_error
from tests.framework.leaks import assert_nothing_left
from tests.framework.node import ROOT_TOKEN, NodeProcess, node_config

ROOT = (("authorization", f"Bearer {ROOT_TOKEN}"),)
PARK_LIMIT_S = 45.0


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 8 MiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(disk)], check=True)
    try:
        yield disk
        assert_nothing_left(disk / "data")
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def fill(path: Path) -> None:
    """Writes until there is no room."""
    with path.open("ab", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError:
            return


@pytest.mark.root
@pytest.mark.slow
async def test_a_full_disk_parks_the_pool_until_there_is_room(tmp_path: Path, small_disk: Path) -> None:
    token = tmp_path / "token"
    token.touch(mode=0o600)
    token.write_text(ROOT_TOKEN)
    config = node_config(small_disk / "data", "local", (("rt", 1),), token)
    with NodeProcess(tmp_path, config) as node:
        async with grpc.aio.insecure_channel(node.address) as channel:
            pools = pool_service_pb2_grpc.PoolServiceStub(channel)
            info = node_service_pb2_grpc.NodeServiceStub(channel)
            sandboxes = sandbox_service_pb2_grpc.SandboxServiceStub(channel)

            async def told() -> node_service_pb2.GetInfoResponse:
                answer: node_service_pb2.GetInfoResponse = await info.GetInfo(
                    node_service_pb2.GetInfoRequest(), metadata=ROOT
                )
                return answer

            async with asyncio.timeout(30):
                while (await told()).pools[0].warm < 1:
                    await asyncio.sleep(0.02)
            assert not (await told()).capacity.at_capacity

            fill(small_disk / "ballast")
            spec = pool_service_pb2.PoolSpec(template="rt", warm=2)
            await pools.Set(pool_service_pb2.SetRequest(pools=[spec]), metadata=ROOT)
            async with asyncio.timeout(30):
                while not (await told()).capacity.at_capacity:
                    await asyncio.sleep(0.02)
            full = await told()
            assert "disk" in full.capacity.cause
            assert full.capacity.retry_time.seconds > 0
            assert full.pools[0].last_error == full.capacity.cause
            assert full.pools[0].warm == 1, "what was made before stays"
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                request = pb.ClaimRequest(template="rt", size=sandbox_pb2.SIZE_MEDIUM)
                await sandboxes.Claim(request, metadata=ROOT, timeout=30)
            error = from_rpc_error(caught.value)
            assert isinstance(error, NodeAtCapacityError), error
            assert error.retry_after is not None
            assert error.retry_after > 0
            assert (await told()).claimed == 0
            assert len(list((small_disk / "data" / "machines").iterdir())) == 1, (
                "the failed ones left nothing"
            )

            (small_disk / "ballast").unlink()
            async with asyncio.timeout(PARK_LIMIT_S):
                while (await told()).pools[0].warm < 2:
                    await asyncio.sleep(0.1)
            well = await told()
            assert not well.capacity.at_capacity
            assert (well.capacity.cause, well.pools[0].last_error) == ("", "")


@pytest.mark.root
async def test_a_claim_that_cannot_be_recorded_is_not_granted(tmp_path: Path, small_disk: Path) -> None:
    with NodeProcess(tmp_path, node_config(small_disk / "data", "local", (("rt", 1),))) as node:
        async with grpc.aio.insecure_channel(node.address) as channel:
            info = node_service_pb2_grpc.NodeServiceStub(channel)
            sandboxes = sandbox_service_pb2_grpc.SandboxServiceStub(channel)

            async def told() -> node_service_pb2.GetInfoResponse:
                answer: node_service_pb2.GetInfoResponse = await info.GetInfo(
                    node_service_pb2.GetInfoRequest()
                )
                return answer

            async with asyncio.timeout(30):
                while (await told()).pools[0].warm < 1:
                    await asyncio.sleep(0.02)
            fill(small_disk / "ballast")
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                # Long, so that no free page of the journal's log takes it.
                request = pb.ClaimRequest(template="rt", metadata={str(i): "x" * 500 for i in range(8)})
                await sandboxes.Claim(request, timeout=30)
            assert caught.value.code() in {
                grpc.StatusCode.UNAVAILABLE,
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                grpc.StatusCode.INTERNAL,
            }
            assert from_rpc_error(caught.value).reason_name() == "PROVISION_FAILED"
            assert (await told()).claimed == 0
            (small_disk / "ballast").unlink()
            answer = await sandboxes.Claim(pb.ClaimRequest(template="rt"), timeout=30)
            assert answer.token
