"""A channel over a serial port: real gRPC, real bridge, a socket pair for the port."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc.aio
import pytest

from cocoon.guest.host.v1 import host_service_pb2 as pb
from cocoon.guest.host.v1 import host_service_pb2_grpc
from cocoon_rpc.errors import GuestUnreachableError, IdentityRenewalFailedError, ProvisionFailedError
from cocoon_rpc.interceptors import ErrorInterceptor
from guestd.bridge import SerialBridge
from nodeagent.guestlink import link as link_module
from nodeagent.guestlink.lanes import SerialLane, UnixLane
from nodeagent.guestlink.link import GuestLink
from nodeagent.guestlink.probe import Identity, renew_identity, wait_ready
from tests.framework.leaks import open_fds


class Host(host_service_pb2_grpc.HostServiceServicer):
    """Answers as a guest does."""

    async def Probe(self, request: pb.ProbeRequest, context: object) -> pb.ProbeResponse:
        return pb.ProbeResponse(guestd_version="here")

    async def RenewIdentity(
        self, request: pb.RenewIdentityRequest, context: object
    ) -> pb.RenewIdentityResponse:
        if request.generation == 13:
            raise IdentityRenewalFailedError(step="clock", cause="broken")
        return pb.RenewIdentityResponse(generation=request.generation)


class Port:
    """QEMU's end of a serial port: one connection at a time, and the guest's end as a socket."""

    def __init__(self, path: Path, guest: socket.socket) -> None:
        self._path, self._guest = path, guest
        self.junk = b""

    async def run(self, started: asyncio.Event) -> None:
        """Shovels bytes between whoever is connected and the guest, until cancelled."""
        loop = asyncio.get_running_loop()
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(self._path))
        listener.listen(1)
        listener.setblocking(False)
        started.set()
        try:
            while True:
                client, _ = await loop.sock_accept(listener)
                client.setblocking(False)
                with client:
                    if self.junk:
                        await loop.sock_sendall(client, self.junk)
                    async with asyncio.TaskGroup() as group:
                        out = group.create_task(self._shovel(self._guest, client))
                        await self._shovel(client, self._guest)
                        out.cancel()
        finally:
            listener.close()

    @staticmethod
    async def _shovel(source: socket.socket, sink: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        try:
            while data := await loop.sock_recv(source, 65536):
                await loop.sock_sendall(sink, data)
        except OSError:
            return


@asynccontextmanager
async def guest(tmp_path: Path, junk: bytes = b"") -> AsyncIterator[tuple[Path, grpc.aio.Server]]:
    """Guestd's server, its bridge, and the port; yields the port's socket on the host."""
    server = grpc.aio.server(interceptors=(ErrorInterceptor(),))
    host_service_pb2_grpc.add_HostServiceServicer_to_server(Host(), server)
    server.add_insecure_port(f"unix:{tmp_path}/g")
    await server.start()
    host_end, guest_end = socket.socketpair()
    host_end.setblocking(False)
    guest_end.setblocking(False)
    port = Port(tmp_path / "p", host_end)
    port.junk = junk
    async with asyncio.TaskGroup() as group:
        started = asyncio.Event()
        tasks = [
            group.create_task(port.run(started)),
            group.create_task(SerialBridge(guest_end.fileno(), f"{tmp_path}/g").run()),
        ]
        await started.wait()
        yield tmp_path / "p", server
        for task in tasks:
            task.cancel()
    host_end.close()
    guest_end.close()
    await server.stop(None)


@pytest.mark.parametrize("junk", [b"", b"\x00\x01old frames\n" * 5000, b"COCOON-LANE 1 " + b"f" * 32 + b"\n"])
async def test_calls_go_through_whatever_came_before(tmp_path: Path, junk: bytes) -> None:
    async with guest(tmp_path, junk) as (port, _):
        link = GuestLink(SerialLane(port), tmp_path / "l")
        await link.open()
        answer = await wait_ready(link.channel, timeout=10)
        assert answer.guestd_version == "here"
        await link.close()
        assert not (tmp_path / "l").exists()


async def test_a_second_link_takes_over_where_the_first_was_cut(tmp_path: Path) -> None:
    async with guest(tmp_path) as (port, _):
        for _ in range(3):
            link = GuestLink(SerialLane(port), tmp_path / "l")
            await link.open()
            await wait_ready(link.channel, timeout=10)
            await link.close()


async def test_close_leaves_no_descriptor(tmp_path: Path) -> None:
    async with guest(tmp_path) as (port, _):
        warm = GuestLink(SerialLane(port), tmp_path / "l")
        await warm.open()
        await wait_ready(warm.channel, timeout=10)
        await warm.close()
        before = open_fds()
        for _ in range(5):
            link = GuestLink(SerialLane(port), tmp_path / "l")
            await link.open()
            await wait_ready(link.channel, timeout=10)
            await link.close()
        async with asyncio.timeout(5):
            while open_fds() > before:
                await asyncio.sleep(0.01)


async def test_a_guest_that_never_answers_is_unreachable(tmp_path: Path) -> None:
    link = GuestLink(SerialLane(tmp_path / "none"), tmp_path / "l")
    await link.open()
    with pytest.raises(GuestUnreachableError):
        await wait_ready(link.channel, timeout=0.3)
    await link.close()
    await link.close()


async def test_unix_lane_goes_straight_and_renewal_fails_closed(tmp_path: Path) -> None:
    async with guest(tmp_path):
        link = GuestLink(UnixLane(tmp_path / "g"), tmp_path / "l")
        await link.open()
        assert not (tmp_path / "l").exists()
        await renew_identity(link.channel, Identity.fresh(1, "m"), timeout=5)
        with pytest.raises(ProvisionFailedError, match="could not renew clock: broken"):
            await renew_identity(link.channel, Identity.fresh(13, "m"), timeout=5)
        await link.close()


async def test_a_path_too_long_for_a_socket_is_said(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="shorter data_dir"):
        await GuestLink(SerialLane(tmp_path / "p"), tmp_path / ("x" * 120)).open()


def test_identity_is_fresh_and_says_no_secret() -> None:
    first, second = Identity.fresh(1, "m"), Identity.fresh(1, "m")
    assert first.machine_id != second.machine_id
    assert first.entropy != second.entropy
    assert len(first.entropy) >= 32
    assert first.entropy.hex() not in repr(first)
    assert str(first.entropy) not in repr(first)


async def test_a_guest_slower_than_the_first_wait_is_joined() -> None:
    """Each echo comes 0.4 s after its line, as from a guest under load."""
    ours, theirs = socket.socketpair()
    reader, writer = await asyncio.open_connection(sock=ours)
    guest_reader, guest_writer = await asyncio.open_connection(sock=theirs)
    lines = []

    async def echo() -> None:
        while line := await guest_reader.readline():
            lines.append(line)
            asyncio.get_running_loop().call_later(0.4, guest_writer.write, line)

    async with asyncio.TaskGroup() as group:
        task = group.create_task(echo())
        async with asyncio.timeout(10):
            await link_module._shake(reader, writer)
        task.cancel()
    assert len(lines) == len(set(lines)) == 2
    for each in (writer, guest_writer):
        each.close()
        await each.wait_closed()
