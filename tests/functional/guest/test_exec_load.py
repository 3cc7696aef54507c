"""Exec under load: bounded memory, and nothing of it stays in guestd."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from pathlib import Path

import pytest

from cocoon.guest.v1 import process_service_pb2 as pb
from cocoon_rpc import errors
from nodeagent.pool.provision import Guest
from tests.functional.guest.calls import alive, exec_call, gone, python, refused, run, shell

# Run in the guest: finds guestd (the parent of this very program) and counts what it holds.
FACTS = """
import json, os
guestd = os.getppid()
status = dict(line.split(":", 1) for line in open(f"/proc/{guestd}/status"))
fds = [f for f in os.listdir(f"/proc/{guestd}/fd")]
children, zombies = 0, 0
for entry in os.listdir("/proc"):
    if entry.isdigit() and int(entry) != os.getpid():
        try:
            fields = open(f"/proc/{entry}/stat").read().rsplit(") ", 1)[1].split()
        except OSError:
            continue
        children += int(fields[1]) == guestd
        zombies += fields[0] == "Z"
print(json.dumps({"fds": len(fds), "threads": int(status["Threads"]), "children": children,
                  "zombies": zombies, "rss_kib": int(status["VmRSS"].split()[0])}))
"""


async def _facts(guest: Guest) -> dict[str, int]:
    facts: dict[str, int] = json.loads(await python(guest, FACTS))
    return facts


async def _settled(guest: Guest, before: dict[str, int]) -> dict[str, int]:
    """Returns the facts once what ends asynchronously has ended; bounded."""
    facts = await _facts(guest)
    for _ in range(50):
        if all(facts[key] <= before[key] for key in ("fds", "children", "zombies")):
            break
        facts = await _facts(guest)
    return facts


async def test_exec_in_parallel_leaves_nothing_in_guestd(guest_any: Guest) -> None:
    await asyncio.gather(*(run(guest_any, "true") for _ in range(16)))
    before = await _facts(guest_any)
    for _ in range(2):
        results = await asyncio.gather(
            *(run(guest_any, "sh", "-c", f"cat; echo {n}", stdin=b"%d " % n) for n in range(64))
        )
        assert [result.text for result in results] == [f"{n} {n}" for n in range(64)]
    after = await _settled(guest_any, before)
    for key in ("fds", "children", "zombies"):
        assert after[key] <= before[key], (before, after)
    assert after["threads"] <= before["threads"] + 4, (before, after)


async def test_exec_cancelled_many_times_leaves_nothing_in_guestd(guest_any: Guest) -> None:
    async def cut_short() -> None:
        async with exec_call(guest_any, pb.ExecStart(argv=["yes"], stdin=True)) as call:
            assert (await call.read()).HasField("started")

    await asyncio.gather(*(cut_short() for _ in range(8)))
    before = await _settled(guest_any, await _facts(guest_any))
    for _ in range(4):
        await asyncio.gather(*(cut_short() for _ in range(8)))
    after = await _settled(guest_any, before)
    for key in ("fds", "children", "zombies"):
        assert after[key] <= before[key], (before, after)
    assert await shell(guest_any, "pgrep -x yes || echo none") == "none"


async def test_exec_slow_reader_holds_the_program_and_not_the_memory(guest_any: Guest) -> None:
    before = await _facts(guest_any)
    async with exec_call(guest_any, pb.ExecStart(argv=["yes"])) as call:
        pid = (await call.read()).started.pid
        written = f"sed -n 's/^wchar: //p' /proc/{pid}/io"
        last, now = -1, int(await shell(guest_any, written))
        async with asyncio.timeout(20):
            while now != last:
                last, now = now, int(await shell(guest_any, f"sleep 0.3; {written}"))
        assert await alive(guest_any, pid)
        assert now < 32 * 1024 * 1024
        assert (await _facts(guest_any))["rss_kib"] < before["rss_kib"] + 48 * 1024
    await gone(guest_any, pid)


async def test_exec_output_goes_on_after_a_pause_of_the_reader(guest_any: Guest) -> None:
    size = 8 * 1024 * 1024
    async with exec_call(guest_any, pb.ExecStart(argv=["head", "-c", str(size), "/dev/zero"])) as call:
        await call.read()
        await shell(guest_any, "sleep 0.5")
        read = 0
        while (response := await call.read()).HasField("stdout"):
            assert response.stdout.offset == read
            read += len(response.stdout.data)
        assert response.exit.code == 0
        assert read == size


@pytest.mark.slow
@pytest.mark.root
async def test_exec_failing_five_thousand_times_leaves_nothing(guest: Guest) -> None:
    async def fail(times: int) -> None:
        for _ in range(times):
            with refused(errors.ProgramNotFoundError):
                await run(guest, "no-such-program")

    await asyncio.gather(*(fail(4) for _ in range(50)))
    before = await _facts(guest)
    await asyncio.gather(*(fail(100) for _ in range(50)))
    after = await _settled(guest, before)
    for key in ("fds", "children", "zombies"):
        assert after[key] <= before[key], (before, after)
    assert after["threads"] <= before["threads"] + 4, (before, after)
    assert after["rss_kib"] < before["rss_kib"] + 16 * 1024, (before, after)


CLIENT = """
import sys
import grpc
from cocoon.guest.v1 import process_service_pb2 as pb, process_service_pb2_grpc
import queue
requests = queue.Queue()
requests.put(pb.ExecRequest(start=pb.ExecStart(argv=["sh", "-c", "sleep 300 & echo $!; sleep 300"])))
stub = process_service_pb2_grpc.ProcessServiceStub(grpc.insecure_channel("unix:" + sys.argv[1]))
for response in stub.Exec(iter(requests.get, None)):
    print(response.started.pid or response.stdout.data.decode().strip(), flush=True)
"""


@pytest.mark.root
async def test_exec_of_a_vanished_client_is_killed_with_its_group(guest: Guest) -> None:
    path = guest.machine.lane.path
    client = await asyncio.create_subprocess_exec(
        sys.executable, "-c", CLIENT, str(path),
        env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if Path(p).is_dir())},
        stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        assert client.stdout is not None
        async with asyncio.timeout(20):
            leader, child = int(await client.stdout.readline()), int(await client.stdout.readline())
        assert await alive(guest, leader)
        assert await alive(guest, child)
    finally:
        client.send_signal(signal.SIGKILL)
        await client.wait()
    await gone(guest, leader, limit_s=2)
    await gone(guest, child, limit_s=2)
