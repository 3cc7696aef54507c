"""Layers repeat byte for byte."""

import os
import shutil
from pathlib import Path

import pytest

from osimages.erofs import layer_argv, make_layer
from osimages.errors import ImageError

needs_mkfs = pytest.mark.skipif(shutil.which("mkfs.erofs") is None, reason="erofs-utils is not installed")


def test_layer_argv_fixes_time_and_uuid() -> None:
    """Neither the clock nor a random number reaches the layer; the tree comes last."""
    argv = layer_argv("tree", "out")
    assert argv[-2:] == ["out", "tree"]
    assert sum(item.startswith(("-T", "-U")) for item in argv) == 2


def _grow(root: Path, names: list[str], time: int) -> Path:
    root.mkdir()
    for name in names:
        (root / name).mkdir()
        (root / name / "file").write_text(name * 3000)
        (root / name / "link").symlink_to("file")
        os.utime(root / name / "file", (time, time))
    return root


@needs_mkfs
@pytest.mark.slow
def test_make_layer_depends_on_content_alone(tmp_path: Path) -> None:
    """Two trees with the same content give the same bytes, whenever and in which order they were written."""
    one = _grow(tmp_path / "one", ["a", "b", "c"], 1_000_000_000)
    two = _grow(tmp_path / "two", ["c", "a", "b"], 1_600_000_000)
    for folder in ("1", "2"):
        (tmp_path / folder).mkdir()
    make_layer(one, tmp_path / "1" / "layer-0.erofs")
    make_layer(two, tmp_path / "2" / "layer-0.erofs")
    assert (tmp_path / "1" / "layer-0.erofs").read_bytes() == (tmp_path / "2" / "layer-0.erofs").read_bytes()


@needs_mkfs
@pytest.mark.slow
def test_make_layer_changes_with_content(tmp_path: Path) -> None:
    """The comparison above can fail."""
    one = _grow(tmp_path / "one", ["a"], 1)
    make_layer(one, tmp_path / "one.erofs")
    (one / "a" / "file").write_text("other")
    make_layer(one, tmp_path / "two.erofs")
    assert (tmp_path / "one.erofs").read_bytes() != (tmp_path / "two.erofs").read_bytes()


@needs_mkfs
def test_make_layer_that_fails_leaves_no_layer(tmp_path: Path) -> None:
    """A killed or failed mkfs does not look like a cached layer."""
    with pytest.raises(ImageError, match=r"mkfs\.erofs .* failed"):
        make_layer(tmp_path / "missing", tmp_path / "out.erofs")
    assert not (tmp_path / "out.erofs").exists()


def test_layers_of_an_image_differ_in_their_uuid() -> None:
    """Overlayfs drops its index over lower layers of one UUID."""
    uuids = {
        word for n in range(3) for word in layer_argv("t", f"/x/layer-{n}.partial") if word.startswith("-U")
    }
    assert len(uuids) == 3
    assert layer_argv("t", "/a/layer-0.partial")[3] == layer_argv("u", "/b/layer-0.erofs")[3]
