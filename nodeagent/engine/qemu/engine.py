"""The engine: boot, capture, clone.

A golden is three files: `ram` (guest memory, which each clone maps privately, so
clones share what they have not written), `state` (devices, some 14 KB) and
`cow.qcow2` (the disk that clones' overlays stand on); its manifest is written last.
The golden of a clone has its memory whole, but its disk stands on its ancestor's.
"""

from __future__ import annotations

import asyncio
import errno
import json
import os
import re
import shutil
import socket
from pathlib import Path

from cocoon_rpc.errors import (
    CapabilityMissingError,
    ImageMissingError,
    NodeAtCapacityError,
    ProvisionFailedError,
)
from cocoon_rpc.scope import complete
from nodeagent.engine.base import EngineFacts, Golden, Machine, MachineSpec
from nodeagent.engine.child import Child, end_recorded, pair, run_tool, start
from nodeagent.engine.qemu import accel, argv, disks, ram
from nodeagent.engine.qemu.console import Console
from nodeagent.engine.qemu.machine import COW, LOG, RAM, SERIAL, QemuMachine, failure
from nodeagent.engine.qemu.qmp import Monitor, MonitorError
from nodeagent.model import Accelerator, Isolation

BINARY = "qemu-system-x86_64"
STATE = "state"
MANIFEST = "manifest.json"
_QUIT_LIMIT_S = 5.0
_TOOL_LIMIT_S = 30.0


