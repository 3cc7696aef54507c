"""First processes of a `local` machine: one that holds it, and pid 1 of its namespaces.

The holder stays on the host; SIGTERM makes it kill pid 1, and when it has ended, every
process and mount of the machine has. If it is killed itself, the kernel kills pid 1.
Pid 1 builds the machine's root in fresh mount, ipc, uts and net namespaces, then runs
guestd and reaps.

Run by the host's Python without site-packages, with the standard library only: after
the root is switched there is nothing left to import from.

Arguments: the machine's directory, then the image's layers, bottom first.
"""

from __future__ import annotations

import ctypes
import errno
import os
import select
import signal
import stat
import subprocess
import sys

_MS_NOSUID, _MS_NODEV, _MS_NOEXEC, _MS_BIND, _MS_REC, _MS_PRIVATE = 2, 4, 8, 1 << 12, 1 << 14, 1 << 18
_CLONE_NEWNS, _CLONE_NEWUTS, _CLONE_NEWIPC, _CLONE_NEWPID, _CLONE_NEWNET = (
    1 << bit for bit in (17, 26, 27, 29, 30)
)
_PR_SET_PDEATHSIG = 1
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


def _check(result: int, what: str) -> None:
    """Raises: OSError, if a C call failed."""
    if result:
        raise OSError(ctypes.get_errno(), f"{what}: {os.strerror(ctypes.get_errno())}")


def mount(source: str, target: str, kind: str, flags: int = 0, data: str = "") -> None:
    """Mounts; makes the target if needed. Raises: OSError."""
    os.makedirs(target, exist_ok=True)
    result = _libc.mount(source.encode(), target.encode(), kind.encode(), flags, data.encode())
    _check(result, f"mount {kind} on {target}")


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
    _check(_libc.syscall(_SYS_PIVOT_ROOT, b".", b"."), "pivot_root")
    _check(_libc.umount2(b".", _MNT_DETACH), "umount of the host's root")
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


def init(directory: str, layers: list[str], holder: int) -> int:
    """Is pid 1: builds the root, runs guestd in it, and ends when it ends.

    `holder` is a pipe whose other end the holder alone has.
    """
    _check(_libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL), "prctl")
    if select.select([holder], [], [], 0)[0]:
        # It ended before the line above could tie us to it.
        return 1
    _check(_libc.unshare(_CLONE_NEWNS | _CLONE_NEWUTS | _CLONE_NEWIPC | _CLONE_NEWNET), "unshare")
    mount("none", "/", "", _MS_REC | _MS_PRIVATE)
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    switch_root(build_root(directory, layers))
    child = os.fork()
    if child == 0:
        os.execve(GUESTD[0], GUESTD, {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LANG": "C.UTF-8"})  # noqa: S606
    return reap_until(child)


def hold(child: int) -> int:
    """Returns pid 1's exit code when it has ended; SIGTERM ends it.

    The signals are blocked already, so none is missed; a stop of pid 1 is no end of it.
    """
    while True:
        if signal.sigwait({signal.SIGTERM, signal.SIGCHLD}) == signal.SIGTERM:
            os.kill(child, signal.SIGKILL)
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status) & 0xFF


def main(directory: str, layers: list[str]) -> int:
    """Splits into holder and pid 1."""
    waited = {signal.SIGTERM, signal.SIGCHLD}
    signal.pthread_sigmask(signal.SIG_BLOCK, waited)
    _check(_libc.unshare(_CLONE_NEWPID), "unshare")
    theirs, ours = os.pipe()
    child = os.fork()
    if child:
        os.close(theirs)
        return hold(child)
    os.close(ours)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, waited)
    return init(directory, layers, theirs)


if __name__ == "__main__":
    os._exit(main(sys.argv[1], sys.argv[2:]))
