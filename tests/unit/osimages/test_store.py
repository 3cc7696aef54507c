"""The image store: whole images or none, aliases last, nothing deleted unasked."""

from pathlib import Path

import pytest

from osimages.errors import ImageError
from osimages.manifest import Manifest, OsFacts, directory_name
from osimages.store import ImageStore, describe_layer

FACTS = OsFacts("debian", "bookworm", "12.11", "cc" * 32, "0.1.0", {})


def _image(directory: Path, content: bytes) -> tuple[Manifest, dict[str, Path]]:
    layer = directory / f"built-{content.hex()}"
    layer.write_bytes(content)
    return Manifest("amd64", (describe_layer(layer, "layer-0.erofs"),), FACTS), {"layer-0.erofs": layer}


@pytest.fixture
def store(tmp_path: Path) -> ImageStore:
    """An empty store."""
    return ImageStore(tmp_path / "images")


def test_add_writes_layers_and_a_manifest_that_hashes_to_the_digest(
    store: ImageStore, tmp_path: Path
) -> None:
    """Anybody can check an image with sha256sum alone."""
    manifest, layers = _image(tmp_path, b"layer")
    digest = store.add(manifest, layers)
    directory = store.root / directory_name(digest)
    assert sorted(path.name for path in directory.iterdir()) == ["layer-0.erofs", "manifest.json"]
    assert (directory / "layer-0.erofs").read_bytes() == b"layer"
    assert (directory / "manifest.json").read_bytes() == manifest.canonical()
    assert store.holds(digest)


def test_add_is_idempotent(store: ImageStore, tmp_path: Path) -> None:
    """An image that is there is not written again, so VMs that run on it are not disturbed."""
    manifest, layers = _image(tmp_path, b"layer")
    digest = store.add(manifest, layers)
    before = (store.root / directory_name(digest)).stat().st_ino
    assert store.add(manifest, {}) == digest
    assert (store.root / directory_name(digest)).stat().st_ino == before


def test_add_that_fails_leaves_nothing(store: ImageStore, tmp_path: Path) -> None:
    """Half an image is never visible, not even as litter."""
    manifest, _ = _image(tmp_path, b"layer")
    with pytest.raises(FileNotFoundError):
        store.add(manifest, {"layer-0.erofs": tmp_path / "missing"})
    assert list(store.root.iterdir()) == []
    assert not store.holds(manifest.digest())


def test_add_replaces_a_damaged_image(store: ImageStore, tmp_path: Path) -> None:
    """A truncated layer does not count as being there."""
    manifest, layers = _image(tmp_path, b"layer")
    digest = store.add(manifest, layers)
    damaged = store.root / directory_name(digest) / "layer-0.erofs"
    damaged.unlink()
    damaged.write_bytes(b"lay")
    assert not store.holds(digest)
    store.add(manifest, layers)
    assert damaged.read_bytes() == b"layer"


def test_set_alias_moves_a_name(store: ImageStore, tmp_path: Path) -> None:
    """The file holds the digest as one line, and the last setting counts."""
    first, second = (store.add(*_image(tmp_path, content)) for content in (b"1", b"2"))
    store.set_alias("base", first)
    store.set_alias("base", second)
    assert (store.root / "aliases" / "base").read_text() == f"{second}\n"
    assert store.aliases() == {"base": second}


def test_set_alias_refuses_an_image_that_is_not_there(store: ImageStore, tmp_path: Path) -> None:
    """A name never leads nowhere."""
    manifest, _ = _image(tmp_path, b"layer")
    with pytest.raises(ImageError, match=r"alias 'base' cannot point to sha256:.* holds no such image"):
        store.set_alias("base", manifest.digest())
    assert store.aliases() == {}


def test_prune_deletes_images_without_a_name_and_litter(store: ImageStore, tmp_path: Path) -> None:
    """Named images stay; the caches beside them are not the store's."""
    named, unnamed = (store.add(*_image(tmp_path, content)) for content in (b"1", b"2"))
    store.set_alias("base", named)
    (store.root / ".incoming-x").mkdir()
    (store.root / ".cache").mkdir()
    assert store.prune() == [directory_name(unnamed), ".incoming-x"]
    assert sorted(path.name for path in store.root.iterdir()) == [".cache", "aliases", directory_name(named)]
