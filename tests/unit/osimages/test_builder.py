"""The builder: which steps a change causes, with stand-ins for the programs that need root or a network.

The stand-ins are small scripts on PATH that do the same to files, much simplified, and note that they ran;
`tar` and `cp` are the real ones.
"""

import hashlib
import os
from pathlib import Path

import pytest

from osimages.builder import Builder
from osimages.errors import ImageError
from osimages.manifest import directory_name, parse_manifest

_STAND_INS = {
    "mmdebstrap": """
for last; do :; done
root=$(mktemp -d)
mkdir -p $root/var/lib/dpkg $root/etc $root/usr
status='Package: git\\nStatus: install ok installed\\nVersion: 1\\nArchitecture: amd64\\n'
printf "$status" > $root/var/lib/dpkg/status
echo 12.11 > $root/etc/debian_version
echo debian > $root/etc/hostname
tar -C $root -cf "$last" .
rm -r $root
""",
    "mkfs.erofs": """
for last; do target=$tree; tree=$last; done
(cd "$tree" && find . -type f | sort | while read -r path; do echo "$path"; cat "$path"; done) > "$target"
""",
    "chroot": """
echo bytecode > "$1/opt/guestd/guestd.pyc"
""",
}


class Workshop:
    """A source tree, an output directory and the stand-ins."""

    def __init__(self, root: Path, declaration: str) -> None:
        self.repository = root / "repository"
        self.declarations = root / "declarations"
        self.out = root / "images"
        self.log = root / "ran.log"
        self.lines: list[str] = []
        (self.declarations / "tiny/files/etc").mkdir(parents=True)
        (self.declarations / "tiny/files/etc/motd").write_text("hello\n")
        (self.declarations / "tiny/image.toml").write_text(declaration)
        (self.declarations / "flat").mkdir()
        (self.declarations / "flat/image.toml").write_text(
            'version = 1\nname = "flat"\nflatten_of = "tiny"\n'
        )
        (self.repository / "guestd").mkdir(parents=True)
        (self.repository / "guestd/__init__.py").touch()
        (self.repository / "guestd/pyproject.toml").write_text(
            '[project]\nname = "guestd"\nversion = "0.1"\ndependencies = []\n'
        )
        (self.repository / "constraints.txt").touch()
        tools = root / "tools"
        tools.mkdir()
        for name, script in _STAND_INS.items():
            (tools / name).write_text(f"#!/bin/sh -eu\necho {name} >> {self.log}\ntree=\n{script}")
            (tools / name).chmod(0o755)
        self.path = f"{tools}:{os.environ['PATH']}"

    def build(self, *names: str, refresh: bool = False) -> dict[str, str]:
        """Build; afterwards `ran` has the programs of this build alone."""
        self.log.write_text("")
        return self.builder().build(names or ("tiny", "flat"), refresh=refresh)

    def builder(self) -> Builder:
        """Make the object under test."""
        return Builder(self.repository, self.out, self.lines.append, self.declarations)

    @property
    def ran(self) -> list[str]:
        """Names of the programs of the last build, in order."""
        return self.log.read_text().split()


@pytest.fixture
def workshop(tmp_path: Path, declaration: str, monkeypatch: pytest.MonkeyPatch) -> Workshop:
    """A workshop whose stand-ins are first on PATH, used by what looks like root."""
    made = Workshop(tmp_path, declaration)
    monkeypatch.setenv("PATH", made.path)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    return made


def test_build_publishes_a_layered_and_a_flat_image(workshop: Workshop) -> None:
    """Two layers, bottom first, and the same files in one; each alias leads to its digest."""
    digests = workshop.build()
    assert set(digests) == {"tiny", "flat"}
    layers = {}
    for name, digest in digests.items():
        assert (workshop.out / "aliases" / name).read_text() == f"{digest}\n"
        directory = workshop.out / directory_name(digest)
        manifest = parse_manifest((directory / "manifest.json").read_bytes())
        assert manifest.os.release == "12.11"
        assert manifest.os.guestd_version == "0.1"
        for layer in manifest.layers:
            assert hashlib.sha256((directory / layer.file).read_bytes()).hexdigest() == layer.sha256
        layers[name] = [(directory / layer.file).read_text() for layer in manifest.layers]
    bottom, top = layers["tiny"]
    (flat,) = layers["flat"]
    assert "./etc/hostname\ndebian\n" in bottom
    assert "./etc/hostname\nsandbox\n" in top
    assert "./etc/motd\nhello\n" in top
    assert "./opt/guestd/guestd.pyc\nbytecode\n" in top
    assert "./etc/debian_version" in flat
    assert "./etc/hostname\nsandbox\n" in flat
    assert "./opt/guestd/guestd.pyc\nbytecode\n" in flat


