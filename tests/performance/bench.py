"""`make bench`: what a client sees, measured on this machine; prints a table, writes JSON.

Figures of shared machines are noisy: compare within one run. The tier of every
claim is verified from its reply. Client and node are processes of their own.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc

from cocoon.guest.v1 import guest_service_pb2, guest_service_pb2_grpc
from cocoon.node.v1 import pool_service_pb2, pool_service_pb2_grpc
from cocoon_rpc.auth import guest_metadata
from cocoonsandbox import Client, Sandbox
from nodeagent.engine.base import Golden, MachineSpec
from nodeagent.engine.qemu.engine import QemuEngine
from nodeagent.images import ImageStore
from nodeagent.model import Size
from tests.framework.node import BOOT, IMAGES, NodeProcess, node_config

TEMPLATE = "rt"
WARM = 6
POOL_LIMIT_S = 180.0
Row = dict[str, Any]
BUDGETS = {
    "claim_warm": "p50 < 1 ms, p99 < 5 ms",
    "claim_clone": "p50 <= 700 ms",
    "engine_clone": "p50 <= 120 ms",
    "exec_true_local": "p50 <= 4 ms",
    "fs_write_mib_s": ">= 300",
    "fs_read_mib_s": ">= 300",
    "node_idle_mib": "< 120",
    "refill_6": "<= 6 x claim_clone",
}


def main() -> int:
    """Runs every row; returns the exit status."""
    parser = argparse.ArgumentParser(description="Measures a node on this machine.")
    parser.add_argument("--out", type=Path, default=Path("build/bench.json"))
    arguments = parser.parse_args()
    rows: dict[str, Row] = {}
    facts: dict[str, Any] = {}
    directory = Path(tempfile.mkdtemp(prefix="cocoon-bench-"))
    try:
        with running(directory / "l", "local", 0) as (node, client):
            local_rows(node, client, rows)
        with running(directory / "q", "qemu", WARM) as (node, client):
            facts = client.info()["engine"]
            vm_rows(node, client, rows)
        rows["engine_clone"] = spread(asyncio.run(engine_clones(directory / "e", 30)))
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    report = {"machine": machine(facts), "rows": rows}
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(report, indent=2) + "\n")
    show(report)
    return 0


@contextmanager
def running(directory: Path, engine: str, warm: int) -> Iterator[tuple[NodeProcess, Client]]:
    """A node and a client of it."""
    say(f"starting a node on {engine}")
    directory.mkdir()
    config = node_config(directory / "data", engine, ((TEMPLATE, warm),) if warm else ())
    with NodeProcess(directory, config) as node, Client(node.address) as client:
        yield node, client


def local_rows(node: NodeProcess, client: Client, rows: dict[str, Row]) -> None:
    """What the node itself costs: guests without a machine under them."""
    time.sleep(1)
    rows["node_idle_mib"] = {"value": resident_mib(node.process.pid), "unit": "MiB resident", "n": 1}
    with client.new(TEMPLATE, ttl_seconds=3600) as sandbox:
        say("rpc_relay, exec_true_local")
        rows["rpc_relay"] = spread(times(unary(node, sandbox), 500, warm_up=50))
        rows["exec_true_local"] = spread(times(lambda: sandbox.exec("/bin/true"), 300, warm_up=30))
        say("fs_write_mib_s, fs_read_mib_s: 128 MiB, five times")
        data = os.urandom(128 * 2**20)
        rows["fs_write_mib_s"] = speed(lambda: sandbox.write_file("/root/big", data), 128, 5)
        rows["fs_read_mib_s"] = speed(lambda: check(sandbox.read_file("/root/big") == data), 128, 5)


def vm_rows(node: NodeProcess, client: Client, rows: dict[str, Row]) -> None:
    """Claims by tier and calls into a real virtual machine."""
    say("filling the pool")
    wait_warm(client)
    say("claim_warm: 60, each from a full pool at rest")
    warm = []
    for _ in range(60):
        warm.append(claim(client, "warm"))
        wait_warm(client)
    rows["claim_warm"] = spread(warm)
    say("claim_warm_burst: 10 rounds of 6 at once, refills and releases running beside them")
    burst, refills = [], []
    for _ in range(10):
        burst += [claim(client, "warm") for _ in range(WARM)]
        began = time.perf_counter()
        wait_warm(client)
        refills.append((time.perf_counter() - began) * 1000)
    rows["claim_warm_burst"] = spread(burst)
    rows["refill_6"] = {
        "value": round(statistics.median(refills), 1),
        "unit": "ms until 6 are warm",
        "n": len(refills),
    }
    say("exec_true_vm, rpc_relay_vm")
    with client.new(TEMPLATE, ttl_seconds=3600) as sandbox:
        wait_warm(client)
        rows["rpc_relay_vm"] = spread(times(unary(node, sandbox), 100, warm_up=10))
        rows["exec_true_vm"] = spread(times(lambda: sandbox.exec("/bin/true"), 50, warm_up=5))
    rows["clone_private_mib"] = {
        "value": private_mib(node),
        "unit": "MiB dirtied, mean of warm clones",
        "n": WARM,
    }
    say("claim_clone: 30, with a pool of none warm")
    set_pool(node, 0)
    wait_warm(client, 0)
    rows["claim_clone"] = spread([claim(client, "clone") for _ in range(30)])
    say("claim_cold: 5, without a pool")
    set_pool(node, None)
    rows["claim_cold"] = spread([claim(client, "cold") for _ in range(5)])


async def engine_clones(directory: Path, count: int) -> list[float]:
    """The engine's part of a clone: until the guest's cpus run."""
    say("engine_clone: 30, without node and guest talk")
    (directory / "machines").mkdir(parents=True)
    from nodeagent.clock import SystemClock
    from nodeagent.pool.provision import Provisioner
    from nodeagent.telemetry.metrics import Metrics

    engine = QemuEngine(BOOT, directory, accel="auto")
    await engine.prepare()
    image = ImageStore(IMAGES).resolve(TEMPLATE)
    provisioner = Provisioner(engine, directory / "machines", SystemClock(), Metrics())
    golden: Golden = await provisioner.golden(image, Size.SMALL, directory / "golden")
    found = []
    for index in range(count):
        spec = MachineSpec(f"m-{index}", image, Size.SMALL, directory / "machines" / f"m-{index}")
        began = time.perf_counter()
        made = await engine.clone(golden, spec)
        found.append((time.perf_counter() - began) * 1000)
        await made.kill()
    return found


def claim(client: Client, tier: str) -> float:
    """Claims, checks the tier, releases; returns the claim's milliseconds."""
    began = time.perf_counter()
    sandbox = client.new(TEMPLATE)
    seen = (time.perf_counter() - began) * 1000
    sandbox.close()
    if sandbox.tier != tier:
        raise SystemExit(f"bench: a claim was {sandbox.tier}, not {tier}")
    return seen


