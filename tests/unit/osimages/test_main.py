"""The command line: exit codes and where messages go."""

from pathlib import Path

import pytest

from osimages.__main__ import main


def test_main_with_an_unknown_image_fails_with_the_declared_ones(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line on stderr, a non-zero exit code, and nothing written."""
    assert main(["--out", str(tmp_path / "images"), "rtt"]) == 1
    captured = capsys.readouterr()
    assert captured.err == "osimages: there is no image 'rtt'; did you mean 'rt'?; declared: base, rt\n"
    assert captured.out == ""
    assert not (tmp_path / "images").exists()


def test_main_requires_a_store(capsys: pytest.CaptureFixture[str]) -> None:
    """There is no default: images are large and belong where the caller says."""
    with pytest.raises(SystemExit, match="2"):
        main(["base"])
    assert "--out" in capsys.readouterr().err
