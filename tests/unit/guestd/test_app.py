"""guestd as a process: who may reach it, how it stops, what it leaves."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import stat
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc.aio
import pytest

from cocoon.guest.host.v1 import host_service_pb2, host_service_pb2_grpc
from cocoon.guest.v1 import file_service_pb2 as files_pb
from cocoon.guest.v1 import file_service_pb2_grpc, process_service_pb2_grpc
from cocoon.guest.v1 import process_service_pb2 as pb
from guestd import app

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def folder() -> Iterator[Path]:
    """A directory with a short name: the path of a unix socket has 107 bytes."""
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


def _start(path: Path) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "guestd", "--socket", str(path), "--no-bridge", "--identity", "namespace"],
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'proto' / 'python'}"},
        stderr=subprocess.PIPE,
    )


@asynccontextmanager
async def _guestd(path: Path) -> AsyncIterator[tuple[subprocess.Popen[bytes], grpc.aio.Channel]]:
    process = _start(path)
    try:
        async with grpc.aio.insecure_channel(f"unix:{path}") as channel:
            stub = host_service_pb2_grpc.HostServiceStub(channel)
            await stub.Probe(host_service_pb2.ProbeRequest(), wait_for_ready=True, timeout=20)
            yield process, channel
    finally:
        process.kill()
        process.communicate()


async def test_guestd_is_reached_by_root_alone(folder: Path) -> None:
    path = folder / "run" / "guestd.sock"
    async with _guestd(path):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


async def test_guestd_takes_the_place_of_one_that_died(folder: Path) -> None:
    path = folder / "guestd.sock"
    async with _guestd(path):
        pass
    assert path.exists()
    async with _guestd(path):
        pass


async def test_guestd_stop_is_orderly_and_takes_its_programs_along(folder: Path) -> None:
    path = folder / "guestd.sock"
    async with _guestd(path) as (process, channel):
        call = process_service_pb2_grpc.ProcessServiceStub(channel).Exec(timeout=30)
        await call.write(pb.ExecRequest(start=pb.ExecStart(argv=["sh", "-c", "sleep 300 & echo $!; wait"])))
        leader = (await call.read()).started.pid
        child = int((await call.read()).stdout.data)
        process.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(process.wait, 10) == 0
        with pytest.raises(grpc.aio.AioRpcError):
            while await call.read() is not grpc.aio.EOF:
                pass
    assert not path.exists()
    async with asyncio.timeout(5):
        while _runs(leader) or _runs(child):
            await asyncio.sleep(0.01)


async def test_guestd_stop_leaves_nothing_of_a_write_it_cut(folder: Path) -> None:
    target = folder / "files" / "target"
    target.parent.mkdir()
    async with _guestd(folder / "guestd.sock") as (process, channel):
        call = file_service_pb2_grpc.FileServiceStub(channel).Write(timeout=30)
        await call.write(files_pb.WriteRequest(start=files_pb.WriteStart(path=str(target))))
        async with asyncio.timeout(5):
            while not list(target.parent.iterdir()):
                await asyncio.sleep(0.01)
        process.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(process.wait, 10) == 0
        with pytest.raises(grpc.aio.AioRpcError):
            await call
    assert list(target.parent.iterdir()) == []


def _runs(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    return False


async def test_guestd_children_inherit_no_descriptor_of_it(folder: Path) -> None:
    async with _guestd(folder / "guestd.sock") as (_, channel):
        call = process_service_pb2_grpc.ProcessServiceStub(channel).Exec(timeout=30)
        await call.write(pb.ExecRequest(start=pb.ExecStart(argv=["sh", "-c", "ls /proc/$$/fd"])))
        responses = []
        while (response := await call.read()) is not grpc.aio.EOF:
            responses.append(response)
    output = b"".join(response.stdout.data for response in responses)
    # Its own three, and for `dash` none more; `bash` keeps one at 255.
    assert set(output.split()) <= {b"0", b"1", b"2", b"255"}


async def test_app_stops_its_server_when_its_bridge_fails(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Broken:
        def __init__(self, path: str) -> None:
            pass

        async def run(self) -> None:
            raise OSError("the port failed")

    monkeypatch.setattr(app, "Bridge", Broken)
    path = folder / "guestd.sock"
    with pytest.raises(ExceptionGroup) as caught:
        async with asyncio.timeout(10):
            await app.run(path, bridge=True, steps=[], stop=asyncio.Event())
    assert [str(error) for error in caught.value.exceptions] == ["the port failed"]
    assert not path.exists()


async def test_app_powers_off_after_it_answered(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "kill", lambda pid, number: sent.append((pid, number)))
    monkeypatch.setattr(os, "sync", lambda: None)
    path = folder / "guestd.sock"
    async with asyncio.timeout(10), asyncio.TaskGroup() as group:
        group.create_task(app.run(path, bridge=False, steps=[], stop=asyncio.Event()))
        async with grpc.aio.insecure_channel(f"unix:{path}") as channel:
            stub = host_service_pb2_grpc.HostServiceStub(channel)
            await stub.Probe(host_service_pb2.ProbeRequest(), wait_for_ready=True)
            await stub.Shutdown(host_service_pb2.ShutdownRequest())
    assert sent == [(1, signal.SIGRTMIN + 4)]


async def test_app_says_when_its_socket_cannot_be_made(folder: Path) -> None:
    with pytest.raises((OSError, RuntimeError)):
        await app.run(folder / ("x" * 200), bridge=False, steps=[], stop=asyncio.Event())
