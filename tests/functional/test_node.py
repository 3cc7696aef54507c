"""A node as its clients meet it: claims, tokens, bad input, pools; raw stubs over a real socket."""

from __future__ import annotations

import asyncio
import time
import urllib.request
import uuid
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import grpc.aio
import pytest
from google.protobuf.duration_pb2 import Duration
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from cocoon.guest.host.v1 import host_service_pb2
from cocoon.guest.v1 import (
    file_service_pb2,
    file_service_pb2_grpc,
    guest_service_pb2,
    guest_service_pb2_grpc,
    process_service_pb2,
    process_service_pb2_grpc,
)
from cocoon.node.v1 import (
    node_service_pb2,
    node_service_pb2_grpc,
    pool_service_pb2,
    pool_service_pb2_grpc,
    sandbox_service_pb2_grpc,
)
from cocoon.node.v1 import sandbox_service_pb2 as pb
from cocoon.types.v1 import sandbox_pb2
from cocoon_rpc.auth import guest_metadata
from cocoon_rpc.errors import CocoonError, from_rpc_error
from tests.framework.node import ROOT_TOKEN, NodeProcess

ROOT = (("authorization", f"Bearer {ROOT_TOKEN}"),)
UNKNOWN = "sandboxes/sb_" + "a" * 26


