"""SandboxService: see the contract for what each method promises."""

from __future__ import annotations

from cocoon.node.v1 import sandbox_service_pb2 as pb
from cocoon.node.v1 import sandbox_service_pb2_grpc
from cocoon.types.v1 import sandbox_pb2
from cocoon_rpc.interceptors import Context
from nodeagent.api import convert
from nodeagent.api.access import caller
from nodeagent.claims import manager as claims
from nodeagent.claims.manager import ClaimAsk, ClaimManager


class SandboxService(sandbox_service_pb2_grpc.SandboxServiceServicer):
    """Proto ↔ claim manager."""

    def __init__(self, claims: ClaimManager, node_id: str, guest_endpoint: str) -> None:
        """Takes the manager and what replies say about this node."""
        self._claims = claims
        self._node_id = node_id
        self._guest_endpoint = guest_endpoint

    async def Claim(self, request: pb.ClaimRequest, context: Context) -> pb.ClaimResponse:
        """Grants a sandbox."""
        ask = ClaimAsk(
            key=convert.pool_key(request.template, request.net, request.size),
            ttl_ns=convert.duration_ns(request.ttl, "ttl"),
            request_id=convert.request_id(request.request_id),
            claim_ref=convert.claim_ref(request.claim_ref),
            metadata=convert.metadata(request.metadata),
        )
        granted = await self._claims.claim(ask)
        return pb.ClaimResponse(sandbox=self._sandbox(granted.claim), token=granted.token)

    async def Get(self, request: pb.GetRequest, context: Context) -> pb.GetResponse:
        """Returns one sandbox."""
        sandbox_id = convert.sandbox_id(request.name)
        caller().require(sandbox_id)
        return pb.GetResponse(sandbox=self._sandbox(self._claims.get(sandbox_id)))

    async def List(self, request: pb.ListRequest, context: Context) -> pb.ListResponse:
        """Lists live sandboxes."""
        wanted = dict(request.metadata).items()
        claims = [
            claim
            for claim in self._claims.list()
            if request.claim_ref in {"", claim.record.claim_ref} and wanted <= claim.record.metadata.items()
        ]
        shown, token = convert.page(claims, request.page_size, request.page_token)
        return pb.ListResponse(sandboxes=[self._sandbox(c) for c in shown], next_page_token=token)

    async def Release(self, request: pb.ReleaseRequest, context: Context) -> pb.ReleaseResponse:
        """Gives a sandbox back."""
        sandbox_id = convert.sandbox_id(request.name)
        convert.request_id(request.request_id)
        caller().require(sandbox_id)
        await self._claims.release(sandbox_id)
        return pb.ReleaseResponse()

    def _sandbox(self, claim: claims.Claim) -> sandbox_pb2.Sandbox:
        return convert.sandbox(claim, self._node_id, self._guest_endpoint)
