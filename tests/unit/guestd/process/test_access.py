"""What a user may reach is asked with that user's rights."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from guestd.process.access import acting_as, why_not_enter, why_not_execute
from guestd.process.account import Account, look_up


def _file_ids() -> list[str]:
    lines = Path("/proc/thread-self/status").read_text().splitlines()
    return [line for line in lines if line.startswith(("Uid:", "Gid:", "Groups:", "CapEff:"))]


@pytest.mark.root
def test_acting_takes_the_users_rights_and_gives_them_back(tmp_path: Path) -> None:
    before = _file_ids()
    secret = tmp_path / "secret"
    secret.mkdir(mode=0o700)
    with acting_as(look_up("nobody")):
        assert why_not_enter(str(secret)) == "permission denied"
        assert _file_ids() != before
    assert _file_ids() == before
    assert why_not_enter(str(secret)) == ""


@pytest.mark.root
def test_acting_gives_rights_back_after_a_failure() -> None:
    before = _file_ids()
    with pytest.raises(RuntimeError), acting_as(look_up("nobody")):
        raise RuntimeError
    assert _file_ids() == before


@pytest.mark.root
def test_acting_takes_the_users_groups() -> None:
    # Not below pytest's directory, which others cannot enter.
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        os.chown(folder, 0, 54_321)
        Path(folder).chmod(0o710)
        with acting_as(Account("a", 12_345, 12_345, (12_345,), "/", "/bin/sh")):
            assert why_not_enter(folder) == "permission denied"
        with acting_as(Account("b", 12_345, 12_345, (12_345, 54_321), "/", "/bin/sh")):
            assert why_not_enter(folder) == ""


def test_enter_says_why_not(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert why_not_enter(str(tmp_path)) == ""
    assert why_not_enter(str(tmp_path / "file")) == "not a directory"
    assert why_not_enter(str(tmp_path / "missing")) == "no such file or directory"


def test_execute_says_why_not(tmp_path: Path) -> None:
    (tmp_path / "plain").touch(mode=0o644)
    (tmp_path / "program").touch(mode=0o755)
    (tmp_path / "loop").symlink_to("loop")
    assert why_not_execute(str(tmp_path / "program")) == ""
    assert why_not_execute(str(tmp_path / "plain")) == "permission denied"
    assert why_not_execute(str(tmp_path)) == "is a directory"
    assert why_not_execute("/dev/null") == "permission denied"
    assert why_not_execute(str(tmp_path / "missing")) is None
    assert why_not_execute(str(tmp_path / "plain" / "below")) is None
    assert why_not_execute(str(tmp_path / "loop")) == "too many levels of symbolic links"
