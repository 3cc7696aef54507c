"""Lanes: how bytes reach the guest daemon, one class for each way (decision 5).

`connect` gives a fresh connection to the guest's bridge, before the nonce line.
A lane holds no state; the caller owns what `connect` returns.
"""

from __future__ import annotations

import asyncio
import re
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

GUEST_PORT = 2048
SERIAL_PORT_NAME = "cocoon.guestd.0"
_CONNECT_LIMIT_S = 5.0
_OK = re.compile(rb"OK [0-9]{1,10}\n")
_LONGEST_OK = 16


class LaneError(Exception):
    """The lane does not lead to the guest now; try again or give the machine up."""


@runtime_checkable
class Lane(Protocol):
    """A way to a guest's bridge."""

    async def connect(self) -> socket.socket:
        """Returns a connected, non-blocking stream socket. Raises: LaneError, OSError."""
        ...


@dataclass(frozen=True, slots=True)
class UnixLane:
    """Engine `local`: guestd's own socket. The gRPC channel goes there straight, no bytes are pumped."""

    path: Path

    async def connect(self) -> socket.socket:
        """Connects to guestd itself: there is no bridge and no nonce line here."""
        return await _connect_unix(self.path)


@dataclass(frozen=True, slots=True)
class SerialLane:
    """QEMU: the unix socket of a chardev that is a virtio-serial port in the guest.

    One connection at a time; in the guest it is one endless stream of bytes.
    """

    path: Path

    async def connect(self) -> socket.socket:
        """Connects to the chardev."""
        return await _connect_unix(self.path)


@dataclass(frozen=True, slots=True)
class HybridVsockLane:
    """Cloud Hypervisor: one unix socket for all ports, with a text handshake."""

    path: Path
    port: int = GUEST_PORT

    async def connect(self) -> socket.socket:
        """Connects and asks for the port: `CONNECT <port>`, answered by `OK <host port>`."""
        sock = await _connect_unix(self.path)
        try:
            async with asyncio.timeout(_CONNECT_LIMIT_S):
                await asyncio.get_running_loop().sock_sendall(sock, b"CONNECT %d\n" % self.port)
                answer = await _read_line(sock)
            if not _OK.fullmatch(answer):
                raise LaneError(f"port {self.port} of the guest refused the connection")
        except TimeoutError:
            sock.close()
            raise LaneError(f"no answer from the hypervisor to CONNECT {self.port}") from None
        except BaseException:
            sock.close()
            raise
        return sock


@dataclass(frozen=True, slots=True)
class VsockLane:
    """Hosts with vhost-vsock: AF_VSOCK to the guest's context id."""

    cid: int
    port: int = GUEST_PORT

    async def connect(self) -> socket.socket:
        """Connects to the guest."""
        sock = socket.socket(socket.AF_VSOCK, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            async with asyncio.timeout(_CONNECT_LIMIT_S):
                await asyncio.get_running_loop().sock_connect(sock, (self.cid, self.port))
        except BaseException:
            sock.close()
            raise
        return sock


async def _connect_unix(path: Path) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        await asyncio.get_running_loop().sock_connect(sock, str(path))
    except BaseException:
        sock.close()
        raise
    return sock


async def _read_line(sock: socket.socket) -> bytes:
    """Reads one short line, byte by byte: what follows it belongs to the stream."""
    line = b""
    while not line.endswith(b"\n") and len(line) < _LONGEST_OK:
        byte = await asyncio.get_running_loop().sock_recv(sock, 1)
        if not byte:
            break
        line += byte
    return line