class Api:
    """The node's stubs on one channel."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.channel = channel
        self.sandboxes = sandbox_service_pb2_grpc.SandboxServiceStub(channel)
        self.pools = pool_service_pb2_grpc.PoolServiceStub(channel)
        self.node = node_service_pb2_grpc.NodeServiceStub(channel)
        self.guests = guest_service_pb2_grpc.GuestServiceStub(channel)

    async def claim(self, **fields: Any) -> pb.ClaimResponse:
        request = pb.ClaimRequest(**{"template": "rt", **fields})
        answer: pb.ClaimResponse = await self.sandboxes.Claim(request, metadata=ROOT, timeout=60)
        return answer

    async def release(self, claimed: pb.ClaimResponse) -> None:
        await self.sandboxes.Release(pb.ReleaseRequest(name=claimed.sandbox.name), metadata=ROOT)

    async def warm(self, count: int) -> None:
        """Waits until the pool of rt has so many."""
        async with asyncio.timeout(90):
            while True:
                listed = await self.pools.List(pool_service_pb2.PoolServiceListRequest(), metadata=ROOT)
                if [p.warm for p in listed.pools if p.spec.template == "rt"] == [count]:
                    return
                await asyncio.sleep(0.02)


def guest_of(claimed: pb.ClaimResponse) -> tuple[tuple[str, str], ...]:
    return guest_metadata(claimed.sandbox.name.removeprefix("sandboxes/"), claimed.token)


def token_of(claimed: pb.ClaimResponse) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {claimed.token}"),)


async def refused(call: Any) -> CocoonError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    error = from_rpc_error(caught.value)
    assert isinstance(error, CocoonError), error
    return error


@pytest.fixture
async def api(node: NodeProcess) -> AsyncIterator[Api]:
    async with grpc.aio.insecure_channel(node.address) as channel:
        yield Api(channel)


@pytest.fixture
async def api_any(node_any: NodeProcess) -> AsyncIterator[Api]:
    async with grpc.aio.insecure_channel(node_any.address) as channel:
        yield Api(channel)


async def test_warm_claim_answers_calls_and_goes(api_any: Api) -> None:
    await api_any.warm(2)
    claimed = await api_any.claim(claim_ref="r", metadata={"k": "v"}, ttl=Duration(seconds=60))
    sandbox = claimed.sandbox
    assert sandbox.tier == sandbox_pb2.CLAIM_TIER_WARM
    assert sandbox.state == sandbox_pb2.SANDBOX_STATE_RUNNING
    assert (sandbox.claim_ref, dict(sandbox.metadata), sandbox.node) == ("r", {"k": "v"}, "nodes/test-node")
    assert sandbox.expire_time.ToSeconds() - sandbox.claim_time.ToSeconds() == 60
    info = await api_any.guests.GetInfo(guest_service_pb2.GetInfoRequest(), metadata=guest_of(claimed))
    assert info.hostname.startswith("m-")
    await api_any.release(claimed)
    await api_any.release(claimed)
    error = await refused(
        api_any.guests.GetInfo(guest_service_pb2.GetInfoRequest(), metadata=guest_of(claimed))
    )
    assert error.reason_name() == "SANDBOX_NOT_FOUND"
    await api_any.sandboxes.Release(pb.ReleaseRequest(name=sandbox.name), metadata=token_of(claimed))
    await api_any.warm(2)


async def test_exec_and_files_go_through_the_relay(api_any: Api) -> None:
    claimed = await api_any.claim()
    metadata = guest_of(claimed)
    content = bytes(range(256)) * 4096

    async def pieces() -> AsyncIterator[file_service_pb2.WriteRequest]:
        yield file_service_pb2.WriteRequest(start=file_service_pb2.WriteStart(path="/root/f"))
        yield file_service_pb2.WriteRequest(chunk=file_service_pb2.FileChunk(data=content))
        yield file_service_pb2.WriteRequest(done=file_service_pb2.WriteDone())

    files = file_service_pb2_grpc.FileServiceStub(api_any.channel)
    written = await files.Write(pieces(), metadata=metadata)
    assert written.size_bytes == len(content)
    request = file_service_pb2.ReadRequest(path="/root/f")
    back = b"".join([r.chunk.data async for r in files.Read(request, metadata=metadata)])
    assert back == content

    async def start() -> AsyncIterator[process_service_pb2.ExecRequest]:
        argv = ["sh", "-c", "wc -c </root/f; exit 7"]
        yield process_service_pb2.ExecRequest(start=process_service_pb2.ExecStart(argv=argv))

    execs = process_service_pb2_grpc.ProcessServiceStub(api_any.channel)
    said = [r async for r in execs.Exec(start(), metadata=metadata)]
    assert b"".join(r.stdout.data for r in said).strip() == str(len(content)).encode()
    assert said[-1].exit.code == 7
    await api_any.release(claimed)


async def test_guest_errors_arrive_with_their_details(api_any: Api) -> None:
    claimed = await api_any.claim()
    stub = file_service_pb2_grpc.FileServiceStub(api_any.channel)
    call = stub.Read(file_service_pb2.ReadRequest(path="/nope"), metadata=guest_of(claimed))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call.read()
        await call.read()
    error = from_rpc_error(caught.value)
    assert isinstance(error, CocoonError)
    assert (error.reason_name(), error.metadata) == ("FILE_NOT_FOUND", {"path": "/nope"})
    await api_any.release(claimed)


async def test_claims_without_warm_machines_say_their_tier(api_any: Api) -> None:
    await api_any.warm(2)
    claims = await asyncio.gather(*(api_any.claim() for _ in range(4)))
    tiers = sorted(c.sandbox.tier for c in claims)
    info = await api_any.node.GetInfo(node_service_pb2.GetInfoRequest(), metadata=ROOT)
    slow = sandbox_pb2.CLAIM_TIER_CLONE if info.engine.snapshots else sandbox_pb2.CLAIM_TIER_COLD
    assert tiers[:2] == [sandbox_pb2.CLAIM_TIER_WARM] * 2
    assert set(tiers[2:]) <= {slow, sandbox_pb2.CLAIM_TIER_WARM}
    names = {
        (await api_any.guests.GetInfo(guest_service_pb2.GetInfoRequest(), metadata=guest_of(c))).hostname
        for c in claims
    }
    assert len(names) == 4
    for claimed in claims:
        await api_any.release(claimed)


BAD_CLAIMS: list[tuple[dict[str, Any], str, str]] = [
    ({"template": ""}, "INVALID_FIELD", "template"),
    ({"template": "no such"}, "INVALID_FIELD", "template"),
    ({"template": "nope"}, "TEMPLATE_NOT_FOUND", "nope"),
    ({"template": "sha256:" + "0" * 64}, "TEMPLATE_NOT_FOUND", "sha256"),
    ({"size": 99}, "INVALID_FIELD", "size"),
    ({"net": 99}, "INVALID_FIELD", "net"),
    ({"net": sandbox_pb2.NET_EGRESS}, "LANE_UNAVAILABLE", "NET_NONE"),
    ({"ttl": Duration(seconds=-1)}, "INVALID_FIELD", "ttl"),
    ({"ttl": Duration(seconds=86401)}, "INVALID_FIELD", "24 hours"),
    ({"request_id": "x"}, "INVALID_FIELD", "request_id"),
    ({"claim_ref": "x" * 257}, "INVALID_FIELD", "claim_ref"),
    ({"metadata": {"a=b": "x"}}, "INVALID_FIELD", "metadata"),
    ({"metadata": {"a": "x\n"}}, "INVALID_FIELD", "metadata"),
    ({"metadata": {str(i): "x" for i in range(17)}}, "INVALID_FIELD", "metadata"),
]


@pytest.mark.parametrize(("fields", "reason", "says"), BAD_CLAIMS)
async def test_bad_claims_get_one_clear_error(
    api: Api, fields: dict[str, Any], reason: str, says: str
) -> None:
    error = await refused(api.claim(**fields))
    assert error.reason_name() == reason
    assert says in error.message


CALLS: list[Callable[[Api], Callable[..., Any]]] = [
    lambda a: lambda **k: a.sandboxes.Claim(pb.ClaimRequest(template="rt"), **k),
    lambda a: lambda **k: a.sandboxes.Get(pb.GetRequest(name=UNKNOWN), **k),
    lambda a: lambda **k: a.sandboxes.List(pb.ListRequest(), **k),
    lambda a: lambda **k: a.sandboxes.Release(pb.ReleaseRequest(name=UNKNOWN), **k),
    lambda a: lambda **k: a.pools.Set(pool_service_pb2.SetRequest(), **k),
    lambda a: lambda **k: a.pools.List(pool_service_pb2.PoolServiceListRequest(), **k),
    lambda a: lambda **k: a.node.GetInfo(node_service_pb2.GetInfoRequest(), **k),
    lambda a: lambda **k: a.guests.GetInfo(guest_service_pb2.GetInfoRequest(), **k),
]


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("token", [None, "", "wrong", ROOT_TOKEN[:-1]])
async def test_without_a_valid_token_nothing_is_said(api: Api, call: Any, token: str | None) -> None:
    metadata = () if token is None else (("authorization", f"Bearer {token}"),)
    error = await refused(call(api)(metadata=metadata))
    assert (error.code, error.message) == (grpc.StatusCode.UNAUTHENTICATED, "missing or invalid token")
    assert error.metadata == {}


async def test_somebody_elses_sandbox_looks_like_none(api: Api) -> None:
    mine, other = await api.claim(), await api.claim()
    for verb, request in (("Get", pb.GetRequest), ("Release", pb.ReleaseRequest)):
        answers = []
        for name in (other.sandbox.name, UNKNOWN):
            call = getattr(api.sandboxes, verb)(request(name=name), metadata=token_of(mine))
            error = await refused(call)
            answers.append((error.code, error.reason_name(), error.message.replace(name, "")))
        assert answers[0] == answers[1]
    answers = []
    for name in (other.sandbox.name, UNKNOWN):
        metadata = guest_metadata(name.removeprefix("sandboxes/"), mine.token)
        error = await refused(api.guests.GetInfo(guest_service_pb2.GetInfoRequest(), metadata=metadata))
        answers.append((error.code, error.reason_name(), error.message.replace(name, "")))
    assert answers[0] == answers[1]
    assert answers[0][1] == "SANDBOX_NOT_FOUND"
    got = await api.sandboxes.Get(pb.GetRequest(name=other.sandbox.name), metadata=token_of(other))
    assert got.sandbox.name == other.sandbox.name
    for claimed in (mine, other):
        await api.release(claimed)


async def test_a_sandbox_token_is_no_root_token(api: Api) -> None:
    mine = await api.claim()
    error = await refused(api.sandboxes.List(pb.ListRequest(), metadata=token_of(mine)))
    assert error.reason_name() == "TOKEN_REJECTED"
    await api.release(mine)


async def test_host_verbs_and_unknown_methods_are_not_relayed(api: Api) -> None:
    mine = await api.claim()
    for method in ("/cocoon.guest.host.v1.HostService/Probe", "/cocoon.guest.v1.ProcessService/Nope", "/x/Y"):
        call = api.channel.unary_unary(method)
        request = host_service_pb2.ProbeRequest().SerializeToString()
        error = await refused(call(request, metadata=guest_of(mine)))
        assert error.reason_name() == "METHOD_NOT_RELAYED"
    await api.release(mine)


async def test_request_id_makes_claims_repeatable(api: Api) -> None:
    request_id = str(uuid.uuid4())
    first, second = await asyncio.gather(*(api.claim(request_id=request_id) for _ in range(2)))
    assert (first.sandbox.name, first.token) == (second.sandbox.name, second.token)
    again = await api.claim(request_id=request_id)
    assert again.token == first.token
    error = await refused(api.claim(request_id=request_id, claim_ref="other"))
    assert error.reason_name() == "REQUEST_ID_REUSED"
    await api.release(first)
    error = await refused(api.claim(request_id=request_id))
    assert error.reason_name() == "SANDBOX_NOT_FOUND"


async def test_concurrent_claims_never_share_a_machine(api: Api) -> None:
    claims = await asyncio.gather(*(api.claim() for _ in range(12)))
    infos = await asyncio.gather(
        *(api.guests.GetInfo(guest_service_pb2.GetInfoRequest(), metadata=guest_of(c)) for c in claims)
    )
    assert len({i.hostname for i in infos}) == len({c.sandbox.name for c in claims}) == 12
    await asyncio.gather(*(api.release(c) for c in claims))


async def test_a_lease_ends_by_itself(api: Api) -> None:
    claimed = await api.claim(ttl=Duration(seconds=1))
    began = time.monotonic()
    async with asyncio.timeout(10):
        while True:
            try:
                await api.sandboxes.Get(pb.GetRequest(name=claimed.sandbox.name), metadata=ROOT)
            except grpc.aio.AioRpcError:
                break
            await asyncio.sleep(0.02)
    assert 0.8 < time.monotonic() - began < 3


async def test_list_pages_and_filters(api: Api) -> None:
    claims = [await api.claim(claim_ref=f"r{i % 2}", metadata={"n": str(i)}) for i in range(3)]
    listed, token = [], ""
    while True:
        page = await api.sandboxes.List(pb.ListRequest(page_size=2, page_token=token), metadata=ROOT)
        assert len(page.sandboxes) <= 2
        listed += [s.name for s in page.sandboxes]
        token = page.next_page_token
        if not token:
            break
    assert [c.sandbox.name for c in claims] == listed[-3:]
    only = await api.sandboxes.List(pb.ListRequest(claim_ref="r0", metadata={"n": "2"}), metadata=ROOT)
    assert [s.name for s in only.sandboxes] == [claims[2].sandbox.name]
    for request in (pb.ListRequest(page_size=-1), pb.ListRequest(page_token="%")):
        assert (await refused(api.sandboxes.List(request, metadata=ROOT))).reason_name() == "INVALID_FIELD"
    for claimed in claims:
        await api.release(claimed)


async def test_pools_are_declared_as_a_whole(api: Api) -> None:
    spec = pool_service_pb2.PoolSpec
    await api.pools.Set(pool_service_pb2.SetRequest(pools=[spec(template="rt", warm=1)]), metadata=ROOT)
    await api.warm(1)
    await api.pools.Set(pool_service_pb2.SetRequest(), metadata=ROOT)
    info = await api.node.GetInfo(node_service_pb2.GetInfoRequest(), metadata=ROOT)
    assert list(info.pools) == []
    cold = await api.claim()
    assert cold.sandbox.tier == sandbox_pb2.CLAIM_TIER_COLD
    await api.release(cold)
    twice = pool_service_pb2.SetRequest(pools=[spec(template="rt"), spec(template="rt", warm=1)])
    assert (await refused(api.pools.Set(twice, metadata=ROOT))).reason_name() == "INVALID_FIELD"
    unknown = pool_service_pb2.SetRequest(pools=[spec(template="nope")])
    assert (await refused(api.pools.Set(unknown, metadata=ROOT))).reason_name() == "TEMPLATE_NOT_FOUND"
    await api.pools.Set(pool_service_pb2.SetRequest(pools=[spec(template="rt", warm=2)]), metadata=ROOT)
    await api.warm(2)


async def test_a_digest_is_served_by_the_pool_of_its_name(api: Api) -> None:
    await api.warm(2)
    info = await api.node.GetInfo(node_service_pb2.GetInfoRequest(), metadata=ROOT)
    digest = next(t.digest for t in info.templates if t.template == "rt")
    claimed = await api.claim(template=digest)
    assert claimed.sandbox.tier == sandbox_pb2.CLAIM_TIER_WARM
    await api.release(claimed)


async def test_health_and_reflection_need_no_token(api: Api) -> None:
    health = health_pb2_grpc.HealthStub(api.channel)
    answer = await health.Check(health_pb2.HealthCheckRequest(service="cocoon.node.v1.SandboxService"))
    assert answer.status == health_pb2.HealthCheckResponse.SERVING
    reflection = reflection_pb2_grpc.ServerReflectionStub(api.channel)

    async def ask() -> AsyncIterator[reflection_pb2.ServerReflectionRequest]:
        yield reflection_pb2.ServerReflectionRequest(list_services="")
        yield reflection_pb2.ServerReflectionRequest(file_containing_symbol="cocoon.guest.v1.ProcessService")

    listed, described = [r async for r in reflection.ServerReflectionInfo(ask())]
    names = {s.name for s in listed.list_services_response.service}
    assert {
        "cocoon.node.v1.SandboxService",
        "cocoon.guest.v1.ProcessService",
        "grpc.health.v1.Health",
    } <= names
    assert "cocoon.guest.host.v1.HostService" not in names
    assert described.file_descriptor_response.file_descriptor_proto


def test_metrics_count_claims_by_tier(node: NodeProcess) -> None:
    text = urllib.request.urlopen(f"http://{node.metrics_address}/metrics", timeout=5).read().decode()
    for line in (
        'cocoon_claim_seconds_bucket{le="0.001",tier="warm"}',
        "cocoon_pool_target",
        "cocoon_claimed",
    ):
        assert line in text
    assert "sb_" not in text


def test_the_log_carries_no_token(node: NodeProcess) -> None:
    assert ROOT_TOKEN not in node.log.read_text()


@pytest.mark.parametrize(
    "method",
    [
        "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo",
        "/grpc.health.v1.Health/Nope",
        "/grpc.channelz.v1.Channelz/GetServers",
    ],
)
async def test_grpc_services_we_lack_are_unimplemented_as_grpc_says_it(api: Api, method: str) -> None:
    """On exactly this code grpcurl falls back from reflection v1."""
    for call in (api.channel.unary_unary(method)(b""), api.channel.stream_stream(method)(iter([b""])).read()):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
        assert "cocoon" not in (caught.value.details() or "")
