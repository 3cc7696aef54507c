"""What a user may reach, asked of the kernel in that user's place.

A program's directory is entered before its user is set, so root's rights would
decide there; and a search of PATH has to skip what the user cannot execute.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import stat
from collections.abc import Iterator, Sequence

from guestd.process.account import Account

_libc = ctypes.CDLL(None, use_errno=True)
_SYS_SETGROUPS = {"x86_64": 116, "aarch64": 159}.get(platform.machine())


@contextlib.contextmanager
def acting_as(account: Account) -> Iterator[None]:
    """Gives the calling thread the account's rights to files, and takes them back.

    Linux keeps credentials per thread. setfsuid and setgroups as bare system calls
    touch no other thread (libc's setgroups would stop them all), and the capabilities
    that override permissions leave and return with a file-system uid of 0. Await
    nothing inside.

    Raises:
        OSError: this process may not change its groups.
    """
    if account.is_root or account.uid == os.geteuid():
        yield
        return
    groups, gid, uid = os.getgroups(), os.getegid(), os.geteuid()
    _set_groups(account.groups)
    try:
        _libc.setfsgid(account.gid)
        _libc.setfsuid(account.uid)
        yield
    finally:
        _libc.setfsuid(uid)
        _libc.setfsgid(gid)
        _set_groups(groups)


def _set_groups(groups: Sequence[int]) -> None:
    array = (ctypes.c_uint32 * len(groups))(*groups)
    if _libc.syscall(_SYS_SETGROUPS, len(groups), array):
        number = ctypes.get_errno()
        raise OSError(number, f"setgroups: {os.strerror(number)}")


def why_not_enter(folder: str) -> str:
    """Returns why a directory cannot be entered; "" if it can."""
    try:
        mode = os.stat(folder).st_mode  # noqa: PTH116
    except OSError as error:
        return (error.strerror or "cannot be read").lower()
    if not stat.S_ISDIR(mode):
        return "not a directory"
    return "" if _executable(folder) else "permission denied"


def why_not_execute(path: str) -> str | None:
    """Returns why a file cannot be executed; "" if it can, None if there is none."""
    try:
        mode = os.stat(path).st_mode  # noqa: PTH116
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        return (error.strerror or "cannot be read").lower()
    if stat.S_ISDIR(mode):
        return "is a directory"
    return "" if stat.S_ISREG(mode) and _executable(path) else "permission denied"


def _executable(path: str) -> bool:
    # By the effective ids, which follow the file-system ones; the real ones stay root's.
    return os.access(path, os.X_OK, effective_ids=True)
