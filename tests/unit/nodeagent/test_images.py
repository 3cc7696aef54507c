"""An image is whole and its digest's, or it is not there."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from cocoon_rpc.errors import ImageMissingError, TemplateNotFoundError
from nodeagent.images import ImageStore


def lay(root: Path, name: str, layers: Any = None, content: bytes = b"erofs") -> str:
    """Lays an image down as the builder does; returns its digest."""
    if layers is None:
        layers = [{"file": "layer-0.erofs", "size_bytes": len(content)}]
    manifest = json.dumps({"layers": layers, "for": name}).encode()
    digest = hashlib.sha256(manifest).hexdigest()
    folder = root / f"sha256-{digest}"
    folder.mkdir(parents=True)
    (folder / "manifest.json").write_bytes(manifest)
    (folder / "layer-0.erofs").write_bytes(content)
    (root / "aliases").mkdir(exist_ok=True)
    (root / "aliases" / name).write_text(f"sha256:{digest}\n")
    return f"sha256:{digest}"


def test_name_and_digest_lead_to_the_same_layers(tmp_path: Path) -> None:
    digest = lay(tmp_path, "rt")
    store = ImageStore(tmp_path)
    by_name, by_digest = store.resolve("rt"), store.resolve(digest)
    assert (by_name.digest, by_name.name) == (digest, "rt")
    assert by_name.layers == by_digest.layers
    assert [p.read_bytes() for p in by_name.layers] == [b"erofs"]


def test_an_alias_that_moves_is_followed(tmp_path: Path) -> None:
    first = lay(tmp_path, "rt")
    store = ImageStore(tmp_path)
    assert store.resolve("rt").digest == first
    second = lay(tmp_path, "rt", content=b"newer one")
    assert store.resolve("rt").digest == second
    assert store.resolve(first).digest == first


def test_an_unknown_name_is_not_found_and_says_what_there_is(tmp_path: Path) -> None:
    lay(tmp_path, "base")
    lay(tmp_path, "rt")
    for unknown in ("nope", "sha256:" + "0" * 64, "../aliases/rt", "a/b"):
        with pytest.raises(TemplateNotFoundError) as caught:
            ImageStore(tmp_path).resolve(unknown)
        assert list(caught.value.detail.known) == ["base", "rt"]  # type: ignore[attr-defined]


@pytest.mark.parametrize("make_root", [False, True])
def test_an_empty_store_names_the_command(tmp_path: Path, make_root: bool) -> None:
    if make_root:
        (tmp_path / "s" / "aliases").mkdir(parents=True)
    store = ImageStore(tmp_path / "s")
    assert store.all() == []
    with pytest.raises(ImageMissingError, match="make images"):
        store.resolve("rt")


def damage_manifest(folder: Path) -> None:
    (folder / "manifest.json").write_text("{}")


def remove_layer(folder: Path) -> None:
    (folder / "layer-0.erofs").unlink()


def cut_layer(folder: Path) -> None:
    (folder / "layer-0.erofs").write_bytes(b"ero")


def no_text(folder: Path) -> None:
    (folder / "manifest.json").write_bytes(b"\xff")


@pytest.mark.parametrize("damage", [damage_manifest, remove_layer, cut_layer, no_text])
def test_a_damaged_image_is_missing_and_not_listed(tmp_path: Path, damage: Any) -> None:
    digest = lay(tmp_path, "rt")
    lay(tmp_path, "whole")
    damage(tmp_path / digest.replace(":", "-"))
    store = ImageStore(tmp_path)
    with pytest.raises(ImageMissingError, match="make images"):
        store.resolve("rt")
    assert [i.name for i in store.all()] == ["whole"]


@pytest.mark.parametrize(
    "layers",
    [
        [],
        {},
        [{"file": "../layer-0.erofs", "size_bytes": 5}],
        [{"file": "/etc/passwd", "size_bytes": 5}],
        [{"file": "layer-0.erofs"}],
        [{"file": "layer-0.erofs", "size_bytes": 4}],
        [{"file": "manifest.json", "size_bytes": 5}],
        "layer-0.erofs",
        7,
    ],
)
def test_a_manifest_that_names_anything_else_is_refused(tmp_path: Path, layers: Any) -> None:
    lay(tmp_path, "rt", layers=layers)
    with pytest.raises(ImageMissingError):
        ImageStore(tmp_path).resolve("rt")


def test_an_alias_that_holds_no_digest_is_missing(tmp_path: Path) -> None:
    lay(tmp_path, "rt")
    (tmp_path / "aliases" / "rt").write_text("../../etc")
    with pytest.raises(ImageMissingError):
        ImageStore(tmp_path).resolve("rt")
