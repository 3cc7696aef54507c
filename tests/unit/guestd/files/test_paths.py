"""Paths by the contract's rules, and the kernel's refusals by the contract's names."""

from __future__ import annotations

import errno
import os
import socket
import stat
from pathlib import Path

import pytest

from cocoon_rpc import errors
from guestd.files.paths import checked_path, open_regular, require_regular, shown, typed
from tests.framework.leaks import open_fds


@pytest.mark.parametrize(
    ("path", "raw", "found"),
    [
        ("/a b/é", b"", "/a b/é".encode()),
        ("", b"/\xff", b"/\xff"),
        ("/" + "x" * 4095, b"", b"/" + b"x" * 4095),
    ],
)
def test_path_comes_back_as_bytes(path: str, raw: bytes, found: bytes) -> None:
    assert checked_path(path, raw) == found


@pytest.mark.parametrize(
    ("path", "raw", "field"),
    [
        ("", b"", "start.path"),
        ("/a", b"/a", "start.path"),
        ("a", b"", "start.path"),
        ("", b"a", "start.raw_path"),
        ("/\0", b"", "start.path"),
        ("", b"/\0", "start.raw_path"),
        ("/" + "é" * 2048, b"", "start.path"),
        ("", b"/" + b"x" * 4096, "start.raw_path"),
    ],
)
def test_path_that_breaks_a_rule_names_its_field(path: str, raw: bytes, field: str) -> None:
    with pytest.raises(errors.InvalidFieldError) as caught:
        checked_path(path, raw, "start.")
    assert caught.value.metadata["field"] == field


def test_path_is_shown_with_escapes_for_what_is_not_utf8() -> None:
    assert shown("/é".encode() + b"\xff") == "/é\\xff"


@pytest.mark.parametrize(
    ("number", "kind"),
    [
        (errno.ENOENT, errors.FileNotFoundError),
        (errno.ENOTDIR, errors.FileNotFoundError),
        (errno.EACCES, errors.FileAccessDeniedError),
        (errno.EPERM, errors.FileAccessDeniedError),
        (errno.ENOSPC, errors.FileSystemFullError),
        (errno.EDQUOT, errors.FileSystemFullError),
        (errno.EISDIR, errors.FileNotRegularError),
        (errno.EROFS, errors.FileOperationFailedError),
        (errno.EIO, errors.FileOperationFailedError),
    ],
)
def test_kernel_refusal_is_typed(number: int, kind: type[errors.CocoonError]) -> None:
    error = typed(OSError(number, os.strerror(number)), b"/p")
    assert type(error) is kind
    assert error.metadata["path"] == "/p"


def test_kernel_refusal_without_a_type_of_its_own_names_its_errno() -> None:
    assert typed(OSError(errno.EROFS, ""), b"/p").metadata["errno"] == "EROFS"
    assert typed(OSError(99_999, ""), b"/p").metadata["errno"] == "EIO"


@pytest.mark.parametrize(
    ("mode", "kind"),
    [
        (stat.S_IFDIR, "directory"),
        (stat.S_IFIFO, "pipe"),
        (stat.S_IFSOCK, "socket"),
        (stat.S_IFCHR, "device"),
        (stat.S_IFBLK, "device"),
    ],
)
def test_file_that_is_not_regular_is_refused_by_kind(mode: int, kind: str) -> None:
    with pytest.raises(errors.FileNotRegularError) as caught:
        require_regular(mode | 0o644, b"/p")
    assert caught.value.metadata["kind"] == kind


def test_regular_file_is_opened_for_reading(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"content")
    fd = open_regular(os.fsencode(tmp_path / "file"))
    try:
        assert os.read(fd, 100) == b"content"
        assert not os.get_inheritable(fd)
    finally:
        os.close(fd)


def test_what_is_not_regular_is_not_opened_and_no_descriptor_stays(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to("loop")
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(str(tmp_path / "socket"))
        before = open_fds()
        for name in ("pipe", "socket", ".", "missing", "loop"):
            with pytest.raises(errors.CocoonError):
                open_regular(os.fsencode(tmp_path) + b"/" + name.encode())
        assert open_fds() == before
