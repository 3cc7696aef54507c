"""What an image consists of: `image.toml` as frozen dataclasses.

Pure but for reading the file. An unknown key is an error with a suggestion, so that a typo cannot silently
build an image without what it asks for.
"""

import difflib
import re
import tomllib
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, TypeGuard

from osimages.errors import ImageError

SPEC_FILE = "image.toml"
SPEC_VERSION = 1

_NAME = re.compile(r"[a-z][a-z0-9-]{0,62}")
_HOSTNAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
_PACKAGE = re.compile(r"[a-z0-9][a-z0-9+.-]+")


@dataclass(frozen=True, slots=True)
class UserSpec:
    """The account that is not root."""

    name: str
    uid: int
    """Also the id of the user's own group."""
    shell: str


@dataclass(frozen=True, slots=True)
class DebianSpec:
    """Layer 0: packages of one Debian suite."""

    suite: str
    packages: tuple[str, ...]
    exclude: tuple[str, ...]
    """dpkg `path-exclude` patterns; they stay in force for packages that a tenant installs."""
    include: tuple[str, ...]
    """dpkg `path-include` patterns: exceptions to `exclude`."""


@dataclass(frozen=True, slots=True)
class GuestSpec:
    """Layer 1: configuration, guestd and its wheels."""

    files: str
    """Directory beside image.toml that is laid over the root."""
    directories: tuple[str, ...]
    python_target: str
    python_packages: tuple[str, ...]
    """Package directories, relative to the repository."""
    python_projects: tuple[str, ...]
    """Directories with a pyproject.toml, relative to the repository; the first is guestd's."""
    mask: tuple[str, ...]
    """systemd units made unstartable."""


@dataclass(frozen=True, slots=True)
class LayeredSpec:
    """An image of two layers."""

    name: str
    arch: str
    hostname: str
    locale: str
    user: UserSpec
    debian: DebianSpec
    guest: GuestSpec


@dataclass(frozen=True, slots=True)
class FlatSpec:
    """The files of another image in a single layer."""

    name: str
    flatten_of: str


ImageSpec = LayeredSpec | FlatSpec


def load(directory: Path) -> ImageSpec:
    """Read the image declared in `directory`.

    Raises:
        ImageError: No such file, not TOML, or not a valid declaration.
    """
    path = directory / SPEC_FILE
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        known = sorted(entry.parent.name for entry in directory.parent.glob(f"*/{SPEC_FILE}"))
        raise ImageError(
            f"there is no image {directory.name!r}{_suggest(directory.name, known)}; "
            f"declared: {', '.join(known)}"
        ) from None
    spec = parse(text, str(path))
    if spec.name != directory.name:
        raise ImageError(
            f"{path}: name is {spec.name!r}, but the directory is {directory.name!r}; make them equal"
        )
    return spec


def parse(text: str, where: str) -> ImageSpec:
    """Parse a declaration; `where` names it in errors.

    Raises:
        ImageError: The text is not TOML or not a valid declaration.
    """
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ImageError(f"{where}: not valid TOML: {error}") from None
    table = _Table(document, where)
    version = table.integer("version")
    if version != SPEC_VERSION:
        raise ImageError(f"{where}: version is {version}; this builder reads version {SPEC_VERSION}")
    name = table.text("name", _NAME)
    spec: ImageSpec
    if table.has("flatten_of"):
        spec = FlatSpec(name=name, flatten_of=table.text("flatten_of", _NAME))
    else:
        spec = LayeredSpec(
            name=name,
            arch=table.choice("arch", ("amd64",)),
            hostname=table.text("hostname", _HOSTNAME),
            locale=table.text("locale"),
            user=_user(table.table("user")),
            debian=_debian(table.table("debian")),
            guest=_guest(table.table("guest")),
        )
    table.finish()
    return spec


def _user(table: "_Table") -> UserSpec:
    user = UserSpec(
        name=table.text("name", _NAME), uid=table.integer("uid"), shell=table.absolute(table.text("shell"))
    )
    if not 1000 <= user.uid < 60000:
        raise ImageError(f"{table.where}.uid is {user.uid}; Debian keeps 1000 to 59999 for people")
    table.finish()
    return user


