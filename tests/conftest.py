"""The fixture ladder: artifacts → golden → guest → node. A test takes the lowest rung it needs.

`*_any` fixtures run a test on both engines: `local`, and `qemu` (marked `vm`).
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc.aio
import pytest

from nodeagent.clock import SystemClock
from nodeagent.engine.base import Engine, Golden
from nodeagent.engine.local.engine import LocalEngine
from nodeagent.engine.qemu.engine import QemuEngine
from nodeagent.images import ImageStore
from nodeagent.model import Image, Size
from nodeagent.pool.provision import Guest, Provisioner
from nodeagent.telemetry.metrics import Metrics
from tests.framework.leaks import assert_nothing_left
from tests.framework.node import BOOT, IMAGES, ROOT_TOKEN, NodeProcess, node_config

ENGINES = [pytest.param("local", marks=pytest.mark.root), pytest.param("qemu", marks=pytest.mark.vm)]


@dataclass(frozen=True)
class Bench:
    """An engine at work in a directory."""

    engine: Engine
    provisioner: Provisioner
    directory: Path
    image: Image
    golden: Golden | None

    async def guest(self) -> Guest:
        """Returns a guest that has answered: a clone where the engine can, else a boot."""
        if self.golden is None:
            return await self.provisioner.cold(self.image, Size.SMALL)
        return await self.provisioner.clone(self.golden)


@pytest.fixture(scope="session")
def images() -> ImageStore:
    """The image store that `make images` made."""
    store = ImageStore(IMAGES)
    assert [i.name for i in store.all()] == ["base", "rt"], "run: make images"
    return store


@pytest.fixture(scope="session")
def work_dir() -> Iterator[Path]:
    """A short-named directory for machines (unix sockets have 107 bytes), empty of them in the end."""
    directory = Path(tempfile.mkdtemp(prefix="cocoon-"))
    yield directory
    assert_nothing_left(directory)
    shutil.rmtree(directory)


def _provisioner(engine: Engine, directory: Path) -> Provisioner:
    (directory / "machines").mkdir(exist_ok=True)
    return Provisioner(engine, directory / "machines", SystemClock(), Metrics())


@pytest.fixture(scope="session")
def qemu_golden(images: ImageStore, work_dir: Path) -> Golden:
    """One golden of `rt` for the whole run."""

    async def make() -> Golden:
        engine = QemuEngine(BOOT, work_dir, accel="auto")
        await engine.prepare()
        return await _provisioner(engine, work_dir).golden(
            images.resolve("rt"), Size.SMALL, work_dir / "golden"
        )

    return asyncio.run(make())


async def _bench(kind: str, request: pytest.FixtureRequest) -> Bench:
    work_dir: Path = request.getfixturevalue("work_dir")
    store: ImageStore = request.getfixturevalue("images")
    golden: Golden | None = None
    engine: Engine = LocalEngine()
    if kind == "qemu":
        golden = request.getfixturevalue("qemu_golden")
        engine = QemuEngine(BOOT, work_dir, accel="auto")
    await engine.prepare()
    return Bench(engine, _provisioner(engine, work_dir), work_dir, store.resolve("rt"), golden)


@pytest.fixture(params=ENGINES)
async def bench_any(request: pytest.FixtureRequest) -> Bench:
    """An engine, prepared; each of them in turn."""
    # The golden is made by asyncio.run, which needs a thread without a loop.
    if request.param == "qemu":
        await asyncio.to_thread(request.getfixturevalue, "qemu_golden")
    return await _bench(request.param, request)


@asynccontextmanager
async def _running(bench: Bench) -> AsyncIterator[Guest]:
    guest = await bench.guest()
    try:
        yield guest
    finally:
        await guest.close()
        assert not guest.machine.pid or not Path(f"/proc/{guest.machine.pid}").exists()


@pytest.fixture
async def guest_any(bench_any: Bench) -> AsyncIterator[Guest]:
    """A running guest, on each engine in turn; `.link.channel` leads to guestd."""
    async with _running(bench_any) as guest:
        yield guest


@pytest.fixture
async def guest(request: pytest.FixtureRequest) -> AsyncIterator[Guest]:
    """A running `local` guest."""
    async with _running(await _bench("local", request)) as guest:
        yield guest


@pytest.fixture
async def vm_guest(request: pytest.FixtureRequest) -> AsyncIterator[Guest]:
    """A running guest on a real VM."""
    await asyncio.to_thread(request.getfixturevalue, "qemu_golden")
    async with _running(await _bench("qemu", request)) as guest:
        yield guest


@pytest.fixture(scope="module", params=ENGINES)
def node_any(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[NodeProcess]:
    """A node with a warm pool of `rt`, on each engine in turn; its root token is asked for."""
    yield from _node(request.param, tmp_path_factory)


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeProcess]:
    """A node on the `local` engine."""
    yield from _node("local", tmp_path_factory)


def _node(engine: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeProcess]:
    directory = tmp_path_factory.mktemp("n")
    token = directory / "token"
    token.touch(mode=0o600)
    token.write_text(ROOT_TOKEN)
    with NodeProcess(directory, node_config(directory / "data", engine, (("rt", 2),), token)) as running:
        yield running


@pytest.fixture
async def channel(node: NodeProcess) -> AsyncIterator[grpc.aio.Channel]:
    """A channel to the node, without credentials."""
    async with grpc.aio.insecure_channel(node.address) as open_channel:
        yield open_channel