def test_build_again_runs_nothing(workshop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    """With equal inputs no program is started, no network touched and no root needed."""
    first = workshop.build()
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert workshop.build() == first
    assert workshop.ran == []
    assert workshop.lines[-1].endswith("is up to date")


def test_change_of_guestd_leaves_debian_alone(workshop: Workshop) -> None:
    """Only the small layer and the flat image are made again; layer 0 keeps its bytes."""
    first = workshop.build()
    (workshop.repository / "guestd/__init__.py").write_text("changed = True\n")
    second = workshop.build()
    assert workshop.ran == ["chroot", "mkfs.erofs", "mkfs.erofs"]
    assert first["tiny"] != second["tiny"]
    bottoms = [
        workshop.out / directory_name(digests["tiny"]) / "layer-0.erofs" for digests in (first, second)
    ]
    assert bottoms[0].samefile(bottoms[1])


@pytest.mark.parametrize(
    "path",
    ["declarations/tiny/files/etc/motd", "repository/constraints.txt", "repository/guestd/__init__.py"],
)
def test_change_of_an_input_is_noticed(workshop: Workshop, path: str) -> None:
    """Files, constraints and sources all belong to the stamp."""
    workshop.build()
    with (workshop.out.parent / path).open("a") as stream:
        stream.write("# changed\n")
    workshop.build()
    assert "chroot" in workshop.ran
    assert "mmdebstrap" not in workshop.ran


@pytest.mark.parametrize(
    "path", ["guestd/tests/test_exec.py", "guestd/exec.pyi", "guestd/README.md", "README.md"]
)
def test_change_of_what_stays_out_is_not_noticed(workshop: Workshop, path: str) -> None:
    """Work on tests, stubs and prose makes no image."""
    workshop.build()
    changed = workshop.repository / path
    changed.parent.mkdir(exist_ok=True)
    changed.touch()
    workshop.build()
    assert workshop.ran == []


def test_change_of_packages_installs_debian_again(workshop: Workshop, declaration: str) -> None:
    """The archive is keyed by the command that makes it."""
    workshop.build()
    (workshop.declarations / "tiny/image.toml").write_text(
        declaration.replace('"libstdc++6"', '"libstdc++6", "git"')
    )
    workshop.build()
    assert workshop.ran[0] == "mmdebstrap"


def test_refresh_installs_debian_again(workshop: Workshop) -> None:
    """The way to today's packages, as stamps do not see what Debian publishes."""
    workshop.build()
    workshop.build(refresh=True)
    assert workshop.ran[0] == "mmdebstrap"


def test_lost_layer_is_built_again(workshop: Workshop) -> None:
    """A stamp alone does not make an image up to date."""
    digest = workshop.build()["flat"]
    (workshop.out / directory_name(digest) / "layer-0.erofs").unlink()
    assert workshop.build()["flat"] == digest
    assert workshop.ran == ["chroot", "mkfs.erofs"]


def test_build_of_the_flat_image_alone(workshop: Workshop) -> None:
    """Its source need not be built as an image first."""
    assert set(workshop.build("flat")) == {"flat"}
    assert not (workshop.out / "aliases/tiny").exists()


def test_failed_build_keeps_the_old_image(workshop: Workshop) -> None:
    """An alias goes on meaning what it meant, and the next build cleans up."""
    first = workshop.build()
    (workshop.repository / "guestd/__init__.py").write_text("changed = True\n")
    tool = Path(workshop.path.split(":")[0], "chroot")
    script = tool.read_text()
    tool.write_text("#!/bin/sh\necho no bytecode today\nexit 7\n")
    with pytest.raises(ImageError, match="failed with exit code 7:\n  no bytecode today"):
        workshop.build()
    assert (workshop.out / "aliases/tiny").read_text() == f"{first['tiny']}\n"
    (workshop.out / ".cache/build-killed").mkdir()
    tool.write_text(script)
    assert workshop.build()["tiny"] != first["tiny"]
    assert list((workshop.out / ".cache").glob("build-*")) == []


def test_build_without_root_says_so(workshop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    """Found before half a minute of installing has passed."""
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(ImageError, match="needs root"):
        workshop.build()
    assert workshop.ran == []


def test_flat_image_of_a_flat_image_is_refused(workshop: Workshop) -> None:
    """There is nothing left to flatten."""
    (workshop.declarations / "thin").mkdir()
    (workshop.declarations / "thin/image.toml").write_text(
        'version = 1\nname = "thin"\nflatten_of = "flat"\n'
    )
    with pytest.raises(ImageError, match="thin: flatten_of names 'flat', which is flat itself"):
        workshop.build("thin")


def test_prune_keeps_what_the_next_build_needs(workshop: Workshop) -> None:
    """Superseded images and caches go; nothing has to be made again afterwards."""
    first = workshop.build()
    (workshop.repository / "guestd/__init__.py").write_text("changed = True\n")
    workshop.build()
    (workshop.out / ".cache/debian-old.tar").touch()
    deleted = workshop.builder().prune()
    assert set(deleted) == {directory_name(digest) for digest in first.values()} | {".cache/debian-old.tar"}
    workshop.build()
    assert workshop.ran == []
