"""QEMU's command line: a pure function of what the machine is.

A clone must be built exactly like the machine its golden was taken from, so both
come from here. Differences: memory (private instead of shared), the incoming state,
and the kernel, which a clone has in its memory already: loading the 40 MB again
would be most of its start.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from nodeagent.guestlink.lanes import SERIAL_PORT_NAME
from nodeagent.model import Accelerator, Size

# Devices of the board that no guest of ours uses.
_TRIMMED = "usb=off,vmport=off,smm=off,hpet=off,sata=off,smbus=off,graphics=off"
QMP_FD = 20
STATE_FD = 21
CONSOLE_FD = 22


@dataclass(frozen=True, slots=True)
class Memory:
    """Where guest memory lies: anonymous (path None), or a file."""

    path: Path | None = None
    shared: bool = False
    """Shared: writes reach the file (a golden in the making). Else copy on write."""


@dataclass(frozen=True, slots=True)
class Kernel:
    """What is booted."""

    vmlinux: Path
    initramfs: Path
    hostname: str


def build(
    *,
    qemu: str,
    machine_id: str,
    accelerator: Accelerator,
    size: Size,
    memory: Memory,
    layers: tuple[Path, ...],
    cow: Path,
    serial_socket: Path,
    kernel: Kernel | None = None,
    incoming: bool = False,
) -> list[str]:
    """Returns argv. `QMP_FD` is the monitor, `CONSOLE_FD` the console, `STATE_FD` an incoming state."""
    argv = [
        qemu,
        "-name", machine_id,
        "-nodefaults", "-no-user-config", "-no-reboot", "-display", "none",
        "-machine", f"q35,memory-backend=ram,{_TRIMMED}",
        "-accel", "kvm" if accelerator is Accelerator.KVM else "tcg,thread=multi",
        "-cpu", "host" if accelerator is Accelerator.KVM else "max",
        "-smp", str(size.cpus),
        "-m", f"size={size.memory_bytes // 2**20}M",
        "-object", _memory(memory, size),
        "-sandbox", "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny",
        "-chardev", f"socket,id=qmp,fd={QMP_FD}",
        "-mon", "chardev=qmp,mode=control",
        "-chardev", f"socket,id=console,fd={CONSOLE_FD}",
        "-serial", "chardev:console",
        "-device", "virtio-serial-pci,max_ports=2",
        "-chardev", f"socket,id=guestd,path={_quoted(serial_socket)},server=on,wait=off",
        "-device", f"virtserialport,chardev=guestd,name={SERIAL_PORT_NAME}",
        "-object", "rng-builtin,id=rng",
        "-device", "virtio-rng-pci,rng=rng",
    ]  # fmt: skip
    for index, layer in enumerate(layers):
        argv += _disk(f"layer{index}", layer, "raw", ",readonly=on")
    argv += _disk("cow", cow, "qcow2", ",discard=unmap,werror=report,rerror=report")
    if kernel is not None:
        argv += ["-kernel", str(kernel.vmlinux), "-initrd", str(kernel.initramfs)]
        argv += ["-append", command_line(len(layers), kernel.hostname)]
    if incoming:
        # The state was saved without machine configuration and description.
        argv += ["-global", "migration.send-configuration=off", "-incoming", f"fd:{STATE_FD}"]
    return argv


def command_line(layer_count: int, hostname: str) -> str:
    """Returns the kernel's command line; keys as docs/boot.md lists them."""
    serials = ",".join(f"layer{index}" for index in range(layer_count))
    # The crypto self-tests are a tenth of the kernel's start under emulation.
    return (
        "console=ttyS0 quiet panic=-1 reboot=t random.trust_cpu=on cryptomgr.notests=1 "
        f"cocoon.layers={serials} cocoon.cow=cow "
        f"cocoon.hostname={hostname}"
    )


def _memory(memory: Memory, size: Size) -> str:
    if memory.path is None:
        return f"memory-backend-ram,id=ram,size={size.memory_bytes}"
    shared = "on" if memory.shared else "off"
    return (
        f"memory-backend-file,id=ram,size={size.memory_bytes},mem-path={_quoted(memory.path)},share={shared}"
    )


def _disk(serial: str, path: Path, kind: str, options: str) -> list[str]:
    return [
        "-drive", f"id={serial},if=none,format={kind},file={_quoted(path)}{options}",
        "-device", f"virtio-blk-pci,drive={serial},serial={serial},num-queues=1",
    ]  # fmt: skip


def _quoted(path: Path) -> str:
    """Returns a path as a value in a QEMU option list, where a comma is written twice."""
    return str(path).replace(",", ",,")
