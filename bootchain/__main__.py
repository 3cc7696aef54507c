"""`python -m bootchain --out build/boot`: brings kernel and initramfs up to date."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from bootchain.build import build
from bootchain.errors import BootchainError


def main() -> int:
    """Returns the exit status: 0 built or up to date, 1 with one line on stderr."""
    parser = argparse.ArgumentParser(prog="bootchain", description="Builds kernel and initramfs.")
    parser.add_argument("--out", type=Path, required=True, help="folder of the artifacts")
    parser.add_argument("--refresh", action="store_true", help="take a newer kernel if Debian has one")
    arguments = parser.parse_args()
    try:
        built = build(arguments.out, lambda line: print(line, flush=True), refresh=arguments.refresh)
    except BootchainError as error:
        print(f"bootchain: {error}", file=sys.stderr)
        return 1
    print(f"boot: {'built' if built else 'up to date'} in {arguments.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
