"""A real grpc.aio server on a unix socket, around the servicer under test."""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

import grpc.aio
import pytest

from cocoon_rpc.interceptors import ErrorInterceptor

Serve = Callable[[Callable[[grpc.aio.Server], None]], AbstractAsyncContextManager[grpc.aio.Channel]]


@pytest.fixture
def serve() -> Serve:
    """Serves what a function adds to the server; gives a channel to it."""

    @asynccontextmanager
    async def serving(add: Callable[[grpc.aio.Server], None]) -> AsyncIterator[grpc.aio.Channel]:
        # Short: the path of a unix socket has 107 bytes.
        with tempfile.TemporaryDirectory() as folder:
            address = f"unix:{Path(folder) / 's'}"
            server = grpc.aio.server(interceptors=(ErrorInterceptor(),))
            add(server)
            server.add_insecure_port(address)
            await server.start()
            try:
                async with grpc.aio.insecure_channel(address) as channel:
                    yield channel
            finally:
                await server.stop(None)

    return serving
