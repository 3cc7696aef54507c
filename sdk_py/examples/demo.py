"""The demo: a node, a pool, three claims, a program in a microVM. `make demo` runs it.

Starts a node of its own on loopback in a temporary directory, and leaves nothing
behind. Everything between node and guest is real: a virtual machine with its own
kernel, gRPC all the way. Exits non-zero if anything was not as said.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cocoonsandbox import Client, Sandbox

CONFIG = """\
version = 1
node_id = "demo"
listen = "127.0.0.1:0"
metrics_listen = ""
data_dir = {data}
image_dir = {images}
boot_dir = {boot}
[[pools]]
template = "rt"
warm = 2
[[pools]]
template = "base"
warm = 0
"""
CSV = "city,degrees\nOslo,3\nCairo,31\nLima,19\nPerth,24\n"
PROGRAM = """\
import csv, json, platform
rows = list(csv.DictReader(open("/root/weather.csv")))
warmest = max(rows, key=lambda row: int(row["degrees"]))
mean = sum(int(row["degrees"]) for row in rows) / len(rows)
json.dump({"rows": len(rows), "mean": mean, "warmest": warmest["city"]}, open("/root/result.json", "w"))
print("computed on", platform.release())
"""
RESULT = {"rows": 4, "mean": 19.25, "warmest": "Cairo"}
POOL_LIMIT_S = 180
STOP_LIMIT_S = 30


def main() -> int:
    """Runs the demo; returns the exit status."""
    parser = argparse.ArgumentParser(
        description="Shows a cold, a clone and a warm claim on a node of its own."
    )
    parser.add_argument("--images", type=Path, default=Path("build/images"), help="image store")
    parser.add_argument("--boot", type=Path, default=Path("build/boot"), help="kernel and initramfs")
    arguments = parser.parse_args()
    directory = Path(tempfile.mkdtemp(prefix="cocoon-demo-"))
    try:
        images, boot = arguments.images.absolute(), arguments.boot.absolute()
        with node(directory, images, boot) as address, Client(address) as client:
            show(client)
        prove_clean(directory / "data")
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    print("nothing left behind: no process, mount, machine or file")
    return 0


def show(client: Client) -> None:
    """The story: a cold claim before there is anything to clone, then a warm one and a clone."""
    engine = client.info()["engine"]
    print(f"node is up: engine {engine['name']} {engine['version']} on {word(engine['accelerator'])}")
    # The goldens are being made: nothing is ready yet.
    with claim(client, "base", "cold") as sandbox:
        print(f"  guest kernel {sandbox.exec('uname', '-r').strip()} ({sandbox.isolation})")
    wait_for_pools(client)
    with claim(client, "rt", "warm") as warm:
        work(warm)
        # The pool of `base` keeps a golden and no warm machines.
        with claim(client, "base", "clone") as clone:
            print(
                f"  the clone is {clone.exec('hostname').strip()}, the first {warm.exec('hostname').strip()}"
            )


def work(sandbox: Sandbox) -> None:
    """Files in, a program, files out."""
    sandbox.write_file("/root/weather.csv", CSV)
    sandbox.write_file("/root/program.py", PROGRAM)
    print("  " + sandbox.exec("python3", "/root/program.py").strip())
    result = json.loads(sandbox.read_file("/root/result.json"))
    check(result == RESULT, f"the program's result is {result}, not {RESULT}")
    print(f"  result.json read back: {result}")
    times = []
    for _ in range(20):
        began = time.perf_counter()
        sandbox.exec("/bin/true")
        times.append((time.perf_counter() - began) * 1000)
    print(f"  exec /bin/true, there and back: {statistics.median(times):.1f} ms (median of {len(times)})")


def claim(client: Client, template: str, tier: str) -> Sandbox:
    """Claims and holds the reply to its tier."""
    began = time.perf_counter()
    sandbox = client.new(template)
    seen = (time.perf_counter() - began) * 1000
    inside = sandbox.provision_seconds * 1000
    print(
        f"claim {template}: {sandbox.tier:5}  {seen:9.2f} ms here, {inside:9.2f} ms in the node  {sandbox.id}"
    )
    if sandbox.tier != tier:
        sandbox.close()
        check(False, f"the claim was {sandbox.tier}, not {tier}")
    return sandbox


def wait_for_pools(client: Client) -> None:
    """Shows the pools filling."""
    shown, began = "", time.monotonic()
    while time.monotonic() - began < POOL_LIMIT_S:
        pools = client.info()["pools"]
        line = "; ".join(
            f"{p['spec']['template']}: golden {word(p['golden'])}, {p['warm']} of {p['spec']['warm']} warm"
            for p in pools
        )
        if line != shown:
            print(f"pools  {line}  (+{time.monotonic() - began:.1f} s)", flush=True)
            shown = line
        if all(p["golden"] == "GOLDEN_STATE_READY" and p["warm"] >= p["spec"]["warm"] for p in pools):
            return
        time.sleep(0.1)
    check(False, f"the pools did not fill: {shown}")


@contextmanager
def node(directory: Path, images: Path, boot: Path) -> Iterator[str]:
    """Runs a node; yields its address; stops it in order."""
    paths = {"data": directory / "data", "images": images, "boot": boot}
    config = directory / "node.toml"
    config.write_text(CONFIG.format(**{key: json.dumps(str(path)) for key, path in paths.items()}))
    log = directory / "node.log"
    print("starting a node (the first start probes KVM by booting a guest) …", flush=True)
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "nodeagent", "--config", str(config)], stderr=output
        )
    try:
        yield address_of(process, log)
    except BaseException:
        print(log.read_text()[-3000:], file=sys.stderr)
        raise
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            status = process.wait(STOP_LIMIT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            status = -1
    check(status == 0, f"the node ended with status {status}")


def address_of(process: subprocess.Popen[bytes], log: Path) -> str:
    """Waits for the node's own word that it serves."""
    began = time.monotonic()
    while process.poll() is None and time.monotonic() - began < STOP_LIMIT_S:
        for line in log.read_text().splitlines():
            if '"node_ready"' in line:
                return str(json.loads(line)["address"])
        time.sleep(0.05)
    check(False, f"the node did not start: {log.read_text()[-1000:]}")
    raise AssertionError


def prove_clean(data: Path) -> None:
    """Holds the promise: no process, no mount, no machine, no golden."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                command = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            check(str(data).encode() not in command, f"process {entry.name} is left: {command!r}")
    check(str(data) not in Path("/proc/mounts").read_text(), "a mount is left")
    for folder in ("machines", "goldens"):
        left = sorted(p.name for p in (data / folder).iterdir())
        check(not left, f"{folder} are left: {left}")


def word(value: str) -> str:
    """Returns the last word of an enum's name, for people."""
    return value.rpartition("_")[2].lower()


def check(condition: bool, complaint: str) -> None:
    """Ends the demo with a complaint unless the condition holds."""
    if not condition:
        raise SystemExit(f"demo failed: {complaint}")


if __name__ == "__main__":
    sys.exit(main())
