"""Exec over gRPC: the order of messages, and a program that never outlives its call."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from google.protobuf.duration_pb2 import Duration

from cocoon.guest.v1 import process_service_pb2 as pb
from cocoon.guest.v1 import process_service_pb2_grpc
from cocoon_rpc import errors
from guestd.process.seen import SeenIds
from guestd.process.spawn import Process
from guestd.rpc.process_service import ProcessService
from tests.framework.leaks import open_fds

_CHUNK = 256 * 1024


@pytest.fixture
def service() -> ProcessService:
    """The servicer behind `stub`; its clock stands still."""
    return ProcessService(SeenIds(lambda: 0.0))


@pytest.fixture
async def stub(serve: Any, service: ProcessService) -> AsyncIterator[Any]:
    """A client of the servicer; in the end nothing runs and no child is left."""

    def add(server: grpc.aio.Server) -> None:
        process_service_pb2_grpc.add_ProcessServiceServicer_to_server(service, server)

    before = _children()
    async with serve(add) as channel:
        yield process_service_pb2_grpc.ProcessServiceStub(channel)
        await _until(lambda: service.running == 0)
    assert _children() == before


def _children() -> set[str]:
    """Returns the children of this process, zombies included."""
    lists = Path("/proc/self/task").glob("*/children")
    return {pid for path in lists for pid in path.read_text().split()}


async def _until(what: Any) -> None:
    async with asyncio.timeout(5):
        while not what():
            await asyncio.sleep(0.01)


def _gone(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return "State:\tZ" in Path(f"/proc/{pid}/status").read_text()
    return True


async def _open(stub: Any, *argv: str, **start: Any) -> tuple[Any, int]:
    """Returns a call whose program runs, and its pid."""
    call = stub.Exec(timeout=30)
    await call.write(pb.ExecRequest(start=pb.ExecStart(argv=argv, **start)))
    return call, (await call.read()).started.pid


async def _rest(call: Any) -> list[pb.ExecResponse]:
    responses = []
    while (response := await call.read()) is not grpc.aio.EOF:
        responses.append(response)
    return responses


async def _refusal(call: Any) -> Any:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await _rest(call)
    return errors.from_rpc_error(caught.value)


async def test_exec_is_started_then_output_then_exit(stub: Any) -> None:
    call, pid = await _open(stub, "sh", "-c", "echo $$; echo err >&2; exit 3")
    *output, last = await _rest(call)
    assert b"".join(r.stdout.data for r in output) == b"%d\n" % pid
    assert b"".join(r.stderr.data for r in output) == b"err\n"
    assert last.exit == pb.Exit(code=3, reason=pb.EXIT_REASON_EXITED)


async def test_exec_signal_passes_input_that_the_program_does_not_read(stub: Any) -> None:
    call, _ = await _open(stub, "sleep", "300", stdin=True)
    # More than a pipe takes.
    for _ in range(3):
        await call.write(pb.ExecRequest(stdin=pb.ExecStdin(data=bytes(_CHUNK))))
    await call.write(pb.ExecRequest(signal=pb.ExecSignal(signal="TERM")))
    assert (await _rest(call))[-1].exit == pb.Exit(signal="SIGTERM", reason=pb.EXIT_REASON_EXITED)


async def test_exec_signal_passes_any_number_of_stdin_close(stub: Any) -> None:
    call, _ = await _open(stub, "sleep", "300", stdin=True)
    for _ in range(20):
        await call.write(pb.ExecRequest(stdin_close=pb.ExecStdinClose()))
    await call.write(pb.ExecRequest(signal=pb.ExecSignal(signal="KILL")))
    assert (await _rest(call))[-1].exit.signal == "SIGKILL"


async def test_exec_last_output_waits_for_a_reader_slower_than_the_grace(
    stub: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("guestd.process.output.DRAIN_GRACE_S", 0.05)
    size = 3 * 1024 * 1024
    call, pid = await _open(stub, "head", "-c", str(size), "/dev/zero")
    read = 0
    while True:
        response = await call.read()
        if not response.HasField("stdout"):
            break
        assert response.stdout.offset == read
        read += len(response.stdout.data)
        await asyncio.sleep(0.1)
    assert read == size
    assert response.exit.code == 0
    assert _gone(pid)


async def test_exec_half_close_without_input_does_not_end_the_program(stub: Any) -> None:
    call, _ = await _open(stub, "sh", "-c", "sleep 0.2; echo alive")
    await call.done_writing()
    output, last = await _rest(call)
    assert output.stdout.data == b"alive\n"
    assert last.exit.code == 0


async def test_exec_cancel_kills_the_group_and_closes_its_pipes(stub: Any, service: ProcessService) -> None:
    call, pid = await _open(stub, "sh", "-c", "sleep 300 & echo $!; sleep 300", stdin=True)
    child = int((await call.read()).stdout.data)
    assert service.running == 1
    fds = open_fds()
    call.cancel()
    await _until(lambda: _gone(pid) and _gone(child))
    await _until(lambda: service.running == 0)
    # stdin, stdout, stderr and the pidfd.
    assert open_fds() == fds - 4


async def test_exec_cancel_while_output_waits_for_the_reader_kills(stub: Any) -> None:
    call, pid = await _open(stub, "yes")
    await asyncio.sleep(0.2)
    call.cancel()
    await _until(lambda: _gone(pid))


async def test_exec_cancel_while_input_waits_for_the_program_kills(stub: Any) -> None:
    call, pid = await _open(stub, "sleep", "300", stdin=True)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.3):
            while True:
                await call.write(pb.ExecRequest(stdin=pb.ExecStdin(data=bytes(_CHUNK))))
    call.cancel()
    await _until(lambda: _gone(pid))


async def test_exec_timeout_is_a_fact_and_keeps_the_output(stub: Any) -> None:
    call, pid = await _open(stub, "sh", "-c", "echo partial; sleep 300", timeout=Duration(nanos=300_000_000))
    output, last = await _rest(call)
    assert output.stdout.data == b"partial\n"
    assert last.exit == pb.Exit(signal="SIGKILL", reason=pb.EXIT_REASON_TIMEOUT)
    assert _gone(pid)


async def test_exec_of_a_program_ended_by_another_is_no_timeout(stub: Any) -> None:
    call, pid = await _open(stub, "sleep", "300", timeout=Duration(seconds=20))
    os.kill(pid, 15)
    assert (await _rest(call))[-1].exit == pb.Exit(signal="SIGTERM", reason=pb.EXIT_REASON_EXITED)


@pytest.mark.parametrize(
    ("request_", "kind", "facts"),
    [
        (pb.ExecRequest(), errors.StreamMessageUnexpectedError, {"got": "nothing"}),
        (
            pb.ExecRequest(start=pb.ExecStart(argv=["true"])),
            errors.StreamMessageUnexpectedError,
            {"got": "start"},
        ),
        (
            pb.ExecRequest(stdin=pb.ExecStdin(data=b"x")),
            errors.StreamMessageUnexpectedError,
            {"got": "stdin"},
        ),
        (
            pb.ExecRequest(signal=pb.ExecSignal(signal="SIGNONE")),
            errors.InvalidFieldError,
            {"field": "signal.signal"},
        ),
        (pb.ExecRequest(signal=pb.ExecSignal()), errors.InvalidFieldError, {"field": "signal.signal"}),
        (pb.ExecRequest(start=pb.ExecStart()), errors.InvalidFieldError, {"field": "start.argv"}),
    ],
)
async def test_exec_message_that_breaks_a_rule_ends_call_and_program(
    stub: Any, request_: pb.ExecRequest, kind: type[Exception], facts: dict[str, str]
) -> None:
    call, pid = await _open(stub, "sleep", "300")
    await call.write(request_)
    error = await _refusal(call)
    assert type(error) is kind
    assert {key: error.metadata[key] for key in facts} == facts
    await _until(lambda: _gone(pid))


@pytest.mark.root
async def test_exec_in_a_directory_its_user_cannot_enter_is_refused(stub: Any, tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    call = stub.Exec(timeout=30)
    await call.write(pb.ExecRequest(start=pb.ExecStart(argv=["pwd"], cwd=str(tmp_path), user="nobody")))
    error = await _refusal(call)
    assert type(error) is errors.CwdNotUsableError
    assert error.metadata == {"cwd": str(tmp_path), "cause": "permission denied"}


async def test_exec_id_is_free_again_after_a_refusal_and_taken_after_a_start(stub: Any) -> None:
    start = {"exec_id": "one-id"}
    call = stub.Exec(timeout=30)
    await call.write(pb.ExecRequest(start=pb.ExecStart(argv=["true"], cwd="/nowhere", **start)))
    assert type(await _refusal(call)) is errors.CwdNotUsableError
    call, _ = await _open(stub, "true", **start)
    await _rest(call)
    call = stub.Exec(timeout=30)
    await call.write(pb.ExecRequest(start=pb.ExecStart(argv=["true"], **start)))
    error = await _refusal(call)
    assert type(error) is errors.ExecIdReusedError
    assert error.metadata == {"exec_id": "one-id"}


async def test_exec_counts_programs_not_calls(stub: Any, service: ProcessService) -> None:
    # The client keeps its side open, so the call lives on for late input.
    call, _ = await _open(stub, "true", stdin=True)
    assert (await call.read()).exit == pb.Exit(code=0, reason=pb.EXIT_REASON_EXITED)
    assert service.running == 0
    await call.done_writing()
    assert await _rest(call) == []


async def test_exec_cancelled_while_its_program_is_reaped_reaps_once(
    stub: Any, service: ProcessService, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The first call connects the channel, whose sockets stay.
    warm, _ = await _open(stub, "true")
    await _rest(warm)
    before = open_fds()
    begun, go_on, ends = asyncio.Event(), asyncio.Event(), []
    real = Process.end

    async def end(process: Process, *, kill_group: bool) -> int:
        ends.append(kill_group)
        begun.set()
        await go_on.wait()
        return await real(process, kill_group=kill_group)

    monkeypatch.setattr(Process, "end", end)
    call, _ = await _open(stub, "true")
    async with asyncio.timeout(5):
        await begun.wait()
    call.cancel()
    await asyncio.sleep(0)
    go_on.set()
    await _until(lambda: service.running == 0)
    await _until(lambda: open_fds() <= before)
    assert ends == [False]
