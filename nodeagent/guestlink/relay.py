"""Guest calls: bytes in, bytes out, never re-encoded.

Any method of `cocoon.guest.v1` is passed to the guest of the sandbox that the
metadata names. What the node adds is who may (before this), which machine, and
the guest's answer as it is: messages, code, text, error details. Methods of
other packages, the host's own among them, are refused here.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import grpc.aio

from cocoon_rpc.auth import method_descriptor
from cocoon_rpc.errors import GuestUnreachableError, MethodNotRelayedError
from cocoon_rpc.interceptors import Context, Handler

PACKAGE = "cocoon.guest.v1"
_HOP_KEYS = frozenset({"authorization", "cocoon-sandbox-id", "user-agent"})
_INFO_METADATA_PREFIXES = ("grpc-", ":")

Take = Callable[[bytes], Awaitable[None]]
Route = Callable[[Any], tuple[str, grpc.aio.Channel]]
"""Metadata of a call → (sandbox name, channel to its guest); raises CocoonError."""


class GuestRelay(grpc.GenericRpcHandler):
    """Serves every guest method by relaying it."""

    def __init__(self, route: Route) -> None:
        """Takes the look-up of a call's guest."""
        self._route = route
        self._handlers: dict[str, Handler] = {}

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Handler | None:
        """Returns the relaying handler of a method, made on its first call."""
        method = handler_call_details.method
        if method.startswith("/grpc."):
            # gRPC's own services are not ours to answer for: clients look for a newer
            # one (reflection v1) and fall back when the server says UNIMPLEMENTED.
            return None
        handler = self._handlers.get(method)
        if handler is None:
            descriptor = method_descriptor(method)
            if descriptor is None or descriptor.containing_service.file.package != PACKAGE:
                return grpc.unary_unary_rpc_method_handler(_refuse(method))
            handler = self._handler(method, descriptor.client_streaming, descriptor.server_streaming)
            self._handlers[method] = handler
        return handler

    def _handler(self, method: str, client_streams: bool, server_streams: bool) -> Handler:
        route = self._route
        if not client_streams and not server_streams:

            async def unary(request: bytes, context: Context) -> bytes:
                metadata = context.invocation_metadata() or ()
                sandbox, channel = route(metadata)
                method_call: Any = channel.unary_unary(method)
                call = method_call(request, metadata=_forward(metadata), timeout=_left(context))
                try:
                    response: bytes = await call
                except grpc.aio.AioRpcError as error:
                    _pass_on(context, error, sandbox)
                    return b""
                except asyncio.CancelledError:
                    if not _is_cut():
                        raise
                    raise GuestUnreachableError(sandbox=sandbox) from None
                return response

            return grpc.unary_unary_rpc_method_handler(unary)
        # One-sided streams are two-sided ones on the wire, so one relay serves all.

        async def relayed(requests: Any, context: Context, take: Take) -> None:
            metadata = context.invocation_metadata() or ()
            sandbox, channel = route(metadata)
            method_call: Any = channel.stream_stream(method)
            source = requests if client_streams else _once(requests)
            call = method_call(metadata=_forward(metadata), timeout=_left(context))
            failure: Exception | None = None
            async with asyncio.TaskGroup() as group:
                feeding = group.create_task(_feed(call, source))
                try:
                    async for response in call:
                        await take(response)
                except asyncio.CancelledError:
                    if not _is_cut():
                        raise
                    failure = GuestUnreachableError(sandbox=sandbox)
                except Exception as error:  # noqa: BLE001 - raised again outside of the group
                    failure = error
                finally:
                    # Leaving early (the client went away) must end the guest's call.
                    call.cancel()
                    feeding.cancel()
            if isinstance(failure, grpc.aio.AioRpcError):
                _pass_on(context, failure, sandbox)
            elif failure is not None:
                raise failure

        if server_streams:

            async def stream(requests: Any, context: Context) -> None:
                await relayed(requests, context, context.write)

            many: Any = stream
            if client_streams:
                return grpc.stream_stream_rpc_method_handler(many)
            return grpc.unary_stream_rpc_method_handler(many)

        async def collect(requests: Any, context: Context) -> bytes:
            last = b""

            async def keep(response: bytes) -> None:
                nonlocal last
                last = response

            await relayed(requests, context, keep)
            return last

        return grpc.stream_unary_rpc_method_handler(collect)


async def _feed(call: Any, requests: AsyncIterator[bytes]) -> None:
    """Sends the requests to the guest; ends with them or with the call, whose status says how it went.

    Below grpc.aio's own sender on purpose: that one makes INTERNAL, "Internal
    error from Core", of a message that met the end of the call, and the guest's
    status is lost: 1 of 10 refusals of an Exec or Write before its input was in.
    """
    with contextlib.suppress(grpc.aio.InternalError, grpc.aio.AioRpcError):
        await call.wait_for_connection()
        async for request in requests:
            await call._cython_call.send_serialized_message(request)
        await call._cython_call.send_receive_close()


def _is_cut() -> bool:
    """Says whether a cancellation came from the link, closed under the call, and not from the caller.

    grpc.aio sends nothing for a handler that ends in CancelledError: the caller
    of a sandbox that was released would wait for ever.
    """
    task = asyncio.current_task()
    return task is not None and not task.cancelling()


async def _once(request: bytes) -> AsyncIterator[bytes]:
    yield request


def _refuse(method: str) -> Any:
    async def refuse(request: bytes, context: Context) -> bytes:
        raise MethodNotRelayedError(method=method)

    return refuse


def _forward(metadata: Any) -> tuple[tuple[str, Any], ...]:
    """Returns what a guest may see of a call's metadata: never a token."""
    return tuple(
        (key, value)
        for key, value in metadata
        if key not in _HOP_KEYS and not key.startswith(_INFO_METADATA_PREFIXES)
    )


def _left(context: Context) -> float | None:
    """Returns the seconds until the caller's deadline; grpc says a huge number for none."""
    left: float | None = context.time_remaining()
    return left if left is not None and left < 10**8 else None


def _pass_on(context: Context, error: grpc.aio.AioRpcError, sandbox: str) -> None:
    """Ends the call as the guest ended it; a guest that is not there is our own error."""
    trailing = error.trailing_metadata() or ()
    bare = not any(key == "grpc-status-details-bin" for key, _ in trailing)
    if error.code() is grpc.StatusCode.UNAVAILABLE and bare:
        raise GuestUnreachableError(sandbox=sandbox) from error
    context.set_trailing_metadata(tuple((k, v) for k, v in trailing))
    context.set_code(error.code())
    context.set_details(error.details() or "")
