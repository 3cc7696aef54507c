"""Users of the guest and the environment their programs get."""

from __future__ import annotations

import os
import pwd
from collections.abc import Mapping
from dataclasses import dataclass

from cocoon_rpc.errors import UserNotFoundError

DEFAULT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


@dataclass(frozen=True, slots=True)
class Account:
    """One user as the guest's tables have them."""

    name: str
    uid: int
    gid: int
    groups: tuple[int, ...]
    home: str
    shell: str

    @property
    def is_root(self) -> bool:
        """Says whether guestd itself runs as this account, with no group more."""
        return self.uid == 0 and self.gid == 0 and set(self.groups) <= {0}


def look_up(name: str) -> Account:
    """Returns the account; an empty name is root. Raises: UserNotFoundError."""
    try:
        entry = pwd.getpwnam(name or "root")
        groups = tuple(os.getgrouplist(entry.pw_name, entry.pw_gid))
    except (KeyError, ValueError, OSError):
        if not name:
            # An image without a passwd file still has a root.
            return Account("root", 0, 0, (0,), "/root", "/bin/sh")
        raise UserNotFoundError(user=name) from None
    return Account(
        entry.pw_name, entry.pw_uid, entry.pw_gid, groups, entry.pw_dir or "/", entry.pw_shell or "/bin/sh"
    )


def environment(account: Account, extra: Mapping[str, str]) -> dict[str, str]:
    """Returns the whole environment of a program: ours, then the caller's on top."""
    return {
        "PATH": DEFAULT_PATH,
        "TERM": "xterm-256color",
        "LANG": "C.UTF-8",
        "HOME": account.home,
        "USER": account.name,
        "LOGNAME": account.name,
        "SHELL": account.shell,
        **extra,
    }
