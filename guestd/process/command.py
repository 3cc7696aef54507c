"""What to run, checked: everything that can be refused before anything starts."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cocoon_rpc.errors import InvalidFieldError, ProgramNotExecutableError, ProgramNotFoundError
from guestd.process.account import Account, environment, look_up

_ARGV_LIMIT = 2 * 1024 * 1024
EXEC_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")


@dataclass(frozen=True, slots=True)
class Command:
    """One program to start."""

    argv: tuple[str, ...]
    program: str
    """The file to execute; relative ones start at `cwd`."""
    cwd: str
    env: Mapping[str, str]
    account: Account
    stdin: bool
    """Whether input follows; otherwise standard input is empty."""


def prepare(argv: Sequence[str], *, cwd: str, env: Mapping[str, str], user: str, stdin: bool) -> Command:
    """Returns the checked command.

    Raises:
        InvalidFieldError: argv, cwd or env break their rules.
        UserNotFoundError, ProgramNotFoundError, ProgramNotExecutableError: as they say.
    """
    if not argv or not argv[0]:
        raise InvalidFieldError(field="start.argv", rule="must name a program")
    if any("\0" in word for word in argv):
        raise InvalidFieldError(field="start.argv", rule="must not contain NUL")
    if sum(len(word) for word in argv) > _ARGV_LIMIT:
        raise InvalidFieldError(field="start.argv", rule="must be at most 2 MiB in all")
    if "\0" in cwd or (cwd and not cwd.startswith("/")):
        raise InvalidFieldError(field="start.cwd", rule="must be an absolute path without NUL")
    for name, value in env.items():
        if not name or "=" in name or "\0" in name:
            raise InvalidFieldError(field="start.env", rule="names must not be empty or contain = or NUL")
        if "\0" in value:
            raise InvalidFieldError(field="start.env", rule=f"the value of {name} must not contain NUL")
    account = look_up(user)
    whole = environment(account, env)
    folder = cwd or (account.home if os.path.isdir(account.home) else "/")  # noqa: PTH112
    program = find_program(argv[0], whole["PATH"], folder)
    return Command(tuple(argv), program, folder, whole, account, stdin)


def find_program(name: str, search_path: str, cwd: str) -> str:
    """Returns the file that a program's name stands for, as execvp finds it.

    Raises: ProgramNotFoundError, ProgramNotExecutableError.
    """
    if "/" in name:
        state = _state(os.path.join(cwd, name))  # noqa: PTH118
        if state == "":
            return name
        if state is None:
            raise ProgramNotFoundError(program=name)
        raise ProgramNotExecutableError(program=name, cause=state)
    refused = None
    for folder in search_path.split(":"):
        path = os.path.join(cwd, folder or ".", name)  # noqa: PTH118
        state = _state(path)
        if state == "":
            return path
        if state is not None and refused is None:
            refused = ProgramNotExecutableError(program=path, cause=state)
    raise refused or ProgramNotFoundError(program=name, search_path=search_path)


def _state(path: str) -> str | None:
    """Returns "" for a file that can be executed, else why not; None if there is none."""
    try:
        mode = os.stat(path).st_mode  # noqa: PTH116
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        return (error.strerror or "cannot be read").lower()
    if stat.S_ISDIR(mode):
        return "is a directory"
    if not stat.S_ISREG(mode) or not mode & 0o111:
        return "permission denied"
    return ""
