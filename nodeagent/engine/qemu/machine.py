"""One running QEMU and its directory."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

from cocoon_rpc.errors import CocoonError, NodeAtCapacityError, ProvisionFailedError
from cocoon_rpc.scope import complete
from nodeagent.engine.base import MachineSpec
from nodeagent.engine.child import Child, tail
from nodeagent.engine.qemu.argv import Memory
from nodeagent.engine.qemu.console import Console
from nodeagent.engine.qemu.qmp import Monitor, MonitorError
from nodeagent.guestlink.lanes import SerialLane

LOG = "qemu.log"
SERIAL = "serial.sock"
COW = "cow.qcow2"
RAM = "ram"


class QemuMachine:
    """A machine; see `nodeagent.engine.base.Machine`."""

    def __init__(
        self, spec: MachineSpec, child: Child, monitor: Monitor, console: Console, memory: Memory
    ) -> None:
        """Takes a started process, its monitor and console, and where its memory lies."""
        self.spec = spec
        self.monitor = monitor
        self.memory = memory
        self._child = child
        self._console = console
        self._killed = False

    @property
    def machine_id(self) -> str:
        """The id from the spec."""
        return self.spec.machine_id

    @property
    def pid(self) -> int:
        """QEMU's pid."""
        return self._child.pid

    @property
    def lane(self) -> SerialLane:
        """The virtio-serial port."""
        return SerialLane(self.spec.directory / SERIAL)

    async def pause(self) -> None:
        """Stops the guest's cpus; its disks are flushed."""
        await self.command("pause", "stop")

    async def resume(self) -> None:
        """Lets them run."""
        await self.command("resume", "cont")

    async def wait(self) -> None:
        """Returns when QEMU has ended."""
        await self._child.wait()

    async def console(self) -> str:
        """Returns the console's last line; after the machine's death its last words."""
        return self._console.last_line()

    async def kill(self) -> None:
        """Ends QEMU and removes the directory."""
        if not self._killed:
            self._killed = True
            await complete(self._kill())

    async def _kill(self) -> None:
        self._child.kill()
        await self._child.wait()
        await self.monitor.close()
        self._console.close()
        await asyncio.to_thread(shutil.rmtree, self.spec.directory, ignore_errors=True)

    async def command(self, stage: str, name: str, **arguments: object) -> object:
        """Runs a monitor command. Raises: ProvisionFailedError, NodeAtCapacityError."""
        try:
            return await self.monitor.execute(name, **arguments)
        except MonitorError as error:
            raise failure(stage, str(error), self.spec.directory) from error


def failure(stage: str, cause: str, directory: Path) -> CocoonError:
    """Returns the error for a QEMU that failed; what it printed last says why."""
    said = tail(directory / LOG)
    text = f"{cause}; {said}" if said else cause
    if "No space left on device" in text or "Disk quota exceeded" in text:
        return NodeAtCapacityError(resource="disk", cause=text)
    if "Cannot allocate memory" in text or "cannot set up guest memory" in text:
        return NodeAtCapacityError(resource="memory", cause=text)
    return ProvisionFailedError(stage=stage, cause=text)
