"""Joins one connection of the channel to a lane: nonce line, echo, then bytes both ways.

After the echo nothing is parsed, copied aside or awaited: each side writes what the
other reads, and a side whose writes pile up pauses the other's reading.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import cast

import structlog

from nodeagent.guestlink.handshake import Handshake
from nodeagent.guestlink.lanes import Lane, LaneError

_ASK_AGAIN_S = 0.25
_PATIENCE_S = 5.0
_HIGH_WATER = 256 * 1024
_log = structlog.get_logger()


class _Side(asyncio.Protocol):
    """One of the two connections."""

    transport: asyncio.Transport | None = None

    def __init__(
        self, made: Callable[[], None], received: Callable[[bytes], None], lost: Callable[[], None]
    ) -> None:
        self._made, self.received, self._lost = made, received, lost
        self.other: _Side

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        self.transport.set_write_buffer_limits(_HIGH_WATER)
        self._made()

    def data_received(self, data: bytes) -> None:
        self.received(data)

    def pause_writing(self) -> None:
        if (source := self.other.transport) is not None and not source.is_closing():
            source.pause_reading()

    def resume_writing(self) -> None:
        if (source := self.other.transport) is not None and not source.is_closing():
            source.resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        self.transport = None
        self._lost()


class Joint:
    """One connection of the channel and its lane connection; they end together.

    `near` is the protocol for the channel's connection. When that arrives, the lane
    is dialled in a task of its own; `close` ends it and waits for it.
    """

    def __init__(self, lane: Lane, *, began: Callable[[Joint], None], ended: Callable[[Joint], None]) -> None:
        """Takes the lane to dial and whom to tell of arrival and end."""
        self._lane = lane
        self._began, self._ended = began, ended
        self.near = _Side(self._arrived, self._early, self._near_lost)
        self._far = _Side(self._dialled, self._answered, self._far_lost)
        self.near.other, self._far.other = self._far, self.near
        self._handshake = Handshake()
        self._waiting = b""
        self._timer: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[None] | None = None
        self._closing = False
        self._gone = asyncio.Event()

    def abort(self) -> None:
        """Ends both connections at once. Idempotent."""
        self._closing = True
        if self._timer is not None:
            self._timer.cancel()
        if self._task is not None:
            self._task.cancel()
        for side in (self.near, self._far):
            if side.transport is not None:
                side.transport.abort()

    async def close(self) -> None:
        """Ends both connections; returns when nothing of them is left."""
        self.abort()
        await self._gone.wait()

    def _arrived(self) -> None:
        self._began(self)
        self._task = asyncio.get_running_loop().create_task(self._dial())
        self._task.add_done_callback(self._dial_ended)

    async def _dial(self) -> None:
        try:
            sock = await self._lane.connect()
            # The transport owns the socket from here, also if this fails.
            await asyncio.get_running_loop().create_connection(lambda: self._far, sock=sock)
        except (OSError, LaneError) as error:
            self._failed(error)

    def _dial_ended(self, _: asyncio.Task[None]) -> None:
        if self._far.transport is None:
            self.abort()
        self._settle()

    def _failed(self, error: Exception) -> None:
        # Not a warning: a guest that boots is tried many times.
        _log.debug("lane_failed", lane=type(self._lane).__name__, cause=str(error))
        self.abort()

    def _early(self, data: bytes) -> None:
        """Keeps what the channel says before the echo; it is read so that its end is seen."""
        self._waiting += data
        if len(self._waiting) > _HIGH_WATER and self.near.transport is not None:
            self.near.transport.pause_reading()

    def _dialled(self) -> None:
        if self._closing:
            self.abort()
        else:
            self._ask()

    def _ask(self) -> None:
        """Sends a line, and the next if there is no answer."""
        assert self._far.transport is not None
        self._far.transport.write(self._handshake.next_line())
        self._ask_after(_ASK_AGAIN_S)

    def _ask_after(self, seconds: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(seconds, self._ask)

    def _answered(self, data: bytes) -> None:
        """Takes what the guest sends before the connection is open."""
        heard = self._handshake.heard
        try:
            rest = self._handshake.feed(data)
        except LaneError as error:
            self._failed(error)
            return
        if rest is not None:
            self._open(rest)
        elif self._handshake.heard and not heard:
            self._ask_after(_PATIENCE_S)

    def _open(self, rest: bytes) -> None:
        near, far = self.near.transport, self._far.transport
        assert self._timer is not None
        self._timer.cancel()
        if near is None or far is None:
            return
        self.near.received, self._far.received = far.write, near.write
        early, self._waiting = self._waiting, b""
        near.resume_reading()
        if early:
            far.write(early)
        if rest:
            near.write(rest)

    def _near_lost(self) -> None:
        self.abort()
        self._settle()

    def _far_lost(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self.near.transport is not None:
            # Not aborted: the guest's last bytes still reach the channel.
            self.near.transport.close()
        self._settle()

    def _settle(self) -> None:
        """Tells the owner once nothing is left: no connection, and no dialling that makes one."""
        assert self._task is not None
        if self.near.transport is None and self._far.transport is None and self._task.done():
            self._gone.set()
            self._ended(self)
