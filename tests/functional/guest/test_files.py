"""FileService on a real guest: what is read is what is there; a write is whole or nothing."""

from __future__ import annotations

import asyncio
import secrets

import pytest

from cocoon.guest.v1 import file_service_pb2 as pb
from cocoon_rpc import errors
from nodeagent.pool.provision import Guest
from tests.functional.guest.calls import (
    begin_write,
    files,
    python,
    read,
    read_all,
    refused,
    send_write,
    shell,
    write,
    write_requests,
)

BIG = 3 * 1024 * 1024 + 7
NOT_REGULAR = [
    ("/etc", "directory"),
    ("/tmp/pipe", "pipe"),
    ("/dev/null", "device"),
    ("/tmp/socket", "socket"),
]
MAKE_ODD = """
mkfifo /tmp/pipe
python3 -c 'import socket; socket.socket(socket.AF_UNIX).bind("/tmp/socket")'
"""
BAD_PATHS = [
    ("path", {"path": ""}),
    ("path", {"path": "/tmp/a", "raw_path": b"/tmp/a"}),
    ("path", {"path": "etc/passwd"}),
    ("raw_path", {"raw_path": b"etc/passwd"}),
    ("path", {"path": "/tmp/a\0b"}),
    ("raw_path", {"raw_path": b"/tmp/\0"}),
    ("path", {"path": "/" + "x/" * 2048}),
]


@pytest.mark.parametrize("size", [0, 1, BIG])
async def test_file_comes_back_as_it_was_written(guest_any: Guest, size: int) -> None:
    content = secrets.token_bytes(size)
    assert await write(guest_any, "/tmp/file", content) == size
    start, found, done = await read_all(guest_any, "/tmp/file")
    assert found == content
    assert (start.size_bytes, start.mode, done) == (size, 0o644, size)
    assert start.modify_time.seconds == int(await shell(guest_any, "stat -c %Y /tmp/file"))


async def test_read_takes_offset_and_length(guest_any: Guest) -> None:
    content = secrets.token_bytes(BIG)
    await write(guest_any, "/tmp/file", content)
    for offset, length in [
        (0, 0),
        (0, 1),
        (1, 2),
        (BIG - 5, 100),
        (BIG, 1),
        (BIG + 9, 1),
        (1000, 2 * 1024 * 1024),
    ]:
        found = await read(guest_any, "/tmp/file", offset=offset, length=length)
        assert found == content[offset : offset + length]
    assert await read(guest_any, "/tmp/file", offset=BIG - 3) == content[-3:]


async def test_read_of_a_proc_file_has_content_though_its_size_is_zero(guest_any: Guest) -> None:
    start, found, _ = await read_all(guest_any, "/proc/version")
    assert start.size_bytes == 0
    assert found.startswith(b"Linux version")


async def test_read_refuses_what_is_not_regular_without_hanging(guest_any: Guest) -> None:
    await shell(guest_any, MAKE_ODD)
    for path, kind in NOT_REGULAR:
        with refused(errors.FileNotRegularError, path=path, kind=kind):
            async with asyncio.timeout(5):
                await read(guest_any, path)


async def test_write_refuses_what_is_not_regular_without_hanging(guest_any: Guest) -> None:
    await shell(guest_any, MAKE_ODD)
    for path, kind in [*NOT_REGULAR, ("/", "directory")]:
        with refused(errors.FileNotRegularError, path=path, kind=kind):
            async with asyncio.timeout(5):
                await begin_write(guest_any, path)


async def test_read_of_a_missing_file_is_typed(guest_any: Guest) -> None:
    for path in ("/tmp/missing", "/etc/passwd/x"):
        with refused(errors.FileNotFoundError, path=path):
            await read(guest_any, path)


async def test_write_into_a_missing_parent_is_typed(guest_any: Guest) -> None:
    for path in ("/tmp/missing/file", "/etc/passwd/x"):
        with refused(errors.FileNotFoundError, path=path):
            await begin_write(guest_any, path)


async def test_symlink_is_followed_and_stays_one(guest_any: Guest) -> None:
    await shell(guest_any, "mkdir -p /tmp/real && echo old >/tmp/real/file && ln -sfn real/file /tmp/link")
    assert await read(guest_any, "/tmp/link") == b"old\n"
    await write(guest_any, "/tmp/link", b"new")
    assert await shell(guest_any, "readlink /tmp/link; cat /tmp/real/file") == "real/file\nnew"


