"""From a directory to an EROFS layer whose bytes depend on the directory's content alone."""

import uuid
from pathlib import Path

from osimages.tools import run

EPOCH = 1_704_067_200
"""Time of every file in an image, in seconds: 2024-01-01. Any constant makes builds repeat; zero would be
before 1980, which zip archives of system files cannot express."""

_NAMESPACE = uuid.UUID("c0c00000-0000-4000-8000-000000000001")


def layer_argv(tree: str, target: str) -> list[str]:
    """Build the mkfs.erofs command.

    Not compressed: decompression costs a booting guest 0.3 s under software emulation, and the page cache
    of the host shares the file between all VMs. The UUID is constant for a layer's name and differs between
    the layers of an image: overlayfs drops its index over two lower layers of one UUID.
    """
    layer_uuid = uuid.uuid5(_NAMESPACE, Path(target).stem)
    return ["mkfs.erofs", "--quiet", f"-T{EPOCH}", f"-U{layer_uuid}", target, tree]


def make_layer(tree: Path, target: Path) -> None:
    """Write `tree` as a read-only file `target`, complete or not at all.

    Raises:
        ImageError: mkfs.erofs is missing or failed.
    """
    partial = target.with_suffix(".partial")
    run(layer_argv(str(tree), str(partial)))
    partial.chmod(0o444)
    partial.rename(target)
