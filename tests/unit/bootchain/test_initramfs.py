"""The initramfs: what is written is what a reader finds, and it depends on the content alone."""

import shutil
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bootchain.build import compile_init, entries
from bootchain.initramfs import Entry, pack

needs_musl = pytest.mark.skipif(shutil.which("musl-gcc") is None, reason="musl-tools is not installed")
needs_cpio = pytest.mark.skipif(shutil.which("cpio") is None, reason="cpio is not installed")

_MODULES = [("virtio", b"\x7fELF virtio"), ("virtio_blk", b"\x7fELF blk")]


def read(archive: bytes) -> list[tuple[Entry, list[int]]]:
    """Returns the entries of a newc archive with their 13 raw header fields, checking its framing."""
    found: list[tuple[Entry, list[int]]] = []
    position = 0
    while True:
        assert position % 4 == 0
        assert archive[position : position + 6] == b"070701"
        header = archive[position + 6 : position + 110]
        fields = [int(header[i : i + 8], 16) for i in range(0, 104, 8)]
        mode, size, name_size = fields[1], fields[6], fields[11]
        name = archive[position + 110 : position + 110 + name_size]
        assert name.endswith(b"\0")
        start = (position + 110 + name_size + 3) // 4 * 4
        data = archive[start : start + size]
        assert len(data) == size
        position = (start + size + 3) // 4 * 4
        if name == b"TRAILER!!!\0":
            assert not archive[position:].strip(b"\0")
            return found
        folder = mode & 0o170000 == 0o040000
        found.append((Entry(name[:-1].decode(), mode & 0o7777, None if folder else data), fields))


_names = st.text(st.characters(exclude_characters="/\0", exclude_categories=["Cs"]), min_size=1, max_size=30)
_entries = st.builds(
    Entry,
    _names.filter(lambda n: n != "TRAILER!!!"),
    st.integers(0, 0o777),
    st.none() | st.binary(max_size=64),
)


@given(st.lists(_entries, max_size=8))
def test_pack_round_trips(given_entries: list[Entry]) -> None:
    """Any names, modes and contents are found again, in order."""
    assert [entry for entry, _ in read(pack(given_entries))] == given_entries


def test_pack_has_no_owner_time_or_device() -> None:
    """What could differ between two builds is zero; inodes count up."""
    parts = read(pack([Entry("a", 0o755), Entry("a/b", 0o644, b"x")]))
    for position, (_, fields) in enumerate(parts, start=1):
        inode, _, uid, gid, _, mtime = fields[:6]
        assert (inode, uid, gid, mtime) == (position, 0, 0, 0)
        assert fields[7:11] == [0, 0, 0, 0]


@needs_cpio
def test_pack_is_read_by_cpio(tmp_path: Path) -> None:
    """The ordinary tool agrees with our own reader."""
    archive = pack(entries(b"#!init", _MODULES))
    subprocess.run(["cpio", "-idm", "--quiet"], input=archive, cwd=tmp_path, check=True)
    assert (tmp_path / "init").read_bytes() == b"#!init"
    assert (tmp_path / "init").stat().st_mode & 0o777 == 0o755
    assert (tmp_path / "modules" / "order").read_text() == "00-virtio.ko\n01-virtio_blk.ko\n"
    assert (tmp_path / "modules" / "01-virtio_blk.ko").read_bytes() == b"\x7fELF blk"
    assert (tmp_path / "proc").is_dir()


def test_entries_put_parents_first() -> None:
    """The kernel makes no folders on its own: each stands before what is in it."""
    seen = {""}
    for entry in entries(b"", _MODULES):
        assert entry.name.rpartition("/")[0] in seen
        seen.add(entry.name)


@needs_musl
def test_initramfs_repeats_byte_for_byte(tmp_path: Path) -> None:
    """Two builds with the real /init, in different folders, give the same bytes; other content does not."""
    archives = []
    for name in ("one", "other-and-longer"):
        folder = tmp_path / name
        folder.mkdir()
        archives.append(pack(entries(compile_init(folder), _MODULES)))
    assert archives[0] == archives[1]
    assert pack(entries(compile_init(tmp_path), _MODULES[:1])) != archives[0]


@needs_musl
def test_init_is_static_and_names_no_folder_of_the_build(tmp_path: Path) -> None:
    """/init needs no loader, and nothing of the machine that built it is inside."""
    init = compile_init(tmp_path)
    assert init[:4] == b"\x7fELF"
    assert b"ld-musl" not in init
    assert str(tmp_path).encode() not in init
    assert str(Path(__file__).parents[3]).encode() not in init
