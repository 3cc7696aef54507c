"""Which modules a guest needs, and in which order they load."""

from __future__ import annotations

import lzma
import re
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path

from bootchain.errors import BootchainError

# All that a guest will ever have: the images carry no kernel package. ext4 is built in.
WANTED = (
    "virtio_pci",
    "virtio_blk",
    "erofs",
    "overlay",
    "virtio_console",
    "vmw_vsock_virtio_transport",
    "vsock_loopback",
    "virtio_rng",
)
_DEPENDS = re.compile(rb"\0depends=([^\0]*)\0")


def depends(module: bytes) -> tuple[str, ...]:
    """Returns the names a module's .modinfo says it needs, in its order."""
    found = _DEPENDS.search(module)
    names = found.group(1).decode().split(",") if found else []
    return tuple(canonical(name) for name in names if name)


def canonical(name: str) -> str:
    """Returns the one spelling of a module's name: the kernel takes `-` and `_` for the same."""
    return name.replace("-", "_")


def load_order(
    wanted: Iterable[str], needs: Callable[[str], tuple[str, ...]], builtin: frozenset[str]
) -> list[str]:
    """Returns modules to load, each after what it needs; built-in ones are left out."""
    order: list[str] = []

    def visit(name: str) -> None:
        if name in builtin or name in order:
            return
        for other in needs(name):
            visit(other)
        order.append(name)

    for name in wanted:
        visit(name)
    return order


def read(tree: Path, wanted: Iterable[str] = WANTED) -> list[tuple[str, bytes]]:
    """Returns (name, contents) of the modules to load from an unpacked `lib/modules/<release>`.

    The package has no modules.dep, which is made where a kernel is installed; what a
    module needs stands in the module itself.

    Raises:
        BootchainError: a module is neither there nor built in.
    """
    files = {canonical(path.name.split(".")[0]): path for path in tree.rglob("*.ko*")}
    builtin = frozenset(
        canonical(Path(line).stem) for line in (tree / "modules.builtin").read_text().splitlines()
    )

    @cache
    def contents(name: str) -> bytes:
        path = files.get(name)
        if path is None:
            raise BootchainError(f"the kernel package has no module {name}")
        return lzma.decompress(path.read_bytes()) if path.suffix == ".xz" else path.read_bytes()

    order = load_order(wanted, lambda name: depends(contents(name)), builtin)
    return [(name, contents(name)) for name in order]
