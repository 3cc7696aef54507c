"""The calls that are open: what a stop has to wait for."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

import grpc
import grpc.aio

from cocoon_rpc.interceptors import Context, Handler, wrap


class OpenCalls(grpc.aio.ServerInterceptor):
    """Maps errors as every server of ours does, and knows which calls are not over.

    A stopped grpc server has cancelled its calls but does not wait for them, and the
    end of the event loop would cancel their clean-up, too: programs would live on and
    temporary files stay.
    """

    def __init__(self) -> None:
        """Starts with none."""
        self._open = 0
        self._none = asyncio.Event()
        self._none.set()

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        """Wraps the method's handler; unknown methods stay unknown."""
        handler = await continuation(handler_call_details)
        return None if handler is None else wrap(handler, handler_call_details.method, self)

    def begin(self, context: Context, method: str) -> object:
        """Counts a call."""
        self._open += 1
        self._none.clear()
        return None

    def end(self, begun: object, method: str, code: grpc.StatusCode) -> None:
        """Counts it off: its clean-up is done."""
        self._open -= 1
        if not self._open:
            self._none.set()

    async def wait_none(self, limit_s: float) -> None:
        """Waits until no call is open, at most `limit_s` seconds."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                await self._none.wait()
