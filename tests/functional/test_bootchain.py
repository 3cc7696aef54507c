"""The boot chain on a real virtual machine: Debian's kernel, our initramfs, tiny layers made here.

Software emulation always: what is tested is the boot, and a KVM that is there need not run a stock kernel.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from bootchain.build import build
from tests.framework.node import BOOT

_PROBE = Path(__file__).with_name("bootchain_probe.c")
_LIMIT_S = 60.0

pytestmark = [
    pytest.mark.vm,
    pytest.mark.slow,
    pytest.mark.skipif(
        any(shutil.which(t) is None for t in ("qemu-system-x86_64", "mkfs.erofs", "mkfs.ext4", "musl-gcc")),
        reason="run: make setup",
    ),
]


@dataclass(frozen=True)
class Machine:
    """What a boot is made of; serials are the names of the disks."""

    layers: tuple[Path, ...]
    cow: Path
    words: str = ""
    serials: str = "cocoon.layers=bottom,top cocoon.cow=cow"
    console: str = "ttyS0"
    late: bool = False
    """The copy-on-write disk is not there at first: `plug` brings it."""

    def argv(self) -> list[str]:
        """Returns QEMU's command line, its console on stdout."""
        line = f"console={self.console} quiet panic=-1 cryptomgr.notests=1 {self.serials} {self.words}"
        argv = ["qemu-system-x86_64", "-accel", "tcg", "-machine", "q35", "-m", "256", "-nodefaults",
                "-no-user-config", "-no-reboot", "-display", "none", "-chardev", "stdio,id=console",
                "-kernel", f"{BOOT}/vmlinux", "-initrd", f"{BOOT}/initramfs.cpio", "-append", line,
                "-device", "virtio-serial-pci"]  # fmt: skip
        # The copy-on-write disk comes first: the guest must go by serials, not by order.
        for serial, path, options in (
            ("cow", self.cow, ""),
            ("top", self.layers[1], ",readonly=on"),
            ("bottom", self.layers[0], ",readonly=on"),
        ):
            argv += ["-drive", f"if=none,id={serial},format=raw,file={path}{options}"]
            if serial == "cow" and self.late:
                argv += [
                    "-device",
                    "pcie-root-port,id=late-port",
                    "-monitor",
                    f"unix:{self.monitor},server=on,wait=off",
                ]
            else:
                argv += ["-device", f"virtio-blk-pci,drive={serial},serial={serial}"]
        if self.console == "hvc0":
            return [*argv, "-device", "virtconsole,chardev=console"]
        return [*argv, "-serial", "chardev:console"]

    @property
    def monitor(self) -> Path:
        """Where the monitor of a machine with a late disk listens."""
        return self.cow.with_name("monitor")

    def plug(self) -> None:
        """Attaches the late disk to the running machine."""
        with socket.socket(socket.AF_UNIX) as monitor:
            monitor.connect(str(self.monitor))
            monitor.sendall(b"device_add virtio-blk-pci,drive=cow,serial=cow,bus=late-port\n")
            answer = b""
            while answer.count(b"(qemu)") < 2:
                answer += monitor.recv(4096)
        assert b"Error" not in answer


@dataclass
class Console:
    """What a machine printed until it powered off, or until the line that was waited for."""

    text: str = ""
    powered_off: bool = False
    seconds: float = 0.0
    lines: list[str] = field(default_factory=list)

    def says(self, text: str) -> bool:
        """Says whether some line ends in `text`."""
        return any(line.endswith(text) for line in self.lines)


