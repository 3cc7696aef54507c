"""The outermost layer of every server of ours: requests in, errors out.

`ErrorInterceptor` is the only place where exceptions become statuses. It checks
REQUIRED fields from the descriptor before the handler runs, sends a
`CocoonError` with its details, and turns anything unexpected into INTERNAL with
an incident id: the text of a foreign exception never reaches a client.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import cache
from typing import Any, TypeVar

import grpc
import grpc.aio
from google.api import field_behavior_pb2
from google.protobuf.descriptor import Descriptor
from google.protobuf.message import Message

from cocoon_rpc.errors import STATUS_KEY, CocoonError, InternalError, InvalidFieldError

_log = logging.getLogger(__name__)
_R = TypeVar("_R")


class ErrorInterceptor(grpc.aio.ServerInterceptor):
    """Maps exceptions to statuses and enforces REQUIRED fields."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler | None:
        """Wraps the method's handler; unknown methods stay unknown."""
        handler: Any = await continuation(handler_call_details)
        return None if handler is None else wrap(handler, handler_call_details.method)


def wrap(handler: Any, method: str) -> grpc.RpcMethodHandler:
    """Returns the handler with errors mapped; `method` is for the log only."""
    make: Any
    if handler.response_streaming:
        inner = handler.stream_stream if handler.request_streaming else handler.unary_stream
        make = grpc.stream_stream_rpc_method_handler if handler.request_streaming else grpc.unary_stream_rpc_method_handler

        async def stream(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[Any]:
            try:
                check_required(request)
                async for response in inner(request, context):
                    yield response
            except Exception as error:  # noqa: BLE001 - the boundary: all of it becomes a status
                await _abort(context, error, method)

        wrapped: Any = stream
    else:
        inner = handler.stream_unary if handler.request_streaming else handler.unary_unary
        make = grpc.stream_unary_rpc_method_handler if handler.request_streaming else grpc.unary_unary_rpc_method_handler

        async def unary(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
            try:
                check_required(request)
                return await inner(request, context)
            except Exception as error:  # noqa: BLE001 - the boundary: all of it becomes a status
                await _abort(context, error, method)

        wrapped = unary
    result: grpc.RpcMethodHandler = make(
        wrapped,
        request_deserializer=handler.request_deserializer,
        response_serializer=handler.response_serializer,
    )
    return result


async def _abort(context: grpc.aio.ServicerContext[Any, Any], error: Exception, method: str) -> None:
    if isinstance(error, grpc.aio.AbortError):
        raise error
    if not isinstance(error, CocoonError):
        incident = secrets.token_hex(8)
        _log.error("rpc_failed", exc_info=error, extra={"incident_id": incident, "rpc": method})
        error = InternalError(incident_id=incident)
    await abort_with(context, error)


async def abort_with(context: grpc.aio.ServicerContext[Any, Any], error: CocoonError) -> None:
    """Ends the call with the error's status; never returns."""
    context.set_trailing_metadata(((STATUS_KEY, error.to_status().SerializeToString()),))
    await context.abort(error.code, error.message)


def check_required(message: Any, path: str = "") -> None:
    """Raises InvalidFieldError for the first REQUIRED field that is not set.

    Looks into sub-messages that are present. Request streams are left alone:
    their messages are checked as they come, by `checked`.
    """
    if not isinstance(message, Message):
        return
    for name, required, nested in _rules(message.DESCRIPTOR):
        value = getattr(message, name)
        present = message.HasField(name) if nested == "one" else bool(value)
        if required and not present:
            raise InvalidFieldError(field=path + name, rule="is required")
        if nested == "one" and present:
            check_required(value, f"{path}{name}.")
        elif nested == "many":
            for index, item in enumerate(value):
                check_required(item, f"{path}{name}[{index}].")


async def checked(requests: AsyncIterator[_R]) -> AsyncIterator[_R]:
    """Yields the messages of a request stream, each checked for REQUIRED fields."""
    async for request in requests:
        check_required(request)
        yield request


@cache
def _rules(descriptor: Descriptor) -> tuple[tuple[str, bool, str], ...]:
    """Returns (field, required, nested: "" | "one" | "many") for fields that matter."""
    rules = []
    for field in descriptor.fields:
        behaviors = field.GetOptions().Extensions[field_behavior_pb2.field_behavior]  # type: ignore[index]
        required = field_behavior_pb2.REQUIRED in behaviors
        nested = ""
        if field.message_type is not None and not field.message_type.GetOptions().map_entry:
            nested = "many" if field.is_repeated else "one"
        own = field.message_type is not None and field.message_type.file.package.startswith("cocoon.")
        if required or (nested and own):
            rules.append((field.name, required, nested))
    return tuple(rules)

