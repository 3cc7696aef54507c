"""The probe with programs in QEMU's place: one that speaks, one that hangs, one that dies."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from nodeagent.engine.qemu import accel
from nodeagent.model import Accelerator
from tests.framework.leaks import processes_naming

# Finds its console as QEMU does, from `-serial file:<path>`, and notes each run.
_FAKE = """#!/bin/sh
echo run >> "$0.runs"
while [ "$1" != -serial ]; do shift; done
console="${2#file:}"
"""
SPEAKS = 'echo "[    0.4] cocoon-init: fatal: cocoon.layers is missing" > "$console"'
HANGS = "echo booting > $console; exec sleep 1000"
DIES = "echo 'KVM internal error' >&2; exit 1"


@pytest.fixture
def fake(tmp_path: Path) -> Callable[[str], Path]:
    def make(behaviour: str) -> Path:
        path = tmp_path / "fake-qemu"
        path.write_text(_FAKE + behaviour + "\n")
        path.chmod(0o755)
        return path

    return make


@pytest.fixture(autouse=True)
def kvm_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda *_: True)


async def decide(qemu: Path, *, kernel: str = "k1", version: str = "7.2") -> Accelerator:
    return await accel.decide(
        qemu=str(qemu),
        qemu_version=version,
        vmlinux=qemu.parent / "vmlinux",
        initramfs=qemu.parent / "initramfs",
        kernel_digest=kernel,
        cache=qemu.parent / "accel.json",
    )


def runs(qemu: Path) -> int:
    path = qemu.with_name(qemu.name + ".runs")
    return len(path.read_text().splitlines()) if path.exists() else 0


async def test_kernel_that_speaks_is_kvm(fake: Callable[[str], Path]) -> None:
    assert await decide(fake(SPEAKS)) is Accelerator.KVM


async def test_kernel_that_hangs_is_tcg_within_the_limit_and_ends(
    fake: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(accel, "LIMIT_S", 0.3)
    qemu = fake(HANGS)
    assert await decide(qemu) is Accelerator.TCG
    assert runs(qemu) == 1
    assert processes_naming(str(qemu.parent)) == []
    assert {path.name for path in qemu.parent.iterdir()} == {"fake-qemu", "fake-qemu.runs", "accel.json"}


async def test_machine_that_dies_is_tcg(fake: Callable[[str], Path]) -> None:
    assert await decide(fake(DIES)) is Accelerator.TCG


async def test_host_without_kvm_is_tcg_unasked(
    fake: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)
    qemu = fake(SPEAKS)
    assert await decide(qemu) is Accelerator.TCG
    assert runs(qemu) == 0


async def test_answer_is_remembered_for_this_kernel_and_qemu(fake: Callable[[str], Path]) -> None:
    qemu = fake(SPEAKS)
    for _ in range(3):
        assert await decide(qemu) is Accelerator.KVM
    assert runs(qemu) == 1
    fake(DIES)
    assert await decide(qemu) is Accelerator.KVM
    assert await decide(qemu, kernel="k2") is Accelerator.TCG
    assert await decide(qemu, kernel="k2", version="8.0") is Accelerator.TCG
    assert runs(qemu) == 3


async def test_answer_of_another_host_boot_is_not_believed(fake: Callable[[str], Path]) -> None:
    qemu = fake(SPEAKS)
    await decide(qemu)
    cache = qemu.parent / "accel.json"
    boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    cache.write_text(cache.read_text().replace(boot_id, "another"))
    await decide(qemu)
    assert runs(qemu) == 2


@pytest.mark.parametrize("text", ["", "{", "[]", '{"key": 1}', "null"])
async def test_broken_memory_is_asked_anew(fake: Callable[[str], Path], text: str) -> None:
    qemu = fake(SPEAKS)
    (qemu.parent / "accel.json").write_text(text)
    assert await decide(qemu) is Accelerator.KVM
    assert json.loads((qemu.parent / "accel.json").read_text())["accelerator"] == "kvm"
