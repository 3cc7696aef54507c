"""What to run, checked: everything that can be refused before anything starts."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cocoon_rpc.errors import (
    CwdNotUsableError,
    InvalidFieldError,
    ProgramNotExecutableError,
    ProgramNotFoundError,
)
from guestd.process.access import acting_as, why_not_enter, why_not_execute
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
        UserNotFoundError, CwdNotUsableError, ProgramNotFoundError,
        ProgramNotExecutableError: as they say, with the user's rights.
    """
    if not argv or not argv[0]:
        raise InvalidFieldError(field="start.argv", rule="must name a program")
    if any("\0" in word for word in argv):
        raise InvalidFieldError(field="start.argv", rule="must not contain NUL")
    if sum(len(word.encode()) for word in argv) > _ARGV_LIMIT:
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
    with acting_as(account):
        folder = cwd or account.home
        if cause := why_not_enter(folder):
            if cwd:
                raise CwdNotUsableError(cwd=cwd, cause=cause)
            folder = "/"
        program = find_program(argv[0], whole["PATH"], folder)
    return Command(tuple(argv), program, folder, whole, account, stdin)


def find_program(name: str, search_path: str, cwd: str) -> str:
    """Returns the file that a program's name stands for, as execvp finds it.

    Raises: ProgramNotFoundError, ProgramNotExecutableError.
    """
    if "/" in name:
        state = why_not_execute(os.path.join(cwd, name))  # noqa: PTH118
        if state == "":
            return name
        if state is None:
            raise ProgramNotFoundError(program=name)
        raise ProgramNotExecutableError(program=name, cause=state)
    refused = None
    for folder in search_path.split(":"):
        path = os.path.join(cwd, folder or ".", name)  # noqa: PTH118
        state = why_not_execute(path)
        if state == "":
            return path
        if state is not None and refused is None:
            refused = ProgramNotExecutableError(program=path, cause=state)
    raise refused or ProgramNotFoundError(program=name, search_path=search_path)
