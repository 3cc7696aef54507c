"""Layer 1: what lands in it, with which modes, and where its wheels come from."""

import stat
from pathlib import Path

import pytest

from osimages import guest
from osimages.errors import ImageError
from osimages.spec import DebianSpec, GuestSpec, LayeredSpec, UserSpec

SPEC = LayeredSpec(
    name="tiny",
    arch="amd64",
    hostname="sandbox",
    locale="C.UTF-8",
    user=UserSpec("sandbox", 1000, "/bin/bash"),
    debian=DebianSpec("bookworm", (), (), ()),
    guest=GuestSpec(
        files="files",
        directories=("/etc/cocoon",),
        python_target="/opt/guestd",
        python_packages=("guestd", "proto/python/cocoon_rpc"),
        python_projects=("guestd", "proto/python"),
        mask=("getty@.service",),
    ),
)


def _write(path: Path, text: str = "") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A source tree with guestd and what both ends share, plus what must not reach a guest."""
    root = tmp_path / "repository"
    _write(
        root / "guestd/pyproject.toml",
        '[project]\nname = "cocoon-guestd"\nversion = "1.2"\ndependencies = ["grpcio>=1", "cocoon-rpc"]\n',
    )
    _write(
        root / "proto/python/pyproject.toml",
        '[project]\nname = "cocoon_rpc"\nversion = "1.0"\ndependencies = ["protobuf ~= 7.0"]\n',
    )
    for name in (
        "__init__.py",
        "process/exec.py",
        "tests/test_exec.py",
        "exec.pyi",
        "__pycache__/x.pyc",
        ".hidden",
    ):
        _write(root / "guestd" / name)
    _write(root / "proto/python/cocoon_rpc/__init__.py")
    return root


@pytest.fixture
def tree(repository: Path, tmp_path: Path) -> Path:
    """The written layer."""
    files, wheels, target = tmp_path / "files", tmp_path / "wheels", tmp_path / "tree"
    _write(files / "etc/systemd/system/guestd.service", "[Service]\n")
    (files / "etc/systemd/system/default.target").symlink_to("sandbox.target")
    _write(files / "usr/local/bin/tool", "#!/bin/sh\n")
    (files / "usr/local/bin/tool").chmod(0o700)
    (files / "etc/systemd/system/guestd.service").chmod(0o600)
    _write(wheels / "grpc/__init__.py")
    _write(wheels / "grpc/_channel.pyi")
    _write(wheels / "bin/protoc-gen-x")
    _write(wheels / "grpcio-1.85.1.dist-info/METADATA")
    guest.write_tree(SPEC, files, repository, wheels, target)
    return target


def test_write_tree_copies_only_what_guests_use(tree: Path) -> None:
    """Tests, stubs, scripts, caches and project files stay behind."""
    target = tree / "opt/guestd"
    assert sorted(str(path.relative_to(target)) for path in target.rglob("*") if path.is_file()) == [
        "__main__.py",
        "cocoon_rpc/__init__.py",
        "grpc/__init__.py",
        "grpcio-1.85.1.dist-info/METADATA",
        "guestd/__init__.py",
        "guestd/process/exec.py",
    ]


def test_write_tree_gives_every_file_a_fixed_mode(tree: Path) -> None:
    """The builder's umask does not decide who may read what in the guest."""
    modes = {
        str(path.relative_to(tree)): stat.S_IMODE(path.stat().st_mode)
        for path in tree.rglob("*")
        if not path.is_symlink()
    }
    assert modes["etc/systemd/system/guestd.service"] == 0o644
    assert modes["usr/local/bin/tool"] == 0o755
    assert set(modes.values()) == {0o644, 0o755}


def test_write_tree_writes_configuration_links_and_directories(tree: Path) -> None:
    """Declared facts become files; a masked unit points to nothing."""
    assert (tree / "etc/hostname").read_text() == "sandbox\n"
    assert (tree / "etc/locale.conf").read_text() == "LANG=C.UTF-8\n"
    assert "127.0.1.1\tsandbox" in (tree / "etc/hosts").read_text()
    assert (tree / "etc/cocoon").is_dir()
    assert (tree / "etc/systemd/system/getty@.service").readlink() == Path("/dev/null")
    assert (tree / "etc/systemd/system/default.target").readlink() == Path("sandbox.target")


def test_requirements_are_third_party_only(repository: Path) -> None:
    """Our own projects are copied, however their names are spelt; the rest goes to pip verbatim."""
    assert guest.requirements(SPEC.guest, repository) == ["grpcio>=1", "protobuf ~= 7.0"]


def test_guestd_version_is_that_of_its_project(repository: Path) -> None:
    """The manifest tells which guestd an image runs."""
    assert guest.guestd_version(SPEC.guest, repository) == "1.2"


def test_guestd_version_must_be_literal(repository: Path) -> None:
    """A version that only a build backend can tell is refused: no backend runs here."""
    (repository / "guestd/pyproject.toml").write_text('[project]\nname = "guestd"\ndependencies = []\n')
    with pytest.raises(ImageError, match="must have a literal version"):
        guest.guestd_version(SPEC.guest, repository)


def test_requirements_of_a_missing_project_say_so(repository: Path) -> None:
    """A wrong path in the declaration is not an empty list of wheels."""
    (repository / "guestd/pyproject.toml").unlink()
    with pytest.raises(ImageError, match=r"guestd/pyproject\.toml is missing"):
        guest.requirements(SPEC.guest, repository)


def test_requirements_must_be_declared(repository: Path) -> None:
    """A project with dynamic dependencies would silently bring none."""
    (repository / "guestd/pyproject.toml").write_text(
        '[project]\nname = "guestd"\ndynamic = ["dependencies"]\n'
    )
    with pytest.raises(ImageError, match=r"\[project\] must declare name and dependencies"):
        guest.requirements(SPEC.guest, repository)


def test_wheels_argv_chooses_for_the_guest_not_the_host() -> None:
    """Platform and Python version are the image's, and nothing is compiled from source."""
    argv = guest.wheels_argv(SPEC, ["grpcio"], "constraints.txt", "out")
    assert argv[argv.index("--platform") + 1] == "manylinux2014_x86_64"
    assert argv[argv.index("--python-version") + 1] == "3.11"
    assert argv[argv.index("--constraint") + 1] == "constraints.txt"
    assert "--only-binary=:all:" in argv
    assert argv[-1] == "grpcio"


def test_wheel_versions_come_from_what_is_installed(tmp_path: Path) -> None:
    """Names are normalised as an index spells them."""
    for name in ("grpcio_status-1.85.1.dist-info", "protobuf-7.36.2.dist-info", "grpc"):
        (tmp_path / name).mkdir()
    assert guest.wheel_versions(tmp_path) == {"grpcio-status": "1.85.1", "protobuf": "7.36.2"}
