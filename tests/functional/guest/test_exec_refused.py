"""Execs that are refused or cut short: typed, and nothing runs on."""

from __future__ import annotations

import secrets
from typing import Any

import grpc.aio
import pytest
from google.protobuf.duration_pb2 import Duration

from cocoon.guest.v1 import process_service_pb2 as pb
from cocoon_rpc import errors
from nodeagent.pool.provision import Guest
from tests.functional.guest.calls import alive, drain, exec_call, gone, refused, run, shell

REFUSED: list[tuple[str, type[errors.CocoonError], dict[str, str], dict[str, Any]]] = [
    ("no_argv", errors.InvalidFieldError, {"field": "start.argv"}, {"argv": []}),
    ("empty_program", errors.InvalidFieldError, {"field": "start.argv"}, {"argv": [""]}),
    ("nul_in_argv", errors.InvalidFieldError, {"field": "start.argv"}, {"argv": ["touch", "a\0b"]}),
    ("long_argv", errors.InvalidFieldError, {"field": "start.argv"}, {"argv": ["touch", "x" * (2**21 + 1)]}),
    ("relative_cwd", errors.InvalidFieldError, {"field": "start.cwd"}, {"cwd": "tmp"}),
    ("nul_in_cwd", errors.InvalidFieldError, {"field": "start.cwd"}, {"cwd": "/tmp\0"}),
    ("empty_env_name", errors.InvalidFieldError, {"field": "start.env"}, {"env": {"": "x"}}),
    ("equals_in_env_name", errors.InvalidFieldError, {"field": "start.env"}, {"env": {"A=B": "x"}}),
    ("nul_in_env_name", errors.InvalidFieldError, {"field": "start.env"}, {"env": {"A\0": "x"}}),
    ("nul_in_env_value", errors.InvalidFieldError, {"field": "start.env"}, {"env": {"A": "\0"}}),
    ("zero_timeout", errors.InvalidFieldError, {"field": "start.timeout"}, {"timeout": Duration()}),
    (
        "negative_timeout",
        errors.InvalidFieldError,
        {"field": "start.timeout"},
        {"timeout": Duration(seconds=-1)},
    ),
    ("bad_exec_id", errors.InvalidFieldError, {"field": "start.exec_id"}, {"exec_id": "a b"}),
    ("long_exec_id", errors.InvalidFieldError, {"field": "start.exec_id"}, {"exec_id": "a" * 65}),
    ("missing_cwd", errors.CwdNotUsableError, {"cwd": "/nowhere"}, {"cwd": "/nowhere"}),
    ("file_as_cwd", errors.CwdNotUsableError, {"cwd": "/etc/passwd"}, {"cwd": "/etc/passwd"}),
    ("unreachable_cwd", errors.CwdNotUsableError, {"cwd": "/root"}, {"cwd": "/root", "user": "sandbox"}),
    ("unknown_user", errors.UserNotFoundError, {"user": "nobody-here"}, {"user": "nobody-here"}),
    ("nul_in_user", errors.UserNotFoundError, {}, {"user": "root\0"}),
    ("missing_program", errors.ProgramNotFoundError, {"program": "no-such"}, {"argv": ["no-such"]}),
    ("missing_path", errors.ProgramNotFoundError, {"program": "/no/such"}, {"argv": ["/no/such"]}),
    ("path_below_a_file", errors.ProgramNotFoundError, {}, {"argv": ["/etc/passwd/x"]}),
    ("plain_file", errors.ProgramNotExecutableError, {"program": "/etc/passwd"}, {"argv": ["/etc/passwd"]}),
    ("directory", errors.ProgramNotExecutableError, {"program": "/usr/bin"}, {"argv": ["/usr/bin"]}),
]


async def test_exec_refusal_is_typed_and_nothing_starts(guest_any: Guest) -> None:
    for name, kind, facts, start in REFUSED:
        try:
            await _refused(guest_any, kind, facts, start)
        except BaseException as error:
            error.add_note(f"case {name}")
            raise


async def _refused(
    guest: Guest, kind: type[errors.CocoonError], facts: dict[str, str], start: dict[str, Any]
) -> None:
    trace = "/tmp/started"
    # A refused call never gets as far as `touch`; one that is let through leaves the trace.
    async with exec_call(guest, pb.ExecStart(**{"argv": ["touch", trace], **start})) as call:
        with refused(kind, **facts):
            await drain(call)
    assert await shell(guest, f"test ! -e {trace} && echo absent") == "absent"


