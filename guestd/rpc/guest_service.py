"""GuestService: see the contract for what each method promises."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from pathlib import Path

from google.protobuf.duration_pb2 import Duration

from cocoon.guest.v1 import guest_service_pb2 as pb
from cocoon.guest.v1 import guest_service_pb2_grpc
from cocoon_rpc.interceptors import Context
from guestd import __version__


class GuestService(guest_service_pb2_grpc.GuestServiceServicer):
    """Facts of the guest."""

    def __init__(self, running: Callable[[], int]) -> None:
        """Takes the count of running programs."""
        self._running = running
        self._started = time.monotonic_ns()
        self._os = _pretty_name()

    async def GetInfo(self, request: pb.GetInfoRequest, context: Context) -> pb.GetInfoResponse:
        """Returns what the guest is."""
        seconds, nanos = divmod(time.monotonic_ns() - self._started, 10**9)
        return pb.GetInfoResponse(
            guestd_version=__version__,
            kernel_release=os.uname().release,
            hostname=socket.gethostname(),
            os=self._os,
            uptime=Duration(seconds=seconds, nanos=nanos),
            processes=self._running(),
        )


def _pretty_name() -> str:
    try:
        lines = Path("/etc/os-release").read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        return ""
    facts = dict(line.split("=", 1) for line in lines if "=" in line)
    return facts.get("PRETTY_NAME", "").strip('"')
