"""The digest of an image: pinned, because everything that ever stored one depends on it."""

import dataclasses

import pytest

from osimages.errors import ImageError
from osimages.manifest import Layer, Manifest, OsFacts, directory_name, parse_manifest

MANIFEST = Manifest(
    arch="amd64",
    layers=(Layer("layer-0.erofs", "aa" * 32, 4096), Layer("layer-1.erofs", "bb" * 32, 8192)),
    os=OsFacts(
        distribution="debian",
        suite="bookworm",
        release="12.11",
        packages_sha256="cc" * 32,
        guestd_version="0.1.0",
        wheels={"protobuf": "7.36.2", "grpcio": "1.85.1"},
    ),
)
CANONICAL = (
    '{"arch":"amd64","layers":['
    f'{{"file":"layer-0.erofs","sha256":"{"aa" * 32}","size_bytes":4096}},'
    f'{{"file":"layer-1.erofs","sha256":"{"bb" * 32}","size_bytes":8192}}],'
    '"os":{"distribution":"debian","guestd_version":"0.1.0",'
    f'"packages_sha256":"{"cc" * 32}","release":"12.11","suite":"bookworm",'
    '"wheels":{"grpcio":"1.85.1","protobuf":"7.36.2"}},"schema_version":1}'
)


def test_canonical_form_is_pinned() -> None:
    """Keys sorted, no spaces: the same on every machine and in every release."""
    assert MANIFEST.canonical().decode() == CANONICAL


def test_digest_is_pinned() -> None:
    """The digest is the SHA-256 of the canonical form."""
    assert MANIFEST.digest() == "sha256:ad65b26457a723c3cb46670f42736d35ff3946e6a773105212dbdb04c49da4db"


def test_parse_is_the_inverse_of_canonical() -> None:
    """A stored manifest reads back equal."""
    assert parse_manifest(MANIFEST.canonical()) == MANIFEST


def test_order_of_layers_changes_the_digest() -> None:
    """Bottom first: the same layers the other way round are another image."""
    assert dataclasses.replace(MANIFEST, layers=MANIFEST.layers[::-1]).digest() != MANIFEST.digest()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (
            CANONICAL.replace('"schema_version":1', '"schema_version":2'),
            "schema version 2; this program reads 1",
        ),
        (CANONICAL.replace('"arch"', '"ark"'), "not an image manifest"),
        (CANONICAL.replace('"size_bytes":4096', '"size":4096'), "not an image manifest"),
        (CANONICAL[:-1], "not an image manifest"),
        ("[]", "not an image manifest"),
    ],
)
def test_parse_refuses_what_is_not_a_manifest(data: str, message: str) -> None:
    """A truncated, foreign or future file is an error, not half an image."""
    with pytest.raises(ImageError, match=message):
        parse_manifest(data.encode())


def test_directory_name_has_no_colon() -> None:
    """A colon would end a path in overlay options."""
    assert directory_name(f"sha256:{'0' * 64}") == f"sha256-{'0' * 64}"


@pytest.mark.parametrize(
    "digest", ["base", f"sha256:{'0' * 63}", f"sha256:{'A' * 64}", f"sha256:{'0' * 64}/../x"]
)
def test_directory_name_refuses_what_is_no_digest(digest: str) -> None:
    """A name from outside never becomes a path."""
    with pytest.raises(ImageError, match="is not a digest"):
        directory_name(digest)
