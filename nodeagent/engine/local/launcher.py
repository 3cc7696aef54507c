"""First process of a `local` machine: builds its root, then runs guestd and reaps.

Runs as pid 1 of fresh mount, pid, ipc, uts and net namespaces, by the host's Python
without site-packages, and imports the standard library only: after the root is
switched there is nothing left to import from. All mounts are in the namespace, so
they end with it.

Arguments: the machine's directory, then the image's layers, bottom first.
"""

from __future__ import annotations

import ctypes
import errno
import os
import stat
import subprocess
import sys

_MS_RDONLY, _MS_NOSUID, _MS_NODEV, _MS_NOEXEC, _MS_BIND = 1, 2, 4, 8, 4096
_MNT_DETACH = 2
_SYS_PIVOT_ROOT = 155
_libc = ctypes.CDLL(None, use_errno=True)
GUESTD = (
    "/usr/bin/python3", "-I", "-S", "-B", "/opt/guestd",
    "--socket", "/run/cocoon/guestd.sock", "--no-bridge", "--identity", "namespace",
)  # fmt: skip
_DEVICES = {
    "null": (1, 3),
    "zero": (1, 5),
    "full": (1, 7),
    "random": (1, 8),
    "urandom": (1, 9),
    "tty": (5, 0),
}


def mount(source: str, target: str, kind: str, flags: int = 0, data: str = "") -> None:
    """Mounts; makes the target if needed. Raises: OSError."""
    os.makedirs(target, exist_ok=True)
    if _libc.mount(source.encode(), target.encode(), kind.encode(), flags, data.encode()):
        raise OSError(ctypes.get_errno(), f"mount {kind} on {target}: {os.strerror(ctypes.get_errno())}")


def build_root(directory: str, layers: list[str]) -> str:
    """Returns the mounted root of the machine."""
    root = f"{directory}/root"
    lowers: list[str] = []
    for index, layer in enumerate(layers):
        lower = f"{directory}/layers/{index}"
        os.makedirs(lower)
        # mount(8) finds a free loop device and marks it to go with the mount.
        subprocess.run(["mount", "-t", "erofs", "-o", "ro,loop", layer, lower], check=True)
        lowers.insert(0, lower)
    for name in ("upper", "work"):
        os.makedirs(f"{directory}/{name}", exist_ok=True)
    options = f"lowerdir={':'.join(lowers)},upperdir={directory}/upper,workdir={directory}/work"
    mount("overlay", root, "overlay", 0, options)
    mount("proc", f"{root}/proc", "proc", _MS_NOSUID | _MS_NODEV | _MS_NOEXEC)
    mount("tmpfs", f"{root}/run", "tmpfs", _MS_NOSUID | _MS_NODEV, "mode=0755")
    mount("tmpfs", f"{root}/dev", "tmpfs", _MS_NOSUID, "mode=0755")
    for name, (major, minor) in _DEVICES.items():
        os.mknod(f"{root}/dev/{name}", stat.S_IFCHR | 0o666, os.makedev(major, minor))
        os.chmod(f"{root}/dev/{name}", 0o666)
    mount(
        "devpts", f"{root}/dev/pts", "devpts", _MS_NOSUID | _MS_NOEXEC, "newinstance,ptmxmode=0666,mode=0620"
    )
    mount("tmpfs", f"{root}/dev/shm", "tmpfs", _MS_NOSUID | _MS_NODEV, "mode=1777")
    for link, target in (
        ("ptmx", "pts/ptmx"),
        ("fd", "/proc/self/fd"),
        ("stdin", "fd/0"),
        ("stdout", "fd/1"),
        ("stderr", "fd/2"),
    ):
        os.symlink(target, f"{root}/dev/{link}")
    # The one place that host and guest share: guestd's socket.
    mount(f"{directory}/share", f"{root}/run/cocoon", "", _MS_BIND)
    return root


def switch_root(root: str) -> None:
    """Makes `root` the root and lets go of the host's. Raises: OSError."""
    os.chdir(root)
    if _libc.syscall(_SYS_PIVOT_ROOT, b".", b"."):
        raise OSError(ctypes.get_errno(), "pivot_root: " + os.strerror(ctypes.get_errno()))
    if _libc.umount2(b".", _MNT_DETACH):
        raise OSError(ctypes.get_errno(), "umount of the host's root: " + os.strerror(ctypes.get_errno()))
    os.chdir("/")


def reap_until(child: int) -> int:
    """Reaps whatever ends, as pid 1 must, until `child` does; returns its exit code."""
    while True:
        try:
            pid, status = os.wait()
        except OSError as error:
            if error.errno == errno.EINTR:
                continue
            raise
        if pid == child:
            return os.waitstatus_to_exitcode(status) & 0xFF


def main(directory: str, layers: list[str]) -> int:
    """Builds the root, runs guestd in it, and ends when it ends."""
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    switch_root(build_root(directory, layers))
    child = os.fork()
    if child == 0:
        os.execve(GUESTD[0], GUESTD, {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LANG": "C.UTF-8"})  # noqa: S606
    return reap_until(child)


if __name__ == "__main__":
    os._exit(main(sys.argv[1], sys.argv[2:]))
