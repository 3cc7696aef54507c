"""Joins guestd's unix socket to the host's lanes (decision 6).

A virtio-serial port where there is one, and AF_VSOCK where the kernel has it. The
port's driver reports "host gone" for as long as it lasts, so the port is watched
edge-triggered, by an epoll of its own inside the event loop: an unused port costs
nothing.
"""

from __future__ import annotations

import asyncio
import logging
import os
import select
import socket
from collections.abc import Callable
from pathlib import Path

from guestd.lane import LINE_LENGTH, Data, Framer, Opened, is_line

VSOCK_PORT = 2048
SERIAL_PORT_NAME = "cocoon.guestd.0"
_PORTS = Path("/sys/class/virtio-ports")
_CHUNK = 64 * 1024
_TURNS = 64
_PORT_WAIT_S = 10.0
_PORT_POLL_S = 0.1
_LINE_WAIT_S = 5.0
_HOST_CID = 2
_LAST_PRIVILEGED_PORT = 1023
_log = logging.getLogger(__name__)


class Bridge:
    """All lanes of this guest. `run` is their scope."""

    def __init__(self, guestd_socket: str) -> None:
        """Takes the unix socket that guestd serves on."""
        self._socket = guestd_socket

    async def run(self, *, started: asyncio.Event | None = None) -> None:
        """Serves every lane there is until cancelled."""
        async with asyncio.TaskGroup() as group:
            listener = listen_vsock()
            if listener is not None:
                group.create_task(VsockBridge(listener, self._socket).run())
            group.create_task(self._serve_serial())
            if started is not None:
                started.set()

    async def _serve_serial(self) -> None:
        deadline = asyncio.get_running_loop().time() + _PORT_WAIT_S
        while (device := find_port()) is None:
            if asyncio.get_running_loop().time() > deadline:
                _log.info("no_serial_port")
                return
            await asyncio.sleep(_PORT_POLL_S)
        port = os.open(device, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
        try:
            await SerialBridge(port, self._socket).run()
        finally:
            os.close(port)


def find_port(ports: Path = _PORTS) -> Path | None:
    """Returns the device of our virtio-serial port; there is no udev to name it."""
    if ports.is_dir():
        for port in sorted(ports.iterdir()):
            if (port / "name").read_text().strip() == SERIAL_PORT_NAME:
                return Path("/dev") / port.name
    return None


class SerialBridge:
    """One serial port ↔ one connection to guestd at a time.

    Both directions move only while the other end takes bytes, so at most one
    chunk waits on each side.
    """

    def __init__(self, port: int, guestd_socket: str) -> None:
        """Takes an open, non-blocking port; the caller closes it."""
        self._port = port
        self._target = guestd_socket
        self._framer = Framer()
        self._guestd: socket.socket | None = None
        self._inbound: list[Opened | Data] = []
        self._outbound = b""
        self._poll = select.epoll()
        self._failed: asyncio.Future[None] | None = None

    async def run(self) -> None:
        """Serves the port until cancelled. Raises: OSError: the port failed."""
        loop = asyncio.get_running_loop()
        self._failed = loop.create_future()
        edges = select.EPOLLIN | select.EPOLLOUT | select.EPOLLHUP | select.EPOLLET
        self._poll.register(self._port, edges)
        loop.add_reader(self._poll.fileno(), self._turn)
        try:
            self._turn()
            await self._failed
        finally:
            loop.remove_reader(self._poll.fileno())
            self._drop()
            self._poll.close()

    def _turn(self) -> None:
        """Moves what can be moved. Edges are consumed first, so none is missed."""
        assert self._failed is not None
        if self._failed.done():
            return
        self._poll.poll(0)
        try:
            for _ in range(_TURNS):
                moved = self._to_guestd()
                if not self._to_host() and not moved:
                    return
        except OSError as error:
            self._failed.set_exception(error)
            return
        # Others have a turn, too; the edge is spent, so come back unasked.
        asyncio.get_running_loop().call_soon(self._turn)

    def _to_guestd(self) -> bool:
        if self._inbound:
            return self._deliver()
        try:
            chunk = os.read(self._port, _CHUNK)
        except BlockingIOError:
            return False
        if not chunk:
            # The host went away; the port says so until it is back.
            self._drop()
            return False
        self._inbound = self._framer.feed(chunk)
        return True

    def _deliver(self) -> bool:
        event = self._inbound[0]
        if isinstance(event, Opened):
            self._drop(keep_inbound=True)
            if self._connect():
                self._framer.feed(event.line)
                self._outbound = event.line
        elif self._guestd is not None:
            try:
                sent = self._guestd.send(event.data)
            except BlockingIOError:
                return False
            except OSError:
                self._drop()
                return True
            if sent < len(event.data):
                self._inbound[0] = Data(event.data[sent:])
                return True
        self._inbound.pop(0)
        return True

    def _to_host(self) -> bool:
        if not self._outbound:
            if self._guestd is None:
                return False
            try:
                self._outbound = self._guestd.recv(_CHUNK)
            except BlockingIOError:
                return False
            except OSError:
                self._outbound = b""
            if not self._outbound:
                self._drop()
                return True
        try:
            sent = os.write(self._port, self._outbound)
        except BlockingIOError:
            return False
        self._outbound = self._outbound[sent:]
        return True

    def _connect(self) -> bool:
        guestd = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            guestd.connect(self._target)
        except OSError as error:
            # Without an echo the host asks again.
            _log.warning("guestd_refused", extra={"cause": str(error)})
            guestd.close()
            return False
        self._guestd = guestd
        edges = select.EPOLLIN | select.EPOLLOUT | select.EPOLLRDHUP | select.EPOLLET
        self._poll.register(guestd.fileno(), edges)
        return True

    def _drop(self, *, keep_inbound: bool = False) -> None:
        """Ends the connection to guestd; bytes of it that wait are nobody's now."""
        if self._guestd is not None:
            self._guestd.close()
            self._guestd = None
        self._framer.closed()
        self._outbound = b""
        if not keep_inbound:
            self._inbound = []


def listen_vsock() -> socket.socket | None:
    """Returns a listening AF_VSOCK socket; None where the kernel has none."""
    try:
        sock = socket.socket(socket.AF_VSOCK, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    except OSError:
        return None
    try:
        sock.bind((socket.VMADDR_CID_ANY, VSOCK_PORT))
        sock.listen(16)
    except OSError as error:
        _log.info("no_vsock", extra={"cause": str(error)})
        sock.close()
        return None
    return sock


def may_connect(cid: int, port: int) -> bool:
    """Says whether a vsock peer may reach the root daemon.

    The host may. A process of this guest may only from a privileged port, which
    takes CAP_NET_BIND_SERVICE: the daemon runs commands as root for whoever gets here.
    """
    return cid == _HOST_CID or port <= _LAST_PRIVILEGED_PORT


class VsockBridge:
    """AF_VSOCK connections ↔ connections to guestd, one to one."""

    def __init__(
        self, listener: socket.socket, guestd_socket: str, admit: Callable[[int, int], bool] = may_connect
    ) -> None:
        """Takes a listening socket and owns it."""
        self._listener = listener
        self._target = guestd_socket
        self._admit = admit

    async def run(self) -> None:
        """Serves until cancelled; open connections end with it."""
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.TaskGroup() as group:
                while True:
                    sock, peer = await loop.sock_accept(self._listener)
                    if self._admit(*peer):
                        group.create_task(self._serve(sock))
                    else:
                        _log.warning("vsock_peer_refused", extra={"peer": str(peer)})
                        sock.close()
        finally:
            self._listener.close()

    async def _serve(self, sock: socket.socket) -> None:
        reader, writer = await asyncio.open_connection(sock=sock)
        try:
            async with asyncio.timeout(_LINE_WAIT_S):
                line = await reader.readexactly(LINE_LENGTH)
            if not is_line(line):
                return
            writer.write(line)
            inner_reader, inner_writer = await asyncio.open_unix_connection(self._target)
            try:
                await _join((reader, inner_writer), (inner_reader, writer))
            finally:
                inner_writer.transport.abort()
        except (OSError, EOFError) as error:
            # TimeoutError is an OSError: a peer that says nothing is dropped.
            _log.debug("vsock_ended", extra={"cause": str(error)})
        finally:
            writer.transport.abort()


async def _join(*pairs: tuple[asyncio.StreamReader, asyncio.StreamWriter]) -> None:
    """Pumps each pair until the first ends."""
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(_pump(*pair)) for pair in pairs]
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            task.cancel()


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(_CHUNK):
        writer.write(data)
        await writer.drain()