def _debian(table: "_Table") -> DebianSpec:
    debian = DebianSpec(
        suite=table.text("suite", _NAME),
        packages=table.texts("packages", _PACKAGE),
        exclude=table.texts("exclude"),
        include=table.texts("include"),
    )
    table.finish()
    return debian


def _guest(table: "_Table") -> GuestSpec:
    guest = GuestSpec(
        files=table.inside(table.text("files")),
        directories=tuple(table.absolute(item) for item in table.texts("directories")),
        python_target=table.absolute(table.text("python_target")),
        python_packages=tuple(table.inside(item) for item in table.texts("python_packages")),
        python_projects=tuple(table.inside(item) for item in table.texts("python_projects")),
        mask=table.texts("mask"),
    )
    if not guest.python_projects:
        raise ImageError(f"{table.where}: python_projects must name at least guestd")
    table.finish()
    return guest


class _Table:
    """A TOML table that remembers which of its keys were asked for, to tell the unknown ones at the end."""

    def __init__(self, values: dict[str, Any], where: str) -> None:
        self.where = where
        self._values = values
        self._asked: set[str] = set()

    def has(self, key: str) -> bool:
        return key in self._values

    def text(self, key: str, pattern: re.Pattern[str] | None = None) -> str:
        value = self._get(key)
        if not isinstance(value, str) or not value:
            raise ImageError(f"{self.where}: {key} must be a non-empty string, not {value!r}")
        if pattern is not None and pattern.fullmatch(value) is None:
            raise ImageError(f"{self.where}: {key} is {value!r}, which does not match {pattern.pattern}")
        return value

    def choice(self, key: str, allowed: tuple[str, ...]) -> str:
        value = self.text(key)
        if value not in allowed:
            raise ImageError(f"{self.where}: {key} is {value!r}; possible: {', '.join(allowed)}")
        return value

    def integer(self, key: str) -> int:
        value = self._get(key)
        if not isinstance(value, int) or isinstance(value, bool):
            raise ImageError(f"{self.where}: {key} must be an integer, not {value!r}")
        return value

    def texts(self, key: str, pattern: re.Pattern[str] | None = None) -> tuple[str, ...]:
        values = self._get(key)
        if not _is_texts(values):
            raise ImageError(f"{self.where}: {key} must be a list of strings, not {values!r}")
        for value in values:
            if pattern is not None and pattern.fullmatch(value) is None:
                raise ImageError(
                    f"{self.where}: {key} holds {value!r}, which does not match {pattern.pattern}"
                )
            if values.count(value) > 1:
                raise ImageError(f"{self.where}: {key} holds {value!r} more than once")
        return tuple(values)

    def table(self, key: str) -> "_Table":
        value = self._get(key)
        if not isinstance(value, dict):
            raise ImageError(f"{self.where}: {key} must be a table [{key}], not {value!r}")
        return _Table(value, f"{self.where}: {key}")

    def absolute(self, path: str) -> str:
        """Check a path in the guest."""
        parts = PurePosixPath(path)
        if not parts.is_absolute() or ".." in parts.parts:
            raise ImageError(f"{self.where}: {path!r} must be an absolute path in the guest, without '..'")
        return path

    def inside(self, path: str) -> str:
        """Check a path in the repository."""
        parts = PurePosixPath(path)
        if parts.is_absolute() or ".." in parts.parts:
            raise ImageError(
                f"{self.where}: {path!r} must be a relative path in the repository, without '..'"
            )
        return path

    def finish(self) -> None:
        """Refuse keys that nothing has asked for."""
        for key in self._values:
            if key not in self._asked:
                raise ImageError(f"{self.where}: unknown key {key!r}{_suggest(key, sorted(self._asked))}")

    def _get(self, key: str) -> Any:
        self._asked.add(key)
        if key not in self._values:
            close = difflib.get_close_matches(
                key, [other for other in self._values if other not in self._asked], n=1
            )
            hint = f" ({close[0]!r} is there: a typo?)" if close else ""
            raise ImageError(f"{self.where}: {key} is missing{hint}")
        return self._values[key]


def _is_texts(values: object) -> TypeGuard[list[str]]:
    return isinstance(values, list) and all(isinstance(value, str) and value for value in values)


def _suggest(word: str, known: list[str]) -> str:
    close = difflib.get_close_matches(word, known, n=1)
    return f"; did you mean {close[0]!r}?" if close else ""
