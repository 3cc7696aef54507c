"""Declarations: what is accepted, and that each mistake gets a message one can act on."""

from pathlib import Path

import pytest

import osimages
from osimages.errors import ImageError
from osimages.spec import FlatSpec, LayeredSpec, load, parse


def test_parse_reads_a_layered_image(declaration: str) -> None:
    """Every key arrives in its field."""
    spec = parse(declaration, "image.toml")
    assert isinstance(spec, LayeredSpec)
    assert (spec.name, spec.arch, spec.hostname, spec.locale) == ("tiny", "amd64", "sandbox", "C.UTF-8")
    assert (spec.user.name, spec.user.uid, spec.user.shell) == ("sandbox", 1000, "/bin/bash")
    assert spec.debian.packages == ("python3", "libstdc++6")
    assert spec.guest.mask == ("getty@.service",)


def test_parse_reads_a_flat_image() -> None:
    """An image that flattens another declares nothing else."""
    assert parse('version = 1\nname = "rt"\nflatten_of = "base"', "image.toml") == FlatSpec("rt", "base")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("hostname =", "hostnam =", "image.toml: hostname is missing ('hostnam' is there: a typo?)"),
        ("mask =", "masks = []\nmask =", "image.toml: guest: unknown key 'masks'; did you mean 'mask'?"),
        ('name = "tiny"', 'name = "tiny"\ncolour = 3', "image.toml: unknown key 'colour'"),
        ("[user]", "[usr]", "image.toml: user is missing ('usr' is there: a typo?)"),
        ("version = 1", "version = 2", "version is 2; this builder reads version 1"),
        ("version = 1", "version = true", "version must be an integer, not True"),
        ('arch = "amd64"', 'arch = "mips"', "arch is 'mips'; possible: amd64"),
        ('name = "tiny"', 'name = "../x"', "name is '../x', which does not match"),
        ("uid = 1000", "uid = 0", "user.uid is 0; Debian keeps 1000 to 59999"),
        ('shell = "/bin/bash"', 'shell = "bash"', "'bash' must be an absolute path in the guest"),
        ('files = "files"', 'files = "../x"', "'../x' must be a relative path in the repository"),
        ('["/etc/cocoon"]', '["/etc/../x"]', "'/etc/../x' must be an absolute path in the guest"),
        ('"libstdc++6"', '"-o=x"', "packages holds '-o=x', which does not match"),
        ('"libstdc++6"', '"python3"', "packages holds 'python3' more than once"),
        ("include = []", 'include = "x"', "include must be a list of strings, not 'x'"),
        ("include = []", 'include = [""]', "include must be a list of strings, not ['']"),
        ('locale = "C.UTF-8"', "locale = []", "locale must be a non-empty string, not []"),
        (
            'python_projects = ["guestd"]',
            "python_projects = []",
            "guest: python_projects must name at least guestd",
        ),
        ("version = 1", "version =", "image.toml: not valid TOML"),
    ],
)
def test_parse_refuses_a_mistake_and_names_it(declaration: str, old: str, new: str, message: str) -> None:
    """The message says which key of which table is wrong, and what was probably meant."""
    assert declaration.count(old) == 1
    with pytest.raises(ImageError) as caught:
        parse(declaration.replace(old, new), "image.toml")
    assert message in str(caught.value)


def test_parse_refuses_content_in_a_flat_image() -> None:
    """Packages of a flat image come from the one it flattens."""
    with pytest.raises(ImageError, match="unknown key 'debian'"):
        parse('version = 1\nname = "rt"\nflatten_of = "base"\n[debian]', "image.toml")


def test_load_suggests_an_image_that_exists(declaration: str, tmp_path: Path) -> None:
    """A misspelt image name is answered with the declared ones."""
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "image.toml").write_text(declaration)
    with pytest.raises(ImageError, match=r"no image 'bse'; did you mean 'base'\?; declared: base"):
        load(tmp_path / "bse")


def test_load_refuses_a_name_other_than_the_directory(declaration: str, tmp_path: Path) -> None:
    """An image is found by its directory, so both names must agree."""
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "image.toml").write_text(declaration)
    with pytest.raises(ImageError, match="name is 'tiny', but the directory is 'other'"):
        load(tmp_path / "other")


def test_declared_images_are_valid() -> None:
    """The images of this repository parse, and rt is base in one layer."""
    directory = Path(osimages.__file__).parent
    base, rt = load(directory / "base"), load(directory / "rt")
    assert isinstance(base, LayeredSpec)
    assert rt == FlatSpec("rt", base.name)
    assert (directory / "base" / base.guest.files).is_dir()
