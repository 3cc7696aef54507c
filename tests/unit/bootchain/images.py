"""Synthetic kernels: the smallest bytes with the structure that the boot chain reads."""

import struct
import subprocess

XEN_PHYS32_ENTRY = 18

_PACK = {
    "lz4": ["lz4", "-l", "-c"],
    "zstd": ["zstd", "-q", "-c"],
    "xz": ["xz", "--check=crc32", "-c"],
    "gzip": ["gzip", "-n", "-c"],
}


def note(name: bytes = b"Xen\0", kind: int = XEN_PHYS32_ENTRY, desc: bytes = b"\0\0\0\1") -> bytes:
    """Returns one ELF note, padded."""
    packed = struct.pack("<III", len(name), len(desc), kind)
    return packed + name + bytes(-len(name) % 4) + desc + bytes(-len(desc) % 4)


def elf(notes: bytes) -> bytes:
    """Returns a 64-bit ELF with a loadable segment and one segment of notes."""
    table, entry = 64, 56
    at = table + 2 * entry
    header = b"\x7fELF\x02\x01\x01" + bytes(9)
    header += struct.pack("<HHIQQQIHHHHHH", 2, 62, 1, 0x1000000, table, 0, 0, 64, entry, 2, 0, 0, 0)
    load = struct.pack("<IIQQQQQQ", 1, 5, 0, 0, 0, 0, 0, 4096)
    return header + load + struct.pack("<IIQQQQQQ", 4, 4, at, 0, 0, len(notes), len(notes), 4) + notes


def packed(packer: str, data: bytes) -> bytes:
    """Returns data as the kernel's build packs it: by a tool, with the size behind (gzip has its own)."""
    stream = subprocess.run(_PACK[packer], input=data, capture_output=True, check=True).stdout
    return stream if packer == "gzip" else stream + struct.pack("<I", len(data))


def bzimage(payload: bytes, *, setup_sectors: int = 3, offset: int = 100) -> bytes:
    """Returns a bzImage whose protected-mode part has `payload` at `offset`."""
    image = bytearray((setup_sectors + 1) * 512)
    image[0x1F1] = setup_sectors
    image[0x202:0x206] = b"HdrS"
    struct.pack_into("<II", image, 0x248, offset, len(payload))
    return bytes(image) + bytes(offset) + payload + b"tail"


def module(*needs: str) -> bytes:
    """Returns a module that says what it needs."""
    return b"\x7fELF code\0license=GPL\0depends=" + ",".join(needs).encode() + b"\0retpoline=Y\0"
