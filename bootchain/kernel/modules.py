"""Which modules a guest needs, and in which order they load."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from bootchain.errors import BootchainError

# All that a guest will ever have: the images carry no kernel package.
WANTED = (
    "virtio_pci",
    "virtio_blk",
    "erofs",
    "overlay",
    "virtio_console",
    "vmw_vsock_virtio_transport",
    "vsock_loopback",
    "virtio_rng",
    "virtio_net",
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
    wanted: Iterable[str], needs: Mapping[str, tuple[str, ...]], builtin: frozenset[str]
) -> list[str]:
    """Returns modules to load, each after what it needs; built-in ones are left out.

    Raises:
        BootchainError: a module is neither there nor built in.
    """
    order: list[str] = []

    def visit(name: str) -> None:
        if name in builtin or name in order:
            return
        if name not in needs:
            raise BootchainError(f"the kernel package has no module {name}")
        for other in needs[name]:
            visit(other)
        order.append(name)

    for name in wanted:
        visit(name)
    return order


def read(tree: Path, wanted: Iterable[str] = WANTED) -> list[tuple[str, bytes]]:
    """Returns (name, contents) of the modules to load from an unpacked `lib/modules/<release>`."""
    files = {canonical(path.stem): path for path in tree.rglob("*.ko")}
    builtin = frozenset(
        canonical(Path(line).stem) for line in (tree / "modules.builtin").read_text().splitlines()
    )
    needs = {name: depends(path.read_bytes()) for name, path in files.items()}
    return [(name, files[name].read_bytes()) for name in load_order(wanted, needs, builtin)]
