"""Starting a program, and owning it until it is reaped.

`subprocess` without preexec_fn runs no Python between fork and exec, so grpc's
threads cannot be caught in the middle; for root it uses vfork (0.9 ms here).
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import os
import signal
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

from cocoon_rpc.errors import (
    CocoonError,
    CwdNotUsableError,
    ProcessLimitReachedError,
    ProgramNotExecutableError,
    ProgramNotFoundError,
)
from guestd.process.command import Command

_PIPE_BYTES = 256 * 1024
_OOM_SCORE = Path("/proc/self/oom_score_adj")
_LIMITS: Mapping[int, str] = {
    errno.EAGAIN: "processes",
    errno.ENOMEM: "memory",
    errno.EMFILE: "file descriptors",
    errno.ENFILE: "file descriptors",
}


class Process:
    """A started program: leader of its own session and process group.

    Not reaped before `end`, so its pid and group id stay its own until then.
    """

    def __init__(self, popen: subprocess.Popen[bytes]) -> None:
        """Takes over the child and its pipes."""
        self._popen = popen
        self._pidfd = os.pidfd_open(popen.pid)
        self.pid = popen.pid
        self.stdin = None if popen.stdin is None else popen.stdin.fileno()
        assert popen.stdout is not None
        assert popen.stderr is not None
        self.stdout = popen.stdout.fileno()
        self.stderr = popen.stderr.fileno()
        for fd in (self.stdin, self.stdout, self.stderr):
            if fd is not None:
                os.set_blocking(fd, False)
        # A full default pipe (64 KiB) costs a wake-up for every 64 KiB; more is
        # refused to users over their pipe quota, which is no error.
        for fd in (self.stdout, self.stderr):
            with contextlib.suppress(OSError):
                fcntl.fcntl(fd, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)

    def signal_group(self, number: int) -> None:
        """Signals the whole group; no effect once nobody is left in it."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)

    def close_stdin(self) -> None:
        """Ends the program's input. Idempotent."""
        if self._popen.stdin is not None and self.stdin is not None:
            self.stdin = None
            with contextlib.suppress(OSError):
                self._popen.stdin.close()

    async def wait(self) -> None:
        """Returns when the program has ended; it is not reaped by this."""
        loop = asyncio.get_running_loop()
        ended = loop.create_future()

        def readable() -> None:
            loop.remove_reader(self._pidfd)
            if not ended.done():
                ended.set_result(None)

        loop.add_reader(self._pidfd, readable)
        try:
            await ended
        finally:
            loop.remove_reader(self._pidfd)

    async def end(self, *, kill_group: bool) -> int:
        """Reaps the program and closes everything; returns its wait status as subprocess gives it.

        With `kill_group` the whole group is killed first, survivors of a leader
        that already ended included.
        """
        if kill_group:
            self.signal_group(signal.SIGKILL)
        await self.wait()
        status = self._popen.wait()
        os.close(self._pidfd)
        self.close_stdin()
        for stream in (self._popen.stdout, self._popen.stderr):
            assert stream is not None
            stream.close()
        return status


def spawn(command: Command) -> Process:
    """Starts a program.

    Raises:
        CwdNotUsableError, ProgramNotFoundError, ProgramNotExecutableError,
        ProcessLimitReachedError: nothing was started.
    """
    account = command.account
    other_user = (
        {} if account.is_root else {"user": account.uid, "group": account.gid, "extra_groups": account.groups}
    )
    try:
        with _unprotected():
            popen = subprocess.Popen(  # type: ignore[call-overload]
                command.argv,
                executable=command.program,
                cwd=command.cwd,
                env=command.env,
                stdin=subprocess.PIPE if command.stdin else subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                bufsize=0,
                start_new_session=True,
                umask=0o022,
                **other_user,
            )
    except OSError as error:
        raise _typed(error, command) from error
    try:
        return Process(popen)
    except OSError as error:
        os.killpg(popen.pid, signal.SIGKILL)
        # Not read to their end: a grandchild in a session of its own could hold them.
        for stream in (popen.stdin, popen.stdout, popen.stderr):
            if stream is not None:
                stream.close()
        popen.wait()
        raise _typed(error, command) from error


@contextlib.contextmanager
def _unprotected() -> Iterator[None]:
    """Gives up guestd's protection from the memory killer while a program starts.

    The program inherits the score and may fork before anybody could reset it; what
    eats the memory is to die, not guestd. Without protection it costs one read; a
    guestd that may not protect itself again (CAP_SYS_RESOURCE) stays without.
    """
    score = _OOM_SCORE.read_text()
    if score.strip() == "0":
        yield
        return
    with contextlib.suppress(OSError):
        _OOM_SCORE.write_text("0")
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            _OOM_SCORE.write_text(score)


def _typed(error: OSError, command: Command) -> CocoonError:
    resource = _LIMITS.get(error.errno or 0)
    if resource is not None:
        return ProcessLimitReachedError(resource=resource)
    cause = (error.strerror or "failed").lower()
    # subprocess names the directory when the failure came before the exec.
    if error.filename == command.cwd and error.filename != command.program:
        return CwdNotUsableError(cwd=command.cwd, cause=cause)
    if error.errno == errno.ENOENT:
        if os.path.exists(os.path.join(command.cwd, command.program)):  # noqa: PTH110, PTH118
            return ProgramNotExecutableError(program=command.program, cause="its interpreter is missing")
        return ProgramNotFoundError(program=command.argv[0])
    if error.errno == errno.E2BIG:
        cause = "argument list too long"
    return ProgramNotExecutableError(program=command.program, cause=cause)