async def test_dangling_symlink_is_missing_to_read_and_its_target_made_by_write(guest_any: Guest) -> None:
    await shell(guest_any, "ln -sfn /tmp/target /tmp/dangling")
    with refused(errors.FileNotFoundError, path="/tmp/dangling"):
        await read(guest_any, "/tmp/dangling")
    await write(guest_any, "/tmp/dangling", b"made")
    assert await shell(guest_any, "test -L /tmp/dangling; cat /tmp/target") == "made"


async def test_symlink_loop_is_typed(guest_any: Guest) -> None:
    await shell(guest_any, "ln -sfn /tmp/b /tmp/a; ln -sfn /tmp/a /tmp/b")
    with refused(errors.FileOperationFailedError, path="/tmp/a", errno="ELOOP"):
        await read(guest_any, "/tmp/a")
    with refused(errors.FileOperationFailedError, path="/tmp/a", errno="ELOOP"):
        await begin_write(guest_any, "/tmp/a")
    assert await shell(guest_any, "readlink /tmp/a /tmp/b") == "/tmp/b\n/tmp/a"


async def test_write_is_atomic_to_a_concurrent_reader(guest_any: Guest) -> None:
    size = 300_000
    await write(guest_any, "/tmp/atomic", b"0" * size)
    script = (
        "import os\n"
        "whole = 0\n"
        "while not os.path.exists('/tmp/stop'):\n"
        "    data = open('/tmp/atomic', 'rb').read()\n"
        f"    assert len(data) == {size} and len(set(data)) == 1, (len(data), set(data))\n"
        "    whole += 1\n"
        "print(whole)\n"
    )
    async with asyncio.TaskGroup() as group:
        reading = group.create_task(python(guest_any, script))
        for turn in range(20):
            await write(guest_any, "/tmp/atomic", b"%d" % (turn % 10) * size)
        await write(guest_any, "/tmp/stop", b"")
    assert int(reading.result()) > 0


async def test_write_keeps_mode_and_owner_of_the_old_file(guest_any: Guest) -> None:
    await shell(guest_any, "echo old >/tmp/owned; chown sandbox:sandbox /tmp/owned; chmod 4751 /tmp/owned")
    await write(guest_any, "/tmp/owned", b"new")
    assert await shell(guest_any, "stat -c '%a %U %G' /tmp/owned") == "4751 sandbox sandbox"


async def test_write_sets_the_mode_it_is_given(guest_any: Guest) -> None:
    await write(guest_any, "/tmp/mode", b"", mode=0o7777)
    assert await shell(guest_any, "stat -c %a /tmp/mode") == "7777"
    await write(guest_any, "/tmp/mode", b"", mode=0)
    assert await shell(guest_any, "stat -c %a /tmp/mode") == "0"


async def test_write_refuses_a_mode_beyond_the_permission_bits(guest_any: Guest) -> None:
    with refused(errors.InvalidFieldError, field="start.mode"):
        await begin_write(guest_any, "/tmp/mode", mode=0o10000)


START = pb.WriteRequest(start=pb.WriteStart(path="/tmp/w/file"))


def _chunk(data: bytes, offset: int) -> pb.WriteRequest:
    return pb.WriteRequest(chunk=pb.FileChunk(data=data, offset=offset))


BROKEN: dict[str, tuple[type[errors.CocoonError], dict[str, str], list[pb.WriteRequest]]] = {
    "gap": (errors.InvalidFieldError, {"field": "chunk.offset"}, [START, _chunk(b"a", 1)]),
    "overlap": (
        errors.InvalidFieldError,
        {"field": "chunk.offset"},
        [START, _chunk(b"aa", 0), _chunk(b"a", 1)],
    ),
    "long_chunk": (errors.InvalidFieldError, {"field": "chunk.data"}, [START, _chunk(b"x" * (2**20 + 1), 0)]),
    "second_start": (errors.StreamMessageUnexpectedError, {"got": "start"}, [START, START]),
    "empty_message": (errors.StreamMessageUnexpectedError, {}, [START, pb.WriteRequest()]),
    "no_start": (errors.StreamStartRequiredError, {"got": "chunk"}, [_chunk(b"x", 0)]),
}
CUT: dict[str, tuple[type[errors.CocoonError], list[pb.WriteRequest]]] = {
    "without_done": (errors.StreamMessageUnexpectedError, [START, _chunk(b"new", 0)]),
    "without_content": (errors.StreamMessageUnexpectedError, [START]),
    "without_anything": (errors.StreamStartRequiredError, []),
}


