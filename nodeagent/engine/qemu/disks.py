"""Copy-on-write disks. No process is started for a clone: an overlay is a small file that is copied."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from cocoon_rpc.errors import NodeAtCapacityError
from nodeagent.engine.child import run_tool

COW_BYTES = 10 * 2**30
_LIMIT_S = 60.0


async def make_blank(path: Path) -> None:
    """Makes the empty ext4 disk that every booted machine starts from, once; sparse.

    Raises: ProvisionFailedError, OSError.
    """
    if path.exists():
        return
    temporary = path.with_suffix(".new")
    try:
        with temporary.open("wb") as file:
            os.truncate(file.fileno(), COW_BYTES)
        options = "lazy_itable_init=1,lazy_journal_init=1"
        argv = ["mkfs.ext4", "-q", "-F", "-m", "0", "-E", options, str(temporary)]
        await run_tool(argv, log=path.with_suffix(".log"), limit_s=_LIMIT_S)
        await make_overlay(path, "raw", overlay_of(path))
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


async def make_overlay(backing: Path, backing_format: str, overlay: Path) -> None:
    """Makes the overlay that is copied for every machine on `backing`, which may come later.

    Raises: ProvisionFailedError.
    """
    argv = [
        "qemu-img", "create", "-q", "-f", "qcow2", "-u", "-F", backing_format, "-b", str(backing),
        str(overlay), str(COW_BYTES),
    ]  # fmt: skip
    await run_tool(argv, log=overlay.with_suffix(".log"), limit_s=_LIMIT_S)


def overlay_of(backing: Path) -> Path:
    """Returns where the overlay to copy for a backing file lies."""
    return backing.with_name(backing.name + ".overlay")


def copy_overlay(backing: Path, target: Path) -> None:
    """Gives a machine its disk. Raises: OSError."""
    shutil.copyfile(overlay_of(backing), target)


def require_free(directory: Path, size: int) -> None:
    """Raises: NodeAtCapacityError: the directory's file system has no `size` bytes left. OSError."""
    free = shutil.disk_usage(directory).free
    if free < size:
        cause = f"{size // 2**20} MiB are needed in {directory}, {free // 2**20} MiB are free"
        raise NodeAtCapacityError(resource="disk", cause=cause)
