"""Moves bytes between a lane and guestd's socket.

Both ends are watched edge-triggered, by an epoll of its own inside the event loop:
a virtio-serial port reports "host gone" for as long as it lasts, which would spin a
level-triggered loop, and one wake-up serves both directions.
"""

from __future__ import annotations

import asyncio
import logging
import os
import select
import socket
from collections.abc import Callable

from guestd.lane import Framer, Opened

_CHUNK = 64 * 1024
_STEPS = 64
_EDGES = select.EPOLLIN | select.EPOLLOUT | select.EPOLLRDHUP | select.EPOLLET
_log = logging.getLogger(__name__)


class _End:
    """A non-blocking descriptor and what is known of it: ready until it says it would block."""

    __slots__ = ("fd", "readable", "writable")

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.readable = self.writable = True

    def read(self) -> bytes | None:
        """Returns what is there, b"" at the end, None if it would block. Raises: OSError."""
        if self.readable:
            try:
                return os.read(self.fd, _CHUNK)
            except BlockingIOError:
                self.readable = False
        return None

    def write(self, data: memoryview) -> int:
        """Returns how many bytes were taken, 0 if it would block. Raises: OSError."""
        if self.writable:
            try:
                return os.write(self.fd, data)
            except BlockingIOError:
                self.writable = False
        return 0


class Splice:
    """One lane ↔ one connection to guestd at a time.

    Both directions move only while the other end takes bytes, so at most one chunk
    waits on each side.
    """

    def __init__(self, lane: int, guestd_socket: str, *, endless: bool) -> None:
        """Takes an open, non-blocking descriptor, which stays the caller's.

        An `endless` lane (a serial port) outlives its connections. Any other is one
        connection, and ends when either side does.
        """
        self._lane = _End(lane)
        self._target = guestd_socket
        self._endless = endless
        self._framer = Framer()
        self._guestd: _End | None = None
        self._inbound = self._outbound = memoryview(b"")
        self._opened: Callable[[], None] | None = None
        self._ended: asyncio.Future[None] | None = None

    async def run(self, *, opened: Callable[[], None] | None = None) -> None:
        """Serves until the lane ends (an endless one: until cancelled); calls `opened` at each line.

        Raises:
            OSError: the lane failed.
        """
        loop = asyncio.get_running_loop()
        self._opened = opened
        self._ended = loop.create_future()
        self._poll = select.epoll()
        self._poll.register(self._lane.fd, _EDGES)
        loop.add_reader(self._poll.fileno(), self._turn)
        try:
            self._turn()
            await self._ended
        finally:
            # A turn that is still to come finds the future done.
            loop.remove_reader(self._poll.fileno())
            self._hang_up()
            self._poll.close()

    def _turn(self) -> None:
        """Moves what can be moved. Edges are consumed first, so none is missed."""
        assert self._ended is not None
        if self._ended.done():
            return
        for fd, mask in self._poll.poll(0):
            end = self._guestd if self._guestd is not None and fd == self._guestd.fd else self._lane
            end.readable |= bool(mask & ~select.EPOLLOUT)
            end.writable |= bool(mask & ~select.EPOLLIN)
        try:
            for _ in range(_STEPS):
                moved = self._to_guestd()
                moved |= self._to_host()
                if self._ended.done() or not moved:
                    return
        except OSError as error:
            self._ended.set_exception(error)
            return
        # Others have a turn, too; the edge is spent, so come back unasked.
        asyncio.get_running_loop().call_soon(self._turn)

    def _to_guestd(self) -> bool:
        if not self._inbound:
            chunk = self._lane.read()
            if chunk is None:
                return False
            if not chunk:
                # The host went away; a port says so until it is back, with an edge.
                self._lane.readable = False
                self._drop()
                return False
            for event in self._framer.feed(chunk):
                if isinstance(event, Opened):
                    self._open(event.line)
                else:
                    self._inbound = memoryview(event.data)
        if self._guestd is None:
            self._inbound = memoryview(b"")
        elif self._inbound:
            try:
                sent = self._guestd.write(self._inbound)
            except OSError:
                self._drop()
                return True
            self._inbound = self._inbound[sent:]
            return sent > 0
        return True

    def _to_host(self) -> bool:
        if not self._outbound:
            if self._guestd is None:
                return False
            try:
                chunk = self._guestd.read()
            except OSError:
                chunk = b""
            if chunk is None:
                return False
            if not chunk:
                self._drop()
                return True
            self._outbound = memoryview(chunk)
        sent = self._lane.write(self._outbound)
        self._outbound = self._outbound[sent:]
        return sent > 0

    def _open(self, line: bytes) -> None:
        """Begins a connection; what waits for the host is of the one before, and dropped."""
        self._hang_up()
        try:
            self._guestd = self._connect()
        except OSError as error:
            # Without an echo the host asks again.
            _log.warning("guestd_refused", extra={"cause": str(error)})
            self._drop()
            return
        self._outbound = memoryview(line)
        if self._opened is not None:
            self._opened()

    def _connect(self) -> _End:
        guestd = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            guestd.connect(self._target)
            self._poll.register(guestd.fileno(), _EDGES)
        except BaseException:
            guestd.close()
            raise
        return _End(guestd.detach())

    def _drop(self) -> None:
        """Ends the connection; bytes of it that wait are nobody's now."""
        assert self._ended is not None
        self._hang_up()
        self._framer.closed()
        if not self._endless and not self._ended.done():
            self._ended.set_result(None)

    def _hang_up(self) -> None:
        if self._guestd is not None:
            os.close(self._guestd.fd)
            self._guestd = None
        self._inbound = self._outbound = memoryview(b"")
