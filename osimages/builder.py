"""Builds the declared images that are out of date.

    image.toml ─► Debian archive (cached) ─┬─► layer-0.erofs (cached) ──┐
    guestd, stubs, wheels (cached), files ─┴─► layer-1.erofs ───────────┴─► base
                                           └─► both trees in one layer ───► rt

Unpacking the archive, the guest tree and the flattening are done anew at each change: seconds together.
What an image was built from is remembered in a stamp; with equal stamps nothing is run and no network is
touched.
"""

import fcntl
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from osimages import debian, guest, spec
from osimages.erofs import EPOCH, layer_argv, make_layer
from osimages.errors import ImageError
from osimages.manifest import Manifest, OsFacts
from osimages.spec import LayeredSpec
from osimages.stamp import digest_of, digest_of_paths
from osimages.store import ImageStore, describe_layer
from osimages.tools import Report, run

_CACHE = ".cache"
_LOCK = "lock"


@dataclass(frozen=True, slots=True)
class Inputs:
    """Digests of everything that an image's bytes follow from."""

    debian: str
    wheels: str
    guest: str

    def stamp(self, flat: bool) -> str:
        """Compute the stamp of the layered or the flat image made of these inputs."""
        return digest_of(self.debian, self.wheels, self.guest, flat)


class Builder:
    """Builds images into a store.

    Args:
        repository: Root of the source tree.
        out: The store's directory; `.cache` in it holds archives, wheels and stamps.
        report: Gets a line before each step that may take longer than 2 s, and after each image.
        declarations: Directory of the `<name>/image.toml`.
    """

    def __init__(self, repository: Path, out: Path, report: Report, declarations: Path | None = None) -> None:
        self._repository = repository
        self._declarations = declarations or Path(__file__).parent
        self._cache = out / _CACHE
        self._report = report
        self._store = ImageStore(out)

    def build(self, names: Sequence[str], *, refresh: bool = False) -> dict[str, str]:
        """Bring images up to date; return the digest of each.

        Args:
            names: Images to build.
            refresh: Install Debian again with the packages of today.

        Raises:
            ImageError: A declaration is wrong, an input missing, or a step failed. Aliases then still mean
                what they meant before.
        """
        groups: dict[str, list[str]] = {}
        for name in names:
            declared = spec.load(self._declarations / name)
            source = declared.name if isinstance(declared, LayeredSpec) else declared.flatten_of
            groups.setdefault(source, []).append(name)
        self._cache.mkdir(parents=True, exist_ok=True)
        with _locked(self._cache / _LOCK, self._report):
            self._sweep()
            done: dict[str, str] = {}
            for source, members in groups.items():
                layered = self._layered(source, members)
                inputs = self._inputs(layered)
                current = {name: self._current(name, inputs.stamp(name != source)) for name in members}
                stale = [name for name in members if refresh or current[name] is None]
                fresh = self._make(layered, inputs, stale, refresh) if stale else {}
                for name in members:
                    done[name] = fresh.get(name) or current[name] or ""
                    self._report(f"{name}: {done[name]} {'built' if name in fresh else 'is up to date'}")
            return done

    def prune(self) -> list[str]:
        """Delete images without an alias, and cached inputs of no declared image; return what was deleted."""
        with _locked(self._cache / _LOCK, self._report):
            kept = {_LOCK}
            for path in self._declarations.glob(f"*/{spec.SPEC_FILE}"):
                declared = spec.load(path.parent)
                kept.add(f"{declared.name}.stamp")
                if isinstance(declared, LayeredSpec):
                    inputs = self._inputs(declared)
                    kept |= {
                        f"debian-{inputs.debian}.tar",
                        f"debian-{inputs.debian}.erofs",
                        f"wheels-{inputs.wheels}",
                    }
            doomed = sorted(path for path in self._cache.iterdir() if path.name not in kept)
            for path in doomed:
                _delete(path)
            return [*self._store.prune(), *(f"{_CACHE}/{path.name}" for path in doomed)]

    def _sweep(self) -> None:
        """Delete what killed builds left in the cache; the caller holds the lock, so none of it is in use."""
        for pattern in ("build-*", "*.partial"):
            for path in self._cache.glob(pattern):
                _delete(path)

    def _layered(self, source: str, wanted_by: Sequence[str]) -> LayeredSpec:
        declared = spec.load(self._declarations / source)
        if not isinstance(declared, LayeredSpec):
            raise ImageError(f"{', '.join(wanted_by)}: flatten_of names {source!r}, which is flat itself")
        return declared

    def _inputs(self, layered: LayeredSpec) -> Inputs:
        """Digest all inputs. Reads a few hundred small files: some 10 ms."""
        here = Path(__file__).parent
        builder = digest_of_paths(here, sorted(path.name for path in here.glob("*.py")))
        wanted = guest.requirements(layered.guest, self._repository)
        constraints = digest_of_paths(self._repository, ["constraints.txt"])
        files = digest_of_paths(self._declarations / layered.name, [layered.guest.files])
        packages = digest_of_paths(self._repository, layered.guest.python_packages, guest.is_for_development)
        version = guest.guestd_version(layered.guest, self._repository)
        return Inputs(
            debian=digest_of(
                debian.archive_argv(layered.debian, layered.user, layered.arch, ""), layer_argv("", ""), EPOCH
            ),
            wheels=digest_of(guest.wheels_argv(layered, wanted, "", "")[1:], constraints),
            guest=digest_of(asdict(layered), builder, files, packages, version),
        )

    def _current(self, name: str, stamp: str) -> str | None:
        """Find the image's digest if it was built from these inputs and is still whole."""
        try:
            remembered = json.loads((self._cache / f"{name}.stamp").read_bytes())
        except (FileNotFoundError, ValueError):
            return None
        digest = self._store.aliases().get(name)
        valid = (
            remembered == {"inputs": stamp, "digest": digest}
            and digest is not None
            and self._store.holds(digest)
        )
        return digest if valid else None

    def _make(
        self, layered: LayeredSpec, inputs: Inputs, names: Sequence[str], refresh: bool
    ) -> dict[str, str]:
        if os.geteuid() != 0:
            raise ImageError(
                "building an image needs root, for owners and modes of its files: run it with sudo"
            )
        archive = self._debian(layered, inputs, refresh)
        wheels = self._wheels(layered, inputs)
        with tempfile.TemporaryDirectory(prefix="build-", dir=self._cache) as scratch:
            root, tree = Path(scratch, "root"), Path(scratch, "guest")
            self._report(f"{layered.name}: unpacking Debian and laying guestd over it …")
            debian.unpack(archive, root)
            debian_layer = archive.with_suffix(".erofs")
            if not debian_layer.exists():
                make_layer(root, debian_layer)
            guest.write_tree(
                layered,
                self._declarations / layered.name / layered.guest.files,
                self._repository,
                wheels,
                tree,
            )
            self._merge(layered, root, tree)
            facts = self._facts(layered, root, wheels)
            built = {}
            for name in names:
                if name == layered.name:
                    make_layer(tree, Path(scratch, "guest.erofs"))
                    layers = [debian_layer, Path(scratch, "guest.erofs")]
                else:
                    make_layer(root, Path(scratch, f"{name}.erofs"))
                    layers = [Path(scratch, f"{name}.erofs")]
                built[name] = self._publish(
                    name, layered.arch, layers, facts, inputs.stamp(name != layered.name)
                )
            return built

    def _debian(self, layered: LayeredSpec, inputs: Inputs, refresh: bool) -> Path:
        archive = self._cache / f"debian-{inputs.debian}.tar"
        if refresh or not archive.exists():
            self._report(f"{layered.name}: installing Debian {layered.debian.suite}, about half a minute …")
            archive.with_suffix(".erofs").unlink(missing_ok=True)
            debian.make_archive(layered.debian, layered.user, layered.arch, archive, self._report)
        return archive

    def _wheels(self, layered: LayeredSpec, inputs: Inputs) -> Path:
        wheels = self._cache / f"wheels-{inputs.wheels}"
        if not wheels.exists():
            wanted = guest.requirements(layered.guest, self._repository)
            self._report(f"{layered.name}: installing wheels for guestd: {', '.join(wanted)} …")
            partial = wheels.with_suffix(".partial")
            partial.mkdir()
            if wanted:
                run(
                    guest.wheels_argv(
                        layered, wanted, str(self._repository / "constraints.txt"), str(partial)
                    )
                )
            partial.rename(wheels)
        return wheels

    def _merge(self, layered: LayeredSpec, root: Path, tree: Path) -> None:
        """Lay the guest tree over Debian, compile there, and bring the bytecode back."""
        target = layered.guest.python_target.removeprefix("/")
        run(["cp", "--archive", f"{tree}/.", str(root)])
        guest.compile_bytecode(root, layered.guest.python_target)
        run(["cp", "--archive", f"{root / target}/.", str(tree / target)])

    def _facts(self, layered: LayeredSpec, root: Path, wheels: Path) -> OsFacts:
        release, packages = debian.facts(root)
        return OsFacts(
            distribution="debian",
            suite=layered.debian.suite,
            release=release,
            packages_sha256=packages,
            guestd_version=guest.guestd_version(layered.guest, self._repository),
            wheels=guest.wheel_versions(wheels),
        )

    def _publish(self, name: str, arch: str, layers: Sequence[Path], facts: OsFacts, stamp: str) -> str:
        files = {f"layer-{index}.erofs": path for index, path in enumerate(layers)}
        manifest = Manifest(
            arch=arch, layers=tuple(describe_layer(path, file) for file, path in files.items()), os=facts
        )
        digest = self._store.add(manifest, files)
        self._store.set_alias(name, digest)
        (self._cache / f"{name}.stamp").write_text(
            json.dumps({"inputs": stamp, "digest": digest}), encoding="utf-8"
        )
        return digest


def _delete(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()


@contextmanager
def _locked(path: Path, report: Report) -> Iterator[None]:
    """Let one build at a time work on a store; the kernel frees the lock when its holder dies."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            report(f"waiting for another build that works on {path.parent.parent} …")
            fcntl.flock(stream, fcntl.LOCK_EX)
        yield
