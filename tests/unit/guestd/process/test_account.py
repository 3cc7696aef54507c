"""Users as the guest's tables have them, and the environment they get."""

from __future__ import annotations

import os
import pwd

import pytest

from cocoon_rpc.errors import UserNotFoundError
from guestd.process.account import DEFAULT_PATH, Account, environment, look_up

_ANNA = Account("anna", 1000, 1000, (1000, 27), "/home/anna", "/bin/bash")


def _entry(**fields: object) -> pwd.struct_passwd:
    whole = {"name": "anna", "passwd": "x", "uid": 1000, "gid": 1000, "gecos": "", "dir": "", "shell": ""}
    return pwd.struct_passwd((whole | fields).values())


def test_account_of_no_name_is_root() -> None:
    account = look_up("")
    assert (account.name, account.uid, account.gid) == ("root", 0, 0)


def test_account_of_no_name_is_root_without_any_table(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise KeyError(name)

    monkeypatch.setattr(pwd, "getpwnam", missing)
    assert look_up("") == Account("root", 0, 0, (0,), "/root", "/bin/sh")
    with pytest.raises(UserNotFoundError):
        look_up("root")


@pytest.mark.parametrize("name", ["nobody-here", "root\0", "0", "../root", "é"])
def test_account_that_is_in_no_table_is_typed(name: str) -> None:
    with pytest.raises(UserNotFoundError) as caught:
        look_up(name)
    assert caught.value.metadata == {"user": name}


def test_account_has_all_its_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pwd, "getpwnam", lambda _: _entry(dir="/home/anna", shell="/bin/bash"))
    monkeypatch.setattr(os, "getgrouplist", lambda name, gid: [gid, 27])
    assert look_up("anna") == _ANNA


def test_account_with_empty_fields_gets_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pwd, "getpwnam", lambda _: _entry())
    monkeypatch.setattr(os, "getgrouplist", lambda name, gid: [gid])
    account = look_up("anna")
    assert (account.home, account.shell) == ("/", "/bin/sh")


@pytest.mark.parametrize(
    ("account", "expected"),
    [
        (Account("root", 0, 0, (0,), "/root", "/bin/sh"), True),
        (Account("root", 0, 0, (0, 27), "/root", "/bin/sh"), False),
        (Account("toor", 0, 100, (100,), "/root", "/bin/sh"), False),
        (_ANNA, False),
    ],
)
def test_account_is_root_only_without_groups_of_its_own(account: Account, expected: bool) -> None:
    assert account.is_root is expected


def test_environment_is_ours_with_the_callers_on_top() -> None:
    assert environment(_ANNA, {"TERM": "dumb", "X": ""}) == {
        "PATH": DEFAULT_PATH,
        "TERM": "dumb",
        "LANG": "C.UTF-8",
        "HOME": "/home/anna",
        "USER": "anna",
        "LOGNAME": "anna",
        "SHELL": "/bin/bash",
        "X": "",
    }
