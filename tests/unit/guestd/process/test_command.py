"""What can be refused before anything starts, and how a program is found."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from cocoon_rpc import errors
from guestd.process.account import DEFAULT_PATH, environment, look_up
from guestd.process.command import EXEC_ID, find_program, prepare


def _prepare(**fields: Any) -> Any:
    return prepare(**{"argv": ["sh"], "cwd": "", "env": {}, "user": "", "stdin": False, **fields})


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "tool"
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)
    return path


def test_command_of_root_is_complete() -> None:
    command = _prepare(argv=["sh", "-c", ""], env={"A": "b"}, stdin=True)
    assert command.argv == ("sh", "-c", "")
    assert os.access(command.program, os.X_OK)
    assert (command.account.uid, command.stdin) == (0, True)
    assert command.env["A"] == "b"


@pytest.mark.parametrize(
    ("field", "fields"),
    [
        ("start.argv", {"argv": []}),
        ("start.argv", {"argv": ["", "x"]}),
        ("start.argv", {"argv": ["sh", "\0"]}),
        ("start.argv", {"argv": ["sh", "x" * (2 * 1024 * 1024)]}),
        ("start.cwd", {"cwd": "."}),
        ("start.cwd", {"cwd": "/\0"}),
        ("start.env", {"env": {"": ""}}),
        ("start.env", {"env": {"A=": ""}}),
        ("start.env", {"env": {"\0": ""}}),
        ("start.env", {"env": {"A": "\0"}}),
    ],
)
def test_command_with_a_bad_field_is_refused(field: str, fields: dict[str, Any]) -> None:
    with pytest.raises(errors.InvalidFieldError) as caught:
        _prepare(**fields)
    assert caught.value.metadata["field"] == field


def test_command_argv_may_be_empty_words_after_the_program() -> None:
    assert _prepare(argv=["sh", ""]).argv == ("sh", "")


def test_command_of_an_unknown_user_is_refused() -> None:
    with pytest.raises(errors.UserNotFoundError) as caught:
        _prepare(user="no-such-user")
    assert caught.value.metadata["user"] == "no-such-user"


def test_command_is_searched_in_the_callers_path(program: Path) -> None:
    assert _prepare(argv=["tool"], env={"PATH": str(program.parent)}).program == str(program)


def test_program_with_a_slash_is_not_searched(program: Path) -> None:
    assert find_program(str(program), "/nowhere", "/") == str(program)
    with pytest.raises(errors.ProgramNotFoundError):
        find_program("./tool", str(program.parent), "/")


def test_program_with_a_relative_path_starts_at_cwd(program: Path) -> None:
    assert find_program("./tool", "", str(program.parent)) == "./tool"


def test_program_search_takes_the_first_that_can_be_executed(program: Path, tmp_path: Path) -> None:
    for folder in ("plain", "directory/tool"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "plain" / "tool").touch(mode=0o644)
    path = f"/nowhere:{tmp_path}/plain:{tmp_path}/directory:{tmp_path}"
    assert find_program("tool", path, "/") == str(program)


def test_program_search_takes_an_empty_entry_for_cwd(program: Path) -> None:
    assert Path(find_program("tool", "/nowhere:", str(program.parent))) == program.parent / "." / "tool"


def test_program_search_names_the_first_that_was_refused(tmp_path: Path) -> None:
    (tmp_path / "tool").touch(mode=0o644)
    with pytest.raises(errors.ProgramNotExecutableError) as caught:
        find_program("tool", f"/nowhere:{tmp_path}", "/")
    assert caught.value.metadata["program"] == str(tmp_path / "tool")


def test_program_search_says_where_it_looked() -> None:
    with pytest.raises(errors.ProgramNotFoundError) as caught:
        find_program("tool", "/nowhere", "/")
    assert caught.value.metadata["search_path"] == "/nowhere"


@pytest.mark.parametrize("path", ["/", "/dev/null"])
def test_program_that_is_no_file_is_not_executable(path: str) -> None:
    with pytest.raises(errors.ProgramNotExecutableError):
        find_program(path, "", "/")


def test_program_through_a_symlink_loop_is_not_executable(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(errors.ProgramNotExecutableError):
        find_program(str(tmp_path / "loop"), "", "/")


def test_environment_is_the_users_with_the_callers_on_top() -> None:
    found = environment(look_up("root"), {"LANG": "de", "MORE": ""})
    assert found["PATH"] == DEFAULT_PATH
    assert (found["USER"], found["LOGNAME"], found["LANG"], found["MORE"]) == ("root", "root", "de", "")


@pytest.mark.parametrize("exec_id", ["a", "A-z_0", "x" * 64])
def test_exec_id_takes_what_the_contract_says(exec_id: str) -> None:
    assert EXEC_ID.fullmatch(exec_id)


@pytest.mark.parametrize("exec_id", ["", "a b", "é", "x" * 65, "a\n"])
def test_exec_id_takes_nothing_else(exec_id: str) -> None:
    assert not EXEC_ID.fullmatch(exec_id)
