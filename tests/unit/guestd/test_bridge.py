"""Both bridges against a real unix server; socket pairs stand in for the port and for vsock."""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest

from guestd.bridge import SerialBridge, VsockBridge, may_connect
from tests.framework.leaks import open_fds

LIMIT_S = 10.0


def line() -> bytes:
    return b"COCOON-LANE 1 " + secrets.token_hex(16).encode() + b"\n"


class Guestd:
    """A unix server that hands out its connections and does nothing by itself."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)
        self._arrived: asyncio.Queue[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = asyncio.Queue()
        self._open: list[asyncio.StreamWriter] = []
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            self._open.append(writer)
            self._arrived.put_nowait((reader, writer))

        self._server = await asyncio.start_unix_server(serve, self.path)

    async def connection(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        async with asyncio.timeout(LIMIT_S):
            return await self._arrived.get()

    async def stop(self) -> None:
        for writer in self._open:
            writer.transport.abort()
        if self._server is not None:
            self._server.close()
            await self._server.wait_closed()
        await asyncio.sleep(0)


class Host:
    """The host's end of a port or connection."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self.sock = sock

    async def send(self, data: bytes) -> None:
        async with asyncio.timeout(LIMIT_S):
            await asyncio.get_running_loop().sock_sendall(self.sock, data)

    async def take(self, count: int) -> bytes:
        got = b""
        async with asyncio.timeout(LIMIT_S):
            while len(got) < count:
                part = await asyncio.get_running_loop().sock_recv(self.sock, count - len(got))
                if not part:
                    raise EOFError(got)
                got += part
        return got

    async def silent(self, for_s: float = 0.1) -> bool:
        """Says whether nothing comes for a moment."""
        with suppress(TimeoutError):
            async with asyncio.timeout(for_s):
                await asyncio.get_running_loop().sock_recv(self.sock, 1)
            return False
        return True


@pytest.fixture
async def guestd(tmp_path: Path) -> AsyncIterator[Guestd]:
    server = Guestd(tmp_path / "guestd.sock")
    await server.start()
    yield server
    await server.stop()


@asynccontextmanager
async def serial(target: str) -> AsyncIterator[Host]:
    """A running serial bridge; in the end it must leave no descriptor."""
    before = open_fds()
    near, far = socket.socketpair()
    near.setblocking(False)
    try:
        async with asyncio.TaskGroup() as group:
            task = group.create_task(SerialBridge(near.fileno(), target).run())
            yield Host(far)
            task.cancel()
    finally:
        near.close()
        far.close()
    # Accepted ends belong to the server, which closes them when its reader sees the end.
    async with asyncio.timeout(LIMIT_S):
        while open_fds() > before + 2:
            await asyncio.sleep(0.01)


@asynccontextmanager
async def opened(guestd: Guestd) -> AsyncIterator[tuple[Host, asyncio.StreamReader, asyncio.StreamWriter]]:
    async with serial(guestd.path) as host:
        nonce = line()
        await host.send(nonce)
        assert await host.take(len(nonce)) == nonce
        yield (host, *await guestd.connection())


async def test_serial_echoes_the_line_and_joins_both_ways(guestd: Guestd) -> None:
    async with opened(guestd) as (host, reader, writer):
        await host.send(b"to guestd")
        assert await reader.readexactly(9) == b"to guestd"
        writer.write(b"to host")
        assert await host.take(7) == b"to host"


async def test_serial_does_not_pass_the_line_on(guestd: Guestd) -> None:
    async with serial(guestd.path) as host:
        await host.send(b"junk of an older connection" + line() + b"first")
        reader, _ = await guestd.connection()
        assert await reader.readexactly(5) == b"first"


async def test_serial_drops_bytes_without_a_line(guestd: Guestd) -> None:
    async with serial(guestd.path) as host:
        await host.send(b"x" * 1000)
        assert await host.silent()


