"""Layer 1: configuration, guestd, its generated stubs and its wheels.

Nothing of it is installed by dpkg or visible to a tenant's Python: guestd runs with its own directory as
the only entry on its path.
"""

import re
import shutil
import sys
import tomllib
from pathlib import Path
from typing import Any

from osimages.errors import ImageError
from osimages.spec import GuestSpec, LayeredSpec
from osimages.stamp import walk
from osimages.tools import run

_PYTHON_VERSION = {"bookworm": "3.11"}
_WHEEL_PLATFORM = {"amd64": "manylinux2014_x86_64"}

_LAUNCHER = """\
# `python3 -I -S /opt/guestd` starts this with its directory as the only entry besides the standard library's.
import runpy

runpy.run_module("guestd", run_name="__main__", alter_sys=True)
"""

_NOT_FOR_GUESTS = re.compile(
    r"(^|/)(tests?|pyproject\.toml|README\.md|\.[^/]+)(/|$)|^bin(/|$)|\.(pyi|proto|pyx|pxd)$"
)


def config_files(spec: LayeredSpec) -> dict[str, str]:
    """Write the configuration that follows from the declaration: path in the guest → content."""
    return {
        "/etc/hostname": f"{spec.hostname}\n",
        "/etc/hosts": f"127.0.0.1\tlocalhost\n127.0.1.1\t{spec.hostname}\n::1\tlocalhost ip6-localhost\n",
        "/etc/locale.conf": f"LANG={spec.locale}\n",
        "/etc/default/locale": f"LANG={spec.locale}\n",
        f"{spec.guest.python_target}/__main__.py": _LAUNCHER,
    }


def requirements(guest: GuestSpec, repository: Path) -> list[str]:
    """Collect the third-party requirements of guestd and of what it imports from this repository, sorted.

    Raises:
        ImageError: A pyproject.toml is missing or declares no dependencies.
    """
    projects = [_project(repository / directory) for directory in guest.python_projects]
    ours = {_normalise(project["name"]) for project in projects}
    wanted = {requirement for project in projects for requirement in project["dependencies"]}
    return sorted(
        item for item in wanted if _normalise(re.split(r"[\s\[<>=!~;@]", item, maxsplit=1)[0]) not in ours
    )


def guestd_version(guest: GuestSpec, repository: Path) -> str:
    """Read the version of the first project, which is guestd.

    Raises:
        ImageError: It has no literal version.
    """
    directory = repository / guest.python_projects[0]
    version = _project(directory).get("version")
    if not isinstance(version, str):
        raise ImageError(
            f"{directory / 'pyproject.toml'}: [project] must have a literal version, for the manifest"
        )
    return version


def wheels_argv(spec: LayeredSpec, wanted: list[str], constraints: str, target: str) -> list[str]:
    """Build the command of the host's pip, told to choose for the guest's Python and never to compile."""
    return [
        *(sys.executable, "-m", "pip", "install", "--quiet", "--no-compile"),
        *("--disable-pip-version-check", "--root-user-action=ignore"),
        *("--target", target, "--constraint", constraints),
        *("--platform", _WHEEL_PLATFORM[spec.arch], "--implementation", "cp"),
        *("--python-version", _PYTHON_VERSION[spec.debian.suite], "--only-binary=:all:"),
        *wanted,
    ]


def wheel_versions(wheels: Path) -> dict[str, str]:
    """Read name and version of each distribution that pip put into `wheels`."""
    pairs = (path.name.removesuffix(".dist-info").rsplit("-", 1) for path in wheels.glob("*.dist-info"))
    return {_normalise(name): version for name, version in sorted(pairs)}


def write_tree(spec: LayeredSpec, files: Path, repository: Path, wheels: Path, tree: Path) -> None:
    """Write all files of the layer, without bytecode.

    Args:
        spec: The image.
        files: The image's overlay directory.
        repository: Where `python_packages` are.
        wheels: What pip installed.
        tree: The layer's root; made here.
    """
    tree.mkdir()
    target = _in(tree, spec.guest.python_target)
    copy(files, tree)
    for path, text in config_files(spec).items():
        _in(tree, path).parent.mkdir(parents=True, exist_ok=True)
        _in(tree, path).write_text(text, encoding="utf-8")
    for path in spec.guest.directories:
        _in(tree, path).mkdir(parents=True, exist_ok=True)
    for unit in spec.guest.mask:
        link = _in(tree, "/etc/systemd/system") / unit
        link.parent.mkdir(parents=True, exist_ok=True)
        link.unlink(missing_ok=True)
        link.symlink_to("/dev/null")
    copy(wheels, target, only_for_guests=True)
    for package in spec.guest.python_packages:
        copy(repository / package, target / Path(package).name, only_for_guests=True)
    _normalise_modes(tree)


def copy(source: Path, target: Path, *, only_for_guests: bool = False) -> None:
    """Copy a directory over another, links as links.

    Args:
        source: Directory to read; caches of tools are left out.
        target: Directory to write; made when missing.
        only_for_guests: Leave out tests, type stubs, scripts and what else serves development only.
    """
    for item in walk(source):
        relative = item.relative_to(source)
        if only_for_guests and is_for_development(relative):
            continue
        place = target / relative
        if item.is_dir() and not item.is_symlink():
            place.mkdir(parents=True, exist_ok=True)
        else:
            shutil.copy2(item, place, follow_symlinks=False)


def is_for_development(relative: Path) -> bool:
    """Tell whether a file of a Python package stays out of the image."""
    return _NOT_FOR_GUESTS.search(relative.as_posix()) is not None


def compile_bytecode(root: Path, target: str) -> None:
    """Compile `target` inside the unpacked image with the image's own Python. Needs root.

    The bytecode is not checked against its source on import: both lie on the read-only layer. The hash seed
    is fixed because the order of set literals in bytecode follows it.

    Raises:
        ImageError: A module does not compile.
    """
    clean = ["/usr/bin/env", "-i", "PATH=/usr/bin:/bin", "PYTHONHASHSEED=0", "LC_ALL=C.UTF-8"]
    compile_all = ["python3", "-m", "compileall", "-q", "-f", "--invalidation-mode", "unchecked-hash", target]
    run(["chroot", str(root), *clean, *compile_all])


def _project(directory: Path) -> dict[str, Any]:
    path = directory / "pyproject.toml"
    try:
        project: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))["project"]
    except FileNotFoundError:
        raise ImageError(f"{path} is missing; the guest's wheels follow from its dependencies") from None
    except (tomllib.TOMLDecodeError, KeyError) as error:
        raise ImageError(f"{path} is not a valid project: {error}") from None
    if "name" not in project or "dependencies" not in project:
        raise ImageError(f"{path}: [project] must declare name and dependencies; an empty list is fine")
    return project


def _normalise(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _in(tree: Path, path: str) -> Path:
    return tree / path.removeprefix("/")


def _normalise_modes(tree: Path) -> None:
    """Give every file one of two modes, every directory one, whatever umask and checkout were."""
    for item in walk(tree):
        if not item.is_symlink():
            item.chmod(0o755 if item.is_dir() or item.stat().st_mode & 0o100 else 0o644)
