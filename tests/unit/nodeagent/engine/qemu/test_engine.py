"""`prepare` on hosts that lack something. What works is in tests/conformance/test_engine.py."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cocoon_rpc.errors import ImageMissingError, ProvisionFailedError
from nodeagent.engine.qemu.engine import BINARY, QemuEngine

_VERSION = "#!/bin/sh\necho 'QEMU emulator version 9.9.1 (Debian)'\n"


@pytest.fixture
def boot_dir(tmp_path: Path) -> Path:
    directory = tmp_path / "boot"
    directory.mkdir()
    for name in ("vmlinux", "initramfs.cpio"):
        (directory / name).touch()
    (directory / "manifest.json").write_text(json.dumps({"vmlinux_sha256": "0" * 64}))
    return directory


@pytest.fixture
def path_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only directory of programs, empty."""
    directory = tmp_path / "bin"
    directory.mkdir()
    monkeypatch.setenv("PATH", str(directory))
    return directory


def program(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o755)


async def test_host_without_qemu_is_told_what_to_install(
    tmp_path: Path, boot_dir: Path, path_dir: Path
) -> None:
    with pytest.raises(ProvisionFailedError, match="apt-get install qemu-system-x86"):
        await QemuEngine(boot_dir, tmp_path, accel="auto").prepare()


@pytest.mark.parametrize("manifest", [None, "", "[]", "{}", "null"])
async def test_missing_kernel_names_the_command(tmp_path: Path, boot_dir: Path, manifest: str | None) -> None:
    (boot_dir / "manifest.json").unlink()
    if manifest is not None:
        (boot_dir / "manifest.json").write_text(manifest)
    with pytest.raises(ImageMissingError, match="make images") as caught:
        await QemuEngine(boot_dir, tmp_path, accel="auto").prepare()
    assert caught.value.detail.image == "the kernel"


@pytest.mark.parametrize("missing", ["vmlinux", "initramfs.cpio"])
async def test_missing_boot_file_names_the_command(tmp_path: Path, boot_dir: Path, missing: str) -> None:
    (boot_dir / missing).unlink()
    with pytest.raises(ImageMissingError, match="make images"):
        await QemuEngine(boot_dir, tmp_path, accel="auto").prepare()


async def test_kvm_that_does_not_work_is_refused_when_asked_for(
    tmp_path: Path, boot_dir: Path, path_dir: Path
) -> None:
    program(path_dir / BINARY, _VERSION)
    program(path_dir / "mkfs.ext4", "#!/bin/sh\n")
    program(path_dir / "qemu-img", "#!/bin/sh\n")
    with pytest.raises(ProvisionFailedError, match=r"engine\.accel = 'auto'"):
        await QemuEngine(boot_dir, tmp_path, accel="kvm").prepare()


async def test_facts_name_version_and_isolation(tmp_path: Path, boot_dir: Path, path_dir: Path) -> None:
    program(path_dir / BINARY, _VERSION)
    program(path_dir / "mkfs.ext4", "#!/bin/sh\n")
    program(path_dir / "qemu-img", "#!/bin/sh\n")
    facts = await QemuEngine(boot_dir, tmp_path, accel="tcg").prepare()
    assert (facts.version, facts.accelerator.value, facts.isolation.value) == ("9.9.1", "tcg", "vm_emulated")
    assert facts.snapshots
