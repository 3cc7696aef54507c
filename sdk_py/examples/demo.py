"""The demo: a node, a pool, three claims, a program in a microVM. `make demo` runs it.

Starts a node of its own on loopback in a temporary directory and leaves nothing
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

# Claims of `rt` are warm at size small and clones at size medium, where the pool
# keeps a golden only. `base` has no pool: its claims boot cold.
CONFIG = """\
version = 1
node_id = "demo"
listen = "127.0.0.1:0"
metrics_listen = ""
data_dir = {data}
image_dir = {images}
boot_dir = {boot}
[engine]
kind = "qemu"
[[pools]]
template = "rt"
warm = 2
[[pools]]
template = "rt"
size = "medium"
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
# Start: the first one finds out whether KVM works, by booting a guest.
START_LIMIT_S = 60
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
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("demo failed: terminated"))
    directory = Path(tempfile.mkdtemp(prefix="cocoon-demo-"))
    try:
        images, boot = arguments.images.absolute(), arguments.boot.absolute()
        with node(directory, images, boot) as address, Client(address) as client:
            show(client)
        prove_clean(directory)
    except KeyboardInterrupt:
        sys.exit("demo failed: interrupted")
    finally:
        shutil.rmtree(directory)
    print("nothing left behind: no process, socket, mount, machine or file")
    return 0


def show(client: Client) -> None:
    """The story: pools fill, then a claim of each tier and some work in a sandbox."""
    engine = client.info()["engine"]
    print(f"the node is up: engine {engine['name']} {engine['version']} on {word(engine['accelerator'])}")
    wait_for_pools(client)
    with claim(client, "base", "small", "cold") as cold:
        print(f"  guest kernel {cold.exec('uname', '-r').strip()}, isolation {cold.isolation}")
    with claim(client, "rt", "medium", "clone") as clone, claim(client, "rt", "small", "warm") as warm:
        names = [sandbox.exec("hostname").strip() for sandbox in (clone, warm)]
        check(names[0] != names[1], f"two guests call themselves {names[0]}")
        print(f"  two guests, each its own: {names[0]} and {names[1]}")
        work(warm)
    check(client.info()["claimed"] == 0, "the node still holds a claim")


def work(sandbox: Sandbox) -> None:
    """Files in, a program, files out; then the time of a round trip."""
    sandbox.write_file("/root/weather.csv", CSV)
    sandbox.write_file("/root/program.py", PROGRAM)
    print("  " + sandbox.exec("python3", "/root/program.py").strip())
    result = json.loads(sandbox.read_file("/root/result.json"))
    check(result == RESULT, f"the program's result is {result}, not {RESULT}")
    print(f"  result.json, read back: {result}")
    times = []
    for _ in range(20):
        began = time.perf_counter()
        sandbox.exec("/bin/true")
        times.append((time.perf_counter() - began) * 1000)
    print(f"  exec /bin/true, there and back: {statistics.median(times):.1f} ms (median of {len(times)})")


def claim(client: Client, template: str, size: str, tier: str) -> Sandbox:
    """Claims, and holds the reply to its tier."""
    began = time.perf_counter()
    sandbox = client.new(template, size=size)
    here, inside = (time.perf_counter() - began) * 1000, sandbox.provision_seconds * 1000
    print(f"{sandbox.tier:5} claim of {template}, {size}: {here:.2f} ms here, {inside:.2f} ms in the node")
    if sandbox.tier != tier:
        sandbox.close()
        check(False, f"the claim was {sandbox.tier}, not {tier}")
    return sandbox


def wait_for_pools(client: Client) -> None:
    """Shows the pools filling, a line for each change."""
    shown, began = "", time.monotonic()
    while time.monotonic() - began < POOL_LIMIT_S:
        pools = client.info()["pools"]
        line = "; ".join(
            f"{p['spec']['template']} {word(p['spec']['size'])}: golden {word(p['golden'])}, "
            f"{p['warm']} of {p['spec']['warm']} warm"
            for p in pools
        )
        if line != shown:
            print(f"pools  {line}  (+{time.monotonic() - began:.1f} s)", flush=True)
            shown = line
        if all(p["golden"] == "GOLDEN_STATE_READY" and p["warm"] >= p["spec"]["warm"] for p in pools):
            return
        time.sleep(0.1)
    check(False, f"the pools did not fill within {POOL_LIMIT_S} s: {shown}")


@contextmanager
def node(directory: Path, images: Path, boot: Path) -> Iterator[str]:
    """Runs a node; yields its address; stops it in order, whatever happened."""
    paths = {"data": directory / "data", "images": images, "boot": boot}
    config = directory / "node.toml"
    config.write_text(CONFIG.format(**{key: json.dumps(str(path)) for key, path in paths.items()}))
    log = directory / "node.log"
    print("starting a node (it first finds out whether KVM works) …", flush=True)
    with log.open("wb") as output:
        # A session of its own: an interrupt from the terminal is the demo's to handle.
        process = subprocess.Popen(
            [sys.executable, "-m", "nodeagent", "--config", str(config)],
            stderr=output,
            start_new_session=True,
        )
    try:
        yield address_of(process, log)
    except (Exception, SystemExit):
        print(log.read_text()[-3000:], file=sys.stderr)
        raise
    finally:
        stop(process)
    check(process.returncode == 0, f"the node ended with status {process.returncode}")


def stop(process: subprocess.Popen[bytes]) -> None:
    """Asks the node to stop and waits for it; a node that does not is killed, which the caller sees."""
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(STOP_LIMIT_S)
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


def address_of(process: subprocess.Popen[bytes], log: Path) -> str:
    """Waits for the node's own word that it serves."""
    began = time.monotonic()
    while process.poll() is None and time.monotonic() - began < START_LIMIT_S:
        for line in log.read_text().splitlines():
            if '"node_ready"' in line:
                return str(json.loads(line)["address"])
        time.sleep(0.05)
    raise SystemExit(f"demo failed: the node did not start (status {process.poll()}); it says why above")


def prove_clean(directory: Path) -> None:
    """Holds the promise: no process, socket, mount, machine or golden of the node is left."""
    mark = str(directory)
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                command = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            check(mark.encode() not in command, f"process {entry.name} is left: {command!r}")
    for table in ("/proc/net/unix", "/proc/mounts"):
        left = [line for line in Path(table).read_text().splitlines() if mark in line]
        check(not left, f"left in {table}: {left}")
    for folder in ("machines", "goldens"):
        left = sorted(path.name for path in (directory / "data" / folder).iterdir())
        check(not left, f"left in {folder}: {left}")


def word(value: str) -> str:
    """Returns the last word of an enum's name, for people."""
    return value.rpartition("_")[2].lower()


def check(condition: bool, complaint: str) -> None:
    """Ends the demo with a complaint unless the condition holds."""
    if not condition:
        raise SystemExit(f"demo failed: {complaint}")


if __name__ == "__main__":
    sys.exit(main())