async def test_broken_write_is_typed_and_changes_nothing(guest_any: Guest) -> None:
    await shell(guest_any, "mkdir -p /tmp/w && echo old >/tmp/w/file")
    for kind, facts, requests in BROKEN.values():
        with refused(kind, **facts):
            await send_write(guest_any, *requests)
        assert await shell(guest_any, "ls -A /tmp/w; cat /tmp/w/file") == "file\nold"


async def test_write_that_ends_without_done_is_typed_and_changes_nothing(guest_any: Guest) -> None:
    await shell(guest_any, "mkdir -p /tmp/w && echo old >/tmp/w/file")
    for kind, requests in CUT.values():
        with refused(kind):
            await send_write(guest_any, *requests, half_close=True)
        assert await shell(guest_any, "ls -A /tmp/w; cat /tmp/w/file") == "file\nold"


async def test_cancelled_write_changes_nothing(guest_any: Guest) -> None:
    await shell(guest_any, "mkdir -p /tmp/w && echo old >/tmp/w/file")
    call = files(guest_any).Write(timeout=20)
    for request in write_requests("/tmp/w/file", b"x" * 2**21, done=False):
        await call.write(request)
    async with asyncio.timeout(5):
        while "tmp" not in await shell(guest_any, "ls -A /tmp/w"):
            pass
    call.cancel()
    async with asyncio.timeout(5):
        while await shell(guest_any, "ls -A /tmp/w") != "file":
            pass
    assert await read(guest_any, "/tmp/w/file") == b"old\n"


async def test_bad_path_fields_are_typed(guest_any: Guest) -> None:
    for field, path in BAD_PATHS:
        with refused(errors.InvalidFieldError, field=field):
            async for _ in files(guest_any).Read(pb.ReadRequest(**path), timeout=20):
                pass
        with refused(errors.InvalidFieldError, field="start." + field):
            await send_write(guest_any, pb.WriteRequest(start=pb.WriteStart(**path)))


async def test_raw_path_need_not_be_utf8(guest_any: Guest) -> None:
    path = b"/tmp/\xff\xfe"
    await write(guest_any, path, b"odd")
    assert await read(guest_any, path) == b"odd"
    assert await python(guest_any, "print(open(b'/tmp/\\xff\\xfe').read())") == "odd"


async def test_raw_path_missing_is_shown_with_escapes(guest_any: Guest) -> None:
    with refused(errors.FileNotFoundError, path="/tmp/\\xfd"):
        await read(guest_any, b"/tmp/\xfd")


async def test_name_of_255_bytes_is_written(guest_any: Guest) -> None:
    path = "/tmp/" + "n" * 255
    await write(guest_any, path, b"long")
    assert await read(guest_any, path) == b"long"


async def test_name_of_256_bytes_is_typed(guest_any: Guest) -> None:
    with refused(errors.FileOperationFailedError, errno="ENAMETOOLONG"):
        await begin_write(guest_any, "/tmp/" + "n" * 256)


async def test_full_file_system_is_typed_and_leaves_the_old_file(guest_any: Guest) -> None:
    await shell(guest_any, "mkdir -p /tmp/full && mount -t tmpfs -o size=1m tmpfs /tmp/full")
    await write(guest_any, "/tmp/full/file", b"old")
    with refused(errors.FileSystemFullError, path="/tmp/full/file"):
        # A mebibyte is what guestd writes at a time, and the old file has a page of the room.
        await send_write(guest_any, *write_requests("/tmp/full/file", bytes(2**20), done=False))
    assert await shell(guest_any, "ls -A /tmp/full") == "file"
    assert await read(guest_any, "/tmp/full/file") == b"old"


async def test_write_to_a_read_only_place_is_typed(guest_any: Guest) -> None:
    await shell(guest_any, "mkdir -p /tmp/ro && mount -t tmpfs -o ro tmpfs /tmp/ro")
    with refused(errors.FileOperationFailedError, errno="EROFS"):
        await begin_write(guest_any, "/tmp/ro/file")
