"""Short directories: a node's unix sockets have 107 bytes for their path."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """A directory with a short name."""
    directory = Path(tempfile.mkdtemp(prefix="cocoon-"))
    yield directory
    shutil.rmtree(directory)
