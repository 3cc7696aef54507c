"""A directory short enough for unix sockets."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def directory() -> Iterator[Path]:
    """A node's data directory: machines and goldens, empty."""
    with tempfile.TemporaryDirectory(prefix="cocoon-") as name:
        made = Path(name)
        (made / "machines").mkdir()
        (made / "goldens").mkdir()
        yield made
