"""Gets the kernel package by apt, into a folder, without installing it."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from bootchain.errors import BootchainError

META = "linux-image-cloud-amd64"
_REAL = re.compile(r"^\s*(?:PreDepends|Depends): (linux-image-\S+)$", re.MULTILINE)


def download(folder: Path) -> Path:
    """Downloads the package that the metapackage stands for; returns the .deb.

    Raises:
        BootchainError: apt does not know it or cannot get it.
    """
    real = _REAL.search(_apt(["apt-cache", "depends", META], folder))
    if real is None:
        raise BootchainError(f"apt knows no {META}: run `apt-get update` first")
    _apt(["apt-get", "download", real.group(1)], folder)
    (deb,) = folder.glob("*.deb")
    return deb


def unpack(deb: Path, folder: Path) -> None:
    """Unpacks a .deb into `folder`. Raises: BootchainError."""
    _apt(["dpkg-deb", "-x", str(deb), str(folder)], folder)


def _apt(argv: list[str], folder: Path) -> str:
    try:
        done = subprocess.run(argv, cwd=folder, capture_output=True, text=True, check=False, timeout=600)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BootchainError(f"{argv[0]}: {error}") from error
    if done.returncode:
        tail = done.stderr.strip().splitlines()[-1:] or ["no message"]
        raise BootchainError(f"{' '.join(argv)} failed: {tail[0]}")
    return done.stdout
