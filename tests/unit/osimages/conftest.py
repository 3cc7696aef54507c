"""What the tests of this folder share."""

import pytest

_DECLARATION = """
version = 1
name = "tiny"
arch = "amd64"
hostname = "sandbox"
locale = "C.UTF-8"

[user]
name = "sandbox"
uid = 1000
shell = "/bin/bash"

[debian]
suite = "bookworm"
packages = ["python3", "libstdc++6"]
exclude = ["/usr/share/man/*"]
include = []

[guest]
files = "files"
directories = ["/etc/cocoon"]
python_target = "/opt/guestd"
python_packages = ["guestd"]
python_projects = ["guestd"]
mask = ["getty@.service"]
"""


@pytest.fixture
def declaration() -> str:
    """A valid declaration of a layered image named tiny."""
    return _DECLARATION
