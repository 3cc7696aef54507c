"""The specification of `nodeagent/engine/base.py`: what every engine promises."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import grpc.aio
import pytest

from cocoon.guest.host.v1 import host_service_pb2 as host_pb
from cocoon.guest.host.v1 import host_service_pb2_grpc
from cocoon_rpc.errors import (
    CapabilityMissingError,
    ImageMissingError,
    NodeAtCapacityError,
    ProvisionFailedError,
)
from nodeagent.engine.base import Golden, Machine, MachineSpec
from nodeagent.engine.child import RECORD, start_time
from nodeagent.guestlink.link import GuestLink
from nodeagent.model import Size
from nodeagent.pool.provision import Guest
from tests.conftest import Bench
from tests.framework.leaks import mounts_naming, open_fds, processes_naming
from tests.functional.guest.calls import shell

CANCEL_AFTER_S = [0.0, 0.005, 0.02, 0.05]
_MIB = 2**20


def spec_of(bench: Bench) -> MachineSpec:
    """A spec that was not used before."""
    machine_id = "m-" + secrets.token_hex(8)
    return MachineSpec(machine_id, bench.image, Size.SMALL, bench.directory / "machines" / machine_id)


async def make(bench: Bench, spec: MachineSpec) -> Machine:
    """A machine by the engine's fast way."""
    if bench.golden is None:
        return await bench.engine.boot(spec)
    return await bench.engine.clone(bench.golden, spec)


async def left(directory: Path) -> list[str]:
    """What is left of a machine, after a bounded wait for processes that are just ending."""
    found: list[str] = []
    for _ in range(200):
        found = processes_naming(str(directory)) + mounts_naming(str(directory))
        found += [str(path) for path in directory.parent.glob(directory.name + "*")]
        if not found:
            break
        await asyncio.sleep(0.01)
    return found


async def probe(guest: Guest, *, limit_s: float) -> None:
    """Asks the guest once whether it is there. Raises: AioRpcError."""
    stub = host_service_pb2_grpc.HostServiceStub(guest.link.channel)
    await stub.Probe(host_pb.ProbeRequest(), timeout=limit_s)


@asynccontextmanager
async def guests(bench: Bench, count: int) -> AsyncIterator[list[Guest]]:
    """Guests that have answered, closed in the end."""
    made: list[Guest] = []
    try:
        while len(made) < count:
            made.append(await bench.guest())
        yield made
    finally:
        for guest in made:
            await guest.close()


def running(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


# Life


@pytest.mark.slow
async def test_boot_gives_a_guest_that_answers(bench_any: Bench) -> None:
    guest = await bench_any.provisioner.cold(bench_any.image, Size.SMALL)
    try:
        await probe(guest, limit_s=10)
        assert running(guest.machine.pid)
        assert await shell(guest, "hostname") == guest.machine.machine_id
    finally:
        await guest.close()


async def test_machines_are_independent(bench_any: Bench) -> None:
    async with guests(bench_any, 2) as (one, other):
        assert one.machine.machine_id != other.machine.machine_id
        assert one.machine.pid != other.machine.pid
        await shell(one, "echo mine > /root/mark && sync")
        assert await shell(other, "test -e /root/mark || echo absent") == "absent"
        await one.close()
        await probe(other, limit_s=10)


async def test_identity_differs_between_machines(bench_any: Bench) -> None:
    """Machine id, hostname and random numbers: clones of one memory must not share them."""
    script = "cat /etc/machine-id; hostname; head -c 16 /dev/urandom | od -An -tx1"
    async with guests(bench_any, 2) as pair:
        answers = [(await shell(guest, script)).splitlines() for guest in pair]
    assert all(len(answer) == 3 and all(answer) for answer in answers), answers
    assert all(mine != yours for mine, yours in zip(*answers, strict=True)), answers


# kill


async def test_kill_leaves_nothing(bench_any: Bench) -> None:
    fds = open_fds()
    guest = await bench_any.guest()
    pid, directory = guest.machine.pid, bench_any.directory / "machines" / guest.machine.machine_id
    assert directory.is_dir()
    assert start_time(pid) is not None
    await guest.close()
    assert not running(pid)
    assert await left(directory) == []
    assert open_fds() <= fds + 8, "grpc keeps a few of its own, a machine would show as more"


@pytest.mark.slow
async def test_kill_frees_its_loop_devices(bench_any: Bench, tmp_path: Path) -> None:
    """Shown on layers that no other machine has."""
    layers = tuple(tmp_path / f"{index}.erofs" for index in range(len(bench_any.image.layers)))
    for source, target in zip(bench_any.image.layers, layers, strict=True):
        # No links: mount(8) would share the loop device of another machine.
        shutil.copyfile(source, target)
    spec = replace(spec_of(bench_any), image=replace(bench_any.image, layers=layers))
    machine = await bench_any.engine.boot(spec)
    try:
        if bench_any.golden is None:
            await _until(lambda: len(_loops(tmp_path)) == len(layers))
    finally:
        await machine.kill()
    await _until(lambda: _loops(tmp_path) == [])


def _loops(directory: Path) -> list[str]:
    found = []
    for loop in Path("/sys/block").glob("loop*/loop/backing_file"):
        with contextlib.suppress(OSError):
            if str(directory) in loop.read_text():
                found.append(str(loop))
    return found


async def _until(condition, *, limit_s: float = 10.0) -> None:
    async with asyncio.timeout(limit_s):
        while not condition():
            await asyncio.sleep(0.01)


async def test_kill_twice_is_no_error(bench_any: Bench) -> None:
    spec = spec_of(bench_any)
    machine = await make(bench_any, spec)
    await machine.kill()
    await machine.kill()
    assert await left(spec.directory) == []


async def test_kill_of_a_dead_machine_is_no_error(bench_any: Bench) -> None:
    spec = spec_of(bench_any)
    machine = await make(bench_any, spec)
    os.kill(machine.pid, signal.SIGKILL)
    await machine.kill()
    assert await left(spec.directory) == []


async def test_kill_completes_when_its_caller_is_cancelled(bench_any: Bench) -> None:
    spec = spec_of(bench_any)
    machine = await make(bench_any, spec)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0):
            await machine.kill()
    assert not spec.directory.exists()
    assert not running(machine.pid)
    assert await left(spec.directory) == []


