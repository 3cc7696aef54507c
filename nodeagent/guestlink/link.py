"""One gRPC channel for one guest, whatever the lane.

grpc cannot use a lane's socket, so a link listens on a local unix socket of its
own, and for each connection of the channel opens the lane anew: nonce line, echo,
then bytes both ways, unparsed (decision 5). A connection of the channel that ends
takes its lane connection with it, and the other way round.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import socket
from pathlib import Path

import grpc.aio
import structlog

from nodeagent.guestlink.lanes import Lane, LaneError, UnixLane

NONCE_PREFIX = b"COCOON-LANE 1 "
_FIRST_ECHO_WAIT_S = 0.25
_LONGEST_ECHO_WAIT_S = 4.0
_JUNK_LIMIT = 64 * 1024 * 1024
_CHUNK = 256 * 1024
_PATH_LIMIT = 107
_log = structlog.get_logger()

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
        self._connections: set[asyncio.Task[None]] = set()

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
        if isinstance(self._lane, UnixLane):
            target = self._lane.path
        else:
            target = self._path
            if len(str(target).encode()) > _PATH_LIMIT:
                raise OSError(
                    f"{target}: unix sockets have at most {_PATH_LIMIT} bytes; use a shorter data_dir"
                )
            self._server = await asyncio.start_unix_server(self._serve, str(target), limit=_CHUNK)
            target.chmod(0o600)
        self._channel = grpc.aio.insecure_channel(f"unix:{target.absolute()}", options=CHANNEL_OPTIONS)

    async def close(self) -> None:
        """Ends the channel and every connection; nothing is left. Idempotent."""
        channel, self._channel = self._channel, None
        if channel is not None:
            await channel.close()
        server, self._server = self._server, None
        if server is not None:
            server.close()
            for task in self._connections:
                task.cancel()
            if self._connections:
                await asyncio.wait(self._connections)
            with contextlib.suppress(FileNotFoundError):
                self._path.unlink()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        # A new connection of the channel means the one before is given up; the
        # serial port holds one at a time.
        for other in self._connections - {task}:
            other.cancel()
        try:
            await self._join(reader, writer)
        except (OSError, LaneError, EOFError) as error:
            _log.debug("lane_ended", lane=type(self._lane).__name__, cause=str(error))
        except asyncio.CancelledError:
            # Ours (close, or a newer connection); the server must not log it.
            pass
        finally:
            self._connections.discard(task)
            writer.transport.abort()

    async def _join(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        sock = await self._lane.connect()
        lane_reader, lane_writer = await _streams(sock)
        try:
            await _shake(lane_reader, lane_writer)
            async with asyncio.TaskGroup() as group:
                tasks = [
                    group.create_task(_pump(reader, lane_writer)),
                    group.create_task(_pump(lane_reader, writer)),
                ]
                await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                for task in tasks:
                    task.cancel()
        finally:
            lane_writer.transport.abort()


async def _streams(sock: socket.socket) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    try:
        return await asyncio.open_connection(sock=sock, limit=_CHUNK)
    except BaseException:
        sock.close()
        raise


async def _shake(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Sends nonce lines until the newest comes back; all before it is another connection's and is dropped.

    A line may get lost in the middle of an old connection's frame, so another
    follows. Each waits twice as long as the one before: a guest slower than the
    wait answers a line that is not the newest any more.
    """
    wait = _FIRST_ECHO_WAIT_S
    while True:
        line = NONCE_PREFIX + secrets.token_hex(16).encode() + b"\n"
        writer.write(line)
        await writer.drain()
        try:
            async with asyncio.timeout(wait):
                return await _skip_to(reader, line)
        except TimeoutError:
            wait = min(wait * 2, _LONGEST_ECHO_WAIT_S)


async def _skip_to(reader: asyncio.StreamReader, line: bytes) -> None:
    """Reads until `line` has just come, byte-exact.

    Raises: LaneError: more than 64 MiB came instead.
    """
    skipped = 0
    while skipped <= _JUNK_LIMIT:
        try:
            await reader.readuntil(line)
        except asyncio.LimitOverrunError as error:
            skipped += len(await reader.readexactly(error.consumed))
        else:
            return
    raise LaneError("the guest sends without end and never echoes the nonce")


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(_CHUNK):
        writer.write(data)
        await writer.drain()
