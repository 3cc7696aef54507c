"""Running the programs an image is built with. The only place here that starts a process."""

import os
import subprocess
from collections import deque
from collections.abc import Callable, Mapping, Sequence

from osimages.errors import ImageError

Report = Callable[[str], None]
"""Takes one line for the person who waits."""

_DEBIAN_PACKAGE = {
    "mmdebstrap": "mmdebstrap",
    "mkfs.erofs": "erofs-utils",
    "tar": "tar",
    "chroot": "coreutils",
}
_TAIL_LINES = 15


def run(argv: Sequence[str], *, report: Report | None = None, env: Mapping[str, str] | None = None) -> None:
    """Run a program to its end, without stdin.

    Args:
        argv: Program and arguments; no shell.
        report: Gets every line of output as it comes.
        env: Added to this process's environment.

    Raises:
        ImageError: The program is not installed or failed; carries the end of its output.
    """
    tail: deque[str] = deque(maxlen=_TAIL_LINES)
    try:
        process = subprocess.Popen(
            argv,
            env={**os.environ, **(env or {})},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
    except FileNotFoundError:
        package = _DEBIAN_PACKAGE.get(argv[0], argv[0])
        raise ImageError(f"{argv[0]} is not installed; on Debian: apt-get install {package}") from None
    with process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                tail.append(line.rstrip())
                if report is not None:
                    report(line.rstrip())
        except BaseException:
            process.terminate()
            raise
    if process.returncode != 0:
        lines = "\n".join(f"  {line}" for line in tail) or "  (it printed nothing)"
        raise ImageError(f"{' '.join(argv[:3])} … failed with exit code {process.returncode}:\n{lines}")
