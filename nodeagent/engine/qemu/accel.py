"""Whether KVM really runs our kernel: seen, not assumed (decision 8).

`/dev/kvm` may be there and still hang a stock kernel (paravirtual nested
virtualisation). So a machine without disks is booted under KVM: its /init complains
about the missing `cocoon.layers` within moments, or KVM is not for us.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from pathlib import Path

from nodeagent.engine.child import start
from nodeagent.model import Accelerator

LIMIT_S = 6.0
_PROOF = b"cocoon-init: fatal: cocoon.layers"
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


async def decide(
    *, qemu: str, qemu_version: str, vmlinux: Path, initramfs: Path, kernel_digest: str, cache: Path
) -> Accelerator:
    """Returns KVM if it boots our kernel, else TCG; remembers the answer for this host boot.

    Raises: OSError: the data directory cannot be written.
    """
    if not os.access("/dev/kvm", os.R_OK | os.W_OK):
        return Accelerator.TCG
    key = f"{qemu_version}|{kernel_digest}|{_BOOT_ID.read_text().strip()}"
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        known = json.loads(cache.read_text())
        if known["key"] == key:
            return Accelerator(known["accelerator"])
    console = cache.with_name("accel-probe.console")
    argv = [
        qemu, "-nodefaults", "-no-user-config", "-no-reboot", "-display", "none",
        "-machine", "q35", "-accel", "kvm", "-cpu", "host", "-m", "128",
        "-kernel", str(vmlinux), "-initrd", str(initramfs), "-append", "console=ttyS0 quiet panic=-1",
        "-serial", f"file:{console}",
    ]  # fmt: skip
    found = Accelerator.KVM if await _speaks(argv, console) else Accelerator.TCG
    cache.write_text(json.dumps({"key": key, "accelerator": found.value}))
    return found


async def _speaks(argv: list[str], console: Path) -> bool:
    """Runs a machine until it ends by itself or the time is up; says whether it spoke."""
    log = console.with_suffix(".log")
    child = start(argv, log=log)
    try:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LIMIT_S):
                # The init powers off after its complaint.
                await child.wait()
        return console.exists() and _PROOF in console.read_bytes()
    finally:
        child.kill()
        await child.wait()
        console.unlink(missing_ok=True)
        log.unlink(missing_ok=True)