async def test_exec_script_without_interpreter_says_so(guest_any: Guest) -> None:
    await shell(guest_any, "printf '#!/no/interpreter\\n' >/tmp/script && chmod +x /tmp/script")
    with refused(errors.ProgramNotExecutableError, program="/tmp/script"):
        await run(guest_any, "/tmp/script")


async def test_exec_file_in_no_known_format_is_not_executable(guest_any: Guest) -> None:
    await shell(guest_any, "printf '\\001\\002' >/tmp/blob && chmod +x /tmp/blob")
    with refused(errors.ProgramNotExecutableError, program="/tmp/blob"):
        await run(guest_any, "/tmp/blob")


async def test_exec_without_start_first_is_refused(guest_any: Guest) -> None:
    async with exec_call(guest_any) as call:
        await call.write(pb.ExecRequest(stdin_close=pb.ExecStdinClose()))
        with refused(errors.StreamStartRequiredError, got="stdin_close"):
            await drain(call)


async def test_exec_without_any_message_is_refused(guest_any: Guest) -> None:
    async with exec_call(guest_any) as call:
        await call.done_writing()
        with refused(errors.StreamStartRequiredError):
            await drain(call)


UNEXPECTED = {
    "second_start": pb.ExecRequest(start=pb.ExecStart(argv=["true"])),
    "stdin_without_start_stdin": pb.ExecRequest(stdin=pb.ExecStdin(data=b"x")),
    "empty_message": pb.ExecRequest(),
}


@pytest.mark.parametrize("name", UNEXPECTED)
async def test_exec_unexpected_message_is_typed_and_kills_the_program(guest_any: Guest, name: str) -> None:
    async with exec_call(guest_any, pb.ExecStart(argv=["sleep", "300"])) as call:
        pid = (await call.read()).started.pid
        await call.write(UNEXPECTED[name])
        with refused(errors.StreamMessageUnexpectedError):
            await drain(call)
    await gone(guest_any, pid)


async def test_exec_stdin_after_stdin_close_is_typed_and_kills_the_program(guest_any: Guest) -> None:
    async with exec_call(guest_any, pb.ExecStart(argv=["sleep", "300"], stdin=True)) as call:
        pid = (await call.read()).started.pid
        await call.write(pb.ExecRequest(stdin_close=pb.ExecStdinClose()))
        await call.write(pb.ExecRequest(stdin=pb.ExecStdin(data=b"x")))
        with refused(errors.StreamMessageUnexpectedError, got="stdin"):
            await drain(call)
    await gone(guest_any, pid)


async def test_exec_cancel_kills_a_silent_group(guest_any: Guest) -> None:
    async with exec_call(
        guest_any, pb.ExecStart(argv=["sh", "-c", "sleep 300 & echo $!; sleep 300"])
    ) as call:
        leader = (await call.read()).started.pid
        child = int((await call.read()).stdout.data)
        assert await alive(guest_any, child)
    await gone(guest_any, leader)
    await gone(guest_any, child)


async def test_exec_deadline_of_the_call_kills_the_group(guest_any: Guest) -> None:
    from cocoon.guest.v1 import process_service_pb2_grpc

    stub = process_service_pb2_grpc.ProcessServiceStub(guest_any.link.channel)
    call = stub.Exec(timeout=2)
    await call.write(pb.ExecRequest(start=pb.ExecStart(argv=["sleep", "300"])))
    pid = (await call.read()).started.pid
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await drain(call)
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    await gone(guest_any, pid)


async def test_exec_id_is_started_once(guest_any: Guest) -> None:
    exec_id = secrets.token_hex(16)
    await run(guest_any, "sh", "-c", "echo ran >>/tmp/ran", exec_id=exec_id)
    with refused(errors.ExecIdReusedError, exec_id=exec_id):
        await run(guest_any, "sh", "-c", "echo ran >>/tmp/ran", exec_id=exec_id)
    assert await shell(guest_any, "cat /tmp/ran") == "ran"


async def test_exec_id_of_a_refused_start_is_free_again(guest_any: Guest) -> None:
    exec_id = secrets.token_hex(16)
    with refused(errors.CwdNotUsableError):
        await run(guest_any, "true", cwd="/nowhere", exec_id=exec_id)
    assert (await run(guest_any, "true", exec_id=exec_id)).exit.code == 0
