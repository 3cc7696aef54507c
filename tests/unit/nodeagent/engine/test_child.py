"""Processes: started, watched, ended with proof; and nobody else's touched."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import string
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cocoon_rpc.errors import ProvisionFailedError
from nodeagent.engine import child as subject
from nodeagent.engine.child import Child, end_recorded, pair, printable, run_tool, start, start_time, tail

_SH = "/bin/sh"


def _start(tmp_path: Path, script: str, **more: object) -> Child:
    return start([_SH, "-c", script], log=tmp_path / "log", **more)  # type: ignore[arg-type]


async def _ended(child: Child) -> int | None:
    async with asyncio.timeout(10):
        await child.wait()
    return child.status


def _fds() -> int:
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208 - the names are not wanted


async def test_start_writes_output_and_errors_to_the_log(tmp_path: Path) -> None:
    child = _start(tmp_path, "echo out; echo err >&2; exit 3")
    assert os.waitstatus_to_exitcode(await _ended(child) or 0) == 3
    assert (tmp_path / "log").read_text() == "out\nerr\n"
    assert (tmp_path / "log").stat().st_mode & 0o777 == 0o600


async def test_start_makes_the_log_new(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("of a former start")
    await _ended(_start(tmp_path, "echo new"))
    assert (tmp_path / "log").read_text() == "new\n"


async def test_start_gives_no_input_and_a_session_of_its_own(tmp_path: Path) -> None:
    child = _start(tmp_path, "cat; cut -d' ' -f6 /proc/$$/stat; echo $$")
    await _ended(child)
    session, pid = (tmp_path / "log").read_text().split()
    assert session == pid == str(child.pid)


async def test_start_hides_our_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_OF_THE_AGENT", "x")
    await _ended(_start(tmp_path, "env"))
    names = {line.partition("=")[0] for line in (tmp_path / "log").read_text().splitlines()}
    assert "PATH" in names
    assert names <= {"PATH", "PWD", "SHLVL", "_", "OLDPWD"}


async def test_start_inherits_only_the_named_fds(tmp_path: Path) -> None:
    # What the test's own starter left inheritable is not ours to judge.
    foreign = {fd for fd in range(3, 1024) if _inheritable(fd)}
    ours, theirs = pair()
    with ours, theirs:
        child = _start(tmp_path, "printf hello >&9; ls /proc/$$/fd", inherit={9: theirs.fileno()})
        await _ended(child)
        assert ours.recv(16, socket.MSG_DONTWAIT) == b"hello"
    assert {int(fd) for fd in (tmp_path / "log").read_text().split()} <= {0, 1, 2, 9} | foreign


async def test_start_keeps_fds_apart_whose_numbers_cross(tmp_path: Path) -> None:
    """Ours at 40 is its 41, and the other way round."""
    one, other = tmp_path / "one", tmp_path / "other"
    with one.open("w") as first, other.open("w") as second:
        ours = {41: os.dup2(first.fileno(), 40, inheritable=False)}
        ours[40] = os.dup2(second.fileno(), 41, inheritable=False)
        try:
            script = "echo one > /dev/fd/41; echo other > /dev/fd/40; ls /proc/$$/fd"
            await _ended(_start(tmp_path, script, inherit=ours))
        finally:
            os.close(40)
            os.close(41)
    assert (one.read_text(), other.read_text()) == ("one\n", "other\n")
    assert {fd for fd in (tmp_path / "log").read_text().split() if 40 <= int(fd) <= 50} == {"40", "41"}


def _inheritable(fd: int) -> bool:
    try:
        return os.get_inheritable(fd)
    except OSError:
        return False


async def test_start_of_an_absent_program_raises_and_leaks_no_fd(tmp_path: Path) -> None:
    before = _fds()
    with pytest.raises(FileNotFoundError):
        start([str(tmp_path / "absent")], log=tmp_path / "log")
    assert _fds() == before


async def test_start_undoes_blocked_and_ignored_signals(tmp_path: Path) -> None:
    """Python ignores SIGPIPE; a machine's process must not."""
    await _ended(_start(tmp_path, "grep -E 'Sig(Blk|Ign)' /proc/self/status"))
    masks = [int(line.split()[1], 16) for line in (tmp_path / "log").read_text().splitlines()]
    assert len(masks) == 2
    assert not any(mask & (1 << (signal.SIGPIPE - 1)) for mask in masks)


async def test_kill_ends_the_process_and_frees_its_fd(tmp_path: Path) -> None:
    before = _fds()
    child = _start(tmp_path, "exec sleep 60")
    child.kill()
    assert os.WTERMSIG(await _ended(child) or 0) == signal.SIGKILL
    assert not Path(f"/proc/{child.pid}").exists()
    assert _fds() == before
    child.kill()


async def test_wait_serves_several_and_again(tmp_path: Path) -> None:
    child = _start(tmp_path, "exit 0")
    await asyncio.gather(_ended(child), _ended(child))
    assert await _ended(child) == 0


# The record


async def test_end_recorded_ends_the_recorded_process(tmp_path: Path) -> None:
    child = _start(tmp_path, "exec sleep 60")
    child.record(tmp_path)
    before = _fds()
    await end_recorded(tmp_path)
    assert await _ended(child) == signal.SIGKILL
    assert _fds() < before, "the pidfd of the child is free, none is left of ours"
    await end_recorded(tmp_path)


