"""ProcessService.Exec on a real guest: what runs, how it is fed, how it ends."""

from __future__ import annotations

import hashlib
import time

import pytest
from google.protobuf.duration_pb2 import Duration

from cocoon.guest.v1 import process_service_pb2 as pb
from cocoon_rpc import errors
from nodeagent.pool.provision import Guest
from tests.functional.guest.calls import alive, collect, drain, exec_call, gone, refused, run, shell

EXITED, TIMEOUT = pb.EXIT_REASON_EXITED, pb.EXIT_REASON_TIMEOUT


async def test_exec_takes_argv_as_it_is(guest_any: Guest) -> None:
    words = ["", "two words", "$HOME", "*", "\n", "-n", "é"]
    result = await run(guest_any, "python3", "-I", "-c", "import sys; print(ascii(sys.argv[1:]))", *words)
    assert result.text == ascii(words)
    assert result.exit == pb.Exit(code=0, reason=EXITED)


async def test_exec_starts_in_cwd(guest_any: Guest) -> None:
    assert await shell(guest_any, "pwd", cwd="/usr/lib") == "/usr/lib"


async def test_exec_starts_at_home_without_cwd(guest_any: Guest) -> None:
    assert await shell(guest_any, "pwd") == "/root"
    assert await shell(guest_any, "pwd", user="sandbox") == "/home/sandbox"


async def test_exec_environment_is_ours_and_the_callers(guest_any: Guest) -> None:
    result = await run(guest_any, "env", env={"TERM": "dumb", "GREETING": "a=b c"})
    lines = dict(line.split("=", 1) for line in result.text.splitlines())
    assert lines == {
        "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "TERM": "dumb",
        "LANG": "C.UTF-8",
        "HOME": "/root",
        "USER": "root",
        "LOGNAME": "root",
        "SHELL": lines["SHELL"],
        "GREETING": "a=b c",
    }


async def test_exec_searches_the_path_of_the_resulting_environment(guest_any: Guest) -> None:
    await shell(
        guest_any,
        "mkdir -p /tmp/bin && printf '#!/bin/sh\\necho mine\\n' >/tmp/bin/mine && chmod +x /tmp/bin/mine",
    )
    assert (await run(guest_any, "mine", env={"PATH": "/nowhere:/tmp/bin"})).text == "mine"


async def test_exec_user_has_home_shell_and_groups(guest_any: Guest) -> None:
    script = (
        'echo $HOME $USER $LOGNAME $SHELL; id -un; id -gn; test "$(id -G)" = "$(id -G sandbox)" && echo same'
    )
    lines = (await shell(guest_any, script, user="sandbox")).splitlines()
    assert lines == ["/home/sandbox sandbox sandbox /bin/bash", "sandbox", "sandbox", "same"]


async def test_exec_of_a_user_cannot_write_what_root_owns(guest_any: Guest) -> None:
    result = await run(guest_any, "touch", "/etc/mine", user="sandbox")
    assert result.exit.code == 1
    assert b"Permission denied" in result.stderr


async def test_exec_exit_code_comes_back(guest_any: Guest) -> None:
    assert (await run(guest_any, "sh", "-c", "exit 255")).exit == pb.Exit(code=255, reason=EXITED)


async def test_exec_keeps_stdout_and_stderr_apart(guest_any: Guest) -> None:
    result = await run(guest_any, "sh", "-c", "echo out; echo err >&2")
    assert (result.stdout, result.stderr) == (b"out\n", b"err\n")


async def test_exec_stdin_is_empty_when_none_is_given(guest_any: Guest) -> None:
    assert (await run(guest_any, "cat")).stdout == b""


async def test_exec_stdin_close_ends_the_input(guest_any: Guest) -> None:
    data = bytes(range(256)) * 4096
    result = await run(guest_any, "sha256sum", stdin=data)
    assert result.text.split()[0] == hashlib.sha256(data).hexdigest()


async def test_exec_half_close_ends_the_input(guest_any: Guest) -> None:
    async with exec_call(guest_any, pb.ExecStart(argv=["cat"], stdin=True)) as call:
        await call.write(pb.ExecRequest(stdin=pb.ExecStdin(data=b"last words")))
        await call.done_writing()
        assert (await collect(call)).stdout == b"last words"


async def test_exec_signal_may_follow_stdin_close(guest_any: Guest) -> None:
    async with exec_call(guest_any, pb.ExecStart(argv=["sleep", "300"], stdin=True)) as call:
        await call.write(pb.ExecRequest(stdin_close=pb.ExecStdinClose()))
        await call.write(pb.ExecRequest(signal=pb.ExecSignal(signal="SIGUSR1")))
        assert (await collect(call)).exit == pb.Exit(signal="SIGUSR1", reason=EXITED)


