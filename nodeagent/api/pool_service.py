"""PoolService: see the contract for what each method promises."""

from __future__ import annotations

import asyncio
import hashlib

from cocoon.node.v1 import pool_service_pb2 as pb
from cocoon.node.v1 import pool_service_pb2_grpc
from cocoon.types.v1 import sandbox_pb2
from cocoon_rpc.errors import InvalidFieldError, LaneUnavailableError, RequestIdReusedError
from cocoon_rpc.interceptors import Context
from nodeagent.api import convert
from nodeagent.clock import Clock
from nodeagent.images import ImageStore
from nodeagent.model import Image, Net, PoolKey
from nodeagent.pool.pools import Pools

_REMEMBERED = 1000


class PoolService(pool_service_pb2_grpc.PoolServiceServicer):
    """Proto ↔ pools."""

    def __init__(self, pools: Pools, images: ImageStore, clock: Clock) -> None:
        """Takes the pools and the images they are made from."""
        self._pools = pools
        self._images = images
        self._clock = clock
        self._requests: dict[str, bytes] = {}

    async def Set(self, request: pb.SetRequest, context: Context) -> pb.SetResponse:
        """Replaces the set of pools."""
        self._remember(convert.request_id(request.request_id), request)
        wanted: dict[PoolKey, tuple[Image, int]] = {}
        for index, spec in enumerate(request.pools):
            where = f"pools[{index}]."
            key = convert.pool_key(spec.template, spec.net, spec.size, where)
            if key.net is not Net.NONE:
                raise LaneUnavailableError(net=sandbox_pb2.NET_EGRESS)
            if spec.warm > 1000:
                raise InvalidFieldError(field=where + "warm", rule="must be at most 1000")
            if key in wanted:
                raise InvalidFieldError(field=where + "template", rule=f"is the second pool of {key}")
            image = await asyncio.to_thread(self._images.resolve, key.template)
            wanted[key] = (image, spec.warm)
        self._pools.set((key, image, warm) for key, (image, warm) in wanted.items())
        return pb.SetResponse(pools=[convert.pool(p, self._clock) for p in self._pools.list()])

    async def List(self, request: pb.PoolServiceListRequest, context: Context) -> pb.PoolServiceListResponse:
        """Lists the pools."""
        shown, token = convert.page(self._pools.list(), request.page_size, request.page_token)
        return pb.PoolServiceListResponse(
            pools=[convert.pool(p, self._clock) for p in shown], next_page_token=token
        )

    def _remember(self, request_id: str, request: pb.SetRequest) -> None:
        """Refuses an id that stood for other content; the verb itself is declarative."""
        if not request_id:
            return
        content = hashlib.sha256(request.SerializeToString(deterministic=True)).digest()
        if self._requests.setdefault(request_id, content) != content:
            raise RequestIdReusedError(request_id=request_id)
        while len(self._requests) > _REMEMBERED:
            del self._requests[next(iter(self._requests))]
