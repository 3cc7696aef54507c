"""Our virtio-serial port is found by its name, when it comes."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from guestd.vports import SERIAL_PORT_NAME, find_port, wait_port


def _port(ports: Path, port: str, name: str) -> None:
    (ports / port).mkdir()
    (ports / port / "name").write_text(name + "\n")


@pytest.mark.parametrize(("name", "found"), [(SERIAL_PORT_NAME, Path("/dev/vport1p1")), ("other", None)])
def test_port_is_found_by_its_name(tmp_path: Path, name: str, found: Path | None) -> None:
    _port(tmp_path, "vport0p1", "console")
    _port(tmp_path, "vport1p1", name)
    assert find_port(tmp_path) == found


def test_port_without_a_name_yet_is_passed_over(tmp_path: Path) -> None:
    (tmp_path / "vport0p1").mkdir()
    _port(tmp_path, "vport1p1", SERIAL_PORT_NAME)
    assert find_port(tmp_path) == Path("/dev/vport1p1")


def test_port_is_none_without_the_driver(tmp_path: Path) -> None:
    assert find_port(tmp_path / "missing") is None


async def test_port_that_is_there_is_not_waited_for(tmp_path: Path) -> None:
    _port(tmp_path, "vport1p1", SERIAL_PORT_NAME)
    assert await asyncio.wait_for(wait_port(tmp_path), 5) == Path("/dev/vport1p1")


async def test_port_that_never_comes_is_waited_for(tmp_path: Path) -> None:
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(wait_port(tmp_path), 0.1)
