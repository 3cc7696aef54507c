"""QEMU's command line, as a pure function."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nodeagent.engine.qemu.argv import CONSOLE_FD, QMP_FD, STATE_FD, Kernel, Memory, build, command_line
from nodeagent.model import Accelerator, Size

_MACHINE: dict[str, Any] = {
    "qemu": "/usr/bin/qemu",
    "machine_id": "m-0123456789abcdef",
    "accelerator": Accelerator.TCG,
    "size": Size.SMALL,
    "memory": Memory(),
    "layers": (Path("/images/base"), Path("/images/rt")),
    "cow": Path("/m/cow.qcow2"),
    "serial_socket": Path("/m/serial.sock"),
}
_KERNEL = Kernel(Path("/boot/vmlinux"), Path("/boot/initramfs"), "m-0123456789abcdef")


def _argv(**changes: Any) -> list[str]:
    return build(**{**_MACHINE, **changes})


def _values(argv: list[str], option: str) -> list[str]:
    return [argv[i + 1] for i, word in enumerate(argv) if word == option]


def _without(argv: list[str], *options: str) -> list[str]:
    skipped = {i + step for i, word in enumerate(argv) if word in options for step in (0, 1)}
    return [word for i, word in enumerate(argv) if i not in skipped]


def test_clone_differs_from_its_golden_in_memory_kernel_and_incoming_state_only() -> None:
    golden = _argv(memory=Memory(Path("/m/ram"), shared=True), kernel=_KERNEL)
    clone = _argv(memory=Memory(Path("/golden/ram")), incoming=True)
    ram = [f"memory-backend-file,id=ram,size={512 * 2**20},mem-path=/m/ram,share=on"]
    assert [v for v in _values(golden, "-object") if v.startswith("memory")] == ram
    private = ram[0].replace("/m/ram,share=on", "/golden/ram,share=off")
    assert _without(golden, "-kernel", "-initrd", "-append") == [
        ram[0] if word == private else word for word in _without(clone, "-global", "-incoming")
    ]
    assert _values(clone, "-incoming") == [f"fd:{STATE_FD}"]


@pytest.mark.parametrize("kind", list(Accelerator)[:2])
def test_accelerator_decides_the_cpu(kind: Accelerator) -> None:
    argv = _argv(accelerator=kind)
    assert _values(argv, "-accel")[0].split(",")[0] == kind.value
    assert _values(argv, "-cpu") == ["host" if kind is Accelerator.KVM else "max"]


@pytest.mark.parametrize("size", Size)
def test_size_is_cpus_and_memory(size: Size) -> None:
    argv = _argv(size=size)
    assert _values(argv, "-smp") == [str(size.cpus)]
    assert _values(argv, "-m") == [f"size={size.memory_bytes // 2**20}M"]
    assert f"memory-backend-ram,id=ram,size={size.memory_bytes}" in argv


def test_comma_in_a_path_is_written_twice() -> None:
    odd = Path("/odd,readonly=off,dir")
    argv = _argv(
        memory=Memory(odd / "ram"),
        layers=(odd / "l",),
        cow=odd / "c",
        serial_socket=odd / "s",
        kernel=_KERNEL,
    )
    paths = [word for word in argv if "/odd" in word]
    assert len(paths) == 4
    assert all("/odd,,readonly=off,,dir/" in word for word in paths)


def test_layers_are_read_only_and_only_they() -> None:
    drives = _values(_argv(), "-drive")
    assert [drive.split(",")[0] for drive in drives] == ["id=layer0", "id=layer1", "id=cow"]
    assert ["readonly=on" in drive.split(",") for drive in drives] == [True, True, False]
    assert [f"file={path}" in drive for path, drive in zip(_MACHINE["layers"], drives, strict=False)] == [
        True
    ] * 2


def test_serials_of_disks_are_what_the_command_line_names() -> None:
    words = dict(w.split("=", 1) for w in command_line(2, "guest").split() if "=" in w)
    devices = [d for d in _values(_argv(kernel=_KERNEL), "-device") if d.startswith("virtio-blk")]
    serials = [field.removeprefix("serial=") for d in devices for field in d.split(",") if "serial=" in field]
    assert [*words["cocoon.layers"].split(","), words["cocoon.cow"]] == serials


def test_command_line_has_the_documented_keys() -> None:
    words = dict((*w.split("=", 1), "")[:2] for w in command_line(3, "m-1").split())
    assert words["cocoon.layers"] == "layer0,layer1,layer2"
    assert words["cocoon.cow"] == "cow"
    assert words["cocoon.hostname"] == "m-1"
    assert words["console"] == "ttyS0"


def test_hypervisor_is_confined() -> None:
    """No default device, no file of the host's configuration, no new program."""
    argv = _argv()
    assert {"-nodefaults", "-no-user-config"} <= set(argv)
    assert {"on", "spawn=deny", "elevateprivileges=deny"} <= set(_values(argv, "-sandbox")[0].split(","))
    assert not [word for word in argv if word.startswith(("-net", "user,", "tap,"))]


def test_monitor_and_console_are_on_inherited_fds_alone() -> None:
    sockets = [chardev for chardev in _values(_argv(), "-chardev") if chardev.startswith("socket")]
    assert sockets == [
        f"socket,id=qmp,fd={QMP_FD}",
        f"socket,id=console,fd={CONSOLE_FD}",
        "socket,id=guestd,path=/m/serial.sock,server=on,wait=off",
    ]


def test_build_is_pure() -> None:
    assert _argv(kernel=_KERNEL) == _argv(kernel=replace(_KERNEL))
