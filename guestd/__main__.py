"""`python -m guestd`: serves the guest verbs until SIGTERM."""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
from pathlib import Path


def main() -> int:
    """Returns the exit status: 0 after an orderly stop."""
    parser = argparse.ArgumentParser(prog="guestd", description="The guest daemon of a cocoon sandbox.")
    parser.add_argument(
        "--socket", type=Path, default=Path("/run/cocoon/guestd.sock"), help="unix socket to serve on"
    )
    parser.add_argument("--no-bridge", action="store_true", help="do not join AF_VSOCK and serial port")
    parser.add_argument(
        "--identity",
        choices=("machine", "namespace"),
        default="machine",
        help="what a renewal changes: a whole machine, or only what namespaces own",
    )
    arguments = parser.parse_args()

    # Read when grpc is loaded. A program of another user is started by a real fork
    # (root's by vfork), and there grpc's own fork handler ran and crashed the child
    # before its exec: about 4 of 10 died of SIGSEGV. A child that only execs needs none.
    os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"
    from guestd import app, identity, log

    log.configure()
    steps = identity.machine_steps() if arguments.identity == "machine" else identity.namespace_steps()

    async def serve() -> None:
        stop = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
        await app.run(arguments.socket, bridge=not arguments.no_bridge, steps=steps, stop=stop)

    asyncio.run(serve())
    return 0


if __name__ == "__main__":
    sys.exit(main())
