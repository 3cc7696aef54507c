"""A handle on one sandbox."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from types import TracebackType
from typing import TYPE_CHECKING, Self

import grpc

from cocoon.node.v1 import sandbox_service_pb2 as pb
from cocoon.node.v1 import sandbox_service_pb2_grpc
from cocoon.types.v1 import sandbox_pb2
from cocoon_rpc.auth import AUTHORIZATION_KEY, guest_metadata
from cocoonsandbox import files, process
from cocoonsandbox.errors import APIError, ExitError, SandboxError, from_node
from cocoonsandbox.process import Input, OnBytes

if TYPE_CHECKING:
    from cocoonsandbox.client import Client

_log = logging.getLogger("cocoonsandbox")
_RELEASE_LIMIT_S = 30.0


class Sandbox:
    """One claimed sandbox; made by `Client.new` or `Client.attach`. A context manager that gives it back.

    Attributes:
        id: `sb_…`.
        token: the sandbox's bearer token; keep it secret.
        owner: `host:port` of the node that owns it.
        deadline: when the lease ends.
        template_digest: digest of the image.
        tier: how the claim was served: "warm", "clone" or "cold".
        isolation: "vm_hardware", "vm_emulated" or "none".
        provision_seconds: time the node spent on the claim.

    After `attach` the last five are None, "" or 0.0 until the first guest call,
    which asks the owner where guest calls go.
    """

    def __init__(self, client: Client, owner: str, sandbox_id: str, token: str) -> None:
        """Takes what `attach` knows; `Client.new` fills in the rest."""
        self._client = client
        self._endpoint = ""
        self._metadata = guest_metadata(sandbox_id, token)
        self._authorization = tuple(pair for pair in self._metadata if pair[0] == AUTHORIZATION_KEY)
        self.id = sandbox_id
        self.token = token
        self.owner = owner
        self.deadline: datetime | None = None
        self.template_digest: str | None = None
        self.tier = ""
        self.isolation = ""
        self.provision_seconds = 0.0

    def _describe(self, sandbox: sandbox_pb2.Sandbox) -> None:
        self._endpoint = sandbox.guest_endpoint or self.owner
        self.deadline = sandbox.expire_time.ToDatetime(tzinfo=UTC)
        self.template_digest = sandbox.template_digest
        self.tier = _word("ClaimTier", sandbox.tier, "CLAIM_TIER_")
        self.isolation = _word("Isolation", sandbox.isolation, "ISOLATION_")
        self.provision_seconds = sandbox.provision_duration.ToNanoseconds() / 1e9

    def __repr__(self) -> str:
        """Names the sandbox, never its token."""
        return f"Sandbox(id={self.id!r}, owner={self.owner!r})"

    def __enter__(self) -> Self:
        """Returns itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Gives the sandbox back; a failure of that is raised only if the block was clean."""
        try:
            self.close()
        except SandboxError:
            if error is None:
                raise
            _log.warning("release_failed sandbox=%s", self.id, exc_info=True)

    def exec(
        self,
        *argv: str,
        cwd: str = "",
        env: Mapping[str, str] | None = None,
        user: str = "",
        stdin: Input = b"",
        timeout: float | None = None,
    ) -> str:
        """Runs a program; returns its standard output, decoded with replacement.

        Args:
            *argv: program and arguments; no shell.
            cwd: absolute; default: the user's home.
            env: added to the guest's own.
            user: name in the guest; default root.
            stdin: bytes, or an iterable of them that a thread of its own reads; b"" = empty.
            timeout: seconds until the program's group is killed; None = no limit.

        Raises:
            ValueError: the timeout is not positive.
            ExitError: a status other than 0.
            SandboxTimeout: the timeout passed; the guest has killed the whole group.
            SilkdError, APIError, ProtocolError: as their names say.
        """
        stdout, stderr = bytearray(), bytearray()
        code = self.run(
            argv, cwd=cwd, env=env, user=user, stdin=stdin, on_stdout=stdout.extend, on_stderr=stderr.extend,
            timeout=timeout,
        )  # fmt: skip
        # Decoded as a whole: characters may lie across chunks.
        text = stdout.decode(errors="replace")
        if code:
            raise ExitError(code, stderr.decode(errors="replace"), text)
        return text

    def run(
        self,
        argv: Sequence[str],
        *,
        cwd: str = "",
        env: Mapping[str, str] | None = None,
        user: str = "",
        stdin: Input = b"",
        on_stdout: OnBytes | None = None,
        on_stderr: OnBytes | None = None,
        timeout: float | None = None,
    ) -> int:
        """Runs a program; hands its output to callbacks as it comes; returns its status.

        Callbacks get bytes as they come, cut anywhere, in this thread. One that
        raises ends the program, and so does an iterable for stdin; the exception
        is raised here. Arguments and errors otherwise as `exec`.
        """
        if isinstance(argv, str):
            raise TypeError("argv is a sequence of words, not one string")
        return process.run(
            self._channel(), self._metadata, argv, cwd=cwd, env=env, user=user, stdin=stdin,
            on_stdout=on_stdout, on_stderr=on_stderr, timeout=timeout,
        )  # fmt: skip

    def write_file(self, path: str, data: bytes | str, mode: int | None = None) -> None:
        """Writes a whole file atomically; text is encoded as UTF-8.

        Args:
            path: absolute; its directory exists.
            data: the content.
            mode: permission bits; None keeps those of an existing file, else 0644.

        Raises: SilkdError, APIError, SandboxTimeout.
        """
        content = data.encode() if isinstance(data, str) else data
        files.write(self._channel(), self._metadata, path, content, mode, self._client.timeout)

    def read_file(self, path: str) -> bytes:
        """Returns a regular file's content. Raises: SilkdError, APIError, SandboxTimeout."""
        return files.read(self._channel(), self._metadata, path, self._client.timeout)

    def close(self) -> None:
        """Gives the sandbox back; one that is gone already is fine. Idempotent.

        Raises: APIError, SandboxTimeout.
        """
        request = pb.ReleaseRequest(name=f"sandboxes/{self.id}")
        try:
            self._owner().Release(request, metadata=self._authorization, timeout=_RELEASE_LIMIT_S)
        except grpc.RpcError as error:
            known = from_node("release", error)
            if isinstance(known, APIError) and known.status == 404:
                return
            raise known from error

    def _owner(self) -> sandbox_service_pb2_grpc.SandboxServiceStub:
        return sandbox_service_pb2_grpc.SandboxServiceStub(self._client._channels.get(self.owner))

    def _channel(self) -> grpc.Channel:
        """Returns the channel for guest calls; an attached handle asks once where they go."""
        if not self._endpoint:
            request = pb.GetRequest(name=f"sandboxes/{self.id}")
            try:
                answer = self._owner().Get(
                    request, metadata=self._authorization, timeout=self._client.timeout
                )
            except grpc.RpcError as error:
                raise from_node("attach", error) from error
            self._describe(answer.sandbox)
        return self._client._channels.get(self._endpoint)


def _word(enum: str, number: int, prefix: str) -> str:
    """Returns an enum's value in lower case; one that this SDK does not know, as its number."""
    value = sandbox_pb2.DESCRIPTOR.enum_types_by_name[enum].values_by_number.get(number)
    return value.name.removeprefix(prefix).lower() if value else str(number)
