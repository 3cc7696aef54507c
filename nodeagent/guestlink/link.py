"""One gRPC channel for one guest, whatever the lane.

grpc cannot use a lane's socket, so a link listens on a local unix socket of its
own, and each connection of the channel is joined to the lane anew (decision 5).
"""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

import grpc.aio

from nodeagent.guestlink.joint import Joint
from nodeagent.guestlink.lanes import Lane, UnixLane

_PATH_LIMIT = 107
_BACKLOG = 8

CHANNEL_OPTIONS = (
    # A channel belongs to one machine: never share a connection with another's.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),
    # The guest may be booting: look again soon.
    ("grpc.min_reconnect_backoff_ms", 50),
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.max_reconnect_backoff_ms", 500),
    ("grpc.default_authority", "guest"),
    # A serial port cannot say that guestd closed a connection: while calls are
    # open, 20 s of silence are asked about and 20 s more end it.
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 20_000),
)


class GuestLink:
    """The link to one guest. `open` and `close` once; owns the socket file and the channel."""

    def __init__(self, lane: Lane, socket_path: Path) -> None:
        """Takes the lane and a path (in the machine's directory) for the local socket."""
        self._lane = lane
        self._path = socket_path
        self._channel: grpc.aio.Channel | None = None
        self._server: asyncio.Server | None = None
        self._joints: set[Joint] = set()

    @property
    def channel(self) -> grpc.aio.Channel:
        """The channel; between `open` and `close`."""
        assert self._channel is not None, "the link is not open"
        return self._channel

    async def open(self) -> None:
        """Listens and makes the channel; does not wait for the guest.

        Raises:
            OSError: the socket cannot be made (also: its path is too long).
        """
        straight = isinstance(self._lane, UnixLane)
        target = (self._lane.path if isinstance(self._lane, UnixLane) else self._path).absolute()
        if len(str(target).encode()) > _PATH_LIMIT:
            raise OSError(f"{target}: unix sockets have at most {_PATH_LIMIT} bytes; use a shorter data_dir")
        if not straight:
            self._server = await asyncio.get_running_loop().create_unix_server(
                self._protocol, sock=_listener(target)
            )
        self._channel = grpc.aio.insecure_channel(f"unix:{target}", options=CHANNEL_OPTIONS)

    async def close(self) -> None:
        """Ends the channel and every connection; nothing is left. Idempotent."""
        channel, self._channel = self._channel, None
        if channel is not None:
            await channel.close()
        server, self._server = self._server, None
        if server is not None:
            server.close()
            for joint in tuple(self._joints):
                await joint.close()
            self._path.unlink(missing_ok=True)

    def _protocol(self) -> asyncio.BaseProtocol:
        return Joint(self._lane, began=self._began, ended=self._joints.discard).near

    def _began(self, joint: Joint) -> None:
        # A new connection of the channel means that the one before is given up; a
        # serial port holds one at a time.
        for other in self._joints:
            other.abort()
        self._joints.add(joint)
        if self._server is None:
            joint.abort()


def _listener(path: Path) -> socket.socket:
    """Returns a listening socket that only this user could ever connect to."""
    path.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        listener.bind(str(path))
        path.chmod(0o600)
        listener.listen(_BACKLOG)
    except BaseException:
        listener.close()
        raise
    return listener
