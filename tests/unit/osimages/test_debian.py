"""Layer 0: the command that makes it, and the facts read from it."""

import pytest

from osimages.debian import archive_argv, installed_packages
from osimages.spec import DebianSpec, UserSpec

DEBIAN = DebianSpec("bookworm", ("python3", "git"), ("/usr/share/doc/*",), ("/usr/share/doc/*/copyright",))
USER = UserSpec("sandbox", 1000, "/bin/bash")


def test_archive_argv_names_suite_packages_and_target() -> None:
    """The suite and the target come last, which leaves the choice of mirror to mmdebstrap."""
    argv = archive_argv(DEBIAN, USER, "amd64", "out.tar")
    assert argv[0] == "mmdebstrap"
    assert argv[-2:] == ["bookworm", "out.tar"]
    assert "--include=python3,git" in argv
    assert "--architectures=amd64" in argv


def test_archive_argv_names_no_mirror() -> None:
    """Mirrors differ between sites and have no place in an image's inputs."""
    assert not any("://" in item for item in archive_argv(DEBIAN, USER, "amd64", "out.tar"))


def test_archive_argv_puts_includes_after_excludes() -> None:
    """The last matching pattern decides in dpkg."""
    argv = archive_argv(DEBIAN, USER, "amd64", "out.tar")
    exclude = argv.index("--dpkgopt=path-exclude=/usr/share/doc/*")
    assert argv.index("--dpkgopt=path-include=/usr/share/doc/*/copyright") > exclude


def test_archive_argv_quotes_what_reaches_a_shell() -> None:
    """Hooks are shell lines; a path with a space stays one word."""
    argv = archive_argv(DEBIAN, UserSpec("sandbox", 1000, "/opt/my shell"), "amd64", "out.tar")
    assert any("--shell '/opt/my shell' sandbox" in item for item in argv)


STATUS = """\
Package: git
Status: install ok installed
Architecture: amd64
Version: 1:2.39.5-0+deb12u2
Description: fast, scalable, distributed revision control system
 Package: not a field, but a line of the description

Package: gone
Status: deinstall ok config-files
Architecture: all
Version: 1

Package: base-files
Status: install ok installed
Version: 12.4+deb12u11
Architecture: amd64
"""


def test_installed_packages_are_sorted_and_complete() -> None:
    """Removed packages that left configuration do not count."""
    assert installed_packages(STATUS) == ["base-files 12.4+deb12u11 amd64", "git 1:2.39.5-0+deb12u2 amd64"]


@pytest.mark.parametrize("status", ["", "\n\n"])
def test_installed_packages_of_nothing(status: str) -> None:
    """An empty database has no packages."""
    assert installed_packages(status) == []