def unary(node: NodeProcess, sandbox: Sandbox) -> Callable[[], object]:
    """Returns a unary guest call through the node."""
    channel = grpc.insecure_channel(node.address)
    stub = guest_service_pb2_grpc.GuestServiceStub(channel)
    metadata = guest_metadata(sandbox.id, sandbox.token)
    return lambda: stub.GetInfo(guest_service_pb2.GetInfoRequest(), metadata=metadata)


def set_pool(node: NodeProcess, warm: int | None) -> None:
    """Declares the one pool anew, or none."""
    with grpc.insecure_channel(node.address) as channel:
        stub = pool_service_pb2_grpc.PoolServiceStub(channel)
        spec = [] if warm is None else [pool_service_pb2.PoolSpec(template=TEMPLATE, warm=warm)]
        stub.Set(pool_service_pb2.SetRequest(pools=spec))


def wait_warm(client: Client, target: int = WARM) -> None:
    """Waits until the pool is at its target with nothing being made."""
    end = time.monotonic() + POOL_LIMIT_S
    while time.monotonic() < end:
        (pool,) = client.info()["pools"]
        if pool["golden"] == "GOLDEN_STATE_READY" and pool["warm"] == target and not pool["refilling"]:
            return
        time.sleep(0.02)
    raise SystemExit(f"bench: the pool did not reach {target}: {pool}")


