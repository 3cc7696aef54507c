"""Running programs: output as it comes, and failures that explain themselves."""

import sys

import pytest

from osimages.errors import ImageError
from osimages.tools import run


def test_run_reports_each_line_of_both_streams() -> None:
    """Whoever waits sees what the program says."""
    lines: list[str] = []
    run(["sh", "-c", "echo out; echo err >&2"], report=lines.append)
    assert lines == ["out", "err"]


def test_run_adds_to_the_environment() -> None:
    """Added variables arrive, inherited ones stay."""
    lines: list[str] = []
    run(["sh", "-c", 'echo "$COLOUR" "${PATH:+path}"'], env={"COLOUR": "blue"}, report=lines.append)
    assert lines == ["blue path"]


def test_run_gives_no_stdin() -> None:
    """A program that asks a question gets end of file instead of hanging the build."""
    run(["sh", "-c", "! read line"])


def test_run_that_fails_carries_the_end_of_the_output() -> None:
    """The reason is in the message, without the pages before it."""
    with pytest.raises(ImageError, match=r"failed with exit code 3:\n  line 86\n") as caught:
        run([sys.executable, "-c", "for i in range(101): print('line', i)\nraise SystemExit(3)"])
    assert str(caught.value).endswith("line 100")


def test_run_names_the_package_of_a_missing_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """What to install is often not what the program is called."""
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(
        ImageError, match=r"mkfs\.erofs is not installed; on Debian: apt-get install erofs-utils"
    ):
        run(["mkfs.erofs", "x"])
