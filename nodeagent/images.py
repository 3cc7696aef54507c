"""The image store: what `make images` laid down, read and checked.

`<root>/sha256-<hex>/{manifest.json,layer-N.erofs}`; `<root>/aliases/<name>` holds a
digest. An image is its manifest's digest; the manifest names layers and sizes.
"""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path

from cocoon_rpc.errors import ImageMissingError, TemplateNotFoundError
from nodeagent.model import Image

COMMAND = "make images"
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_ALIAS = re.compile(r"[a-zA-Z0-9][a-zA-Z0-9._-]{0,62}")
_LAYER = re.compile(r"layer-[0-9]{1,2}\.erofs")
_MOST_KNOWN = 50


class ImageStore:
    """Images by name or digest. Digests never change, so what was checked stays checked."""

    def __init__(self, root: Path) -> None:
        """Takes the store's folder; it need not be there yet."""
        self._root = root
        self._checked: dict[str, tuple[Path, ...]] = {}

    def resolve(self, template: str) -> Image:
        """Returns the image of a name or digest.

        Raises:
            TemplateNotFoundError: the store has others, but not this.
            ImageMissingError: the store is empty, or the image is damaged.
        """
        digest = template if _DIGEST.fullmatch(template) else self._alias(template)
        known = self._checked.get(digest)
        if known is None:
            known = self._checked[digest] = self._check(template, digest)
        return Image(template, digest, known)

    def all(self) -> list[Image]:
        """Returns the named images that are whole, sorted by name."""
        images = []
        for name in self._names():
            try:
                images.append(self.resolve(name))
            except (TemplateNotFoundError, ImageMissingError):
                continue
        return images

    def _names(self) -> list[str]:
        aliases = self._root / "aliases"
        return (
            sorted(p.name for p in aliases.iterdir() if _ALIAS.fullmatch(p.name)) if aliases.is_dir() else []
        )

    def _alias(self, name: str) -> str:
        names = self._names()
        if not names:
            raise ImageMissingError(image=f"image {name}", command=COMMAND)
        if name not in names:
            raise TemplateNotFoundError(template=name, known=names[:_MOST_KNOWN])
        digest = (self._root / "aliases" / name).read_text().strip()
        if not _DIGEST.fullmatch(digest):
            raise ImageMissingError(image=f"image {name}", command=COMMAND)
        return digest

    def _check(self, template: str, digest: str) -> tuple[Path, ...]:
        folder = self._root / digest.replace(":", "-")
        paths: tuple[Path, ...] = ()
        try:
            manifest = (folder / "manifest.json").read_bytes()
            layers = json.loads(manifest)["layers"]
            paths = tuple(folder / layer["file"] for layer in layers)
            whole = (
                bool(paths)
                and hashlib.sha256(manifest).hexdigest() == digest.removeprefix("sha256:")
                and all(_LAYER.fullmatch(p.name) and p.parent == folder for p in paths)
                and all(p.stat().st_size == x["size_bytes"] for p, x in zip(paths, layers, strict=True))
            )
        except FileNotFoundError:
            if template == digest:
                raise TemplateNotFoundError(template=template, known=self._names()[:_MOST_KNOWN]) from None
            whole = False
        except (OSError, ValueError, KeyError, TypeError):
            whole = False
        if not whole:
            raise ImageMissingError(image=f"image {template}", command=COMMAND)
        return paths
