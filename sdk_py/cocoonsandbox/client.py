"""The way to a node."""

from __future__ import annotations

import math
import random
import ssl
import time
import uuid
from types import TracebackType
from typing import Any, Self

import grpc
from google.protobuf.duration_pb2 import Duration
from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message

from cocoon.node.v1 import (
    node_service_pb2,
    node_service_pb2_grpc,
    sandbox_service_pb2,
    sandbox_service_pb2_grpc,
)
from cocoon.types.v1 import sandbox_pb2
from cocoonsandbox._transport import Channels, check_token, credentials, parse_address
from cocoonsandbox.errors import APIError, SandboxTimeout, from_node
from cocoonsandbox.sandbox import Sandbox

_NETS = {"none": sandbox_pb2.NET_NONE, "egress": sandbox_pb2.NET_EGRESS}
_SIZES = {
    "small": sandbox_pb2.SIZE_SMALL,
    "medium": sandbox_pb2.SIZE_MEDIUM,
    "large": sandbox_pb2.SIZE_LARGE,
    "xlarge": sandbox_pb2.SIZE_XLARGE,
    "2xlarge": sandbox_pb2.SIZE_2XLARGE,
}
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 1.0
# How long a claim asks on for a node that cannot be reached: a restart takes less,
# and a wrong address should not cost the whole timeout.
_UNREACHABLE_LIMIT_S = 15.0


class Client:
    """A client of one node. Thread-safe; close it or use it as a context manager."""

    def __init__(
        self,
        addr: str,
        api_token: str = "",
        timeout: float = 120.0,
        *,
        ssl_context: ssl.SSLContext | None = None,
        keep_alive: float = 30.0,
    ) -> None:
        """Connects lazily.

        Args:
            addr: `host:port` or an http(s) origin; of several, separated by commas, the first counts.
            api_token: the node's root token; "" for a node without one.
            timeout: seconds for calls that have no timeout of their own.
            ssl_context: turns TLS on and gives its root certificates; nothing else of it can be handed to
                gRPC. An https origin alone uses the default roots.
            keep_alive: seconds after which an unused connection is closed, at least 1.

        Raises:
            ValueError: one of them cannot be used; says which and why, never the token.
        """
        self._addr, scheme = parse_address(addr)
        check_token(api_token, "api_token")
        if not timeout > 0 or not keep_alive >= 0:
            raise ValueError("timeout must be positive and keep_alive not negative")
        self.timeout = timeout
        self._channels = Channels(credentials(scheme, ssl_context), keep_alive)
        self._metadata = (("authorization", f"Bearer {api_token}"),) if api_token else ()

    def __repr__(self) -> str:
        """Names the node, never the token."""
        return f"Client({self._addr!r})"

    def __enter__(self) -> Self:
        """Returns itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Closes the connections; sandboxes live on."""
        self.close()

    def close(self) -> None:
        """Closes the connections. Idempotent."""
        self._channels.close()

    def new(
        self,
        template: str,
        net: str = "none",
        size: str = "small",
        ttl_seconds: int = 0,
        claim_ref: str = "",
        *,
        deadline: float | None = None,
    ) -> Sandbox:
        """Claims a sandbox.

        A reply that got lost is asked for again under the same request id, so no
        sandbox leaks.

        Args:
            template: image name or digest.
            net: "none" or "egress".
            size: "small", "medium", "large", "xlarge" or "2xlarge".
            ttl_seconds: length of the lease; 0 = 5 minutes, at most 86400.
            claim_ref: the caller's own reference.
            deadline: on the monotonic clock, for the whole claim; default: the client's timeout from now.

        Raises:
            ValueError: net or size are none of those.
            APIError: the node refused or could not be reached.
            SandboxTimeout: the deadline passed.
        """
        if net not in _NETS:
            raise ValueError(f"net must be one of {', '.join(_NETS)}, not {net!r}")
        if size not in _SIZES:
            raise ValueError(f"size must be one of {', '.join(_SIZES)}, not {size!r}")
        request = sandbox_service_pb2.ClaimRequest(
            request_id=str(uuid.uuid4()),
            template=template,
            net=_NETS[net],
            size=_SIZES[size],
            ttl=Duration(seconds=ttl_seconds),
            claim_ref=claim_ref,
        )
        response = self._claim(request, time.monotonic() + self.timeout if deadline is None else deadline)
        kind, _, sandbox_id = response.sandbox.name.partition("/")
        if kind != "sandboxes" or not sandbox_id or not response.token:
            raise APIError("claim", 0, "the node's reply names no sandbox or no token")
        sandbox = Sandbox(self, self._addr, sandbox_id, response.token)
        sandbox._describe(response.sandbox)
        return sandbox

    def _claim(
        self, request: sandbox_service_pb2.ClaimRequest, deadline: float
    ) -> sandbox_service_pb2.ClaimResponse:
        stub = sandbox_service_pb2_grpc.SandboxServiceStub(self._channels.get(self._addr))
        pause, failed_since = _FIRST_PAUSE_S, -math.inf
        while True:
            asked = time.monotonic()
            if asked >= deadline:
                raise SandboxTimeout("claim: no answer in time")
            try:
                return stub.Claim(request, metadata=self._metadata, timeout=deadline - asked)
            except grpc.RpcError as error:
                known = from_node("claim", error)
                # Only a transport that failed leaves open what the node did.
                lost = isinstance(known, APIError) and known.status == 0
                now = time.monotonic()
                # A call that got somewhere for a while says that the node was there.
                if failed_since < 0 or now - asked > _UNREACHABLE_LIMIT_S:
                    failed_since = now
                if not lost or now + pause >= min(deadline, failed_since + _UNREACHABLE_LIMIT_S):
                    raise known from error
            time.sleep(pause * random.uniform(0.5, 1.0))  # noqa: S311 - spreads retries
            pause = min(pause * 2, _LONGEST_PAUSE_S)

    def attach(self, owner_addr: str, sandbox_id: str, token: str) -> Sandbox:
        """Returns a handle on a sandbox claimed elsewhere; no round trip.

        Raises: ValueError: owner_addr is no address, or the token cannot be one.
        """
        owner, _ = parse_address(owner_addr)
        check_token(sandbox_id, "sandbox_id")
        check_token(token, "token")
        return Sandbox(self, owner, sandbox_id, token)

    def sandboxes(self) -> list[dict[str, Any]]:
        """Returns the node's live sandboxes as dictionaries. Raises: APIError, SandboxTimeout."""
        stub = sandbox_service_pb2_grpc.SandboxServiceStub(self._channels.get(self._addr))
        found: list[dict[str, Any]] = []
        request = sandbox_service_pb2.ListRequest(page_size=1000)
        while True:
            try:
                page = stub.List(request, metadata=self._metadata, timeout=self.timeout)
            except grpc.RpcError as error:
                raise from_node("sandboxes", error) from error
            found += map(_as_dict, page.sandboxes)
            if not page.next_page_token:
                return found
            request.page_token = page.next_page_token

    def info(self) -> dict[str, Any]:
        """Returns what the node is and does, as a dictionary. Raises: APIError, SandboxTimeout."""
        stub = node_service_pb2_grpc.NodeServiceStub(self._channels.get(self._addr))
        try:
            answer = stub.GetInfo(
                node_service_pb2.GetInfoRequest(), metadata=self._metadata, timeout=self.timeout
            )
        except grpc.RpcError as error:
            raise from_node("info", error) from error
        return _as_dict(answer)


def _as_dict(message: Message) -> dict[str, Any]:
    """Returns a message as ProtoJSON would say it, zeros and empty lists included."""
    return MessageToDict(message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)