class QemuEngine:
    """Makes machines with QEMU; see `nodeagent.engine.base.Engine`."""

    def __init__(self, boot_dir: Path, data_dir: Path, *, accel: str) -> None:
        """Takes where kernel and initramfs are, where to keep its own files, and `auto`, `kvm` or `tcg`."""
        self._vmlinux = (boot_dir / "vmlinux").absolute()
        self._initramfs = (boot_dir / "initramfs.cpio").absolute()
        self._boot_manifest = boot_dir / "manifest.json"
        self._data_dir = data_dir.absolute()
        self._blank = self._data_dir / "blank.ext4"
        self._accel = accel
        self._accelerator = Accelerator.TCG
        self._qemu = ""

    async def prepare(self) -> EngineFacts:
        """Checks host and artifacts; decides the accelerator."""
        try:
            digest = str(json.loads(self._boot_manifest.read_text())["vmlinux_sha256"])
            for artifact in (self._vmlinux, self._initramfs):
                artifact.stat()
        except (OSError, ValueError, KeyError, TypeError):
            raise ImageMissingError(image="the kernel", command="make images") from None
        self._qemu = shutil.which(BINARY) or ""
        if not self._qemu:
            raise ProvisionFailedError(
                stage="prepare",
                cause=f"{BINARY} is not installed; run: apt-get install qemu-system-x86 qemu-utils",
            )
        version = await self._version()
        await disks.make_blank(self._blank)
        self._accelerator = await self._decide(version, digest)
        hardware = self._accelerator is Accelerator.KVM
        return EngineFacts(
            name="qemu",
            version=version,
            accelerator=self._accelerator,
            isolation=Isolation.VM_HARDWARE if hardware else Isolation.VM_EMULATED,
            snapshots=True,
        )

    async def _decide(self, version: str, digest: str) -> Accelerator:
        if self._accel == "tcg":
            return Accelerator.TCG
        found = await accel.decide(
            qemu=self._qemu,
            qemu_version=version,
            vmlinux=self._vmlinux,
            initramfs=self._initramfs,
            kernel_digest=digest,
            cache=self._data_dir / "accel.json",
        )
        if self._accel == "kvm" and found is not Accelerator.KVM:
            raise ProvisionFailedError(
                stage="prepare", cause="KVM does not run our kernel on this host; set engine.accel = 'auto'"
            )
        return found

    async def _version(self) -> str:
        log = self._data_dir / "version.log"
        output = await run_tool([self._qemu, "--version"], log=log, limit_s=_TOOL_LIMIT_S)
        found = re.search(r"version (\S+)", output)
        return found.group(1) if found else "unknown"

    async def boot(self, spec: MachineSpec) -> Machine:
        """Boots a machine from its image."""
        memory = argv.Memory(spec.directory / RAM, shared=True) if spec.capturable else argv.Memory()
        kernel = argv.Kernel(self._vmlinux, self._initramfs, spec.machine_id)
        return await self._start("boot", spec, memory, self._blank, kernel=kernel)

    async def clone(self, golden: Golden, spec: MachineSpec) -> Machine:
        """Makes a running machine from a golden."""
        folder = golden.directory
        # QEMU would make an absent memory file anew and run a machine of zeros.
        parts = (MANIFEST, STATE, RAM, COW, disks.overlay_of(folder / COW).name)
        if missing := [name for name in parts if not (folder / name).is_file()]:
            raise ProvisionFailedError(
                stage="clone", cause=f"{folder.name} is no complete golden: it has no {missing[0]}"
            )
        try:
            state = os.open(folder / STATE, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise _typed("clone", error) from error
        try:
            machine = await self._start("clone", spec, argv.Memory(folder / RAM), folder / COW, state=state)
        finally:
            os.close(state)
        try:
            # While the state still loads this asks for the start after it.
            await machine.command("clone", "cont")
        except BaseException:
            await machine.kill()
            raise
        return machine

    async def capture(self, machine: Machine, directory: Path) -> Golden:
        """Snapshots a machine that was booted to be captured, or cloned, and ends it."""
        assert isinstance(machine, QemuMachine)
        parts = directory.with_name(directory.name + ".new")
        try:
            try:
                await self._collect(machine, parts, directory)
            finally:
                await machine.kill()
            # Last, and nothing is awaited after it: one that was cancelled has made no golden.
            parts.rename(directory)
        except BaseException as error:
            await complete(asyncio.to_thread(shutil.rmtree, parts, ignore_errors=True))
            if isinstance(error, ram.MappingError):
                raise ProvisionFailedError(stage="capture", cause=str(error)) from error
            if isinstance(error, OSError):
                # TimeoutError is one, too.
                raise _typed("capture", error) from error
            raise
        return Golden(directory, machine.spec.image, machine.spec.size)

    async def _collect(self, machine: QemuMachine, parts: Path, directory: Path) -> None:
        """Stops the machine for ever and puts into `parts` what makes the golden at `directory`."""
        memory = machine.memory.path
        if memory is None:
            raise CapabilityMissingError(capability="capture of a machine booted without it", engine="qemu")
        cloned = not machine.memory.shared
        await asyncio.to_thread(shutil.rmtree, parts, ignore_errors=True)
        parts.mkdir(mode=0o700)
        if cloned:
            await complete(asyncio.to_thread(ram.copy_sparse, memory, parts / RAM))
        await machine.pause()
        await machine.command("capture", "xen-save-devices-state", filename=str(parts / STATE), live=False)
        if cloned:
            await complete(asyncio.to_thread(ram.overlay_written, machine.pid, memory, parts / RAM))
        # Disks were flushed by the pause; the rest goes by itself.
        await machine.command("capture", "quit")
        async with asyncio.timeout(_QUIT_LIMIT_S):
            await machine.wait()
        if not cloned:
            memory.rename(parts / RAM)
        (machine.spec.directory / COW).rename(parts / COW)
        await disks.make_overlay(directory / COW, "qcow2", disks.overlay_of(parts / COW))
        facts = {"image": machine.spec.image.digest, "size": machine.spec.size.label}
        (parts / MANIFEST).write_text(json.dumps(facts))

    async def reap(self, directory: Path) -> None:
        """Ends and removes what a former agent left."""
        await end_recorded(directory)
        await asyncio.to_thread(shutil.rmtree, directory, ignore_errors=True)

    async def _start(
        self,
        stage: str,
        spec: MachineSpec,
        memory: argv.Memory,
        backing: Path,
        *,
        kernel: argv.Kernel | None = None,
        state: int | None = None,
    ) -> QemuMachine:
        """Starts QEMU and waits for its monitor; on failure nothing is left."""
        missing = [layer for layer in spec.image.layers if not layer.is_file()]
        if missing:
            raise ImageMissingError(image=f"image {spec.image.name}", command="make images")
        child: Child | None = None
        ends: list[socket.socket] = []
        try:
            ends += (*pair(), *pair())
            monitor_end, its_monitor, console_end, its_console = ends
            if memory.shared:
                # QEMU is killed, not told, when its memory file finds no block left.
                disks.require_free(spec.directory.parent, spec.size.memory_bytes)
            spec.directory.mkdir(mode=0o700)
            disks.copy_overlay(backing, spec.directory / COW)
            command = argv.build(
                qemu=self._qemu,
                machine_id=spec.machine_id,
                accelerator=self._accelerator,
                size=spec.size,
                memory=memory,
                layers=spec.image.layers,
                cow=spec.directory / COW,
                serial_socket=spec.directory / SERIAL,
                kernel=kernel,
                incoming=state is not None,
            )
            inherit = {argv.QMP_FD: its_monitor.fileno(), argv.CONSOLE_FD: its_console.fileno()}
            if state is not None:
                inherit[argv.STATE_FD] = state
            child = start(command, log=spec.directory / LOG, inherit=inherit)
            its_monitor.close()
            its_console.close()
            child.record(spec.directory)
            monitor = Monitor(spec.machine_id)
            await monitor.open(monitor_end)
            return QemuMachine(spec, child, monitor, Console(console_end), memory)
        except BaseException as error:
            for end in ends:
                end.close()
            if child is not None:
                child.kill()
                await complete(child.wait())
            cause = failure(stage, str(error), spec.directory) if isinstance(error, MonitorError) else error
            await complete(asyncio.to_thread(shutil.rmtree, spec.directory, ignore_errors=True))
            if isinstance(cause, OSError):
                cause = _typed(stage, cause)
            if cause is error:
                raise
            raise cause from error


def _typed(stage: str, error: OSError) -> ProvisionFailedError | NodeAtCapacityError:
    if error.errno in {errno.ENOSPC, errno.EDQUOT}:
        return NodeAtCapacityError(resource="disk", cause=str(error))
    return ProvisionFailedError(stage=stage, cause=str(error) or type(error).__name__)
