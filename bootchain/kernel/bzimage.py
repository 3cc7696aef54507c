"""The uncompressed kernel inside a bzImage, and whether it can be booted directly.

Field offsets: the kernel's Documentation/x86/boot.rst. The ELF must carry the PVH
entry note, so that a hypervisor can start it without a boot loader.
"""

from __future__ import annotations

import struct
from collections.abc import Callable

from bootchain.errors import BootchainError

_SETUP_SECTS = 0x1F1
_HEADER_MAGIC = 0x202
_PAYLOAD_OFFSET = 0x248
_PAYLOAD_LENGTH = 0x24C
_SECTOR = 512
_PACKERS = {
    b"\x02\x21\x4c\x18": "lz4",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"\xfd7zX": "xz",
    b"\x1f\x8b\x08\x00": "gzip",
}
_XEN = b"Xen\0"
_PHYS32_ENTRY = 18
_PT_NOTE = 4


def payload(image: bytes) -> bytes:
    """Returns the compressed kernel of a bzImage. Raises: BootchainError."""
    if image[_HEADER_MAGIC : _HEADER_MAGIC + 4] != b"HdrS" or len(image) < _PAYLOAD_LENGTH + 4:
        raise BootchainError("not a bzImage: the setup header has no HdrS magic")
    setup_sectors = image[_SETUP_SECTS] or 4
    offset, length = struct.unpack_from("<II", image, _PAYLOAD_OFFSET)
    start = (setup_sectors + 1) * _SECTOR + offset
    if start + length > len(image):
        raise BootchainError("truncated bzImage: its payload ends beyond the file")
    return image[start : start + length]


def vmlinux(image: bytes, unpack: Callable[[str, bytes], bytes]) -> bytes:
    """Returns the ELF kernel of a bzImage, checked.

    Args:
        image: the whole bzImage.
        unpack: (packer, data) -> data, where packer is the name of the tool that made it.

    Raises:
        BootchainError: it is no bzImage, not packed in a known way, or cannot be booted directly.
    """
    packed = payload(image)
    packer = _PACKERS.get(packed[:4])
    if packer is None:
        raise BootchainError(f"the kernel is packed in a way not known here (magic {packed[:4].hex()})")
    # The last four bytes are the unpacked size; only for gzip are they a part of the stream.
    (size,) = struct.unpack("<I", packed[-4:])
    kernel = unpack(packer, packed if packer == "gzip" else packed[:-4])
    if len(kernel) != size:
        raise BootchainError(f"unpacked {len(kernel)} bytes of kernel, the image says {size}")
    if not has_pvh_entry(kernel):
        raise BootchainError("the kernel has no PVH entry note (CONFIG_PVH); it needs a boot loader")
    return kernel


def has_pvh_entry(elf: bytes) -> bool:
    """Says whether a 64-bit ELF has the note that PVH boot starts from."""
    if elf[:5] != b"\x7fELF\x02":
        return False
    try:
        (table,) = struct.unpack_from("<Q", elf, 32)
        entry_size, count = struct.unpack_from("<HH", elf, 54)
        headers = [struct.unpack_from("<IIQQQQ", elf, table + index * entry_size) for index in range(count)]
    except struct.error:
        return False
    for kind, _, offset, _, _, size in headers:
        if kind == _PT_NOTE and _has_note(elf[offset : offset + size]):
            return True
    return False


def _has_note(notes: bytes) -> bool:
    position = 0
    while position + 12 <= len(notes):
        name_size, desc_size, kind = struct.unpack_from("<III", notes, position)
        name = notes[position + 12 : position + 12 + name_size]
        if name == _XEN and kind == _PHYS32_ENTRY:
            return True
        position += 12 + (name_size + 3) // 4 * 4 + (desc_size + 3) // 4 * 4
    return False
