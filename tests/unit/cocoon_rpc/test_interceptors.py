"""What a server shows of its errors, over a real socket."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import pytest

from cocoon.node.v1 import pool_service_pb2, sandbox_service_pb2
from cocoon_rpc import errors
from cocoon_rpc.interceptors import check_required, wrap


class Handlers(grpc.GenericRpcHandler):
    """Methods by name; records clean-ups."""

    def __init__(self) -> None:
        self.cleaned = asyncio.Event()
        self.started = asyncio.Event()

    def service(self, details: grpc.HandlerCallDetails) -> Any:
        name = details.method.rpartition("/")[2]
        handler = getattr(self, name)
        kind = "unary_stream" if name.startswith("stream") else "unary_unary"
        return wrap(getattr(grpc, f"{kind}_rpc_method_handler")(handler), details.method)

    async def unary_typed(self, request: bytes, context: Any) -> bytes:
        raise errors.SandboxNotFoundError(sandbox="sandboxes/x")

    async def unary_bug(self, request: bytes, context: Any) -> bytes:
        raise ValueError("the secret of the house")

    async def unary_waits(self, request: bytes, context: Any) -> bytes:
        return await self._forever()

    async def stream_typed(self, request: bytes, context: Any) -> AsyncIterator[bytes]:
        yield b"1"
        raise errors.FileNotFoundError(path="/x")

    async def stream_waits(self, request: bytes, context: Any) -> AsyncIterator[bytes]:
        yield b"1"
        await self._forever()

    async def _forever(self) -> bytes:
        try:
            self.started.set()
            await asyncio.Event().wait()
            raise AssertionError
        finally:
            await asyncio.sleep(0)
            self.cleaned.set()


@pytest.fixture
async def server() -> AsyncIterator[tuple[Handlers, grpc.aio.Channel]]:
    handlers = Handlers()
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((handlers,))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield handlers, channel
    await server.stop(None)


async def _error(call: Any) -> Any:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        if hasattr(call, "__aiter__"):
            async for _ in call:
                pass
        else:
            await call
    return errors.from_rpc_error(caught.value)


async def test_typed_errors_arrive_typed(server: tuple[Handlers, grpc.aio.Channel]) -> None:
    _, channel = server
    assert isinstance(await _error(channel.unary_unary("/s/unary_typed")(b"")), errors.SandboxNotFoundError)
    found = await _error(channel.unary_stream("/s/stream_typed")(b""))
    assert isinstance(found, errors.FileNotFoundError)
    assert found.metadata == {"path": "/x"}


async def test_a_bug_shows_an_incident_and_nothing_else(
    server: tuple[Handlers, grpc.aio.Channel], caplog: pytest.LogCaptureFixture
) -> None:
    error = await _error(server[1].unary_unary("/s/unary_bug")(b""))
    assert isinstance(error, errors.InternalError)
    assert "secret" not in error.message
    assert error.metadata["incident_id"] in str(caplog.records[-1].__dict__["incident_id"])


@pytest.mark.parametrize("method", ["unary_waits", "stream_waits"])
async def test_a_cancelled_call_cleans_up(server: tuple[Handlers, grpc.aio.Channel], method: str) -> None:
    handlers, channel = server
    kind = channel.unary_unary if method.startswith("unary") else channel.unary_stream
    call = kind(f"/s/{method}")(b"")
    if hasattr(call, "read"):
        assert await call.read() == b"1"
    async with asyncio.timeout(5):
        await handlers.started.wait()
    call.cancel()
    async with asyncio.timeout(5):
        await handlers.cleaned.wait()


def test_required_fields_are_found_at_any_depth() -> None:
    with pytest.raises(errors.InvalidFieldError, match="template"):
        check_required(sandbox_service_pb2.ClaimRequest())
    with pytest.raises(errors.InvalidFieldError, match=r"pools\[1\]\.template"):
        spec = pool_service_pb2.PoolSpec
        check_required(pool_service_pb2.SetRequest(pools=[spec(template="a"), spec()]))
    check_required(sandbox_service_pb2.ClaimRequest(template="rt"))
