"""Copy-on-write disks, by the tools that QEMU itself comes with."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from cocoon_rpc.errors import NodeAtCapacityError, ProvisionFailedError
from nodeagent.engine.qemu import disks


def _info(path: Path) -> dict[str, object]:
    command = ["qemu-img", "info", "-U", "--output=json", str(path)]
    facts: dict[str, object] = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
    return facts


async def test_blank_is_an_empty_sparse_file_system(tmp_path: Path) -> None:
    blank = tmp_path / "blank.ext4"
    await disks.make_blank(blank)
    assert blank.stat().st_size == disks.COW_BYTES
    assert blank.stat().st_blocks * 512 < 64 * 2**20
    subprocess.run(["e2fsck", "-f", "-n", blank], check=True, capture_output=True)
    assert {path.name for path in tmp_path.iterdir()} == {"blank.ext4", "blank.ext4.overlay"}


async def test_blank_is_made_once(tmp_path: Path) -> None:
    blank = tmp_path / "blank.ext4"
    await disks.make_blank(blank)
    made = blank.stat()
    await disks.make_blank(blank)
    assert blank.stat().st_ino == made.st_ino
    assert blank.stat().st_mtime_ns == made.st_mtime_ns


async def test_blank_that_cannot_be_made_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ProvisionFailedError, match=r"mkfs\.ext4 is not installed"):
        await disks.make_blank(tmp_path / "blank.ext4")
    assert list(tmp_path.iterdir()) == []


async def test_machine_gets_a_small_disk_that_stands_on_its_backing(tmp_path: Path) -> None:
    blank = tmp_path / "blank.ext4"
    await disks.make_blank(blank)
    (tmp_path / "m").mkdir()
    disks.copy_overlay(blank, tmp_path / "m" / "cow.qcow2")
    facts = _info(tmp_path / "m" / "cow.qcow2")
    assert facts["backing-filename"] == str(blank)
    assert facts["backing-filename-format"] == "raw"
    assert facts["virtual-size"] == disks.COW_BYTES
    assert (tmp_path / "m" / "cow.qcow2").stat().st_size < 2**20


async def test_overlay_may_be_made_before_its_backing_is_in_place(tmp_path: Path) -> None:
    await disks.make_overlay(tmp_path / "golden" / "cow.qcow2", "qcow2", tmp_path / "new.overlay")
    facts = _info(tmp_path / "new.overlay")
    assert facts["backing-filename"] == str(tmp_path / "golden" / "cow.qcow2")
    assert facts["backing-filename-format"] == "qcow2"


def test_disk_without_an_overlay_to_copy_is_an_os_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        disks.copy_overlay(tmp_path / "absent", tmp_path / "cow.qcow2")


def test_free_space_is_required(tmp_path: Path) -> None:
    disks.require_free(tmp_path, 1)
    with pytest.raises(NodeAtCapacityError, match="are needed in") as caught:
        disks.require_free(tmp_path, 2**60)
    assert caught.value.detail.resource == "disk"
