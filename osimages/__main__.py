"""Command line: `python -m osimages --out build/images [base rt]`."""

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from osimages.builder import Builder
from osimages.errors import ImageError
from osimages.tools import Report


def main(arguments: Sequence[str] | None = None) -> int:
    """Build images; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m osimages", description="Build the guest OS images out of date."
    )
    parser.add_argument("names", nargs="*", default=["base", "rt"], help="images to build (default: base rt)")
    parser.add_argument(
        "--out", type=Path, required=True, help="directory of the image store, such as build/images"
    )
    parser.add_argument(
        "--refresh", action="store_true", help="install Debian again, with the packages of today"
    )
    parser.add_argument(
        "--prune", action="store_true", help="afterwards delete images without a name and old caches"
    )
    options = parser.parse_args(arguments)
    report = _reporter(time.monotonic())
    builder = Builder(Path(__file__).parent.parent, options.out.resolve(), report)
    try:
        builder.build(options.names, refresh=options.refresh)
        if options.prune:
            for path in builder.prune():
                report(f"deleted {path}")
    except ImageError as error:
        sys.stderr.write(f"osimages: {error}\n")
        return 1
    return 0


def _reporter(start: float) -> Report:
    def report(line: str) -> None:
        sys.stderr.write(f"osimages {time.monotonic() - start:6.1f} s  {line}\n")

    return report


if __name__ == "__main__":
    sys.exit(main())
