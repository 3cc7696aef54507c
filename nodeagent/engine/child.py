"""Host processes that are machines: started without a fork of Python, ended with proof.

A record of pid, start time and boot id lies in the machine's directory, so that a
later agent can end what an earlier one left, and never anybody else's process.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path

from cocoon_rpc.errors import ProvisionFailedError
from cocoon_rpc.scope import complete

RECORD = "process.json"
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class Child:
    """A process of ours, watched by its pidfd."""

    def __init__(self, pid: int) -> None:
        """Takes a child that was just started."""
        self.pid = pid
        self.status: int | None = None
        self._pidfd = os.pidfd_open(pid)
        self._ended = asyncio.Event()
        asyncio.get_running_loop().add_reader(self._pidfd, self._reap)

    def _reap(self) -> None:
        asyncio.get_running_loop().remove_reader(self._pidfd)
        os.close(self._pidfd)
        _, self.status = os.waitpid(self.pid, 0)
        self._ended.set()

    async def wait(self) -> None:
        """Returns when it has ended and was reaped."""
        await self._ended.wait()

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Sends a signal; no effect on one that has ended."""
        if not self._ended.is_set():
            signal.pidfd_send_signal(self._pidfd, number)

    def record(self, directory: Path) -> None:
        """Writes down who it is. Raises: OSError."""
        facts = {"pid": self.pid, "start_time": start_time(self.pid), "boot_id": _BOOT_ID.read_text().strip()}
        (directory / RECORD).write_text(json.dumps(facts))


def start(
    argv: Sequence[str],
    *,
    log: Path,
    inherit: Mapping[int, int] | None = None,
    env: Mapping[str, str] | None = None,
) -> Child:
    """Starts a program in a session of its own; its output goes to `log`.

    Args:
        argv: program (absolute path) and arguments.
        log: file for standard output and error; made new.
        inherit: fd in the child → fd of ours.
        env: the whole environment; default: PATH alone.

    Raises:
        OSError: it cannot be started.
    """
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    null = os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)
    try:
        actions = _placed({0: null, 1: output, 2: output, **(inherit or {})})
        environment = dict(env or {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"})
        pid = os.posix_spawn(
            argv[0],
            list(argv),
            environment,
            file_actions=actions,
            setsid=True,
            setsigmask=(),
            setsigdef=(signal.SIGPIPE,),
        )
    finally:
        os.close(output)
        os.close(null)
    return Child(pid)


def _placed(fds: Mapping[int, int]) -> list[tuple[int, ...]]:
    """Returns spawn actions that give the child `fds` (its fd → ours).

    By way of numbers that nobody has: one of ours may have the number of another of its.
    """
    free = max(*fds, *fds.values()) + 1
    steps = list(enumerate(fds.items(), free))
    actions: list[tuple[int, ...]] = [(os.POSIX_SPAWN_DUP2, ours, between) for between, (_, ours) in steps]
    for between, (theirs, _) in steps:
        actions += [(os.POSIX_SPAWN_DUP2, between, theirs), (os.POSIX_SPAWN_CLOSE, between)]
    return actions


async def run_tool(argv: Sequence[str], *, log: Path, limit_s: float) -> str:
    """Runs a tool to its end and returns what it printed; the event loop's own way would fork under grpc.

    Raises:
        ProvisionFailedError: not installed, too slow, or it failed; the text has its last line.
    """
    program = shutil.which(argv[0])
    if program is None:
        raise ProvisionFailedError(stage="prepare", cause=f"{argv[0]} is not installed; run: make setup")
    try:
        child = start([program, *argv[1:]], log=log)
        try:
            async with asyncio.timeout(limit_s):
                await child.wait()
        finally:
            child.kill()
            await complete(child.wait())
        if child.status:
            raise ProvisionFailedError(stage="prepare", cause=f"{argv[0]}: {tail(log) or 'failed'}")
        return log.read_text(errors="replace")
    except TimeoutError:
        raise ProvisionFailedError(
            stage="prepare", cause=f"{argv[0]} took longer than {limit_s:.0f} s"
        ) from None
    finally:
        log.unlink(missing_ok=True)


def start_time(pid: int) -> int | None:
    """Returns a process's start in clock ticks since boot (field 22 of stat); None if there is none."""
    with contextlib.suppress(OSError, IndexError, ValueError):
        stat = Path(f"/proc/{pid}/stat").read_text()
        return int(stat.rpartition(")")[2].split()[19])
    return None


async def end_recorded(directory: Path) -> None:
    """Ends the process a former agent recorded in `directory`, if it is still that one."""
    try:
        facts = json.loads((directory / RECORD).read_text())
        pid, started, boot_id = int(facts["pid"]), int(facts["start_time"]), str(facts["boot_id"])
    except (OSError, ValueError, KeyError, TypeError):
        return
    if boot_id != _BOOT_ID.read_text().strip():
        return
    try:
        pidfd = os.pidfd_open(pid)
    except (OSError, OverflowError):
        return
    try:
        # The pidfd holds whoever has the pid now; only then is the start time its own.
        if start_time(pid) != started:
            return
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        gone = asyncio.Event()
        asyncio.get_running_loop().add_reader(pidfd, gone.set)
        try:
            await gone.wait()
        finally:
            asyncio.get_running_loop().remove_reader(pidfd)
    finally:
        os.close(pidfd)


def tail(log: Path, limit: int = 300) -> str:
    """Returns the last line of a log, printable and bounded: a guest may have written it."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - 4096))
            lines = file.read().decode(errors="replace").strip().splitlines()
    except OSError:
        return ""
    return printable(lines[-1])[-limit:] if lines else ""


def printable(text: str) -> str:
    """Returns text without control characters."""
    return "".join(c for c in text if c.isprintable())


def pair() -> tuple[socket.socket, socket.socket]:
    """Returns a connected pair of stream sockets, closed on exec."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
