"""Lanes against what they talk to, byte for byte."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from nodeagent.guestlink.lanes import HybridVsockLane, Lane, LaneError, SerialLane, UnixLane, VsockLane

Talk = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def hypervisor(path: Path, talk: Talk) -> AsyncIterator[None]:
    """A unix socket where `talk` answers, as Cloud Hypervisor's vsock does."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await talk(reader, writer)
        finally:
            writer.close()

    async with await asyncio.start_unix_server(serve, str(path)) as server:
        yield
        server.close()


async def receive(sock: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        data += await asyncio.get_running_loop().sock_recv(sock, count - len(data))
    return data


async def test_hybrid_vsock_asks_for_the_port_and_leaves_the_stream_whole(tmp_path: Path) -> None:
    asked = []

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append(await reader.readline())
        # The answer in pieces, and the first bytes of the stream right behind it.
        for piece in (b"O", b"K 1073", b"741824\nfirst"):
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0)
        assert await reader.readexactly(4) == b"ping"

    async with hypervisor(tmp_path / "v", talk):
        sock = await HybridVsockLane(tmp_path / "v").connect()
        assert await receive(sock, 5) == b"first"
        await asyncio.get_running_loop().sock_sendall(sock, b"ping")
        sock.close()
    assert asked == [b"CONNECT 2048\n"]


@pytest.mark.parametrize("answer", [b"", b"NO\n", b"OK\n", b"OK x\n", b"OK 1", b"OK " + b"9" * 64 + b"\n"])
async def test_hybrid_vsock_refusal_is_a_lane_error(tmp_path: Path, answer: bytes) -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readline()
        writer.write(answer)
        await writer.drain()

    async with hypervisor(tmp_path / "v", talk):
        with pytest.raises(LaneError, match="refused"):
            await HybridVsockLane(tmp_path / "v", port=7).connect()


async def test_a_silent_hypervisor_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nodeagent.guestlink.lanes._CONNECT_LIMIT_S", 0.05)

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()

    async with hypervisor(tmp_path / "v", talk):
        with pytest.raises(LaneError, match="no answer"):
            await HybridVsockLane(tmp_path / "v").connect()


@pytest.mark.parametrize("lane_type", [UnixLane, SerialLane, HybridVsockLane])
async def test_a_missing_socket_is_an_os_error(tmp_path: Path, lane_type: type) -> None:
    lane: Lane = lane_type(tmp_path / "none")
    with pytest.raises(FileNotFoundError):
        await lane.connect()


async def test_vsock_to_a_guest_that_is_not_there_fails_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nodeagent.guestlink.lanes._CONNECT_LIMIT_S", 0.2)
    with pytest.raises(OSError):
        await VsockLane(cid=4_000_000_000).connect()