async def test_wait_returns_when_the_process_ends_by_another_hand(bench_any: Bench) -> None:
    machine = await make(bench_any, spec_of(bench_any))
    try:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await machine.wait()
        os.kill(machine.pid, signal.SIGKILL)
        async with asyncio.timeout(5):
            await machine.wait()
        assert not running(machine.pid)
    finally:
        await machine.kill()


# What fails leaves nothing


@pytest.mark.parametrize("after_s", CANCEL_AFTER_S)
async def test_boot_cancelled_leaves_nothing(bench_any: Bench, after_s: float) -> None:
    await _cancelled(bench_any, after_s, boot=True)


@pytest.mark.parametrize("after_s", CANCEL_AFTER_S)
async def test_clone_cancelled_leaves_nothing(bench_any: Bench, after_s: float) -> None:
    if bench_any.golden is None:
        pytest.skip("this engine has no clones")
    await _cancelled(bench_any, after_s, boot=False)


async def _cancelled(bench: Bench, after_s: float, *, boot: bool) -> None:
    spec, machine = spec_of(bench), None
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(after_s):
            machine = await (bench.engine.boot(spec) if boot else make(bench, spec))
    if machine is not None:
        # It was faster, and the machine is ours.
        await machine.kill()
    assert await left(spec.directory) == []


async def test_missing_layer_is_image_missing(bench_any: Bench, tmp_path: Path) -> None:
    spec = spec_of(bench_any)
    gone = replace(bench_any.image, layers=(*bench_any.image.layers, tmp_path / "absent.erofs"))
    with pytest.raises(ImageMissingError):
        await bench_any.engine.boot(replace(spec, image=gone))
    assert await left(spec.directory) == []


