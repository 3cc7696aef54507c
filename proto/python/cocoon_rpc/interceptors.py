"""The outermost layer of every server of ours: requests in, errors out.

`ErrorInterceptor` is the only place where exceptions become statuses. It checks
REQUIRED fields from the descriptor before the handler runs, sends a
`CocoonError` with its details, and turns anything unexpected into INTERNAL with
an incident id: the text of a foreign exception never reaches a client.
"""

from __future__ import annotations

import inspect
import logging
import secrets
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from functools import cache
from typing import Any, Protocol, TypeAlias

import grpc
import grpc.aio
from google.api import field_behavior_pb2
from google.protobuf.descriptor import Descriptor
from google.protobuf.message import Message

from cocoon_rpc.errors import STATUS_KEY, CocoonError, InternalError, InvalidFieldError

_log = logging.getLogger(__name__)
_CODES: dict[int, grpc.StatusCode] = {code.value[0]: code for code in grpc.StatusCode}
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
Context: TypeAlias = grpc.aio.ServicerContext[Any, Any]


class Observer(Protocol):
    """What a server adds around each call; see `wrap`."""

    def begin(self, context: Context, method: str) -> object:
        """Runs before the request is looked at; what it raises ends the call."""
        ...

    def end(self, begun: object, method: str, code: grpc.StatusCode) -> None:
        """Runs after the call with what `begin` returned; must not raise."""
        ...


class _Silent:
    def begin(self, context: Context, method: str) -> object:
        return None

    def end(self, begun: object, method: str, code: grpc.StatusCode) -> None:
        return None


class ErrorInterceptor(grpc.aio.ServerInterceptor):
    """Maps exceptions to statuses and enforces REQUIRED fields."""

    def __init__(self, observer: Observer | None = None) -> None:
        """Takes what watches the calls, if anything does."""
        self._observer = observer

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        """Wraps the method's handler; unknown methods stay unknown."""
        handler: Any = await continuation(handler_call_details)
        return None if handler is None else wrap(handler, handler_call_details.method, self._observer)


def wrap(handler: Any, method: str, observer: Observer | None = None) -> Handler:
    """Returns the handler with errors mapped, REQUIRED fields checked and calls observed."""
    watch: Observer = observer or _Silent()
    make: Any
    wrapped: Any
    if handler.response_streaming:
        many = handler.request_streaming
        inner = handler.stream_stream if many else handler.unary_stream
        make = grpc.stream_stream_rpc_method_handler if many else grpc.unary_stream_rpc_method_handler

        yields = inspect.isasyncgenfunction(inner)

        async def stream(request: Any, context: Context) -> None:
            begun, code = None, grpc.StatusCode.CANCELLED
            try:
                begun = watch.begin(context, method)
                check_required(request)
                if yields:
                    # Closed here and not by the garbage collector: a handler's
                    # clean-up is done when its call is.
                    async with aclosing(inner(request, context)) as responses:
                        async for response in responses:
                            await context.write(response)
                else:
                    await inner(request, context)
                code = _code_of(context)
            except Exception as error:  # noqa: BLE001 - the boundary: all of it becomes a status
                code = await _abort(context, error, method)
            finally:
                watch.end(begun, method, code)

        wrapped = stream
    else:
        many = handler.request_streaming
        inner = handler.stream_unary if many else handler.unary_unary
        make = grpc.stream_unary_rpc_method_handler if many else grpc.unary_unary_rpc_method_handler

        async def unary(request: Any, context: Context) -> Any:
            begun, code = None, grpc.StatusCode.CANCELLED
            try:
                begun = watch.begin(context, method)
                check_required(request)
                response = await inner(request, context)
                code = _code_of(context)
                return response
            except Exception as error:  # noqa: BLE001 - the boundary: all of it becomes a status
                code = await _abort(context, error, method)
            finally:
                watch.end(begun, method, code)

        wrapped = unary
    result: Handler = make(
        wrapped,
        request_deserializer=handler.request_deserializer,
        response_serializer=handler.response_serializer,
    )
    return result


def _code_of(context: Context) -> grpc.StatusCode:
    """Returns the code a handler set; grpc.aio keeps it as a number, 0 when unset."""
    code: Any = context.code()
    return _CODES[code] if isinstance(code, int) else code or grpc.StatusCode.OK


async def _abort(context: Context, error: Exception, method: str) -> grpc.StatusCode:
    """Ends the call with the status of `error`; returns its code only to please the caller's flow."""
    if isinstance(error, grpc.aio.AbortError):
        raise error
    if not isinstance(error, CocoonError):
        incident = secrets.token_hex(8)
        _log.error("rpc_failed", exc_info=error, extra={"incident_id": incident, "rpc": method})
        error = InternalError(incident_id=incident)
    set_status(context, error)
    return error.code


def set_status(context: Context, error: CocoonError) -> None:
    """Makes the call end with the error's status.

    `context.abort` would raise through the handler and log every refusal of a
    bad request as an event of its own; setting code and details says the same on
    the wire.
    """
    context.set_trailing_metadata(((STATUS_KEY, error.to_status().SerializeToString()),))
    context.set_code(error.code)
    context.set_details(error.message)


def check_required(message: Any, path: str = "") -> None:
    """Raises InvalidFieldError for the first REQUIRED field that is not set.

    Looks into sub-messages that are present. Request streams are left alone:
    their messages are checked as they come, by `streams.checked`.
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


@cache
def _rules(descriptor: Descriptor) -> tuple[tuple[str, bool, str], ...]:
    """Returns (field, required, nested: "" | "one" | "many") for fields that matter."""
    rules = []
    for field in descriptor.fields:
        behaviors = field.GetOptions().Extensions[field_behavior_pb2.field_behavior]
        required = field_behavior_pb2.REQUIRED in behaviors
        nested = ""
        if field.message_type is not None and not field.message_type.GetOptions().map_entry:
            nested = "many" if field.is_repeated else "one"
        own = field.message_type is not None and field.message_type.file.package.startswith("cocoon.")
        if required or (nested and own):
            rules.append((field.name, required, nested))
    return tuple(rules)
