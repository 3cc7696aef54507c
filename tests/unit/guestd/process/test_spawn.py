"""Real children: started as asked, owned until reaped, and refusals by their type."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from cocoon_rpc import errors
from guestd.process.account import look_up
from guestd.process.command import Command, prepare
from guestd.process.spawn import Process, spawn
from tests.framework.leaks import open_fds


def command(*argv: str, stdin: bool = False, **fields: Any) -> Command:
    return prepare(argv, **{"cwd": "/", "env": {}, "user": "", "stdin": stdin, **fields})


async def _output(process: Process) -> bytes:
    """Waits for a program with little to say; returns what it said."""
    await asyncio.wait_for(process.wait(), 10)
    return os.read(process.stdout, 65536)


async def test_spawn_gives_back_everything_it_opened() -> None:
    before = open_fds()
    process = spawn(command("true", stdin=True))
    assert open_fds() > before
    assert await process.end(kill_group=False) == 0
    assert open_fds() == before
    assert not Path(f"/proc/{process.pid}").exists()


async def test_spawn_makes_a_leader_of_session_and_group() -> None:
    process = spawn(command("sleep", "300"))
    try:
        assert os.getpgid(process.pid) == process.pid == os.getsid(process.pid)
    finally:
        assert await process.end(kill_group=True) == -signal.SIGKILL


async def test_spawn_honours_cwd_environment_and_umask(tmp_path: Path) -> None:
    process = spawn(command("sh", "-c", "pwd; echo $A; umask", cwd=str(tmp_path), env={"A": "b"}))
    assert (await _output(process)).decode().split() == [str(tmp_path), "b", "0022"]
    assert await process.end(kill_group=False) == 0


async def test_spawn_child_inherits_only_standard_descriptors() -> None:
    reading, writing = os.pipe()
    os.set_inheritable(writing, True)
    process = spawn(command("ls", "/proc/self/fd"))
    found = await _output(process)
    await process.end(kill_group=False)
    os.close(reading)
    os.close(writing)
    # The fourth is the directory being listed.
    assert len(found.split()) == 4


async def test_spawn_child_is_the_first_to_die_of_memory() -> None:
    process = spawn(command("sleep", "300"))
    try:
        assert Path(f"/proc/{process.pid}/oom_score_adj").read_text() == "0\n"
    finally:
        await process.end(kill_group=True)


async def test_spawn_without_stdin_has_an_empty_one() -> None:
    process = spawn(command("readlink", "/proc/self/fd/0"))
    assert process.stdin is None
    assert await _output(process) == b"/dev/null\n"
    await process.end(kill_group=False)


async def test_process_close_stdin_ends_the_input_and_may_be_repeated() -> None:
    process = spawn(command("cat", stdin=True))
    assert process.stdin is not None
    os.write(process.stdin, b"said")
    process.close_stdin()
    process.close_stdin()
    assert await _output(process) == b"said"
    assert await process.end(kill_group=False) == 0


async def test_process_end_kills_survivors_of_a_leader_that_ended() -> None:
    process = spawn(command("sh", "-c", "sleep 300 & echo $!"))
    child = int(await _output(process))
    pidfd = os.pidfd_open(child)
    try:
        assert await process.end(kill_group=True) == 0
        ended = asyncio.Event()
        asyncio.get_running_loop().add_reader(pidfd, ended.set)
        await asyncio.wait_for(ended.wait(), 10)
    finally:
        asyncio.get_running_loop().remove_reader(pidfd)
        os.close(pidfd)


async def test_process_is_not_reaped_by_waiting() -> None:
    process = spawn(command("true"))
    await asyncio.wait_for(process.wait(), 10)
    assert "Z (zombie)" in Path(f"/proc/{process.pid}/status").read_text()
    process.signal_group(signal.SIGTERM)
    assert await process.end(kill_group=False) == 0


async def test_process_wait_that_is_cancelled_leaves_no_reader() -> None:
    process = spawn(command("sleep", "300"))
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(process.wait(), 0.01)
    assert not asyncio.get_running_loop().remove_reader(process._pidfd)
    await process.end(kill_group=True)


@pytest.mark.root
async def test_spawn_as_another_user_takes_uid_gid_and_groups() -> None:
    account = look_up("nobody")
    process = spawn(command("sh", "-c", "id -u; id -g; id -G", user="nobody"))
    assert await _output(process) == f"{account.uid}\n{account.gid}\n{account.gid}\n".encode()
    assert await process.end(kill_group=False) == 0


def test_spawn_into_a_missing_directory_is_typed() -> None:
    before = open_fds()
    with pytest.raises(errors.CwdNotUsableError) as caught:
        spawn(command("true", cwd="/nowhere"))
    assert caught.value.metadata["cwd"] == "/nowhere"
    assert open_fds() == before


def test_spawn_of_a_script_without_interpreter_is_typed(tmp_path: Path) -> None:
    script = tmp_path / "script"
    script.write_text("#!/no/interpreter\n")
    script.chmod(0o755)
    with pytest.raises(errors.ProgramNotExecutableError, match="interpreter"):
        spawn(command(str(script)))


def test_spawn_of_a_program_that_vanished_is_typed(tmp_path: Path) -> None:
    program = tmp_path / "program"
    program.touch(mode=0o755)
    prepared = command(str(program))
    program.unlink()
    with pytest.raises(errors.ProgramNotFoundError):
        spawn(prepared)


def test_spawn_with_too_much_for_the_kernel_is_typed() -> None:
    with pytest.raises(errors.ProgramNotExecutableError, match="too long"):
        spawn(command("true", "x" * 200_000))


@pytest.mark.parametrize(
    ("number", "resource"),
    [
        (errno.EAGAIN, "processes"),
        (errno.ENOMEM, "memory"),
        (errno.EMFILE, "file descriptors"),
        (errno.ENFILE, "file descriptors"),
    ],
)
def test_spawn_beyond_a_limit_is_typed(monkeypatch: pytest.MonkeyPatch, number: int, resource: str) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(subprocess, "Popen", refuse)
    with pytest.raises(errors.ProcessLimitReachedError) as caught:
        spawn(command("true"))
    assert caught.value.metadata["resource"] == resource


async def test_spawn_without_a_descriptor_for_the_pidfd_leaves_no_child(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = open_fds()
    started: list[int] = []

    def refuse(pid: int) -> int:
        started.append(pid)
        raise OSError(errno.EMFILE, "too many")

    monkeypatch.setattr(os, "pidfd_open", refuse)
    with pytest.raises(errors.ProcessLimitReachedError):
        spawn(command("sleep", "300", stdin=True))
    assert open_fds() == before
    assert not Path(f"/proc/{started[0]}").exists()


@pytest.mark.parametrize("score", ["-900\n", "0\n", "300\n"])
async def test_spawn_gives_up_protection_only_while_it_starts(
    score: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = tmp_path / "oom_score_adj"
    own.write_text(score)
    monkeypatch.setattr("guestd.process.spawn._OOM_SCORE", own)
    real, during = subprocess.Popen, []

    def start(*arguments: object, **options: object) -> object:
        during.append(own.read_text().strip())
        return real(*arguments, **options)

    monkeypatch.setattr(subprocess, "Popen", start)
    process = spawn(command("true"))
    assert await process.end(kill_group=False) == 0
    assert during == ["0"]
    assert own.read_text() == score