@pytest.mark.parametrize(
    "change",
    [
        {"start_time": 1},
        {"boot_id": "11111111-2222-3333-4444-555555555555"},
        {"start_time": None},
        {"pid": None},
        {"pid": -1},
        {"pid": 0},
        {"pid": 10**30},
        {"pid": 2**31 - 1},
    ],
    ids=str,
)
async def test_end_recorded_needs_every_fact_to_fit(tmp_path: Path, change: dict[str, object]) -> None:
    child = _start(tmp_path, "exec sleep 60")
    try:
        child.record(tmp_path)
        facts = json.loads((tmp_path / subject.RECORD).read_text())
        (tmp_path / subject.RECORD).write_text(json.dumps({**facts, **change}))
        before = _fds()
        await end_recorded(tmp_path)
        assert _fds() == before
        assert start_time(child.pid) == facts["start_time"]
        assert child.status is None
    finally:
        child.kill()
        await _ended(child)


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b"3", b"null", b"\xff", b'{"pid": 1}'])
async def test_end_recorded_ignores_a_record_it_cannot_read(tmp_path: Path, text: bytes) -> None:
    (tmp_path / subject.RECORD).write_bytes(text)
    await end_recorded(tmp_path)


async def test_start_time_of_nobody_is_none(tmp_path: Path) -> None:
    child = _start(tmp_path, "exit 0")
    await _ended(child)
    assert start_time(child.pid) is None
    assert start_time(os.getpid()) is not None


async def test_start_time_survives_a_hostile_process_name(tmp_path: Path) -> None:
    program = tmp_path / "a) R 1 1 ("
    program.symlink_to("/bin/sleep")
    child = start([str(program), "60"], log=tmp_path / "log")
    try:
        plain = _start(tmp_path, "exec sleep 60")
        try:
            mine, other = start_time(child.pid), start_time(plain.pid)
            assert mine is not None
            assert other is not None
            assert 0 <= other - mine < 1000
        finally:
            plain.kill()
            await _ended(plain)
    finally:
        child.kill()
        await _ended(child)


# Tools


async def test_run_tool_returns_the_output_and_removes_the_log(tmp_path: Path) -> None:
    assert await run_tool([_SH, "-c", "echo hi"], log=tmp_path / "log", limit_s=10) == "hi\n"
    assert list(tmp_path.iterdir()) == []


async def test_run_tool_failure_says_the_last_line(tmp_path: Path) -> None:
    with pytest.raises(ProvisionFailedError, match="the reason"):
        await run_tool([_SH, "-c", "echo noise; echo the reason; exit 1"], log=tmp_path / "log", limit_s=10)
    assert list(tmp_path.iterdir()) == []


async def test_run_tool_ends_one_that_is_too_slow(tmp_path: Path) -> None:
    script = f"echo $$ > {tmp_path / 'pid'}; exec sleep 60"
    with pytest.raises(ProvisionFailedError, match="longer than 0 s"):
        await run_tool([_SH, "-c", script], log=tmp_path / "log", limit_s=0.3)
    assert start_time(int((tmp_path / "pid").read_text())) is None
    assert not (tmp_path / "log").exists()


async def test_run_tool_cancelled_ends_the_tool(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    script = f"echo $$ > {pid}.new; mv {pid}.new {pid}; exec sleep 60"
    async with asyncio.TaskGroup() as group:
        task = group.create_task(run_tool([_SH, "-c", script], log=tmp_path / "log", limit_s=60))
        async with asyncio.timeout(10):
            while not pid.exists():
                await asyncio.sleep(0.01)
        task.cancel()
    assert start_time(int(pid.read_text())) is None
    assert not (tmp_path / "log").exists()


async def test_run_tool_that_is_not_installed_says_what_to_run(tmp_path: Path) -> None:
    with pytest.raises(ProvisionFailedError, match="no-such-tool is not installed; run: make setup"):
        await run_tool(["no-such-tool"], log=tmp_path / "log", limit_s=1)


# What a guest may have written


@given(st.binary(max_size=9000))
def test_tail_is_printable_and_bounded(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    log = tmp_path_factory.getbasetemp() / "hostile.log"
    log.write_bytes(content)
    text = tail(log)
    assert text.isprintable()
    assert len(text) <= 300


def test_tail_is_the_last_line_with_text(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_bytes(b"first\n" + b"x" * 10_000 + b"\nlast \x1b[31mred\x00\n\n \n")
    assert tail(log) == "last [31mred"
    assert tail(log, limit=3) == "red"


@pytest.mark.parametrize("content", [None, b"", b"\n\n"])
def test_tail_of_nothing_is_empty(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / "log").write_bytes(content)
    assert tail(tmp_path / "log") == ""


@given(st.text())
def test_printable_keeps_what_harms_no_terminal(text: str) -> None:
    kept = printable(text)
    assert kept.isprintable()
    assert printable(string.ascii_letters + text) == string.ascii_letters + kept


def test_pair_is_connected_and_not_inherited() -> None:
    ours, theirs = pair()
    with ours, theirs:
        ours.sendall(b"x")
        assert theirs.recv(1) == b"x"
        assert not ours.get_inheritable()
        assert not theirs.get_inheritable()