async def test_exec_stdin_nobody_reads_is_dropped_after_the_end(guest_any: Guest) -> None:
    result = await run(guest_any, "true", stdin=b"x" * (2 * 1024 * 1024))
    assert result.exit == pb.Exit(code=0, reason=EXITED)


async def test_exec_output_of_both_streams_is_byte_exact_and_before_the_exit(guest_any: Guest) -> None:
    size = 2 * 1024 * 1024
    script = (
        "import os,threading\n"
        "def say(fd, text):\n"
        f"    with os.fdopen(fd, 'wb') as f: f.write((text * {size})[:{size}])\n"
        "t = threading.Thread(target=say, args=(2, b'stderr!'))\n"
        "t.start(); say(1, b'out'); t.join()\n"
    )
    result = await run(guest_any, "python3", "-I", "-c", script)
    assert result.stdout == (b"out" * size)[:size]
    assert result.stderr == (b"stderr!" * size)[:size]
    assert result.exit == pb.Exit(code=0, reason=EXITED)


async def test_exec_program_that_closes_its_output_runs_on(guest_any: Guest) -> None:
    result = await run(guest_any, "sh", "-c", "exec >&- 2>&-; sleep 0.3; exit 7")
    assert result.exit == pb.Exit(code=7, reason=EXITED)


async def test_exec_timeout_kills_the_group_and_keeps_the_output(guest_any: Guest) -> None:
    begun = time.monotonic()
    result = await run(
        guest_any, "sh", "-c", "echo partial; sleep 300 & echo $!; sleep 300", timeout=Duration(seconds=1)
    )
    assert time.monotonic() - begun < 8
    partial, child = result.text.splitlines()
    assert partial == "partial"
    assert result.exit == pb.Exit(signal="SIGKILL", reason=TIMEOUT)
    await gone(guest_any, int(child))


async def test_exec_timeout_that_does_not_pass_changes_nothing(guest_any: Guest) -> None:
    result = await run(guest_any, "true", timeout=Duration(seconds=50))
    assert result.exit == pb.Exit(code=0, reason=EXITED)


@pytest.mark.parametrize("name", ["SIGTERM", "TERM"])
async def test_exec_signal_goes_to_the_group_by_name(guest_any: Guest, name: str) -> None:
    async with exec_call(guest_any, pb.ExecStart(argv=["sh", "-c", "sleep 300 & echo $!; wait"])) as call:
        await call.read()
        child = int((await call.read()).stdout.data)
        await call.write(pb.ExecRequest(signal=pb.ExecSignal(signal=name)))
        last = (await drain(call))[-1]
    assert last.exit == pb.Exit(signal="SIGTERM", reason=EXITED)
    await gone(guest_any, child)


async def test_exec_signal_can_be_handled_by_the_program(guest_any: Guest) -> None:
    script = "trap 'echo caught; exit 3' INT; echo ready; while :; do sleep 0.1; done"
    async with exec_call(guest_any, pb.ExecStart(argv=["sh", "-c", script])) as call:
        await call.read()
        assert (await call.read()).stdout.data == b"ready\n"
        await call.write(pb.ExecRequest(signal=pb.ExecSignal(signal="INT")))
        rest = await drain(call)
    assert rest[0].stdout.data == b"caught\n"
    assert rest[-1].exit == pb.Exit(code=3, reason=EXITED)


async def test_exec_unknown_signal_is_typed_and_kills_the_program(guest_any: Guest) -> None:
    async with exec_call(guest_any, pb.ExecStart(argv=["sleep", "300"])) as call:
        pid = (await call.read()).started.pid
        await call.write(pb.ExecRequest(signal=pb.ExecSignal(signal="SIGNONE")))
        with refused(errors.InvalidFieldError, field="signal.signal"):
            await drain(call)
    await gone(guest_any, pid)


async def test_exec_background_child_does_not_hold_the_call_and_survives(guest_any: Guest) -> None:
    begun = time.monotonic()
    result = await run(guest_any, "sh", "-c", "sleep 300 & echo $!")
    assert time.monotonic() - begun < 4
    assert result.exit == pb.Exit(code=0, reason=EXITED)
    child = int(result.text)
    try:
        assert await alive(guest_any, child)
    finally:
        await shell(guest_any, f"kill {child}")


async def test_exec_is_not_protected_from_the_memory_killer(guest_any: Guest) -> None:
    # A child of the program, too: it inherits what the program had when it forked.
    assert await shell(guest_any, "cat /proc/$$/oom_score_adj; cat /proc/self/oom_score_adj") == "0\n0"
    assert await shell(guest_any, "cat /proc/self/oom_score_adj", user="sandbox") == "0"


async def test_exec_leaves_guestd_protected_from_the_memory_killer(vm_guest: Guest) -> None:
    assert await shell(vm_guest, "cat /proc/$PPID/oom_score_adj") == "-900"
