"""The manifest of an image and the digest that addresses it. Pure.

The digest is the SHA-256 of the manifest's canonical JSON, and the manifest names the SHA-256 of each
layer, so it pins every byte of the guest's root file system. Names are aliases and stand in no manifest;
neither does any time.
"""

import hashlib
import json
import re
from dataclasses import asdict, dataclass
from typing import Any

from osimages.errors import ImageError

SCHEMA_VERSION = 1

_DIGEST = re.compile(r"sha256:([0-9a-f]{64})")


@dataclass(frozen=True, slots=True)
class Layer:
    """One read-only EROFS file system."""

    file: str
    """Name within the image's directory."""
    sha256: str
    """Lower-case hex."""
    size_bytes: int


@dataclass(frozen=True, slots=True)
class OsFacts:
    """What one wants to know of an image without mounting it."""

    distribution: str
    suite: str
    release: str
    """Debian's point release, such as `12.11`."""
    packages_sha256: str
    """Digest of the image's package list, one `name version architecture` per line, sorted."""
    guestd_version: str
    wheels: dict[str, str]
    """Version of each Python distribution that guestd runs on."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """An image: its layers, bottom first, and facts about them."""

    arch: str
    layers: tuple[Layer, ...]
    os: OsFacts
    schema_version: int = SCHEMA_VERSION

    def canonical(self) -> bytes:
        """Serialise to the only JSON text with this meaning: sorted keys, no spaces, UTF-8."""
        return json.dumps(asdict(self), sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()

    def digest(self) -> str:
        """Compute `sha256:<hex>`: what `sha256sum manifest.json` says."""
        return f"sha256:{hashlib.sha256(self.canonical()).hexdigest()}"


def parse_manifest(data: bytes) -> Manifest:
    """Read what `Manifest.canonical` wrote.

    Raises:
        ImageError: Not a manifest, or one of another schema version.
    """
    try:
        document: dict[str, Any] = json.loads(data)
        if document["schema_version"] != SCHEMA_VERSION:
            raise ImageError(
                f"the manifest has schema version {document['schema_version']}; "
                f"this program reads {SCHEMA_VERSION}"
            )
        return Manifest(
            arch=document["arch"],
            layers=tuple(Layer(**layer) for layer in document["layers"]),
            os=OsFacts(**document["os"]),
        )
    except (ValueError, KeyError, TypeError) as error:
        raise ImageError(f"not an image manifest: {error!r}") from error


def directory_name(digest: str) -> str:
    """Turn `sha256:<hex>` into the image's directory name `sha256-<hex>`.

    Raises:
        ImageError: Not a digest.
    """
    match = _DIGEST.fullmatch(digest)
    if match is None:
        raise ImageError(f"{digest!r} is not a digest of the form sha256:<64 hex digits>")
    return f"sha256-{match[1]}"
