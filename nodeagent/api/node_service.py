"""NodeService: see the contract for what each method promises."""

from __future__ import annotations

import nodeagent
from cocoon.node.v1 import node_service_pb2 as pb
from cocoon.node.v1 import node_service_pb2_grpc
from cocoon_rpc.interceptors import Context
from nodeagent.api import convert
from nodeagent.claims.manager import ClaimManager
from nodeagent.clock import Clock
from nodeagent.config import Config
from nodeagent.engine.base import EngineFacts
from nodeagent.images import ImageStore
from nodeagent.pool.pools import Pools


class NodeService(node_service_pb2_grpc.NodeServiceServicer):
    """Facts of the node as one message."""

    def __init__(
        self,
        config: Config,
        facts: EngineFacts,
        claims: ClaimManager,
        pools: Pools,
        images: ImageStore,
        clock: Clock,
    ) -> None:
        """Takes everything that GetInfo tells about."""
        self._config = config
        self._facts = facts
        self._claims = claims
        self._pools = pools
        self._images = images
        self._clock = clock
        self._started = clock.monotonic()

    async def GetInfo(self, request: pb.GetInfoRequest, context: Context) -> pb.GetInfoResponse:
        """Returns what the node is, has and does."""
        capacity = self._pools.capacity
        parked = capacity.parked
        return pb.GetInfoResponse(
            name=f"nodes/{self._config.node_id}",
            version=nodeagent.__version__,
            uptime=convert.duration(int((self._clock.monotonic() - self._started) * 1e9)),
            engine=pb.EngineInfo(
                name=self._facts.name,
                version=self._facts.version,
                accelerator=convert.ACCELERATOR[self._facts.accelerator],
                isolation=convert.ISOLATION[self._facts.isolation],
                snapshots=self._facts.snapshots,
            ),
            claimed=self._claims.claimed,
            pools=[convert.pool(p, self._clock) for p in self._pools.list()],
            templates=[pb.Template(template=i.name, digest=i.digest) for i in self._images.all()],
            capacity=pb.Capacity(
                at_capacity=parked,
                cause=capacity.cause if parked else "",
                retry_time=convert.timestamp(capacity.retry_wall_ns) if parked else None,
                max_claims=self._config.max_claims,
            ),
        )
