"""Which modules are taken, in which order."""

import lzma
from pathlib import Path

import pytest

from bootchain.errors import BootchainError
from bootchain.kernel.modules import depends, load_order, read
from tests.unit.bootchain.images import module

_NEEDS = {"blk": ("virtio",), "virtio": ("ring",), "pci": ("virtio", "ring"), "ring": (), "erofs": ("crc",)}


@pytest.mark.parametrize(
    ("wanted", "order"),
    [
        ([], []),
        (["ring"], ["ring"]),
        (["blk"], ["ring", "virtio", "blk"]),
        (["pci", "blk"], ["ring", "virtio", "pci", "blk"]),
        (["blk", "pci"], ["ring", "virtio", "blk", "pci"]),
        (["blk", "virtio", "blk"], ["ring", "virtio", "blk"]),
        (["erofs"], ["erofs"]),
        (["crc"], []),
    ],
)
def test_load_order_puts_needs_first(wanted: list[str], order: list[str]) -> None:
    """Each module once, after all it needs; what is built in is left out."""
    assert load_order(wanted, _NEEDS.__getitem__, frozenset({"crc"})) == order


@pytest.mark.parametrize(
    ("text", "names"),
    [
        (module(), ()),
        (module("virtio"), ("virtio",)),
        (module("virtio-ring", "crc32c_x"), ("virtio_ring", "crc32c_x")),
        (b"\x7fELF no information", ()),
        (b"\0not_depends=a\0", ()),
    ],
)
def test_depends_reads_the_modules_own_word(text: bytes, names: tuple[str, ...]) -> None:
    """Names come in the one spelling that is compared."""
    assert depends(text) == names


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A `lib/modules/<release>` with a plain module, one that needs it and is packed, and a built-in one."""
    drivers = tmp_path / "kernel" / "drivers"
    drivers.mkdir(parents=True)
    (drivers / "virtio-ring.ko").write_bytes(module())
    (drivers / "virtio_blk.ko.xz").write_bytes(lzma.compress(module("virtio_ring", "crc32c")))
    (tmp_path / "modules.builtin").write_text("kernel/crypto/crc32c.ko\nkernel/fs/ext4/ext4.ko\n")
    return tmp_path


def test_read_returns_contents_unpacked(tree: Path) -> None:
    """Spelling, packing and what is built in make no difference to who asks."""
    assert read(tree, ["virtio_blk", "ext4"]) == [
        ("virtio_ring", module()),
        ("virtio_blk", module("virtio_ring", "crc32c")),
    ]


def test_read_refuses_a_module_that_is_not_there(tree: Path) -> None:
    """A kernel that lacks a module fails the build, not the boot."""
    with pytest.raises(BootchainError, match="no module overlay"):
        read(tree, ["virtio_blk", "overlay"])