@pytest.fixture
def full_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system without a free block."""
    directory = tmp_path / "full"
    directory.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", directory], check=True, timeout=10)
    with contextlib.suppress(OSError), (directory / "filler").open("wb", buffering=0) as file:
        while file.write(bytes(4096)):
            pass
    yield directory
    subprocess.run(["umount", directory], check=True, timeout=10)


@pytest.mark.root
async def test_full_disk_is_at_capacity(bench_any: Bench, full_disk: Path) -> None:
    spec = replace(spec_of(bench_any), directory=full_disk / "m")
    with pytest.raises(NodeAtCapacityError):
        await (await make(bench_any, spec)).kill()
    assert not spec.directory.exists()
    assert processes_naming(str(spec.directory)) == []


# pause, resume, console


async def test_pause_silences_the_guest_until_resume(bench_any: Bench) -> None:
    async with guests(bench_any, 1) as (guest,):
        await guest.machine.pause()
        await guest.machine.pause()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await probe(guest, limit_s=1)
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await guest.machine.resume()
        await guest.machine.resume()
        await probe(guest, limit_s=10)


@pytest.mark.parametrize("after_s", CANCEL_AFTER_S)
async def test_kill_of_a_paused_machine_leaves_nothing(bench_any: Bench, after_s: float) -> None:
    """However early it was stopped."""
    spec = spec_of(bench_any)
    machine = await make(bench_any, spec)
    try:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(after_s):
                await machine.wait()
        await machine.pause()
    finally:
        async with asyncio.timeout(10):
            await machine.kill()
    assert await left(spec.directory) == []


async def test_console_is_printable_and_bounded(bench_any: Bench) -> None:
    """Whatever the guest writes there."""
    async with guests(bench_any, 1) as (guest,):
        if bench_any.golden is not None:
            hostile = (
                r"printf '\033]0;evil\007\033[2J'; head -c 5000 /dev/zero | tr '\0' x; printf 'the-end\r\n'"
            )
            await shell(guest, f"({hostile}) > /dev/console")
            text = await guest.machine.console()
            assert text.endswith("the-end")
        text = await guest.machine.console()
        assert text.isprintable()
        assert len(text) <= 300
    assert (await guest.machine.console()).isprintable(), "a dead machine may be asked, too"


# Snapshots


async def test_engine_without_snapshots_says_so(bench_any: Bench) -> None:
    facts = await bench_any.engine.prepare()
    if facts.snapshots:
        pytest.skip("this engine has snapshots")
    spec = spec_of(bench_any)
    machine = await bench_any.engine.boot(spec)
    with pytest.raises(CapabilityMissingError):
        await bench_any.engine.capture(machine, bench_any.directory / "no-golden")
    assert not running(machine.pid)
    assert await left(spec.directory) == []
    golden = Golden(bench_any.directory, bench_any.image, Size.SMALL)
    with pytest.raises(CapabilityMissingError):
        await bench_any.engine.clone(golden, spec)
    assert await left(spec.directory) == []


def _golden_of(bench: Bench) -> Golden:
    if bench.golden is None:
        pytest.skip("this engine has no goldens")
    return bench.golden


def _fingerprint(golden: Golden) -> dict[str, str]:
    """Digests of the golden's files; of its memory, samples and times."""
    facts = {
        name: hashlib.sha256((golden.directory / name).read_bytes()).hexdigest()
        for name in ("state", "cow.qcow2", "manifest.json")
    }
    ram = golden.directory / "ram"
    with ram.open("rb") as file:
        for at in range(0, ram.stat().st_size, 64 * _MIB):
            file.seek(at)
            facts[f"ram at {at}"] = hashlib.sha256(file.read(_MIB)).hexdigest()
    return {**facts, "ram modified": str(ram.stat().st_mtime_ns), "ram size": str(ram.stat().st_size)}


async def test_golden_is_not_changed_by_its_clones(bench_any: Bench) -> None:
    golden = _golden_of(bench_any)
    before = _fingerprint(golden)
    async with guests(bench_any, 2) as (one, other):
        await shell(one, "dd if=/dev/urandom of=/root/fill bs=1M count=16 conv=fsync 2>/dev/null")
        await shell(one, "dd if=/dev/urandom of=/dev/shm/fill bs=1M count=32 2>/dev/null")
        assert await shell(other, "ls /root/fill /dev/shm/fill 2>/dev/null; echo end") == "end"
    assert _fingerprint(golden) == before


async def test_golden_of_a_clone_works_at_any_depth(bench_any: Bench, tmp_path: Path) -> None:
    """What each generation left in memory and on disk is there in the next, and in no ancestor."""
    first = golden = _golden_of(bench_any)
    before = _fingerprint(first)
    for generation in range(3):
        guest = await bench_any.provisioner.clone(golden)
        try:
            await shell(guest, f"echo {generation} | tee -a /root/told > /dev/null; sync")
            await shell(guest, f"echo {generation} >> /dev/shm/told; head -c 8M /dev/urandom > /dev/shm/fill")
            told = await shell(guest, "cat /root/told /dev/shm/told; sha256sum < /dev/shm/fill")
            expected = [str(each) for each in range(generation + 1)] * 2
            assert told.splitlines()[:-1] == expected
            await guest.link.close()
        except BaseException:
            await guest.close()
            raise
        golden = await bench_any.engine.capture(guest.machine, tmp_path / f"golden-{generation}")
        assert not running(guest.machine.pid)
        assert await left(bench_any.directory / "machines" / guest.machine.machine_id) == []
        for _ in range(2):
            child = await bench_any.provisioner.clone(golden)
            try:
                script = "cat /root/told /dev/shm/told; sha256sum < /dev/shm/fill"
                assert await shell(child, script) == told
                await shell(child, "echo child | tee -a /root/told /dev/shm/told /dev/shm/fill; sync")
            finally:
                await child.close()
    assert _fingerprint(first) == before


