"""Finds our virtio-serial port; there is no udev to name its device."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from pathlib import Path

SERIAL_PORT_NAME = "cocoon.guestd.0"
_PORTS = Path("/sys/class/virtio-ports")
_DEVICES = Path("/dev")
_NETLINK_KOBJECT_UEVENT = 15
_KERNEL_EVENTS = 1
_LONGEST_EVENT = 8 * 1024


def find_port(ports: Path = _PORTS) -> Path | None:
    """Returns the device of our port, None while there is none."""
    if ports.is_dir():
        for port in sorted(ports.iterdir()):
            # A port appears before its name does.
            with contextlib.suppress(OSError):
                if (port / "name").read_text().strip() == SERIAL_PORT_NAME:
                    return _DEVICES / port.name
    return None


async def wait_port(ports: Path = _PORTS) -> Path:
    """Waits until our port is there, for ever if need be: a machine may have none.

    The driver announces a port's name as a change of the device, so this sleeps
    between the kernel's device events.

    Raises:
        OSError: the kernel does not tell of its devices.
    """
    with socket.socket(
        socket.AF_NETLINK, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK, _NETLINK_KOBJECT_UEVENT
    ) as events:
        # Listening first: what comes before it is seen by the look, what comes after is told.
        events.bind((0, _KERNEL_EVENTS))
        while (port := find_port(ports)) is None:
            # Events lost to a full queue (ENOBUFS) are as good as one that came.
            with contextlib.suppress(OSError):
                await asyncio.get_running_loop().sock_recv(events, _LONGEST_EVENT)
    return port
