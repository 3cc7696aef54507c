"""The one wiring: a gRPC server on a unix socket, and the bridge to the host."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc.aio

from cocoon.guest.host.v1 import host_service_pb2_grpc
from cocoon.guest.v1 import file_service_pb2_grpc, guest_service_pb2_grpc, process_service_pb2_grpc
from cocoon_rpc.interceptors import ErrorInterceptor
from guestd.bridge import Bridge
from guestd.identity import Renewer, Step
from guestd.process.seen import SeenIds
from guestd.rpc.calls import OpenCalls
from guestd.rpc.file_service import FileService
from guestd.rpc.guest_service import GuestService
from guestd.rpc.host_service import HostService
from guestd.rpc.process_service import ProcessService

_FILE_THREADS = 4
_STOP_GRACE_S = 1.0
_CLEAN_UP_LIMIT_S = 2.0
_OPTIONS: Sequence[tuple[str, int]] = (
    ("grpc.so_reuseport", 0),
    # The host asks after 20 s of silence; see its link.
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.http2.max_ping_strikes", 0),
)


async def run(path: Path, *, bridge: bool, steps: list[Step], stop: asyncio.Event) -> None:
    """Serves until `stop` is set or the host asks for a power-off.

    Raises:
        OSError, RuntimeError: the directory or the socket cannot be made.
    """
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    power_off = asyncio.Event()
    # Closed by hand below: waiting for a thread that is stuck on a disk would hold the stop.
    for_files = ThreadPoolExecutor(_FILE_THREADS, thread_name_prefix="guestd-files")
    for_host = ThreadPoolExecutor(1, thread_name_prefix="guestd-host")
    calls = OpenCalls()
    server = grpc.aio.server(interceptors=(ErrorInterceptor(calls),), options=_OPTIONS)
    processes = ProcessService(SeenIds(time.monotonic))
    process_service_pb2_grpc.add_ProcessServiceServicer_to_server(processes, server)
    file_service_pb2_grpc.add_FileServiceServicer_to_server(FileService(for_files), server)
    guest_service_pb2_grpc.add_GuestServiceServicer_to_server(GuestService(lambda: processes.running), server)
    host_service_pb2_grpc.add_HostServiceServicer_to_server(
        HostService(Renewer(steps), for_host, power_off), server
    )
    old = os.umask(0o177)
    try:
        server.add_insecure_port(f"unix:{path}")
    finally:
        os.umask(old)
    try:
        async with asyncio.TaskGroup() as group:
            await server.start()
            tasks = [group.create_task(stop.wait()), group.create_task(power_off.wait())]
            joined = [group.create_task(Bridge(str(path)).run())] if bridge else []
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            # The answer to Shutdown is on its way while the grace runs.
            await server.stop(_STOP_GRACE_S)
            for task in (*tasks, *joined):
                task.cancel()
    finally:
        # Once more, for a bridge that failed.
        await server.stop(None)
        await calls.wait_none(_CLEAN_UP_LIMIT_S)
        for executor in (for_files, for_host):
            executor.shutdown(wait=False, cancel_futures=True)
        path.unlink(missing_ok=True)
    if power_off.is_set():
        # systemd's own signal for an orderly power-off.
        os.kill(1, signal.SIGRTMIN + 4)
