"""On a real process that maps a file privately, as a clone does."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from nodeagent.engine.qemu import ram

PAGE = os.sysconf("SC_PAGE_SIZE")
PAGES = 10_000
"""More than two chunks of the pagemap."""

# Maps a file, reads some pages, writes some, and waits to be ended.
_MAPPER = """
import mmap, os, sys
fd = os.open(sys.argv[1], os.O_RDWR)
memory = mmap.mmap(fd, 0, flags=getattr(mmap, sys.argv[2]))
size = os.sysconf("SC_PAGE_SIZE")
for page in eval(sys.argv[3]):
    memory[page * size]
for page in eval(sys.argv[4]):
    memory[page * size + 5 : page * size + 12] = b"written"
print("ready", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A memory file with data, holes, data at the end."""
    path = tmp_path / "ram"
    with path.open("wb") as file:
        file.truncate(PAGES * PAGE)
        for page in (0, 1, 2, 4095, 4096, 7000, PAGES - 1):
            file.seek(page * PAGE)
            file.write(os.urandom(PAGE))
    return path


@pytest.fixture
def mapper(base: Path) -> Iterator[Callable[..., int]]:
    """Starts a process that maps the base; returns its pid."""
    with ExitStack() as stack:

        def start(written: list[int], *, read: list[int] | None = None, flags: str = "MAP_PRIVATE") -> int:
            process = stack.enter_context(
                subprocess.Popen(
                    [sys.executable, "-c", _MAPPER, base, flags, repr(read or []), repr(written)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                )
            )
            stack.callback(process.kill)
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"
            return process.pid

        yield start


def _with(data: bytes, written: list[int]) -> bytes:
    changed = bytearray(data)
    for page in written:
        changed[page * PAGE + 5 : page * PAGE + 12] = b"written"
    return bytes(changed)


@pytest.mark.parametrize(
    "written",
    [[], [0], [PAGES - 1], [3, 4, 5], [4094, 4095, 4096, 4097], [0, 2, 4, 7000, 8191, 8192, PAGES - 1]],
    ids=str,
)
def test_composed_memory_is_the_base_with_what_was_written(
    base: Path, mapper: Callable[..., int], tmp_path: Path, written: list[int]
) -> None:
    before = base.read_bytes()
    pid = mapper(written, read=[1, 6000, 9000])
    target = tmp_path / "composed"
    ram.copy_sparse(base, target)
    assert ram.overlay_written(pid, base, target) == len(written) * PAGE, "only pages that were written"
    assert target.read_bytes() == _with(before, written)
    assert base.read_bytes() == before


def test_composed_memory_has_every_page_when_all_were_written(
    base: Path, mapper: Callable[..., int], tmp_path: Path
) -> None:
    everything = list(range(PAGES))
    pid = mapper(everything)
    target = tmp_path / "composed"
    ram.copy_sparse(base, target)
    assert ram.overlay_written(pid, base, target) == PAGES * PAGE
    assert target.read_bytes() == _with(base.read_bytes(), everything)


def test_copy_keeps_holes(base: Path, tmp_path: Path) -> None:
    ram.copy_sparse(base, tmp_path / "copy")
    assert (tmp_path / "copy").read_bytes() == base.read_bytes()
    assert (tmp_path / "copy").stat().st_blocks <= base.stat().st_blocks


def test_copy_of_nothing_but_a_hole(tmp_path: Path) -> None:
    with (tmp_path / "hole").open("wb") as file:
        file.truncate(3 * PAGE)
    ram.copy_sparse(tmp_path / "hole", tmp_path / "copy")
    assert (tmp_path / "copy").read_bytes() == bytes(3 * PAGE)


def test_copy_overwrites_nothing(base: Path, tmp_path: Path) -> None:
    (tmp_path / "copy").touch()
    with pytest.raises(FileExistsError):
        ram.copy_sparse(base, tmp_path / "copy")


def test_shared_mapping_is_refused(base: Path, mapper: Callable[..., int], tmp_path: Path) -> None:
    pid = mapper([3], flags="MAP_SHARED")
    ram.copy_sparse(base, tmp_path / "copy")
    with pytest.raises(ram.MappingError, match="privately and whole"):
        ram.overlay_written(pid, base, tmp_path / "copy")


def test_process_without_the_file_is_refused(base: Path, tmp_path: Path) -> None:
    ram.copy_sparse(base, tmp_path / "copy")
    with pytest.raises(ram.MappingError, match=f"process {os.getpid()} does not map ram"):
        ram.overlay_written(os.getpid(), base, tmp_path / "copy")


def test_dead_process_is_an_os_error(base: Path, tmp_path: Path) -> None:
    with subprocess.Popen(["/bin/true"]) as process:
        pass
    ram.copy_sparse(base, tmp_path / "copy")
    with pytest.raises(OSError, match=str(process.pid)):
        ram.overlay_written(process.pid, base, tmp_path / "copy")
