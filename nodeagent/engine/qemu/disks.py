"""Copy-on-write disks. No process is started for a clone: an overlay is a small file that is copied."""

from __future__ import annotations

import asyncio
import os
import shutil
from pathlib import Path

from cocoon_rpc.errors import ProvisionFailedError

COW_BYTES = 10 * 2**30
_LIMIT_S = 60.0


async def run(*argv: str) -> None:
    """Runs a disk tool. Raises: ProvisionFailedError with its last words."""
    try:
        process = await asyncio.create_subprocess_exec(
            *argv, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
        )
    except FileNotFoundError:
        raise ProvisionFailedError(stage="disk", cause=f"{argv[0]} is not installed; run `make setup`") from None
    try:
        async with asyncio.timeout(_LIMIT_S):
            output, _ = await process.communicate()
    except BaseException:
        process.kill()
        await process.wait()
        raise
    if process.returncode:
        words = output.decode(errors="replace").strip().splitlines()[-1:] or ["no message"]
        raise ProvisionFailedError(stage="disk", cause=f"{argv[0]}: {words[0]}")


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
        await run("mkfs.ext4", "-q", "-F", "-m", "0", "-E", "lazy_itable_init=1,lazy_journal_init=1", str(temporary))
        await make_overlay(path, "raw", overlay_of(path))
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


async def make_overlay(backing: Path, backing_format: str, overlay: Path) -> None:
    """Makes the overlay that is copied for every machine on `backing`, which may come later.

    Raises: ProvisionFailedError.
    """
    await run(
        "qemu-img", "create", "-q", "-f", "qcow2", "-u", "-F", backing_format, "-b", str(backing),
        str(overlay), str(COW_BYTES),
    )  # fmt: skip


def overlay_of(backing: Path) -> Path:
    """Returns where the overlay to copy for a backing file lies."""
    return backing.with_name(backing.name + ".overlay")


def copy_overlay(backing: Path, target: Path) -> None:
    """Gives a machine its disk. Raises: OSError."""
    shutil.copyfile(overlay_of(backing), target)
