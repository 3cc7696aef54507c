"""A reproducible initramfs: the kernel's cpio format ("newc"), written purely.

The same entries give the same bytes: fixed times and owners, inodes by position,
entries in the order given. Uncompressed, because unpacking costs more than reading.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

_MAGIC = b"070701"
_REGULAR = 0o100000
_DIRECTORY = 0o040000
_BLOCK = 512


@dataclass(frozen=True, slots=True)
class Entry:
    """One file or directory (data None) of the archive; names have no leading slash."""

    name: str
    mode: int
    data: bytes | None = None


def pack(entries: Iterable[Entry]) -> bytes:
    """Returns the archive of the entries, parents before children as given."""
    archive = bytearray()
    for inode, entry in enumerate(entries, start=1):
        kind = _DIRECTORY if entry.data is None else _REGULAR
        links = 2 if entry.data is None else 1
        archive += _record(
            entry.name, inode=inode, mode=kind | entry.mode, links=links, data=entry.data or b""
        )
    archive += _record("TRAILER!!!", inode=0, mode=0, links=1, data=b"")
    archive += bytes(-len(archive) % _BLOCK)
    return bytes(archive)


def _record(name: str, *, inode: int, mode: int, links: int, data: bytes) -> bytes:
    encoded = name.encode() + b"\0"
    # ino mode uid gid nlink mtime filesize devmajor devminor rdevmajor rdevminor namesize check
    fields = (inode, mode, 0, 0, links, 0, len(data), 0, 0, 0, 0, len(encoded), 0)
    header = _MAGIC + b"".join(b"%08X" % field for field in fields) + encoded
    return header + bytes(-len(header) % 4) + data + bytes(-len(data) % 4)
