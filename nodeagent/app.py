"""The one wiring: configuration → a running node, in one scope.

Everything is started in `run`'s TaskGroup and ends with it, in the reverse order:
the API stops taking calls, claims end, pools drain, the journal is closed.
"""

from __future__ import annotations

import asyncio
import fcntl
import gc
import os
import shutil
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import structlog

from cocoon_rpc.auth import sandbox_id
from cocoon_rpc.errors import SandboxNotFoundError
from nodeagent.api.access import Access, AccessInterceptor, caller
from nodeagent.api.node_service import NodeService
from nodeagent.api.pool_service import PoolService
from nodeagent.api.sandbox_service import SandboxService
from nodeagent.api.server import add_services, open_server
from nodeagent.claims.manager import ClaimManager
from nodeagent.clock import SystemClock
from nodeagent.config import Config, ConfigError, read_root_token, split_address
from nodeagent.engine import make_engine
from nodeagent.engine.base import Engine
from nodeagent.guestlink.relay import GuestRelay
from nodeagent.images import ImageStore
from nodeagent.journal.store import Journal
from nodeagent.model import PoolKey
from nodeagent.pool.pools import Pools
from nodeagent.pool.provision import Provisioner
from nodeagent.pool.target import refill_concurrency
from nodeagent.telemetry.metrics import Metrics

STOP_GRACE_S = 2.0
# 107 bytes of a unix socket's path, less "/machines/m-" + 16 + "/share/guestd.sock".
_LONGEST_DATA_DIR = 60
_log = structlog.get_logger()


async def run(config: Config, stop: asyncio.Event) -> None:
    """Runs a node until `stop` is set.

    Raises:
        ConfigError: a port or the data directory is in use, or a token file is bad.
        CocoonError: kernel, image or hypervisor are missing; the text says what to do.
    """
    clock, metrics = SystemClock(), Metrics()
    token = read_root_token(config)
    async with AsyncExitStack() as stack:
        stack.enter_context(_locked(config.data_dir))
        images = ImageStore(config.image_dir)
        engine = make_engine(config)
        facts = await engine.prepare()
        machines, goldens = config.data_dir / "machines", config.data_dir / "goldens"
        await _reap(engine, machines)
        await _clear(goldens)
        journal = Journal(config.data_dir / "journal.db")
        stack.callback(journal.close)
        provisioner = Provisioner(engine, machines, clock, metrics)
        pools = Pools(
            provisioner,
            facts,
            goldens=goldens,
            concurrency=refill_concurrency(config.refill_concurrency, os.cpu_count() or 1, facts.accelerator),
            clock=clock,
            metrics=metrics,
        )
        claims = ClaimManager(
            node_id=config.node_id,
            max_claims=config.max_claims,
            isolation=facts.isolation,
            pools=pools,
            provisioner=provisioner,
            images=images,
            journal=journal,
            clock=clock,
            metrics=metrics,
        )
        claims.recover()
        pools.set(
            (PoolKey(p.template, p.net, p.size), images.resolve(p.template), p.warm) for p in config.pools
        )
        metrics.watch(lambda: _gauges(claims, pools))
        access = Access(token, claims.owner_of)
        server, address = open_server(config, AccessInterceptor(access, metrics))
        metrics_address = _serve_metrics(config, metrics, stack)
        endpoint = config.advertise or address
        await add_services(
            server,
            sandbox=SandboxService(claims, config.node_id, endpoint),
            pool=PoolService(pools, images, clock),
            node=NodeService(config, facts, claims, pools, images, clock),
            relay=GuestRelay(lambda metadata: _route(claims, metadata)),
        )
        async with _background(pools, claims):
            await server.start()
            # What is there now stays: the collector need not look at it again and
            # again, each time in the middle of somebody's claim.
            gc.collect()
            gc.freeze()
            _log.info(
                "node_ready",
                node=config.node_id,
                address=address,
                metrics=metrics_address,
                engine=facts.name,
                accelerator=facts.accelerator.value,
                isolation=facts.isolation.value,
            )
            await stop.wait()
            _log.info("node_stopping", node=config.node_id)
            await server.stop(STOP_GRACE_S)
    _log.info("node_stopped", node=config.node_id)


@asynccontextmanager
async def _background(pools: Pools, claims: ClaimManager) -> AsyncIterator[None]:
    """Runs pools and claims around a block; a crash of either ends the block."""
    async with asyncio.TaskGroup() as group:
        started = asyncio.Event()
        tasks = [group.create_task(pools.run()), group.create_task(claims.run(started=started))]
        await started.wait()
        yield
        for task in reversed(tasks):
            task.cancel()


def _route(claims: ClaimManager, metadata: Any) -> tuple[str, grpc.aio.Channel]:
    """Returns where a guest call goes. Somebody else's sandbox looks like none."""
    asked = sandbox_id(metadata) or ""
    caller().require(asked)
    if not asked:
        raise SandboxNotFoundError(sandbox="sandboxes/")
    claim = claims.called(asked)
    return claim.name, claim.guest.link.channel


def _gauges(claims: ClaimManager, pools: Pools) -> dict[str, Any]:
    return {
        "claimed": claims.claimed,
        "at_capacity": pools.capacity.parked,
        "pools": [
            ((p.key.template, p.key.net.value, p.key.size.label), p.warm, p.target) for p in pools.list()
        ],
    }


def _serve_metrics(config: Config, metrics: Metrics, stack: AsyncExitStack) -> str:
    if not config.metrics_listen:
        return ""
    host, port = split_address(config.metrics_listen, "metrics_listen")
    try:
        bound, close = metrics.serve(host, port)
    except OSError as error:
        raise ConfigError(f"metrics_listen: cannot listen on {config.metrics_listen}: {error}") from error
    stack.callback(close)
    return f"{host}:{bound}"


class _locked:  # noqa: N801 - used as a statement
    """Holds the data directory for this agent alone; makes it if needed."""

    def __init__(self, data_dir: Path) -> None:
        self._data_dir = data_dir

    def __enter__(self) -> None:
        if len(str(self._data_dir.absolute()).encode()) > _LONGEST_DATA_DIR:
            raise ConfigError(
                f"data_dir: at most {_LONGEST_DATA_DIR} bytes, for unix sockets: {self._data_dir}"
            )
        try:
            for folder in (self._data_dir, self._data_dir / "machines", self._data_dir / "goldens"):
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = (self._data_dir / "lock").open("w")
        except OSError as error:
            raise ConfigError(f"data_dir: cannot use {self._data_dir}: {error}") from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._lock.close()
            raise ConfigError(f"data_dir: {self._data_dir} is in use by another node agent") from None

    def __exit__(self, *_: object) -> None:
        self._lock.close()


async def _reap(engine: Engine, machines: Path) -> None:
    """Takes down what a killed agent left: its claims are lost, so its machines go."""
    for directory in sorted(machines.iterdir()):
        _log.warning("machine_reaped", machine=directory.name)
        await engine.reap(directory)


async def _clear(goldens: Path) -> None:
    for directory in goldens.iterdir():
        await asyncio.to_thread(shutil.rmtree, directory, ignore_errors=True)
