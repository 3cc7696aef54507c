"""Who is calling, and may they: one wrapper around every method of the node.

Order: who (token → principal) → may (the contract's rule) → required fields →
handler → errors → metrics. A caller without a valid token learns nothing else.
"""

from __future__ import annotations

import hmac
import time
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio

from cocoon.types.v1 import options_pb2
from cocoon_rpc.auth import auth_rule, bearer
from cocoon_rpc.errors import SandboxNotFoundError, TokenRejectedError
from cocoon_rpc.interceptors import Context, Handler, wrap
from nodeagent.claims.ids import token_sha256
from nodeagent.telemetry.metrics import Metrics

_OPEN_PACKAGES = ("/grpc.health.v1.", "/grpc.reflection.")


@dataclass(frozen=True, slots=True)
class Principal:
    """Who calls: root, or the holder of one sandbox's token."""

    root: bool
    sandbox_id: str = ""

    def require(self, sandbox_id: str) -> None:
        """Raises SandboxNotFoundError for somebody else's sandbox, as for an unknown one."""
        if not self.root and self.sandbox_id != sandbox_id:
            raise SandboxNotFoundError(sandbox=f"sandboxes/{sandbox_id}")


_ROOT = Principal(root=True)
_caller: ContextVar[Principal] = ContextVar("caller")


def caller() -> Principal:
    """Returns who makes the present call; inside a handler only."""
    return _caller.get()


class Access:
    """Turns tokens into principals."""

    def __init__(self, root_token: str | None, owner_of: Callable[[bytes], str | None]) -> None:
        """Takes the root token (None: everybody on loopback is root) and the look-up of sandbox tokens."""
        self._root = None if root_token is None else token_sha256(root_token)
        self._owner_of = owner_of

    def principal(self, metadata: Any) -> Principal | None:
        """Returns who a call's metadata says it is from; None = nobody."""
        token = bearer(metadata)
        if token is None:
            return _ROOT if self._root is None else None
        digest = token_sha256(token)
        # Digests are compared, so time says nothing about a token; the root
        # one in constant time all the same.
        if self._root is not None and hmac.compare_digest(digest, self._root):
            return _ROOT
        owner = self._owner_of(digest)
        if owner is not None:
            return Principal(root=False, sandbox_id=owner)
        return None

    def admit(self, metadata: Any, method: str) -> Principal:
        """Returns the caller if the method's rule lets them in. Raises: TokenRejectedError."""
        principal = self.principal(metadata)
        rule = auth_rule(method)
        if principal is not None:
            if rule == options_pb2.AUTH_RULE_ROOT_OR_SANDBOX:
                return principal
            if rule == options_pb2.AUTH_RULE_ROOT and principal.root:
                return principal
            if rule == options_pb2.AUTH_RULE_SANDBOX and principal.sandbox_id:
                return principal
            if rule in {options_pb2.AUTH_RULE_UNSPECIFIED, options_pb2.AUTH_RULE_HOST}:
                # Nothing serves it; the relay says so to those who may ask.
                return principal
        raise TokenRejectedError


class AccessInterceptor(grpc.aio.ServerInterceptor):
    """Wraps each method once; the node's only interceptor."""

    def __init__(self, access: Access, metrics: Metrics) -> None:
        """Takes who decides and who counts."""
        self._access = access
        self._metrics = metrics
        self._wrapped: dict[str, Handler] = {}

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        """Returns the wrapped handler; made on a method's first call."""
        method = handler_call_details.method
        wrapped = self._wrapped.get(method)
        if wrapped is not None:
            return wrapped
        handler = await continuation(handler_call_details)
        if handler is None or method.startswith(_OPEN_PACKAGES):
            return handler
        wrapped = wrap(handler, method, self)
        if auth_rule(method) != options_pb2.AUTH_RULE_UNSPECIFIED:
            # Only methods of the contract are kept: a caller's inventions are without number.
            self._wrapped[method] = wrapped
        return wrapped

    def begin(self, context: Context, method: str) -> float:
        """Lets the caller in or raises TokenRejectedError; returns the time."""
        _caller.set(self._access.admit(context.invocation_metadata() or (), method))
        return time.perf_counter()

    def end(self, begun: object, method: str, code: grpc.StatusCode) -> None:
        """Counts the call."""
        if isinstance(begun, float):
            self._metrics.rpc_seconds.labels(method, code.name).observe(time.perf_counter() - begun)
