r"""Built images on disk.

    <root>/sha256-<hex>/manifest.json, layer-0.erofs, layer-1.erofs     bottom layer first
    <root>/aliases/<name>                                               "sha256:<hex>\n"

An image's directory appears by one rename, complete, and never changes. The alias is replaced after that,
so whoever follows an alias finds a whole image, also while a build is running or after one was killed.
"""

import hashlib
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

from osimages.errors import ImageError
from osimages.manifest import Layer, Manifest, directory_name, parse_manifest

MANIFEST_FILE = "manifest.json"


class ImageStore:
    """The directory that holds images.

    Args:
        root: Made when missing. Must lie on one file system.
    """

    def __init__(self, root: Path) -> None:
        self.root = root

    def add(self, manifest: Manifest, layers: Mapping[str, Path]) -> str:
        """Take an image in and return its digest. Does nothing when the image is there already.

        Args:
            manifest: Describes the layers.
            layers: For each `Layer.file`, the file to copy. Hard-linked when possible: layers are immutable.
        """
        digest = manifest.digest()
        final = self.root / directory_name(digest)
        if self.holds(digest):
            return digest
        self.root.mkdir(parents=True, exist_ok=True)
        staging = Path(tempfile.mkdtemp(prefix=".incoming-", dir=self.root))
        try:
            staging.chmod(0o755)
            for layer in manifest.layers:
                _link_or_copy(layers[layer.file], staging / layer.file)
            _write_synced(staging / MANIFEST_FILE, manifest.canonical())
            if final.exists():  # and incomplete, or holds() would have said so
                shutil.rmtree(final)
            staging.rename(final)
        except BaseException:
            shutil.rmtree(staging, ignore_errors=True)
            raise
        return digest

    def holds(self, digest: str) -> bool:
        """Tell whether the image is there with all its layers in full length. Does not read the layers."""
        directory = self.root / directory_name(digest)
        try:
            manifest = parse_manifest((directory / MANIFEST_FILE).read_bytes())
            return manifest.digest() == digest and all(
                (directory / layer.file).stat().st_size == layer.size_bytes for layer in manifest.layers
            )
        except (FileNotFoundError, ImageError):
            return False

    def set_alias(self, name: str, digest: str) -> None:
        """Let `name` mean `digest` from now on.

        Raises:
            ImageError: There is no such image.
        """
        if not self.holds(digest):
            raise ImageError(f"alias {name!r} cannot point to {digest}: {self.root} holds no such image")
        aliases = self.root / "aliases"
        aliases.mkdir(exist_ok=True)
        staging = aliases / f".{name}.new"
        _write_synced(staging, f"{digest}\n".encode())
        staging.rename(aliases / name)

    def aliases(self) -> dict[str, str]:
        """Read all names and what they mean."""
        found = sorted((self.root / "aliases").glob("[!.]*"))
        return {path.name: path.read_text(encoding="utf-8").strip() for path in found}

    def prune(self) -> list[str]:
        """Delete images without an alias and what killed builds left; return the deleted directory names.

        The caller makes sure that no VM runs on them: an open layer stays readable for a VMM that has it
        open, but its next boot would not find it.
        """
        kept = {directory_name(digest) for digest in self.aliases().values()}
        doomed = [
            path
            for pattern in ("sha256-*", ".incoming-*")
            for path in sorted(self.root.glob(pattern))
            if path.name not in kept
        ]
        for path in doomed:
            shutil.rmtree(path)
        return [path.name for path in doomed]


def describe_layer(path: Path, file: str) -> Layer:
    """Measure a built layer that is going to be called `file`."""
    with path.open("rb") as stream:
        return Layer(
            file=file,
            sha256=hashlib.file_digest(stream, "sha256").hexdigest(),
            size_bytes=path.stat().st_size,
        )


def _link_or_copy(source: Path, target: Path) -> None:
    try:
        target.hardlink_to(source)
    except OSError:  # another file system, or one without hard links
        shutil.copyfile(source, target)


def _write_synced(path: Path, data: bytes) -> None:
    """Write and wait for the disk: a rename after it never exposes an empty file after a power cut."""
    with path.open("wb") as stream:
        stream.write(data)
        stream.flush()
        os.fsync(stream.fileno())
