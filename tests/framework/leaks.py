"""What a test must not leave behind on the host."""

from __future__ import annotations

import os
from pathlib import Path


def processes_naming(text: str) -> list[str]:
    """Returns `pid: command` of processes whose command line contains `text`, other than ours."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if text in command:
            found.append(f"{entry.name}: {command[:200]}")
    return found


def mounts_naming(text: str) -> list[str]:
    """Returns the host's mounts whose line contains `text`."""
    return [line for line in Path("/proc/mounts").read_text().splitlines() if text in line]


def assert_nothing_left(directory: Path) -> None:
    """Asserts that no process or mount belongs to `directory` and no machine lies in it."""
    assert processes_naming(str(directory)) == []
    assert mounts_naming(str(directory)) == []
    machines = directory / "machines"
    assert not machines.exists() or list(machines.iterdir()) == []


def open_fds(pid: int | str = "self") -> int:
    """Returns how many file descriptors a process has."""
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))
