"""`python -m nodeagent --config node.toml`: runs a node until SIGTERM or SIGINT."""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sqlite3
import sys
from pathlib import Path

from nodeagent import __version__
from nodeagent.config import Config, ConfigError, load, to_toml


def main() -> int:
    """Parses the command line and runs; returns the exit status.

    0 after an orderly stop, 2 for a configuration or a host that cannot be used.
    """
    parser = argparse.ArgumentParser(prog="cocoon-node", description="Runs a cocoon node.")
    parser.add_argument("--config", type=Path, required=True, help="TOML file; see docs/deploy.md")
    parser.add_argument("--print-config", action="store_true", help="print the effective values and exit")
    parser.add_argument("--version", action="version", version=__version__)
    arguments = parser.parse_args()
    try:
        config = load(arguments.config, os.environ)
    except ConfigError as error:
        return _refuse(arguments.config, error)
    if arguments.print_config:
        print(to_toml(config))
        return 0
    return _serve(config, arguments.config)


def _serve(config: Config, path: Path) -> int:
    # grpc's core writes its own lines on stderr; what matters of it we say ourselves.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    # Late, so that --print-config and typos do not wait for grpc.
    import uvloop

    from cocoon_rpc.errors import CocoonError
    from nodeagent import app
    from nodeagent.telemetry import logs

    logs.configure(config.log_level)

    async def serve() -> None:
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop.set)
        await app.run(config, stop)

    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(serve())
    except (ConfigError, CocoonError, sqlite3.Error) as error:
        return _refuse(path, error)
    return 0


def _refuse(path: Path, error: Exception) -> int:
    print(f"cocoon-node: {path}: {error}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
