"""The memory of a clone as a file of its own: its golden's, with the pages it has written.

A clone maps its golden's memory file privately. A page it has written is anonymous in
its address space, every other page is still the file's; the kernel's pagemap tells
which is which. So a snapshot of a clone costs what the clone wrote, and the result
needs no ancestor.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Iterator
from pathlib import Path

_PAGE = os.sysconf("SC_PAGE_SIZE")
_ENTRY = 8
# Of a pagemap entry (admin-guide/mm/pagemap): bit 63 present, 62 swapped, 61 a file's page.
_PRESENT, _SWAPPED, _OF_FILE = 1 << 63, 1 << 62, 1 << 61
_CHUNK_PAGES = 4096
_COPY_BYTES = 1 << 26


class MappingError(Exception):
    """The process does not map the file as expected."""


def copy_sparse(source: Path, target: Path) -> None:
    """Copies a file that nobody writes, without its holes. Raises: OSError."""
    with source.open("rb") as reader, target.open("xb") as writer:
        size = os.fstat(reader.fileno()).st_size
        os.truncate(writer.fileno(), size)
        at = 0
        while (start := _data(reader.fileno(), at)) is not None:
            at, end = start, os.lseek(reader.fileno(), start, os.SEEK_HOLE)
            while at < end:
                length = min(end - at, _COPY_BYTES)
                copied = os.copy_file_range(reader.fileno(), writer.fileno(), length, at, at)
                if not copied:
                    raise OSError(f"{source} became shorter while it was copied")
                at += copied


def overlay_written(pid: int, base: Path, target: Path) -> int:
    """Writes the pages a stopped process has written over its private mapping of `base`.

    Args:
        pid: the process; a child of ours, or we are root.
        base: the file it maps privately and whole, in one piece or several.
        target: a copy of `base`.

    Returns:
        How many bytes were written.

    Raises:
        MappingError: it maps no such file.
        OSError: the target or the process's memory failed.
    """
    written = 0
    memory = os.open(f"/proc/{pid}/mem", os.O_RDONLY | os.O_CLOEXEC)
    try:
        with target.open("r+b", buffering=0) as writer:
            for address, length, offset in _mappings(pid, base):
                for first, count in _runs(pid, address, length):
                    written += _copy(memory, first, writer.fileno(), offset + first - address, count * _PAGE)
    finally:
        os.close(memory)
    return written


def _mappings(pid: int, base: Path) -> list[tuple[int, int, int]]:
    """Returns (address, length, offset in the file) of each private mapping of `base`."""
    name, found = str(base.resolve()), []
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        span, mode, offset, _, _, *path = line.split(maxsplit=5)
        if path == [name] and mode.endswith("p"):
            first, last = (int(part, 16) for part in span.split("-"))
            found.append((first, last - first, int(offset, 16)))
    if sum(length for _, length, _ in found) != base.stat().st_size:
        raise MappingError(f"process {pid} does not map {base.name} privately and whole")
    return found


def _runs(pid: int, address: int, length: int) -> Iterator[tuple[int, int]]:
    """Yields (address, pages) of runs of written pages."""
    first, count = 0, 0
    with Path(f"/proc/{pid}/pagemap").open("rb", buffering=0) as pagemap:
        for chunk in range(address, address + length, _CHUNK_PAGES * _PAGE):
            pages = min(_CHUNK_PAGES, (address + length - chunk) // _PAGE)
            entries = array("Q", os.pread(pagemap.fileno(), pages * _ENTRY, chunk // _PAGE * _ENTRY))
            if len(entries) != pages:
                raise MappingError(f"the memory of process {pid} is gone")
            for index, entry in enumerate(entries):
                if not (entry & _SWAPPED or (entry & _PRESENT and not entry & _OF_FILE)):
                    continue
                here = chunk + index * _PAGE
                if here != first + count * _PAGE:
                    if count:
                        yield first, count
                    first, count = here, 0
                count += 1
    if count:
        yield first, count


def _copy(source: int, at: int, target: int, to: int, length: int) -> int:
    for done in range(0, length, _COPY_BYTES):
        wanted = min(_COPY_BYTES, length - done)
        data = os.pread(source, wanted, at + done)
        if len(data) != wanted or os.pwrite(target, data, to + done) != wanted:
            raise OSError("short copy of a machine's memory")
    return length


def _data(fd: int, at: int) -> int | None:
    """Returns where the next data of a file begins, None after the last."""
    try:
        return os.lseek(fd, at, os.SEEK_DATA)
    except OSError:
        # ENXIO: only a hole is left.
        return None