def times(call: Callable[[], object], count: int, *, warm_up: int) -> list[float]:
    """Returns the milliseconds of each call."""
    for _ in range(warm_up):
        call()
    found = []
    for _ in range(count):
        began = time.perf_counter()
        call()
        found.append((time.perf_counter() - began) * 1000)
    return found


def speed(call: Callable[[], object], mib: int, count: int) -> Row:
    """Returns the median of MiB per second."""
    found = [mib / (t / 1000) for t in times(call, count, warm_up=1)]
    return {"value": round(statistics.median(found), 1), "unit": "MiB/s", "n": count}


def spread(found: list[float]) -> Row:
    """Returns the percentiles of milliseconds."""
    cuts = statistics.quantiles(found, n=100, method="inclusive")
    return {
        "p50_ms": round(statistics.median(found), 3),
        "p90_ms": round(cuts[89], 3),
        "p99_ms": round(cuts[98], 3),
        "n": len(found),
    }


def resident_mib(pid: int) -> float:
    """Returns a process's resident memory."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return round(int(line.split()[1]) / 1024, 1)
    return 0.0


def private_mib(node: NodeProcess) -> float:
    """Returns the mean private memory of the node's machines' guest RAM: what clones do not share."""
    found = []
    for record in (node.directory / "data" / "machines").glob("*/process.json"):
        dirty, in_ram = 0, False
        for line in Path(f"/proc/{json.loads(record.read_text())['pid']}/smaps").read_text().splitlines():
            if "-" in line.split(" ")[0] and ":" not in line.split(" ")[0]:
                in_ram = line.endswith("/ram")
            elif in_ram and line.startswith("Private_Dirty:"):
                dirty += int(line.split()[1])
        found.append(dirty / 1024)
    return round(statistics.mean(found), 1)


def machine(engine: dict[str, Any]) -> dict[str, Any]:
    """Returns what the figures were made on."""
    cpu = next((x for x in Path("/proc/cpuinfo").read_text().splitlines() if x.startswith("model name")), "")
    return {
        "cpu": cpu.partition(":")[2].strip(),
        "cpus": os.cpu_count(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "engine": engine.get("name"),
        "engine_version": engine.get("version"),
        "accelerator": str(engine.get("accelerator", "")).rpartition("_")[2].lower(),
        "template": TEMPLATE,
        "size": "small (1 cpu, 512 MiB)",
    }


def show(report: dict[str, Any]) -> None:
    """Prints the table."""
    print("\n" + "  ".join(f"{key}={value}" for key, value in report["machine"].items()))
    print(f"{'row':20} {'p50':>10} {'p90':>10} {'p99':>10} {'n':>5}  budget")
    for name, row in sorted(report["rows"].items()):
        if "p50_ms" in row:
            values = f"{row['p50_ms']:10.2f} {row['p90_ms']:10.2f} {row['p99_ms']:10.2f}"
            print(f"{name:20} {values} {row['n']:5}  {BUDGETS.get(name, '')}")
        else:
            print(f"{name:20} {row['value']:10} {row['unit']:>21} {row['n']:5}  {BUDGETS.get(name, '')}")


def check(condition: bool) -> None:
    """Ends the run if what was measured was not right."""
    if not condition:
        raise SystemExit("bench: a result was wrong")


def say(line: str) -> None:
    """Says what takes long."""
    print(f"bench: {line}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
