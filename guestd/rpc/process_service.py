"""ProcessService: see the contract for what each method promises."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

from cocoon.guest.v1 import process_service_pb2 as pb
from cocoon.guest.v1 import process_service_pb2_grpc
from cocoon_rpc.errors import InvalidFieldError, StreamMessageUnexpectedError
from cocoon_rpc.interceptors import Context
from cocoon_rpc.scope import complete
from cocoon_rpc.streams import checked, first_start
from guestd.process.command import EXEC_ID, Command, prepare
from guestd.process.exit import exit_message, signal_number
from guestd.process.input import InputWriter
from guestd.process.output import OutputReader
from guestd.process.seen import SeenIds
from guestd.process.spawn import Process, spawn

_LATE_INPUT_S = 0.5
_LONGEST_TIMEOUT_S = 10 * 365 * 86400.0


class ProcessService(process_service_pb2_grpc.ProcessServiceServicer):
    """Runs programs; each lives in the scope of its call."""

    def __init__(self, seen: SeenIds) -> None:
        """Takes the memory of exec ids."""
        self._seen = seen
        self.running = 0
        """Programs that run now."""

    async def Exec(  # type: ignore[override]
        self, request_iterator: AsyncIterator[pb.ExecRequest], context: Context
    ) -> None:
        """Runs one program; writes to the context, so that its clean-up is this call's."""
        requests = checked(request_iterator)
        start: pb.ExecStart = await first_start(requests)
        command = prepare(start.argv, cwd=start.cwd, env=start.env, user=start.user, stdin=start.stdin)
        timeout = _timeout(start)
        process = self._spawn(command, start.exec_id)
        self.running += 1
        run = _Run(process, timeout, self._ended)
        try:
            await run.stream(requests, context)
        except BaseExceptionGroup as group:
            raise group.exceptions[0] from None

    def _ended(self) -> None:
        self.running -= 1

    def _spawn(self, command: Command, exec_id: str) -> Process:
        if not exec_id:
            return spawn(command)
        if not EXEC_ID.fullmatch(exec_id):
            raise InvalidFieldError(field="start.exec_id", rule="must be at most 64 of [A-Za-z0-9_-]")
        self._seen.admit(exec_id)
        try:
            return spawn(command)
        except BaseException:
            self._seen.forget(exec_id)
            raise


class _Run:
    """One program and its call."""

    def __init__(self, process: Process, timeout: float | None, on_end: Callable[[], None]) -> None:
        self._process = process
        self._on_end = on_end
        self._status: int | None = None
        self._timeout = timeout
        self._ended = False
        self._timed_out = False
        self._offsets = {"stdout": 0, "stderr": 0}
        self._input = InputWriter(process)
        self._reader = OutputReader({"stdout": process.stdout, "stderr": process.stderr}, lambda: self._ended)

    async def stream(self, requests: AsyncIterator[pb.ExecRequest], context: Context) -> None:
        """Carries input and output until the exit was written."""
        try:
            async with asyncio.TaskGroup() as group:
                watch = group.create_task(self._watch())
                feed = group.create_task(self._feed(requests))
                writer = group.create_task(self._input.run())
                await context.write(pb.ExecResponse(started=pb.ExecStarted(pid=self._process.pid)))
                async for name, data in self._reader.chunks():
                    output = pb.ExecOutput(data=data, offset=self._offsets[name])
                    self._offsets[name] += len(data)
                    await context.write(
                        pb.ExecResponse(stdout=output) if name == "stdout" else pb.ExecResponse(stderr=output)
                    )
                # A program may close its output and run on.
                await watch
                writer.cancel()
                await asyncio.wait({writer})
                self._input.discard()
                # Survivors of a program that ended by itself live on.
                status = await complete(self._end(kill_group=False))
                await context.write(pb.ExecResponse(exit=exit_message(status, timed_out=self._timed_out)))
                # A client of grpc.aio that is still sending when its call ends loses
                # the status: what is under way may arrive.
                await asyncio.wait({feed}, timeout=_LATE_INPUT_S)
                feed.cancel()
        finally:
            # A call that was cut short takes the group along.
            await complete(self._end(kill_group=True))

    async def _end(self, *, kill_group: bool) -> int:
        """Reaps the program, once; the call may go on after that, the program does not."""
        if self._status is None:
            self._status = await self._process.end(kill_group=kill_group)
            self._on_end()
        return self._status

    async def _watch(self) -> None:
        """Notes the program's end; kills its group when the time is up."""
        try:
            async with asyncio.timeout(self._timeout):
                await self._process.wait()
        except TimeoutError:
            self._timed_out = True
            self._process.signal_group(9)
            await self._process.wait()
        self._ended = True
        self._reader.poke()

    async def _feed(self, requests: AsyncIterator[pb.ExecRequest]) -> None:
        """Carries input and signals until the client has no more to say."""
        closed = self._process.stdin is None
        async for request in requests:
            kind = request.WhichOneof("message")
            if self._ended:
                continue
            if kind == "stdin" and not closed:
                await self._input.put(request.stdin.data)
            elif kind == "stdin_close":
                if not closed:
                    closed = True
                    await self._input.put(None)
            elif kind == "signal":
                self._process.signal_group(signal_number(request.signal.signal))
            elif kind == "stdin":
                raise StreamMessageUnexpectedError(
                    got=kind, rule="input needs start.stdin and ends with stdin_close"
                )
            else:
                raise StreamMessageUnexpectedError(
                    got=kind or "nothing", rule="start comes once, as the first"
                )
        if not closed:
            await self._input.put(None)


def _timeout(start: pb.ExecStart) -> float | None:
    if not start.HasField("timeout"):
        return None
    seconds = start.timeout.seconds + start.timeout.nanos / 1e9
    if seconds <= 0:
        raise InvalidFieldError(field="start.timeout", rule="must be positive")
    return min(seconds, _LONGEST_TIMEOUT_S)
