"""Builds `vmlinux`, `initramfs.cpio` and `manifest.json`; does nothing when they are up to date."""

from __future__ import annotations

import hashlib
import json
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

from bootchain import initramfs
from bootchain.errors import BootchainError
from bootchain.kernel import bzimage, modules, package

_HERE = Path(__file__).parent
_CC = ("musl-gcc", "-std=gnu11", "-Wall", "-Wextra", "-Werror", "-static", "-Os", "-s", "-fno-ident",
       "-Wl,--build-id=none")  # fmt: skip


def build(out: Path, say: Callable[[str], None], *, refresh: bool = False) -> bool:
    """Brings `out` up to date; returns whether anything was built.

    With `refresh` apt is asked for a newer kernel; otherwise one that is there
    stays, and nothing needs a network.

    Raises:
        BootchainError: a tool or the kernel package is missing or failed.
    """
    out = out.resolve()
    stamp, manifest = _inputs(), out / "manifest.json"
    if not refresh and _is_current(manifest, out, stamp):
        return False
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out, prefix=".build-") as scratch:
        folder = Path(scratch)
        say("boot: downloading Debian's cloud kernel (27 MB)")
        deb = package.download(folder)
        say(f"boot: unpacking {deb.name}")
        tree = folder / "tree"
        tree.mkdir()
        package.unpack(deb, tree)
        (image,) = tree.glob("boot/vmlinuz-*")
        release = image.name.removeprefix("vmlinuz-")
        kernel = bzimage.vmlinux(image.read_bytes(), _unpack)
        loaded = modules.read(tree / "lib" / "modules" / release)
        say("boot: compiling /init and packing the initramfs")
        archive = initramfs.pack(entries(compile_init(folder), loaded))
        facts = {
            "kernel_version": release,
            "kernel_package": deb.name.removesuffix(".deb"),
            "modules": [name for name, _ in loaded],
            "vmlinux_sha256": hashlib.sha256(kernel).hexdigest(),
            "initramfs_sha256": hashlib.sha256(archive).hexdigest(),
            "inputs_sha256": stamp,
        }
        # The manifest goes first and comes last: it is there only with its files.
        manifest.unlink(missing_ok=True)
        for name, data in (
            ("vmlinux", kernel),
            ("initramfs.cpio", archive),
            ("manifest.json", (json.dumps(facts, indent=2) + "\n").encode()),
        ):
            part = folder / name
            part.write_bytes(data)
            part.replace(out / name)
    return True


def entries(init: bytes, loaded: list[tuple[str, bytes]]) -> list[initramfs.Entry]:
    """Returns what stands in the initramfs."""
    names = [f"{index:02d}-{name}.ko" for index, (name, _) in enumerate(loaded)]
    folders = ("cow", "dev", "layers", "modules", "proc", "root", "sys")
    return [
        *(initramfs.Entry(folder, 0o755) for folder in folders),
        initramfs.Entry("init", 0o755, init),
        initramfs.Entry("modules/order", 0o644, "".join(f"{n}\n" for n in names).encode()),
        *(initramfs.Entry(f"modules/{n}", 0o644, m[1]) for n, m in zip(names, loaded, strict=True)),
    ]


def compile_init(folder: Path) -> bytes:
    """Returns the static /init. Raises: BootchainError."""
    sources = sorted((_HERE / "init").glob("*.c"))
    _run([*_CC, "-o", str(folder / "init"), *(s.name for s in sources)], cwd=_HERE / "init")
    return (folder / "init").read_bytes()


def _unpack(packer: str, packed: bytes) -> bytes:
    return _run([packer, "-d", "-c"], stdin=packed)


def _run(argv: list[str], *, cwd: Path | None = None, stdin: bytes = b"") -> bytes:
    try:
        done = subprocess.run(argv, cwd=cwd, input=stdin, capture_output=True, check=False, timeout=120)
    except FileNotFoundError as error:
        raise BootchainError(f"{argv[0]} is not installed: run `make setup`") from error
    if done.returncode:
        raise BootchainError(f"{argv[0]} failed: {done.stderr.decode(errors='replace')[-500:]}")
    return done.stdout


def _inputs() -> str:
    """Returns the digest of everything of ours that the artifacts are made from."""
    digest = hashlib.sha256()
    for path in sorted(p for kind in ("*.py", "*.c", "*.h") for p in _HERE.rglob(kind)):
        digest.update(f"{path.relative_to(_HERE)}\0".encode() + path.read_bytes())
    return digest.hexdigest()


def _is_current(manifest: Path, out: Path, stamp: str) -> bool:
    try:
        facts = json.loads(manifest.read_text())
    except (OSError, ValueError):
        return False
    there = (out / "vmlinux").is_file() and (out / "initramfs.cpio").is_file()
    return bool(there and facts.get("inputs_sha256") == stamp)
