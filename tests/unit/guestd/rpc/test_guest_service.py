"""GetInfo says what the guest is now."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from cocoon.guest.v1 import guest_service_pb2 as pb
from cocoon.guest.v1 import guest_service_pb2_grpc
from guestd import __version__
from guestd.rpc.guest_service import GuestService


async def test_info_tells_the_facts(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    running = 0
    service = GuestService(lambda: running)

    def add(server: grpc.aio.Server) -> None:
        guest_service_pb2_grpc.add_GuestServiceServicer_to_server(service, server)

    async with serve(add) as channel:
        stub = guest_service_pb2_grpc.GuestServiceStub(channel)
        first = await stub.GetInfo(pb.GetInfoRequest())
        running = 3
        # A renewal changes the name under a daemon that lives on.
        monkeypatch.setattr(socket, "gethostname", lambda: "renewed")
        second = await stub.GetInfo(pb.GetInfoRequest())
    assert first.guestd_version == __version__
    assert first.kernel_release == os.uname().release
    assert f'PRETTY_NAME="{first.os}"' in Path("/etc/os-release").read_text()
    assert (first.processes, second.processes) == (0, 3)
    assert second.hostname == "renewed" != first.hostname
    assert 0 <= first.uptime.ToNanoseconds() < second.uptime.ToNanoseconds()