async def test_capture_of_an_uncapturable_machine_ends_it(bench_any: Bench) -> None:
    _golden_of(bench_any)
    spec = spec_of(bench_any)
    machine = await bench_any.engine.boot(spec)
    with pytest.raises(CapabilityMissingError):
        await bench_any.engine.capture(machine, bench_any.directory / "no-golden")
    assert not running(machine.pid)
    assert await left(spec.directory) == []
    assert not (bench_any.directory / "no-golden").exists()


async def test_capture_cancelled_leaves_no_golden_and_no_machine(bench_any: Bench) -> None:
    _golden_of(bench_any)
    directory = bench_any.directory / "half-golden"
    for after_s in CANCEL_AFTER_S:
        spec = replace(spec_of(bench_any), capturable=True)
        machine = await bench_any.engine.boot(spec)
        try:
            async with asyncio.timeout(after_s):
                await bench_any.engine.capture(machine, directory)
        except TimeoutError:
            assert not directory.exists()
        else:
            shutil.rmtree(directory)
        assert not running(machine.pid)
        assert await left(spec.directory) == []
        assert await left(directory) == []


@pytest.mark.parametrize("missing", ["manifest.json", "state", "ram", "cow.qcow2", "cow.qcow2.overlay"])
async def test_clone_of_an_incomplete_golden_fails_and_leaves_nothing(
    bench_any: Bench, tmp_path: Path, missing: str
) -> None:
    golden = _golden_of(bench_any)
    broken = tmp_path / "golden"
    broken.mkdir()
    for path in golden.directory.iterdir():
        if path.name != missing:
            (broken / path.name).symlink_to(path)
    spec = spec_of(bench_any)
    with pytest.raises(ProvisionFailedError):
        await (await bench_any.engine.clone(replace(golden, directory=broken), spec)).kill()
    assert await left(spec.directory) == []
    assert sorted(p.name for p in broken.iterdir()) == sorted(
        p.name for p in golden.directory.iterdir() if p.name != missing
    )


# reap


@pytest.fixture
def bystander() -> Iterator[subprocess.Popen[bytes]]:
    """A process that has nothing to do with machines."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        yield process
        process.kill()


async def test_reap_ends_what_a_former_agent_left(bench_any: Bench) -> None:
    spec = spec_of(bench_any)
    machine = await make(bench_any, spec)
    try:
        await bench_any.engine.reap(spec.directory)
        async with asyncio.timeout(5):
            await machine.wait()
        assert await left(spec.directory) == []
        await bench_any.engine.reap(spec.directory)
    finally:
        await machine.kill()


@pytest.mark.parametrize("wrong", [{"start_time": 1}, {"boot_id": "another"}, {"pid": "text"}, {"pid": -1}])
async def test_reap_leaves_a_recycled_pid_alone(
    bench_any: Bench, bystander: subprocess.Popen[bytes], wrong: dict[str, object]
) -> None:
    directory = spec_of(bench_any).directory
    directory.mkdir()
    boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    facts = {"pid": bystander.pid, "start_time": start_time(bystander.pid), "boot_id": boot_id}
    (directory / RECORD).write_text(json.dumps({**facts, **wrong}))
    await bench_any.engine.reap(directory)
    assert bystander.poll() is None
    assert await left(directory) == []


@pytest.mark.parametrize("record", [None, b"", b"{", b"[]", b"\xff\xfe", b'{"pid": 1}'])
async def test_reap_needs_no_sound_record(bench_any: Bench, record: bytes | None) -> None:
    directory = spec_of(bench_any).directory
    directory.mkdir()
    if record is not None:
        (directory / RECORD).write_bytes(record)
    await bench_any.engine.reap(directory)
    assert await left(directory) == []


async def test_lane_is_usable_from_the_moment_a_machine_is_returned(bench_any: Bench, tmp_path: Path) -> None:
    spec = spec_of(bench_any)
    machine = await make(bench_any, spec)
    link = GuestLink(machine.lane, tmp_path / "link.sock")
    try:
        await link.open()
        stub = host_service_pb2_grpc.HostServiceStub(link.channel)
        await stub.Probe(host_pb.ProbeRequest(), timeout=20, wait_for_ready=True)
    finally:
        await link.close()
        await machine.kill()
