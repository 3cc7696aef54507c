"""Layer 0: a minimal Debian as a tar archive, made by mmdebstrap.

The archive is the cache: half a minute to make, a second to unpack. It is keyed by the command that makes
it, so what Debian publishes later does not change it; `--refresh` fetches again.
"""

import hashlib
import re
import shlex
from pathlib import Path

from osimages.erofs import EPOCH
from osimages.spec import DebianSpec, UserSpec
from osimages.tools import Report, run

_LEFTOVERS = (
    # The builder's own name and resolver, which mmdebstrap lends to the chroot.
    "/etc/hostname",
    "/etc/resolv.conf",
    # Backups and locks of what useradd and dpkg edited.
    "/etc/passwd-",
    "/etc/group-",
    "/etc/shadow-",
    "/etc/gshadow-",
    "/etc/subuid-",
    "/etc/subgid-",
    "/etc/.pwd.lock",
    "/var/lib/dpkg/status-old",
    "/var/cache/debconf/config.dat-old",
    "/var/cache/debconf/templates.dat-old",
)

_PYTHON_ROOTS = ("/usr/lib/python3", "/usr/lib/python3.11", "/usr/share/python3")


def archive_argv(debian: DebianSpec, user: UserSpec, arch: str, target: str) -> list[str]:
    """Build the mmdebstrap command, without a mirror: mmdebstrap knows the suite's and its updates."""
    return [
        "mmdebstrap",
        "--mode=root",
        "--variant=apt",
        f"--architectures={arch}",
        f"--include={','.join(debian.packages)}",
        *(f"--dpkgopt=path-exclude={pattern}" for pattern in debian.exclude),
        *(f"--dpkgopt=path-include={pattern}" for pattern in debian.include),
        *(f"--customize-hook={hook}" for hook in _hooks(user)),
        "--format=tar",
        debian.suite,
        target,
    ]


def make_archive(debian: DebianSpec, user: UserSpec, arch: str, target: Path, report: Report) -> None:
    """Install Debian and write it to `target`. Needs root and the network.

    Raises:
        ImageError: mmdebstrap is missing or failed.
    """
    partial = target.with_suffix(".partial")
    run(
        archive_argv(debian, user, arch, str(partial)),
        report=report,
        env={"SOURCE_DATE_EPOCH": str(EPOCH), "LC_ALL": "C.UTF-8"},
    )
    partial.rename(target)


def unpack(archive: Path, root: Path) -> None:
    """Unpack with owners, modes and file capabilities. Needs root."""
    root.mkdir()
    faithfully = ["--numeric-owner", "--same-permissions", "--xattrs", "--xattrs-include=*"]
    run(["tar", "--extract", *faithfully, f"--file={archive}", f"--directory={root}"])


def installed_packages(status: str) -> list[str]:
    """List `name version architecture` of each installed package in dpkg's status file, sorted."""
    found = []
    for stanza in status.split("\n\n"):
        fields = dict(re.findall(r"^(Package|Status|Version|Architecture): (.*)$", stanza, re.MULTILINE))
        if fields.get("Status") == "install ok installed":
            found.append(f"{fields['Package']} {fields['Version']} {fields['Architecture']}")
    return sorted(found)


def facts(root: Path) -> tuple[str, str]:
    """Read the point release and the digest of the package list from an unpacked archive."""
    packages = installed_packages((root / "var/lib/dpkg/status").read_text(encoding="utf-8"))
    release = (root / "etc/debian_version").read_text(encoding="utf-8").strip()
    return release, hashlib.sha256("\n".join(packages).encode()).hexdigest()


def _hooks(user: UserSpec) -> list[str]:
    """Write the shell lines that finish the installation; `$1` is its root."""
    account = f"--uid {user.uid} --user-group --create-home --shell {shlex.quote(user.shell)} {user.name}"
    sources = " ".join(f'"$1"{path}' for path in _PYTHON_ROOTS)
    compile_all = f"python3 -m compileall -q -f --invalidation-mode timestamp {' '.join(_PYTHON_ROOTS)}"
    return [
        f'chroot "$1" useradd {account}',
        # The layer gives every file one time, which would outdate all bytecode. With the sources at that
        # time before they are compiled, it stays valid, and still notices when a tenant edits a module.
        f"find {sources} -name '*.py' -exec touch -d @{EPOCH} {{}} +",
        f'PYTHONHASHSEED=0 chroot "$1" {compile_all}',
        # Present and empty: systemd fills it in at boot, and RenewIdentity gives each clone its own.
        ': > "$1"/etc/machine-id',
        "rm -f " + " ".join(f'"$1"{path}' for path in _LEFTOVERS),
    ]