async def test_serial_new_line_replaces_the_connection(guestd: Guestd) -> None:
    async with opened(guestd) as (host, reader, _):
        nonce = line()
        await host.send(nonce)
        assert await host.take(len(nonce)) == nonce
        second, writer = await guestd.connection()
        assert await asyncio.wait_for(reader.read(), LIMIT_S) == b""
        await host.send(b"x")
        assert await second.readexactly(1) == b"x"
        writer.write(b"y")
        assert await host.take(1) == b"y"


async def test_serial_does_not_echo_while_guestd_refuses(tmp_path: Path) -> None:
    path = tmp_path / "late.sock"
    async with serial(str(path)) as host:
        await host.send(line())
        assert await host.silent()
        server = Guestd(path)
        await server.start()
        nonce = line()
        await host.send(nonce)
        assert await host.take(len(nonce)) == nonce
        await server.connection()
        await server.stop()


async def test_serial_serves_again_after_guestd_closed(guestd: Guestd) -> None:
    async with opened(guestd) as (host, _, writer):
        writer.write(b"last")
        writer.close()
        assert await host.take(4) == b"last"
        nonce = line()
        async with asyncio.timeout(LIMIT_S):
            # The bridge may not have seen the end yet; the host asks again, as it does.
            await host.send(nonce)
            assert await host.take(len(nonce)) == nonce
        await guestd.connection()


async def test_serial_moves_much_both_ways_at_once(guestd: Guestd) -> None:
    there, back = secrets.token_bytes(5_000_000), secrets.token_bytes(5_000_000)
    async with opened(guestd) as (host, reader, writer):

        async def answer() -> None:
            writer.write(back)
            await writer.drain()

        async with asyncio.TaskGroup() as group:
            group.create_task(host.send(there))
            group.create_task(answer())
            up = group.create_task(reader.readexactly(len(there)))
            down = group.create_task(host.take(len(back)))
        assert up.result() == there
        assert down.result() == back


async def test_serial_holds_the_sender_while_the_host_does_not_read(guestd: Guestd) -> None:
    content = secrets.token_bytes(8_000_000)
    async with opened(guestd) as (host, _, writer):
        writer.write(content)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(writer.drain(), 0.3)
        # The buffers of two socket pairs and one chunk; the rest still waits at the sender.
        assert writer.transport.get_write_buffer_size() > len(content) - 2_000_000
        assert await host.take(len(content)) == content


async def test_serial_holds_the_host_while_guestd_does_not_read(guestd: Guestd) -> None:
    content = secrets.token_bytes(8_000_000)
    async with opened(guestd) as (host, reader, _), asyncio.TaskGroup() as group:
        sending = group.create_task(host.send(content))
        await asyncio.sleep(0.2)
        assert not sending.done()
        assert await reader.readexactly(len(content)) == content


async def test_serial_fails_when_its_port_does(guestd: Guestd) -> None:
    reading, writing = os.pipe()
    try:
        # A pipe's write end cannot be read, like a port whose driver fails.
        with pytest.raises(OSError, match="Bad file descriptor"):
            await asyncio.wait_for(SerialBridge(writing, guestd.path).run(), LIMIT_S)
    finally:
        os.close(reading)
        os.close(writing)


@pytest.mark.parametrize(
    ("cid", "port", "allowed"),
    [
        (2, 1, True),
        (2, 4_000_000_000, True),
        (1, 1023, True),
        (1, 1024, False),
        (3, 1023, False),
        (3, 1024, False),
        (1, 2**32 - 1, False),
    ],
)
def test_vsock_peer_is_the_host_or_has_a_privileged_port(cid: int, port: int, allowed: bool) -> None:
    assert may_connect(cid, port) is allowed


class Listener:
    """A unix listener that names vsock peers."""

    def __init__(self, path: Path, peer: tuple[int, int]) -> None:
        self._sock = socket.socket(socket.AF_UNIX)
        self._sock.setblocking(False)
        self._sock.bind(str(path))
        self._sock.listen()
        self._peer = peer

    def fileno(self) -> int:
        return self._sock.fileno()

    def gettimeout(self) -> float:
        return 0.0

    def accept(self) -> tuple[socket.socket, tuple[int, int]]:
        return self._sock.accept()[0], self._peer

    def close(self) -> None:
        self._sock.close()


