"""Stamps: they change with what goes into an image, and with nothing else."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from osimages.errors import ImageError
from osimages.stamp import digest_of, digest_of_paths


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A source tree with a package and a link."""
    package = tmp_path / "guestd"
    (package / "process").mkdir(parents=True)
    (package / "__init__.py").write_text("a = 1\n")
    (package / "process" / "exec.py").write_text("b = 2\n")
    (package / "link").symlink_to("process")
    return tmp_path


def _relink(tree: Path) -> None:
    (tree / "guestd/link").unlink()
    (tree / "guestd/link").symlink_to("elsewhere")


@pytest.mark.parametrize(
    "change",
    [
        lambda tree: (tree / "guestd/process/exec.py").write_text("b = 3\n"),
        lambda tree: (tree / "guestd/process/exec.py").rename(tree / "guestd/process/run.py"),
        lambda tree: (tree / "guestd/process/exec.py").chmod(0o755),
        lambda tree: (tree / "guestd/new.py").touch(),
        lambda tree: (tree / "guestd/__init__.py").unlink(),
        _relink,
    ],
    ids=["content", "name", "execute bit", "added", "removed", "link target"],
)
def test_digest_changes_with(tree: Path, change: Callable[[Path], object]) -> None:
    """Whatever lands in the image differently gives another digest."""
    before = digest_of_paths(tree, ["guestd"])
    change(tree)
    assert digest_of_paths(tree, ["guestd"]) != before


@pytest.mark.parametrize(
    "change",
    [
        lambda tree: os.utime(tree / "guestd/__init__.py", (1, 1)),
        lambda tree: (tree / "guestd/__init__.py").chmod(0o600),
        lambda tree: (tree / "guestd/__pycache__").mkdir(),
        lambda tree: (tree / "other").mkdir(),
    ],
    ids=["time", "other mode bits", "bytecode", "neighbours"],
)
def test_digest_does_not_change_with(tree: Path, change: Callable[[Path], object]) -> None:
    """A fresh checkout or a test run does not cause a build."""
    before = digest_of_paths(tree, ["guestd"])
    change(tree)
    assert digest_of_paths(tree, ["guestd"]) == before


def test_digest_of_missing_stubs_says_how_to_make_them(tmp_path: Path) -> None:
    """Generated code is not committed, so a fresh checkout meets this."""
    with pytest.raises(ImageError, match=r"cocoon is missing, .* run `make proto` first"):
        digest_of_paths(tmp_path, ["proto/python/cocoon"])


def test_digest_of_facts_tells_structure_apart() -> None:
    """Concatenation does not make two lists of facts equal."""
    assert digest_of(["a", "b"]) != digest_of(["ab"]) != digest_of("ab")
    assert digest_of({"a": 1, "b": 2}) == digest_of({"b": 2, "a": 1})