def boot(machine: Machine, *, until: str | None = None) -> Console:
    """Runs a machine until it powers off, or until a line contains `until`; never beyond the limit.

    A late disk is plugged when the modules are loaded, so that /init is already looking for it.
    """
    console = Console()
    started = time.monotonic()
    with subprocess.Popen(
        ["timeout", "--kill-after=1", f"{_LIMIT_S}", *machine.argv()],
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        for raw in process.stdout:
            console.lines.append(raw.decode(errors="replace").rstrip())
            if machine.late and "trace: modules" in console.lines[-1]:
                machine.plug()
            if until is not None and until in console.lines[-1]:
                process.terminate()
        console.powered_off = process.wait() == 0 and until is None
    console.seconds = time.monotonic() - started
    console.text = "\n".join(console.lines)
    return console


@pytest.fixture(scope="module", autouse=True)
def _artifacts() -> None:
    """The kernel and initramfs of these sources."""
    build(BOOT, print)


@pytest.fixture(scope="module")
def layers(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, ...]:
    """Two EROFS layers: the probe and some files below, one hidden and one new file above."""
    folder = tmp_path_factory.mktemp("layers")
    bottom, top = folder / "bottom", folder / "top"
    for layer in (bottom, top):
        (layer / "folder").mkdir(parents=True)
    (bottom / "sbin").mkdir()
    probe = bottom / "sbin" / "init"
    compiler = ["musl-gcc", "-static", "-Os", "-Wall", "-Werror", f"-I{_headers(folder)}"]
    subprocess.run([*compiler, "-o", probe, _PROBE], check=True)
    (bottom / "sbin" / "other").hardlink_to(probe)
    (bottom / "only-bottom").write_text("b")
    (bottom / "both").write_text("hidden")
    (bottom / "folder" / "file").write_text("in a folder")
    (bottom / "link-a").write_text("as in the layer")
    (bottom / "link-b").hardlink_to(bottom / "link-a")
    (top / "only-top").write_text("t")
    (top / "both").write_text("top wins")
    return tuple(_erofs(folder, name, number) for number, name in enumerate(("bottom", "top")))


def _headers(folder: Path) -> Path:
    """Returns a folder with the kernel's headers alone: musl-gcc leaves /usr/include out."""
    include = folder / "include"
    include.mkdir()
    (include / "linux").symlink_to("/usr/include/linux")
    (include / "asm-generic").symlink_to("/usr/include/asm-generic")
    (include / "asm").symlink_to(f"/usr/include/{os.uname().machine}-linux-gnu/asm")
    return include


def _erofs(folder: Path, name: str, number: int) -> Path:
    target = folder / f"{name}.erofs"
    uuid = f"00000000-0000-4000-8000-{number:012d}"
    subprocess.run(["mkfs.erofs", "--quiet", "-T0", f"-U{uuid}", target, folder / name], check=True)
    return target


Make = Callable[..., Machine]


@pytest.fixture
def machine(layers: tuple[Path, ...], tmp_path: Path) -> Make:
    """Makes machines on the two layers and one empty copy-on-write disk."""
    return lambda **facts: Machine(layers, _cow(tmp_path), **facts)


def _cow(folder: Path) -> Path:
    cow = folder / "cow.img"
    if not cow.exists():
        with cow.open("wb") as file:
            file.truncate(32 << 20)
        subprocess.run(["mkfs.ext4", "-q", cow], check=True)
    return cow


@pytest.fixture(scope="module")
def boots(layers: tuple[Path, ...], tmp_path_factory: pytest.TempPathFactory) -> tuple[Console, Console]:
    """Two boots of one machine, with a hostname, a trace and words that nobody knows."""
    cow = _cow(tmp_path_factory.mktemp("boots"))
    words = "cocoon.hostname=box-7 sandbox.trace boot=cocoon-overlay cocoon.later=x other=1"
    first = boot(Machine(layers, cow, words))
    return first, boot(Machine(layers, cow, words))


def test_boot_reaches_init_and_powers_off(boots: tuple[Console, Console]) -> None:
    """From start marker to PID 1 of the image, and a machine that is gone afterwards."""
    first, _ = boots
    assert first.powered_off, first.text
    assert "cocoon-init: start at " in first.text
    assert "cocoon-init: rootfs ready at " in first.text
    assert first.says("probe: pid=1 argv0=/sbin/init")
    assert first.says("probe: done")


def test_boot_stacks_layers_bottom_first(boots: tuple[Console, Console]) -> None:
    """Files of both layers are there, and of two with the same name the upper layer's."""
    first, _ = boots
    assert first.says("probe: file /only-bottom=b")
    assert first.says("probe: file /only-top=t")
    assert first.says("probe: file /both=top wins")


def test_boot_keeps_writes_on_the_cow_disk(boots: tuple[Console, Console]) -> None:
    """What one boot writes the next one reads, though the layers never change."""
    first, second = boots
    assert first.says("probe: file /note=-")
    assert second.says("probe: file /note=from an earlier boot")


def test_boot_gives_a_root_that_behaves_like_a_disk(boots: tuple[Console, Console]) -> None:
    """Hard links stay joined when written to, folders of a layer can be renamed."""
    for console in boots:
        assert console.says("probe: file /link-b=changed")
        assert console.says("probe: file /folder-renamed/file=in a folder")
    assert boots[0].says("probe: rename=works")


def test_boot_sets_the_hostname(boots: tuple[Console, Console]) -> None:
    """`cocoon.hostname` is the kernel's name when the image's init starts."""
    assert boots[0].says("probe: hostname=box-7")


def test_boot_gives_an_empty_machine_id(boots: tuple[Console, Console]) -> None:
    """An image without a machine-id gets an empty one, on every boot."""
    for console in boots:
        assert console.says("probe: machine-id size=0")


def test_boot_loads_what_guests_need(boots: tuple[Console, Console]) -> None:
    """Every module loads; AF_VSOCK talks to itself."""
    first, _ = boots
    assert "does not load" not in first.text
    assert first.says("probe: vsock=works")


def test_boot_mounts_only_the_new_root(boots: tuple[Console, Console]) -> None:
    """The image sees an overlay and the three kernel filesystems; layers and cow disk have no path."""
    mounts = [line.split()[2:5] for line in boots[0].lines if line.startswith("probe: mount ")]
    shown = [(kind, target) for _, target, kind in mounts if kind != "rootfs"]
    assert sorted(shown) == [("devtmpfs", "/dev"), ("overlay", "/"), ("proc", "/proc"), ("sysfs", "/sys")]


def test_boot_traces_each_phase(boots: tuple[Console, Console]) -> None:
    """`sandbox.trace` prints the microseconds of every phase."""
    phases = [line.split()[2] for line in boots[0].lines if line.startswith("cocoon-init: trace: ")]
    assert phases == ["cmdline", "modules", "disks", "mounts", "switch"]


def test_boot_speaks_on_a_virtio_console(machine: Make) -> None:
    """With `console=hvc0`, whose driver is a module, progress and an early fault are seen all the same."""
    console = boot(machine(console="hvc0"))
    assert console.powered_off, console.text
    assert "cocoon-init: rootfs ready at " in console.text
    assert console.says("probe: done")
    faulty = boot(machine(console="hvc0", serials="cocoon.layers=bottom,top"))
    assert faulty.powered_off
    assert "cocoon-init: fatal: cocoon.cow is missing" in faulty.text


def test_boot_waits_for_a_late_disk(machine: Make) -> None:
    """A disk that is attached while /init looks for it is found."""
    console = boot(machine(late=True, words="sandbox.trace"))
    assert console.powered_off, console.text
    assert console.says("probe: done")


def test_boot_takes_another_init(machine: Make) -> None:
    """`sandbox.init` names the program to run."""
    assert "argv0=/sbin/other" in boot(machine(words="sandbox.init=/sbin/other")).text


@pytest.mark.parametrize(
    ("facts", "line"),
    [
        ({"serials": "cocoon.layers=bottom,top"}, "fatal: cocoon.cow is missing"),
        ({"serials": "cocoon.cow=cow"}, "fatal: cocoon.layers is missing"),
        ({"words": "cocoon.timeout=soon"}, "fatal: cocoon.timeout: not a whole number"),
        (
            {"serials": "cocoon.layers=bottom,lost cocoon.cow=cow cocoon.timeout=1"},
            'fatal: no disk with serial "lost" within 1 s: attach it, or correct cocoon.layers',
        ),
        (
            {"serials": "cocoon.layers=bottom,top cocoon.cow=co cocoon.timeout=0"},
            'fatal: no disk with serial "co" within 0 s: attach it, or correct cocoon.cow',
        ),
        ({"serials": "cocoon.layers=bottom,cow cocoon.cow=cow"}, "fatal: cannot mount /dev/vda (erofs)"),
        ({"serials": "cocoon.layers=bottom cocoon.cow=top"}, "fatal: cannot mount /dev/vdb (ext4)"),
        ({"words": "sandbox.init=/sbin/lost"}, "fatal: cannot run /sbin/lost: No such file"),
    ],
    ids=[
        "no-cow",
        "no-layers",
        "timeout",
        "lost-layer",
        "prefix-of-serial",
        "no-erofs",
        "no-ext4",
        "no-init",
    ],
)
def test_boot_that_fails_says_why_and_powers_off(machine: Make, facts: dict[str, str], line: str) -> None:
    """One console line names what is wrong, and the machine goes away by itself."""
    console = boot(machine(**facts))
    assert console.powered_off, console.text
    assert sum("fatal" in text for text in console.lines) == 1
    assert f"cocoon-init: {line}" in console.text
    assert "probe:" not in console.text


def test_boot_that_fails_waits_when_debugged(machine: Make) -> None:
    """With `sandbox.debug` the machine stays up for whoever wants to look."""
    console = boot(machine(words="cocoon.timeout=soon sandbox.debug"), until="waiting for ever")
    assert "fatal: cocoon.timeout" in console.text
    assert "powering off" not in console.text
