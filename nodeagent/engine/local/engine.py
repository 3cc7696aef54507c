"""The `local` engine: fast guests for tests and client development.

guestd runs in its own mount, pid, ipc, uts and net namespaces over an overlay of
the same image, so a test that deletes `/tmp` harms nobody. It shares the host's
kernel and is root there: no boundary, no capture.
"""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
import signal
import sys
from pathlib import Path

from cocoon_rpc.errors import (
    CapabilityMissingError,
    ImageMissingError,
    NodeAtCapacityError,
    ProvisionFailedError,
)
from cocoon_rpc.scope import complete
from nodeagent.engine.base import EngineFacts, Golden, Machine, MachineSpec
from nodeagent.engine.child import Child, end_recorded, start, tail
from nodeagent.engine.local import launcher
from nodeagent.guestlink.lanes import UnixLane
from nodeagent.model import Accelerator, Isolation

_LOG = "launcher.log"
_END_LIMIT_S = 5.0


class LocalMachine:
    """A machine; see `nodeagent.engine.base.Machine`."""

    def __init__(self, spec: MachineSpec, child: Child) -> None:
        """Takes the started launcher."""
        self._spec = spec
        self._child = child

    @property
    def machine_id(self) -> str:
        """The id from the spec."""
        return self._spec.machine_id

    @property
    def pid(self) -> int:
        """The holder's pid; see `launcher`."""
        return self._child.pid

    @property
    def lane(self) -> UnixLane:
        """Guestd's own socket."""
        return UnixLane(self._spec.directory / "share" / "guestd.sock")

    async def pause(self) -> None:
        """Stops every process of the machine."""
        self._signal(signal.SIGSTOP)

    async def resume(self) -> None:
        """Lets them run."""
        self._signal(signal.SIGCONT)

    def _signal(self, number: int) -> None:
        for pid in _descendants(self._child.pid):
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                continue

    async def wait(self) -> None:
        """Returns when the holder has ended."""
        await self._child.wait()

    async def console(self) -> str:
        """Returns the last line it printed."""
        return tail(self._spec.directory / _LOG)

    async def kill(self) -> None:
        """Ends pid 1 of the machine, and with it everything in its namespaces."""
        await complete(self._kill())

    async def _kill(self) -> None:
        await _end(self._child)
        await _removed(self._spec.directory)


class LocalEngine:
    """Makes `local` machines; see `nodeagent.engine.base.Engine`."""

    async def prepare(self) -> EngineFacts:
        """Checks that the host can make namespaces and mounts."""
        if os.geteuid():
            raise ProvisionFailedError(
                stage="prepare", cause="engine local needs root for namespaces and mounts"
            )
        for tool in ("mount", "ip"):
            if shutil.which(tool) is None:
                raise ProvisionFailedError(
                    stage="prepare",
                    cause=f"{tool} is not installed; run: apt-get install util-linux iproute2 mount",
                )
        return EngineFacts("local", "1", Accelerator.NONE, Isolation.NONE, snapshots=False)

    async def boot(self, spec: MachineSpec) -> Machine:
        """Starts the machine; returns before guestd answers."""
        if missing := [layer for layer in spec.image.layers if not layer.is_file()]:
            raise ImageMissingError(image=f"image {missing[0].parent.name}", command="make images")
        child = None
        try:
            (spec.directory / "share").mkdir(mode=0o700, parents=True)
            argv = [
                sys.executable, "-I", "-S", launcher.__file__,
                str(spec.directory.absolute()), *(str(layer.absolute()) for layer in spec.image.layers),
            ]  # fmt: skip
            child = start(argv, log=spec.directory / _LOG)
            child.record(spec.directory)
        except OSError as error:
            if child is not None:
                await complete(_end(child))
            await complete(_removed(spec.directory))
            if error.errno in {errno.ENOSPC, errno.EDQUOT}:
                raise NodeAtCapacityError(resource="disk", cause=str(error)) from error
            raise ProvisionFailedError(stage="boot", cause=str(error)) from error
        return LocalMachine(spec, child)

    async def capture(self, machine: Machine, directory: Path) -> Golden:
        """Cannot; ends the machine as the port says."""
        await machine.kill()
        raise CapabilityMissingError(capability="capture", engine="local")

    async def clone(self, golden: Golden, spec: MachineSpec) -> Machine:
        """Cannot."""
        raise CapabilityMissingError(capability="clone", engine="local")

    async def reap(self, directory: Path) -> None:
        """Ends and removes what a former agent left."""
        await end_recorded(directory)
        await _removed(directory)


async def _end(holder: Child) -> None:
    """Ends a machine's processes; the holder goes last."""
    holder.kill(signal.SIGTERM)
    try:
        async with asyncio.timeout(_END_LIMIT_S):
            await holder.wait()
    except TimeoutError:
        # Then the kernel kills pid 1.
        holder.kill()
        await holder.wait()


async def _removed(directory: Path) -> None:
    """Removes a machine's directory; its mounts end a moment after its last process."""
    for _ in range(200):
        await asyncio.to_thread(shutil.rmtree, directory, ignore_errors=True)
        if not directory.exists():
            return
        await asyncio.sleep(0.01)


def _descendants(pid: int) -> list[int]:
    """Returns the processes below `pid`, parents first."""
    return [each for child in _children(pid) for each in (child, *_descendants(child))]


def _children(pid: int) -> list[int]:
    files = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for file in files for child in file.read_text().split()]
