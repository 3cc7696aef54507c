"""A new identity for a guest that was booted or cloned (decision 10).

The order matters: randomness first, so that nothing is made from a generator that
another clone shares. Each step either works or fails the whole.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import re
import socket
import struct
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from cocoon_rpc.errors import CocoonError, IdentityRenewalFailedError, InvalidFieldError

# include/uapi/linux/random.h
_RNDADDENTROPY = 0x40085203
_RNDRESEEDCRNG = 0x5207
_MNT_DETACH = 2
_libc = ctypes.CDLL(None, use_errno=True)
_MACHINE_ID = re.compile(r"[0-9a-f]{32}")
_HOSTNAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
_KEYGEN_LIMIT_S = 3


@dataclass(frozen=True, slots=True)
class Identity:
    """What the host sent."""

    generation: int
    entropy: bytes = field(repr=False)
    machine_id: str
    hostname: str
    wall_ns: int

    def check(self) -> None:
        """Raises InvalidFieldError for what breaks the contract's rules."""
        if self.generation < 1:
            raise InvalidFieldError(field="generation", rule="must be at least 1")
        if not 32 <= len(self.entropy) <= 512:
            raise InvalidFieldError(field="entropy", rule="must be 32 to 512 bytes")
        if not _MACHINE_ID.fullmatch(self.machine_id):
            raise InvalidFieldError(field="machine_id", rule="must be 32 lower-case hexadecimal digits")
        if not _HOSTNAME.fullmatch(self.hostname):
            raise InvalidFieldError(field="hostname", rule="must be 1 to 63 of [a-z0-9-]")
        if self.wall_ns <= 0:
            raise InvalidFieldError(field="wall_time", rule="must be after 1970")


Step = tuple[str, Callable[[Identity], None]]


class Renewer:
    """Takes a guest through the steps of a renewal. Blocking."""

    def __init__(self, steps: list[Step]) -> None:
        """Takes the steps in order; see `machine_steps` and `namespace_steps`."""
        self._steps = steps
        self.step = "start"
        """The step it is at, for whoever waits in vain."""

    def renew(self, identity: Identity) -> None:
        """Runs every step. Raises: IdentityRenewalFailedError naming the one that failed."""
        for name, step in self._steps:
            self.step = name
            try:
                step(identity)
            except CocoonError:
                raise
            except Exception as error:
                raise IdentityRenewalFailedError(step=name, cause=str(error)) from error


def machine_steps(root: Path = Path("/")) -> list[Step]:
    """Returns the steps of a guest with a kernel of its own."""
    files = _Files(root)
    return [
        ("entropy", add_entropy),
        ("machine_id", files.machine_id),
        ("hostname", files.hostname),
        ("host_keys", files.host_keys),
        ("clock", set_clock),
        ("generation", files.generation),
    ]


def namespace_steps(root: Path = Path("/")) -> list[Step]:
    """Returns the steps of a guest in namespaces: kernel and clock are the host's and stay."""
    files = _Files(root)
    return [
        ("machine_id", files.machine_id),
        ("hostname", files.hostname),
        ("host_keys", files.host_keys),
        ("generation", files.generation),
    ]


def add_entropy(identity: Identity) -> None:
    """Credits the kernel's generator with the host's entropy and reseeds it from that at once."""
    data = identity.entropy
    # struct rand_pool_info { int entropy_count (bits); int buf_size; __u32 buf[]; }
    packed = struct.pack("ii", len(data) * 8, len(data)) + data
    with open("/dev/urandom", "wb", buffering=0) as device:  # noqa: PTH123 - unbuffered
        fcntl.ioctl(device, _RNDADDENTROPY, packed)
        fcntl.ioctl(device, _RNDRESEEDCRNG)


def set_clock(identity: Identity) -> None:
    """Sets the wall clock to the host's; the way here took a moment, so it is never ahead."""
    time.clock_settime_ns(time.CLOCK_REALTIME, identity.wall_ns)


class _Files:
    """The steps that write files, below a root so that tests can have one."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def machine_id(self, identity: Identity) -> None:
        """Writes the machine-id, also where the init mounted a transient one over it."""
        line = identity.machine_id + "\n"
        path = self._root / "etc/machine-id"
        if is_mount_point(path):
            # An init that found the file empty mounts a transient one over it.
            unmount(path)
        _replace(path, line, 0o444)
        transient = self._root / "run/machine-id"
        if transient.exists():
            _replace(transient, line, 0o444)

    def hostname(self, identity: Identity) -> None:
        """Sets the name in the kernel and for the next boot."""
        socket.sethostname(identity.hostname)
        _replace(self._root / "etc/hostname", identity.hostname + "\n", 0o644)

    def host_keys(self, identity: Identity) -> None:
        """Replaces ssh host keys, if the image has any."""
        keys = list((self._root / "etc/ssh").glob("ssh_host_*_key*"))
        if not keys:
            return
        for key in keys:
            key.unlink()
        subprocess.run(
            ["ssh-keygen", "-A", "-f", str(self._root)],
            check=True,
            capture_output=True,
            timeout=_KEYGEN_LIMIT_S,
        )

    def generation(self, identity: Identity) -> None:
        """Leaves the number where a runtime can watch it."""
        folder = self._root / "run/cocoon"
        folder.mkdir(parents=True, exist_ok=True)
        _replace(folder / "generation", f"{identity.generation}\n", 0o444)


def is_mount_point(path: Path) -> bool:
    """Says whether something is mounted exactly here; a device number tells nothing on overlayfs."""
    mounts = Path("/proc/self/mountinfo").read_text().splitlines()
    return any(line.split(" ", 5)[4] == str(path) for line in mounts)


def unmount(path: Path) -> None:
    """Takes a mount away. Raises: OSError."""
    if _libc.umount2(os.fsencode(path), _MNT_DETACH):
        number = ctypes.get_errno()
        raise OSError(number, f"umount {path}: {os.strerror(number)}")


def _replace(path: Path, text: str, mode: int) -> None:
    temporary = path.with_name(f".{path.name}.new")
    temporary.write_text(text)
    temporary.chmod(mode)
    temporary.replace(path)
