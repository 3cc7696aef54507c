"""Which package apt is asked for, with an apt of our own on PATH."""

from pathlib import Path

import pytest

from bootchain.errors import BootchainError
from bootchain.kernel import package

_REAL = "linux-image-6.1.0-99-cloud-amd64"


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A PATH of its own: a folder for scripts in place of apt."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    return folder


def script(folder: Path, name: str, body: str) -> None:
    (folder / name).write_text(f"#!/bin/sh\n{body}\n")
    (folder / name).chmod(0o755)


def test_download_takes_the_package_behind_the_metapackage(tools: Path, tmp_path: Path) -> None:
    """The metapackage is empty: what it depends on is downloaded, into the folder."""
    script(
        tools, "apt-cache", f"echo '{package.META}'; echo '  Depends: {_REAL}'; echo '    {_REAL}-unsigned'"
    )
    script(tools, "apt-get", '[ "$1" = download ] && : > "$2_6.1.1-1_amd64.deb"')
    into = tmp_path / "into"
    into.mkdir()
    assert package.download(into) == into / f"{_REAL}_6.1.1-1_amd64.deb"


def test_download_without_package_lists_says_what_to_do(tools: Path, tmp_path: Path) -> None:
    """A machine that never ran `apt-get update` knows no kernel."""
    script(tools, "apt-cache", "exit 0")
    with pytest.raises(BootchainError, match="apt-get update"):
        package.download(tmp_path)


def test_download_passes_on_why_apt_failed(tools: Path, tmp_path: Path) -> None:
    """The last line of apt's complaint is in the message."""
    script(tools, "apt-cache", f"echo '  Depends: {_REAL}'")
    script(tools, "apt-get", "echo 'E: no route to host' >&2; exit 100")
    with pytest.raises(BootchainError, match="no route to host"):
        package.download(tmp_path)


def test_download_without_apt_is_told(tools: Path, tmp_path: Path) -> None:
    """A host that is no Debian gets one sentence, not a traceback."""
    assert not list(tools.iterdir())
    with pytest.raises(BootchainError, match="apt-cache"):
        package.download(tmp_path)
