"""Paths as the contract gives them, and errors of the kernel as the contract names them."""

from __future__ import annotations

import errno
import os
import stat

from cocoon_rpc.errors import (
    CocoonError,
    FileAccessDeniedError,
    FileNotFoundError,  # noqa: A004 - the contract's, never the built-in one here
    FileNotRegularError,
    FileOperationFailedError,
    FileSystemFullError,
    InvalidFieldError,
)

_LONGEST = 4096


def checked_path(path: str, raw_path: bytes, prefix: str = "") -> bytes:
    """Returns the path as bytes; exactly one of the two is set. Raises: InvalidFieldError."""
    if bool(path) == bool(raw_path):
        raise InvalidFieldError(field=prefix + "path", rule="set exactly one of path and raw_path")
    field = prefix + ("path" if path else "raw_path")
    found = path.encode() if path else raw_path
    if not found.startswith(b"/"):
        raise InvalidFieldError(field=field, rule="must be absolute")
    if b"\0" in found:
        raise InvalidFieldError(field=field, rule="must not contain NUL")
    if len(found) > _LONGEST:
        raise InvalidFieldError(field=field, rule=f"must be at most {_LONGEST} bytes")
    return found


def shown(path: bytes) -> str:
    """Returns a path for people; bytes that are not UTF-8 become escapes."""
    return path.decode(errors="backslashreplace")


def typed(error: OSError, path: bytes) -> CocoonError:
    """Returns the contract's error for a kernel's refusal."""
    name = shown(path)
    if error.errno in {errno.ENOENT, errno.ENOTDIR}:
        return FileNotFoundError(path=name)
    if error.errno in {errno.EACCES, errno.EPERM}:
        return FileAccessDeniedError(path=name)
    if error.errno in {errno.ENOSPC, errno.EDQUOT}:
        return FileSystemFullError(path=name)
    if error.errno == errno.EISDIR:
        return FileNotRegularError(path=name, kind="directory")
    return FileOperationFailedError(path=name, errno=errno.errorcode.get(error.errno or 0, "EIO"))


def require_regular(mode: int, path: bytes) -> None:
    """Raises FileNotRegularError for what is not a regular file."""
    kinds = {
        stat.S_IFDIR: "directory",
        stat.S_IFIFO: "pipe",
        stat.S_IFSOCK: "socket",
        stat.S_IFCHR: "device",
        stat.S_IFBLK: "device",
    }
    kind = kinds.get(stat.S_IFMT(mode))
    if kind is not None:
        raise FileNotRegularError(path=shown(path), kind=kind)


def open_regular(path: bytes) -> int:
    """Opens a regular file for reading; others are not even opened, for opening can act.

    Raises: FileNotFoundError, FileNotRegularError, FileAccessDeniedError,
        FileOperationFailedError.
    """
    try:
        place = os.open(path, os.O_PATH | os.O_CLOEXEC)
        try:
            require_regular(os.fstat(place).st_mode, path)
            return os.open(f"/proc/self/fd/{place}", os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        finally:
            os.close(place)
    except OSError as error:
        raise typed(error, path) from error
