"""The calls that are open: what a stop has to wait for."""

from __future__ import annotations

import asyncio
import contextlib

import grpc

from cocoon_rpc.interceptors import Context


class OpenCalls:
    """Watches a server's calls: knows which are not over (`cocoon_rpc.interceptors.Observer`).

    A stopped grpc server has cancelled its calls but does not wait for them, and the
    end of the event loop would cancel their clean-up, too: programs would live on and
    temporary files stay.
    """

    def __init__(self) -> None:
        """Starts with none."""
        self._open = 0
        self._none = asyncio.Event()
        self._none.set()

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
