"""Joins guestd's unix socket to the host's lanes (decision 6).

A virtio-serial port where there is one, and AF_VSOCK where the kernel has it: the
same image on every engine.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Callable
from pathlib import Path

from guestd.splice import Splice
from guestd.vports import wait_port

VSOCK_PORT = 2048
_LINE_WAIT_S = 5.0
_ACCEPT_PAUSE_S = 1.0
_HOST_CID = 2
_LOOPBACK_CID = 1
_LAST_PRIVILEGED_PORT = 1023
_log = logging.getLogger(__name__)


class Bridge:
    """All lanes of this guest. `run` is their scope."""

    def __init__(self, guestd_socket: str) -> None:
        """Takes the unix socket that guestd serves on."""
        self._socket = guestd_socket

    async def run(self, *, started: asyncio.Event | None = None) -> None:
        """Serves every lane there is until cancelled. Raises: OSError: a lane failed."""
        async with asyncio.TaskGroup() as group:
            listener = listen_vsock()
            if listener is not None:
                group.create_task(VsockBridge(listener, self._socket).run())
            group.create_task(self._serve_serial())
            if started is not None:
                started.set()

    async def _serve_serial(self) -> None:
        try:
            device = await wait_port()
        except OSError as error:
            _log.warning("no_serial_port", extra={"cause": str(error)})
            return
        port = open_port(device)
        try:
            await SerialBridge(port, self._socket).run()
        finally:
            os.close(port)


def open_port(device: Path) -> int:
    """Opens a serial port for a bridge. Raises: OSError."""
    return os.open(device, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)


class SerialBridge:
    """One serial port ↔ one connection to guestd at a time."""

    def __init__(self, port: int, guestd_socket: str) -> None:
        """Takes an open, non-blocking port; the caller closes it."""
        self._splice = Splice(port, guestd_socket, endless=True)

    async def run(self) -> None:
        """Serves the port until cancelled. Raises: OSError: the port failed."""
        await self._splice.run()


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
    It comes from the loopback's context id, also if it called the guest's own.
    """
    return cid == _HOST_CID or (cid == _LOOPBACK_CID and port <= _LAST_PRIVILEGED_PORT)


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
                    try:
                        sock, peer = await loop.sock_accept(self._listener)
                    except OSError as error:
                        # No descriptor is free. The listener stays readable: do not spin.
                        _log.warning("vsock_accept_failed", extra={"cause": str(error)})
                        await asyncio.sleep(_ACCEPT_PAUSE_S)
                        continue
                    if self._admit(*peer):
                        group.create_task(self._serve(sock))
                    else:
                        _log.warning("vsock_peer_refused", extra={"peer": str(peer)})
                        sock.close()
        finally:
            self._listener.close()

    async def _serve(self, sock: socket.socket) -> None:
        """Serves one connection; one that does not open in time is dropped."""
        with sock:
            try:
                async with asyncio.timeout(_LINE_WAIT_S) as patience:
                    splice = Splice(sock.fileno(), self._target, endless=False)
                    await splice.run(opened=lambda: patience.reschedule(None))
            except OSError as error:
                # TimeoutError is one.
                _log.debug("vsock_ended", extra={"cause": str(error)})
