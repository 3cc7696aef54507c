"""Digests of inputs: whether anything that goes into an image has changed.

A path's digest covers its relative name, kind, execute bit and content or link target, and nothing that a
checkout or a copy changes (times, owners, other mode bits).
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from osimages.errors import ImageError

_IGNORED = frozenset({"__pycache__", ".mypy_cache", ".ruff_cache", ".pytest_cache", ".hypothesis"})


def digest_of(*facts: object) -> str:
    """Compute 32 hex digits of the SHA-256 of JSON-able facts: enough to tell inputs apart in a file name."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:32]


def digest_of_paths(
    root: Path, relative: Iterable[str], skip: Callable[[Path], bool] = lambda _: False
) -> str:
    """Compute the digest of files and whole directories below `root`.

    Args:
        root: Names in the digest are relative to it.
        relative: Paths below `root`.
        skip: Tells, from its path within one of `relative`, what does not count.

    Raises:
        ImageError: One of them does not exist.
    """
    return digest_of([entry for name in relative for entry in _entries(root, root / name, skip)])


def walk(path: Path) -> Iterator[Path]:
    """Yield `path` and all below it, parents first, sorted, without caches that tools leave in sources."""
    yield path
    if path.is_dir() and not path.is_symlink():
        for child in sorted(path.iterdir()):
            if child.name not in _IGNORED:
                yield from walk(child)


def _entries(root: Path, path: Path, skip: Callable[[Path], bool]) -> Iterator[tuple[str, str, str]]:
    if not path.exists():
        raise ImageError(f"{path} is missing, and an image is built from it{_remedy(path)}")
    for item in walk(path):
        name = str(item.relative_to(root))
        if skip(item.relative_to(path)):
            continue
        if item.is_symlink():
            yield name, "link", str(item.readlink())
        elif item.is_file():
            kind = "program" if item.stat().st_mode & 0o100 else "file"
            yield name, kind, hashlib.sha256(item.read_bytes()).hexdigest()
        else:
            yield name, "directory", ""


def _remedy(path: Path) -> str:
    return "; run `make proto` first" if path.parts[-3:] == ("proto", "python", "cocoon") else ""
