"""The steps of a renewal below a temporary root; nothing here touches the host's name or clock."""

from __future__ import annotations

import dataclasses
import socket
import stat
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from cocoon_rpc import errors
from guestd import identity
from guestd.identity import Identity, Renewer, is_mount_point, machine_steps, namespace_steps, set_clock

IDENTITY = Identity(
    generation=7,
    entropy=bytes(range(64)),
    machine_id="0123456789abcdef" * 2,
    hostname="m-abc",
    wall_ns=10**18 + 1,
)


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the kernel's name was set to."""
    found: list[str] = []
    monkeypatch.setattr(socket, "sethostname", found.append)
    return found


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "etc").mkdir()
    (tmp_path / "run").mkdir()
    return tmp_path


def test_identity_that_keeps_the_rules_is_taken() -> None:
    IDENTITY.check()
    for hostname in ("a", "0", "a-b", "a" * 63):
        dataclasses.replace(IDENTITY, hostname=hostname).check()
    for size in (32, 512):
        dataclasses.replace(IDENTITY, entropy=bytes(size)).check()


@pytest.mark.parametrize(
    ("field", "value", "name"),
    [
        ("generation", 0, "generation"),
        ("entropy", bytes(31), "entropy"),
        ("entropy", bytes(513), "entropy"),
        ("machine_id", "0" * 31, "machine_id"),
        ("machine_id", "0" * 33, "machine_id"),
        ("machine_id", "G" * 32, "machine_id"),
        ("machine_id", "0" * 32 + "\n", "machine_id"),
        ("hostname", "", "hostname"),
        ("hostname", "a" * 64, "hostname"),
        ("hostname", "-a", "hostname"),
        ("hostname", "a-", "hostname"),
        ("hostname", "A", "hostname"),
        ("hostname", "a\n", "hostname"),
        ("wall_ns", 0, "wall_time"),
        ("wall_ns", -1, "wall_time"),
    ],
)
def test_identity_that_breaks_a_rule_names_the_field(field: str, value: Any, name: str) -> None:
    with pytest.raises(errors.InvalidFieldError) as caught:
        dataclasses.replace(IDENTITY, **{field: value}).check()
    assert caught.value.metadata["field"] == name


def test_identity_does_not_show_its_entropy() -> None:
    assert "entropy" not in repr(IDENTITY)


def test_machine_steps_begin_with_randomness_and_end_with_the_generation() -> None:
    names = [name for name, _ in machine_steps()]
    assert names == ["entropy", "machine_id", "hostname", "host_keys", "clock", "generation"]


def test_namespace_steps_leave_kernel_and_clock_alone() -> None:
    assert {name for name, _ in machine_steps()} - {name for name, _ in namespace_steps()} == {
        "entropy",
        "clock",
    }


def test_renewal_writes_files_and_sets_the_name(root: Path, names: list[str]) -> None:
    Renewer(namespace_steps(root)).renew(IDENTITY)
    assert (root / "etc/machine-id").read_text() == IDENTITY.machine_id + "\n"
    assert (root / "etc/hostname").read_text() == "m-abc\n"
    assert (root / "run/cocoon/generation").read_text() == "7\n"
    assert names == ["m-abc"]
    modes = [stat.S_IMODE((root / f).stat().st_mode) for f in ("etc/machine-id", "etc/hostname")]
    assert modes == [0o444, 0o644]
    # Neither a temporary file nor a transient machine-id that was not there.
    assert sorted(p.name for p in root.rglob("*") if p.is_file()) == ["generation", "hostname", "machine-id"]


def test_renewal_may_be_repeated_over_its_own_files(root: Path, names: list[str]) -> None:
    Renewer(namespace_steps(root)).renew(IDENTITY)
    Renewer(namespace_steps(root)).renew(dataclasses.replace(IDENTITY, hostname="other"))
    assert (root / "etc/hostname").read_text() == "other\n"
    assert names == ["m-abc", "other"]


@pytest.mark.usefixtures("names")
def test_renewal_replaces_a_transient_machine_id(root: Path) -> None:
    (root / "run/machine-id").write_text("old\n")
    Renewer(namespace_steps(root)).renew(IDENTITY)
    assert (root / "run/machine-id").read_text() == IDENTITY.machine_id + "\n"


@pytest.mark.usefixtures("names")
def test_renewal_replaces_host_keys_where_there_are_some(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[list[str]] = []
    monkeypatch.setattr(subprocess, "run", lambda argv, **_: calls.append(argv))
    Renewer(namespace_steps(root)).renew(IDENTITY)
    assert calls == []
    (root / "etc/ssh").mkdir()
    for name in ("ssh_host_rsa_key", "ssh_host_rsa_key.pub", "sshd_config"):
        (root / "etc/ssh" / name).touch()
    Renewer(namespace_steps(root)).renew(IDENTITY)
    assert [path.name for path in (root / "etc/ssh").iterdir()] == ["sshd_config"]
    assert calls == [["ssh-keygen", "-A", "-f", str(root)]]


def test_clock_is_set_to_the_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[int, int]] = []
    monkeypatch.setattr(time, "clock_settime_ns", lambda *call: calls.append(call))
    set_clock(IDENTITY)
    assert calls == [(time.CLOCK_REALTIME, 10**18 + 1)]


STEPS = [name for name, _ in machine_steps()]


@pytest.mark.parametrize("failing", STEPS)
@pytest.mark.parametrize("failure", [OSError(5, "broken"), subprocess.TimeoutExpired("ssh-keygen", 30)])
def test_renewal_names_the_step_that_failed_and_stops_there(failing: str, failure: Exception) -> None:
    ran: list[str] = []

    def step(name: str) -> None:
        ran.append(name)
        if name == failing:
            raise failure

    with pytest.raises(errors.IdentityRenewalFailedError) as caught:
        Renewer([(name, lambda _, name=name: step(name)) for name in STEPS]).renew(IDENTITY)
    assert caught.value.metadata["step"] == failing
    assert ran == STEPS[: STEPS.index(failing) + 1]


def test_renewal_fails_where_the_root_is_not_writable(root: Path, names: list[str]) -> None:
    (root / "etc").rmdir()
    with pytest.raises(errors.IdentityRenewalFailedError) as caught:
        Renewer(namespace_steps(root)).renew(IDENTITY)
    assert caught.value.metadata["step"] == "machine_id"
    assert names == []


def test_mount_point_is_exactly_one(tmp_path: Path) -> None:
    assert is_mount_point(Path("/proc"))
    assert not is_mount_point(Path("/proc/self"))
    assert not is_mount_point(tmp_path)


def test_unmount_of_what_is_not_mounted_fails(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="umount"):
        identity.unmount(tmp_path)
