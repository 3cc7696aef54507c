"""The bytes of a link: a client at its socket, a scripted guest at the other end of its lane."""

from __future__ import annotations

import asyncio
import secrets
import socket
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path

import pytest
import uvloop

from nodeagent.guestlink import joint
from nodeagent.guestlink.handshake import LINE_LENGTH
from nodeagent.guestlink.lanes import LaneError
from nodeagent.guestlink.link import GuestLink
from tests.framework.leaks import open_fds

LIMIT_S = 10.0
MUCH = 8_000_000
OLD_LINE = b"COCOON-LANE 1 " + b"f" * 32 + b"\n"


@pytest.fixture(params=[asyncio.DefaultEventLoopPolicy, uvloop.EventLoopPolicy], ids=["asyncio", "uvloop"])
def event_loop_policy(request: pytest.FixtureRequest) -> asyncio.AbstractEventLoopPolicy:
    return request.param()


class End:
    """One end of a connection, bounded in time."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self.sock = sock

    async def send(self, data: bytes) -> None:
        async with asyncio.timeout(LIMIT_S):
            await asyncio.get_running_loop().sock_sendall(self.sock, data)

    async def take(self, count: int) -> bytes:
        got = bytearray()
        async with asyncio.timeout(LIMIT_S):
            while len(got) < count:
                part = await asyncio.get_running_loop().sock_recv(self.sock, count - len(got))
                if not part:
                    raise EOFError(bytes(got))
                got += part
        return bytes(got)

    async def ended(self) -> bool:
        """Says whether the other side ends it, with nothing before that."""
        with suppress(ConnectionResetError):
            async with asyncio.timeout(LIMIT_S):
                return await asyncio.get_running_loop().sock_recv(self.sock, 1) == b""
        return True

    async def lines(self, quiet_s: float) -> list[bytes]:
        """Takes lines until none comes for a while."""
        lines = []
        with suppress(TimeoutError):
            while True:
                async with asyncio.timeout(quiet_s):
                    lines.append(await self.take(LINE_LENGTH))
        return lines


class PairLane:
    """A lane to the test itself. `failure`: what connecting ends in; `stuck`: it never ends."""

    def __init__(self) -> None:
        self.guests: asyncio.Queue[End] = asyncio.Queue()
        self.ends: list[socket.socket] = []
        self.failure: Exception | None = None
        self.stuck = False
        self.dialled = asyncio.Event()

    async def connect(self) -> socket.socket:
        self.dialled.set()
        if self.stuck:
            await asyncio.get_running_loop().create_future()
        if self.failure is not None:
            raise self.failure
        ours, theirs = socket.socketpair()
        theirs.setblocking(False)
        self.ends.append(ours)
        self.guests.put_nowait(End(ours))
        return theirs

    async def guest(self) -> End:
        async with asyncio.timeout(LIMIT_S):
            return await self.guests.get()


class Rig:
    """A link, its lane, and clients of its socket."""

    def __init__(self, directory: Path) -> None:
        self.lane = PairLane()
        self.path = directory / "l"
        self.link = GuestLink(self.lane, self.path)
        self.clients: list[socket.socket] = []

    async def client(self) -> End:
        sock = socket.socket(socket.AF_UNIX)
        sock.setblocking(False)
        self.clients.append(sock)
        await asyncio.get_running_loop().sock_connect(sock, str(self.path))
        return End(sock)

    async def joined(self) -> tuple[End, End]:
        """A client and a guest, joined."""
        client = await self.client()
        guest = await self.lane.guest()
        await guest.send(await guest.take(LINE_LENGTH))
        return client, guest

    def drop_ends(self) -> None:
        for sock in (*self.clients, *self.lane.ends):
            sock.close()


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    """An open link; in the end it must leave no task, descriptor or file."""
    probe = GuestLink(PairLane(), tmp_path / "warm-up")
    await probe.open()
    await probe.close()
    before, tasks = open_fds(), asyncio.all_tasks()
    made = Rig(tmp_path)
    await made.link.open()
    yield made
    async with asyncio.timeout(LIMIT_S):
        await made.link.close()
    assert made.link._joints == set()
    assert asyncio.all_tasks() <= tasks
    assert not made.path.exists()
    made.drop_ends()
    async with asyncio.timeout(LIMIT_S):
        # Descriptors of grpc's own threads go a moment after the channel.
        while open_fds() > before:
            await asyncio.sleep(0.01)


async def test_bytes_pass_only_after_the_echo_and_whole(rig: Rig) -> None:
    client = await rig.client()
    await client.send(b"early")
    guest = await rig.lane.guest()
    line = await guest.take(LINE_LENGTH)
    await guest.send(b"\x00old frames\n" + OLD_LINE + line + b"first")
    assert await client.take(5) == b"first"
    assert await guest.take(5) == b"early"
    await client.send(b"late")
    assert await guest.take(4) == b"late"


async def test_a_lost_line_is_followed_by_a_fresh_one(rig: Rig) -> None:
    client = await rig.client()
    guest = await rig.lane.guest()
    lost, line = await guest.take(LINE_LENGTH), await guest.take(LINE_LENGTH)
    assert lost != line
    await guest.send(line)
    await client.send(b"x")
    assert await guest.take(1) == b"x"


async def test_a_guest_slower_than_the_asking_is_reached(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joint, "_ASK_AGAIN_S", 0.05)
    client = await rig.client()
    guest = await rig.lane.guest()
    # Each echo comes when the next line is out: only because the asking stops is there a last one.
    first, *rest = [await guest.take(LINE_LENGTH) for _ in range(3)]
    await guest.send(first)
    rest += await guest.lines(quiet_s=0.5)
    assert len(rest) < 8
    await guest.send(b"".join(rest))
    await client.send(b"x")
    assert await guest.take(1) == b"x"


async def test_a_guest_that_was_heard_and_fell_silent_is_asked_again(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(joint, "_PATIENCE_S", 0.05)
    await rig.client()
    guest = await rig.lane.guest()
    first, second = await guest.take(LINE_LENGTH), await guest.take(LINE_LENGTH)
    await guest.send(first)
    assert await guest.take(LINE_LENGTH) not in {first, second}


async def test_junk_without_end_ends_the_connection(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nodeagent.guestlink.handshake._JUNK_LIMIT", 1_000_000)
    client = await rig.client()
    guest = await rig.lane.guest()
    with suppress(ConnectionError):
        await guest.send(b"x" * 2_000_000)
    assert await client.ended()


async def test_much_passes_both_ways_at_once_unchanged(rig: Rig) -> None:
    client, guest = await rig.joined()
    up, down = secrets.token_bytes(MUCH), secrets.token_bytes(MUCH)
    async with asyncio.TaskGroup() as group:
        group.create_task(client.send(up))
        group.create_task(guest.send(down))
        at_guest = group.create_task(guest.take(MUCH))
        at_client = group.create_task(client.take(MUCH))
    assert at_guest.result() == up
    assert at_client.result() == down


@pytest.mark.parametrize("upwards", [True, False])
async def test_a_reader_that_stops_holds_the_writer(rig: Rig, upwards: bool) -> None:
    client, guest = await rig.joined()
    writer, reader = (client, guest) if upwards else (guest, client)
    content = secrets.token_bytes(MUCH)
    loop = asyncio.get_running_loop()
    sent = 0
    with suppress(TimeoutError):
        while True:
            async with asyncio.timeout(0.3):
                while True:
                    try:
                        sent += writer.sock.send(content[sent : sent + 65536])
                        break
                    except BlockingIOError:
                        await asyncio.sleep(0.005)
    # Two kernel buffers, and what the link holds: one read and its high-water mark.
    assert sent < 3_000_000
    async with asyncio.TaskGroup() as group:
        group.create_task(loop.sock_sendall(writer.sock, content[sent:]))
        got = group.create_task(reader.take(MUCH))
    assert got.result() == content


async def test_the_clients_end_ends_the_lane(rig: Rig) -> None:
    client, guest = await rig.joined()
    client.sock.close()
    assert await guest.ended()


async def test_a_client_that_leaves_before_the_echo_ends_the_asking(rig: Rig) -> None:
    client = await rig.client()
    guest = await rig.lane.guest()
    await guest.take(LINE_LENGTH)
    client.sock.close()
    assert await guest.ended()


async def test_the_lanes_end_reaches_the_client_after_its_last_bytes(rig: Rig) -> None:
    client, guest = await rig.joined()
    content = secrets.token_bytes(400_000)
    sending = asyncio.get_running_loop().create_task(guest.send(content))
    assert await client.take(len(content)) == content
    await sending
    guest.sock.close()
    assert await client.ended()


async def test_a_new_connection_takes_the_lane_over(rig: Rig) -> None:
    old_client, old_guest = await rig.joined()
    client, guest = await rig.joined()
    assert await old_client.ended()
    assert await old_guest.ended()
    await client.send(b"x")
    assert await guest.take(1) == b"x"


@pytest.mark.parametrize("failure", [LaneError("refused"), ConnectionRefusedError(), FileNotFoundError()])
async def test_a_lane_that_fails_ends_the_connection_and_is_tried_by_the_next(
    rig: Rig, failure: Exception
) -> None:
    rig.lane.failure = failure
    assert await (await rig.client()).ended()
    rig.lane.failure = None
    client, guest = await rig.joined()
    await client.send(b"x")
    assert await guest.take(1) == b"x"


async def test_a_client_that_leaves_a_stuck_lane_ends_the_dialling(rig: Rig) -> None:
    rig.lane.stuck = True
    client = await rig.client()
    await rig.lane.dialled.wait()
    client.sock.close()
    async with asyncio.timeout(LIMIT_S):
        while rig.link._joints:
            await asyncio.sleep(0.005)


@pytest.mark.parametrize("stage", ["dialling", "asking", "joined", "full"])
async def test_close_ends_a_connection_at_any_stage(rig: Rig, stage: str) -> None:
    rig.lane.stuck = stage == "dialling"
    if stage in {"dialling", "asking"}:
        client = await rig.client()
        await rig.lane.dialled.wait()
    else:
        client, guest = await rig.joined()
        if stage == "full":
            with suppress(TimeoutError):
                await asyncio.wait_for(guest.send(bytes(MUCH)), 0.3)
    async with asyncio.timeout(LIMIT_S):
        await rig.link.close()
    with suppress(EOFError, ConnectionError):
        await client.take(MUCH)
        pytest.fail("the connection goes on")


async def test_socket_is_its_users_alone_and_replaces_a_stale_one(tmp_path: Path) -> None:
    (tmp_path / "l").touch()
    link = GuestLink(PairLane(), tmp_path / "l")
    await link.open()
    assert (tmp_path / "l").is_socket()
    assert (tmp_path / "l").stat().st_mode & 0o777 == 0o600
    await link.close()