@asynccontextmanager
async def vsock(tmp_path: Path, target: str, peer: tuple[int, int]) -> AsyncIterator[Path]:
    path = tmp_path / "vsock.sock"
    bridge = VsockBridge(Listener(path, peer), target)  # type: ignore[arg-type]
    async with asyncio.TaskGroup() as group:
        task = group.create_task(bridge.run())
        yield path
        task.cancel()


@asynccontextmanager
async def dialled(path: Path) -> AsyncIterator[Host]:
    with socket.socket(socket.AF_UNIX) as sock:
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(sock, str(path))
        yield Host(sock)


async def test_vsock_joins_connections_one_to_one(guestd: Guestd, tmp_path: Path) -> None:
    async with vsock(tmp_path, guestd.path, (2, 9999)) as path, dialled(path) as one, dialled(path) as two:
        for host in (one, two):
            nonce = line()
            await host.send(nonce + b"hi")
            assert await host.take(len(nonce)) == nonce
            reader, writer = await guestd.connection()
            assert await reader.readexactly(2) == b"hi"
            writer.write(b"ho")
            assert await host.take(2) == b"ho"


async def test_vsock_peer_without_privilege_is_closed_without_an_echo(guestd: Guestd, tmp_path: Path) -> None:
    async with vsock(tmp_path, guestd.path, (1, 50_000)) as path, dialled(path) as host:
        with pytest.raises((EOFError, ConnectionError)):
            await host.take(1)


@pytest.mark.parametrize("said", [b"", b"x" * 47, b"COCOON-LANE 2 " + b"a" * 32 + b"\n", line()[:-1]])
async def test_vsock_connection_without_a_line_is_dropped_in_time(
    guestd: Guestd, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: bytes
) -> None:
    monkeypatch.setattr("guestd.bridge._LINE_WAIT_S", 0.05)
    async with vsock(tmp_path, guestd.path, (2, 1)) as path, dialled(path) as host:
        await host.send(said)
        with pytest.raises((EOFError, ConnectionError)):
            await host.take(1)


async def test_vsock_connection_that_opened_may_be_silent(
    guestd: Guestd, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("guestd.bridge._LINE_WAIT_S", 0.05)
    async with vsock(tmp_path, guestd.path, (2, 1)) as path, dialled(path) as host:
        nonce = line()
        await host.send(nonce)
        await host.take(len(nonce))
        _, writer = await guestd.connection()
        assert await host.silent(0.2)
        writer.write(b"x")
        assert await host.take(1) == b"x"


async def test_vsock_end_on_either_side_ends_the_other(guestd: Guestd, tmp_path: Path) -> None:
    async with vsock(tmp_path, guestd.path, (2, 1)) as path:
        async with dialled(path) as host:
            await host.send(line())
            reader, _ = await guestd.connection()
        assert await asyncio.wait_for(reader.read(), LIMIT_S) == b""
        async with dialled(path) as host:
            nonce = line()
            await host.send(nonce)
            await host.take(len(nonce))
            _, writer = await guestd.connection()
            writer.close()
            with pytest.raises((EOFError, ConnectionError)):
                await host.take(1)


async def test_vsock_connection_that_guestd_refuses_is_closed_and_others_go_on(tmp_path: Path) -> None:
    target = tmp_path / "late.sock"
    async with vsock(tmp_path, str(target), (2, 1)) as path:
        async with dialled(path) as host:
            await host.send(line())
            with pytest.raises((EOFError, ConnectionError)):
                await host.take(48)
        server = Guestd(target)
        await server.start()
        async with dialled(path) as host:
            await host.send(line())
            await server.connection()
        await server.stop()


async def test_vsock_cancellation_leaves_no_descriptor(guestd: Guestd, tmp_path: Path) -> None:
    before = open_fds()
    async with vsock(tmp_path, guestd.path, (2, 1)) as path, dialled(path) as host:
        await host.send(line())
        await guestd.connection()
    await guestd.stop()
    async with asyncio.timeout(LIMIT_S):
        while open_fds() > before:
            await asyncio.sleep(0.01)
