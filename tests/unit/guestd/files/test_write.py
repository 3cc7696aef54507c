"""A file is replaced whole or not at all, and nothing stays beside it."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from cocoon_rpc import errors
from guestd.files.write import AtomicFile
from tests.framework.leaks import open_fds


@pytest.fixture(autouse=True)
def _no_descriptor_left() -> Iterator[None]:
    before = open_fds()
    yield
    assert open_fds() == before


def _names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def _write(path: Path, content: bytes, mode: int | None = None) -> None:
    file = AtomicFile(os.fsencode(path), mode)
    try:
        file.append(content)
        file.commit()
    finally:
        file.close()


def test_write_makes_a_file_only_when_it_is_committed(tmp_path: Path) -> None:
    file = AtomicFile(os.fsencode(tmp_path / "file"), None)
    file.append(b"one")
    file.append(b"two")
    assert not (tmp_path / "file").exists()
    file.commit()
    file.close()
    assert (tmp_path / "file").read_bytes() == b"onetwo"
    assert file.size == 6
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == 0o644
    assert _names(tmp_path) == ["file"]


def test_write_that_is_closed_without_commit_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("old")
    file = AtomicFile(os.fsencode(tmp_path / "file"), None)
    file.append(b"new")
    file.close()
    file.close()
    assert (tmp_path / "file").read_text() == "old"
    assert _names(tmp_path) == ["file"]


def test_write_content_is_private_until_it_is_in_place(tmp_path: Path) -> None:
    file = AtomicFile(os.fsencode(tmp_path / "file"), 0o666)
    try:
        (temporary,) = tmp_path.iterdir()
        assert stat.S_IMODE(temporary.stat().st_mode) == 0o600
    finally:
        file.close()


def test_write_keeps_mode_unless_told_otherwise(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.touch()
    path.chmod(0o4711)
    _write(path, b"1")
    assert stat.S_IMODE(path.stat().st_mode) == 0o4711
    _write(path, b"2", 0o600)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


@pytest.mark.root
def test_write_keeps_owner_also_with_a_new_mode(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.touch()
    os.chown(path, 12_345, 54_321)
    _write(path, b"1", 0o4755)
    found = path.stat()
    assert (found.st_uid, found.st_gid, stat.S_IMODE(found.st_mode)) == (12_345, 54_321, 0o4755)


def test_write_follows_a_symlink(tmp_path: Path) -> None:
    (tmp_path / "target").write_text("old")
    (tmp_path / "link").symlink_to("target")
    _write(tmp_path / "link", b"new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "target").read_text() == "new"


def test_write_to_a_symlink_loop_is_typed_and_keeps_it(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(errors.FileOperationFailedError) as caught:
        AtomicFile(os.fsencode(tmp_path / "loop"), None)
    assert caught.value.metadata["errno"] == "ELOOP"
    assert (tmp_path / "loop").is_symlink()


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        (".", errors.FileNotRegularError),
        ("pipe", errors.FileNotRegularError),
        ("missing/file", errors.FileNotFoundError),
        ("plain/file", errors.FileNotFoundError),
        ("n" * 256, errors.FileOperationFailedError),
    ],
)
def test_write_that_cannot_be_is_typed_and_leaves_nothing(
    tmp_path: Path, name: str, kind: type[errors.CocoonError]
) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "plain").touch()
    with pytest.raises(kind):
        AtomicFile(os.fsencode(tmp_path) + b"/" + name.encode(), None)
    assert _names(tmp_path) == ["pipe", "plain"]


def test_write_to_the_root_is_typed() -> None:
    with pytest.raises(errors.FileNotRegularError):
        AtomicFile(b"/", None)


def test_write_of_the_longest_name_has_room_for_its_temporary(tmp_path: Path) -> None:
    _write(tmp_path / ("n" * 255), b"x")
    assert _names(tmp_path) == ["n" * 255]


def test_write_goes_to_the_directory_it_began_in(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    file = AtomicFile(os.fsencode(tmp_path / "a" / "file"), None)
    (tmp_path / "a").rename(tmp_path / "b")
    file.append(b"x")
    file.commit()
    file.close()
    assert (tmp_path / "b" / "file").read_bytes() == b"x"


@pytest.mark.parametrize("call", ["write", "fchmod", "rename"])
def test_write_that_fails_on_the_way_keeps_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "full")

    (tmp_path / "file").write_text("old")
    with monkeypatch.context() as patched:
        patched.setattr(os, call, full)
        with pytest.raises(errors.FileSystemFullError):
            _write(tmp_path / "file", b"new")
    assert (tmp_path / "file").read_text() == "old"
    assert _names(tmp_path) == ["file"]
