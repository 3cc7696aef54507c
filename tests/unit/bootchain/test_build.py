"""The build as a whole, with a kernel package of our own making and no network."""

import hashlib
import json
from pathlib import Path

import pytest

from bootchain import __main__ as command
from bootchain import build as subject
from bootchain.errors import BootchainError
from bootchain.kernel import modules, package
from tests.unit.bootchain.images import bzimage, elf, module, note, packed

_RELEASE = "6.1.0-99-cloud-amd64"
_KERNEL = elf(note())


class Apt:
    """Stands in for apt and dpkg: a package that unpacks to a tiny kernel with all its modules."""

    def __init__(self) -> None:
        self.downloads = 0
        self.kernel = _KERNEL

    def download(self, folder: Path) -> Path:
        """Counts, and leaves a file with a package's name."""
        self.downloads += 1
        deb = folder / f"linux-image-{_RELEASE}_6.1.1-1_amd64.deb"
        deb.touch()
        return deb

    def unpack(self, _deb: Path, tree: Path) -> None:
        """Lays out what a kernel package has."""
        (tree / "boot").mkdir()
        (tree / "boot" / f"vmlinuz-{_RELEASE}").write_bytes(bzimage(packed("gzip", self.kernel)))
        drivers = tree / "lib" / "modules" / _RELEASE / "kernel"
        drivers.mkdir(parents=True)
        (drivers.parent / "modules.builtin").write_text("kernel/fs/ext4/ext4.ko\n")
        for name in modules.WANTED:
            (drivers / f"{name}.ko").write_bytes(module())


@pytest.fixture
def apt(monkeypatch: pytest.MonkeyPatch) -> Apt:
    """The stand-in, in place; /init is not compiled."""
    fake = Apt()
    monkeypatch.setattr(package, "download", fake.download)
    monkeypatch.setattr(package, "unpack", fake.unpack)
    monkeypatch.setattr(subject, "compile_init", lambda _folder: b"\x7fELF init")
    return fake


def silent(_line: str) -> None:
    """Progress that nobody reads."""


def test_build_leaves_artifacts_that_agree_with_the_manifest(apt: Apt, tmp_path: Path) -> None:
    """Kernel, initramfs and the manifest with their digests; nothing else stays."""
    assert subject.build(tmp_path, silent)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["initramfs.cpio", "manifest.json", "vmlinux"]
    assert (tmp_path / "vmlinux").read_bytes() == _KERNEL
    facts = json.loads((tmp_path / "manifest.json").read_text())
    assert facts["kernel_version"] == _RELEASE
    assert facts["kernel_package"] == f"linux-image-{_RELEASE}_6.1.1-1_amd64"
    assert facts["modules"] == list(modules.WANTED)
    for name, key in (("vmlinux", "vmlinux_sha256"), ("initramfs.cpio", "initramfs_sha256")):
        assert facts[key] == hashlib.sha256((tmp_path / name).read_bytes()).hexdigest()


def test_build_repeats_byte_for_byte(apt: Apt, tmp_path: Path) -> None:
    """Two builds of the same inputs are the same files, the manifest too."""
    for name in ("one", "two"):
        assert subject.build(tmp_path / name, silent)
    for name in ("vmlinux", "initramfs.cpio", "manifest.json"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()


def test_build_asks_apt_only_when_something_changed(
    apt: Apt, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing changed: no apt. Other sources, a lost file, a broken manifest or `refresh`: built anew."""
    assert subject.build(tmp_path, silent)
    assert not subject.build(tmp_path, silent)
    assert apt.downloads == 1
    (tmp_path / "vmlinux").unlink()
    assert subject.build(tmp_path, silent)
    (tmp_path / "manifest.json").write_text("{")
    assert subject.build(tmp_path, silent)
    assert subject.build(tmp_path, silent, refresh=True)
    monkeypatch.setattr(subject, "_inputs", lambda: "other sources")
    assert subject.build(tmp_path, silent)
    assert not subject.build(tmp_path, silent)
    assert apt.downloads == 5


def test_build_that_fails_keeps_what_was_there(apt: Apt, tmp_path: Path) -> None:
    """A package that cannot be used leaves the last good artifacts and no scratch."""
    subject.build(tmp_path, silent)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    apt.kernel = elf(note(kind=1))
    with pytest.raises(BootchainError, match="PVH"):
        subject.build(tmp_path, silent, refresh=True)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_main_says_what_it_did(
    apt: Apt, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Built, up to date, and one line on stderr with status 1 when it fails."""
    monkeypatch.setattr("sys.argv", ["bootchain", "--out", str(tmp_path)])
    assert command.main() == 0
    assert "downloading" in capsys.readouterr().out
    assert command.main() == 0
    assert capsys.readouterr().out == f"boot: up to date in {tmp_path}\n"
    apt.kernel = b""
    monkeypatch.setattr("sys.argv", ["bootchain", "--out", str(tmp_path), "--refresh"])
    assert command.main() == 1
    assert capsys.readouterr().err.startswith("bootchain: the kernel has no PVH entry")
