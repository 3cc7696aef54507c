"""The kernel inside a bzImage, from synthetic images."""

import shutil
import subprocess

import pytest

from bootchain.errors import BootchainError
from bootchain.kernel.bzimage import has_pvh_entry, payload, vmlinux
from tests.unit.bootchain.images import bzimage, elf, note, packed

_KERNEL = elf(note())


def unpack(packer: str, data: bytes) -> bytes:
    return subprocess.run([packer, "-d", "-c"], input=data, capture_output=True, check=True).stdout


@pytest.mark.parametrize("setup_sectors", [1, 3, 39])
def test_payload_is_where_the_header_says(setup_sectors: int) -> None:
    """Behind the boot sector and the setup sectors, at the offset, neither more nor less."""
    assert payload(bzimage(b"packed kernel", setup_sectors=setup_sectors, offset=77)) == b"packed kernel"


def test_payload_takes_no_setup_sectors_for_four() -> None:
    """A zero in the header is the oldest kernels' way to say four."""
    image = bytearray(bzimage(b"packed kernel", setup_sectors=4))
    image[0x1F1] = 0
    assert payload(bytes(image)) == b"packed kernel"


@pytest.mark.parametrize("image", [b"", b"MZ" + bytes(600), b"\x7fELF" + bytes(4000), bzimage(b"")[:0x210]])
def test_payload_refuses_other_files(image: bytes) -> None:
    """What has no setup header is no bzImage."""
    with pytest.raises(BootchainError, match="not a bzImage"):
        payload(image)


def test_payload_refuses_a_truncated_image() -> None:
    """A download that broke off is told as such."""
    with pytest.raises(BootchainError, match="truncated"):
        payload(bzimage(bytes(5000))[:-1000])


@pytest.mark.parametrize("packer", ["lz4", "zstd", "xz", "gzip"])
def test_vmlinux_unpacks(packer: str) -> None:
    """The kernel comes back whatever Debian packed it with."""
    if shutil.which(packer) is None:
        pytest.skip(f"{packer} is not installed")
    assert vmlinux(bzimage(packed(packer, _KERNEL)), unpack) == _KERNEL


def test_vmlinux_refuses_an_unknown_packer() -> None:
    """The message has the magic, which says what to add."""
    with pytest.raises(BootchainError, match="42410000"):
        vmlinux(bzimage(b"BA\0\0 something"), unpack)


def test_vmlinux_refuses_a_wrong_size() -> None:
    """The size behind the stream is checked."""
    with pytest.raises(BootchainError, match="the image says"):
        vmlinux(bzimage(packed("gzip", _KERNEL)), lambda packer, data: unpack(packer, data)[:-1])


def test_vmlinux_refuses_a_kernel_without_pvh_entry() -> None:
    """It would need a boot loader, which there is not."""
    with pytest.raises(BootchainError, match="PVH"):
        vmlinux(bzimage(packed("gzip", elf(note(kind=6)))), unpack)


@pytest.mark.parametrize(
    ("notes", "found"),
    [
        (note(), True),
        (note(b"GNU\0", 3, bytes(20)) + note(b"Linux\0", 257, bytes(5)) + note(), True),
        (b"", False),
        (note(b"GNU\0", 18), False),
        (note(kind=17), False),
        (note()[:8], False),
    ],
)
def test_has_pvh_entry_wants_the_xen_note(notes: bytes, *, found: bool) -> None:
    """Only Xen's note of type 18 counts, also behind padded ones; a cut one does not."""
    assert has_pvh_entry(elf(notes)) is found


@pytest.mark.parametrize("length", range(0, 64, 7))
def test_has_pvh_entry_takes_any_prefix(length: int) -> None:
    """A cut ELF has no entry, and no exception."""
    assert not has_pvh_entry(_KERNEL[:length])
