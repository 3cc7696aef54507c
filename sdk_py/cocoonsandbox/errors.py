"""What can go wrong, and the one place where gRPC errors become it.

::

    SandboxError
    ├── SandboxTimeout (also TimeoutError)   the caller's timeout or deadline passed
    ├── APIError                             the node refused or could not be reached
    ├── SilkdError                           the guest refused
    ├── ExitError                            a program ended with a non-zero status
    └── ProtocolError                        a stream broke its rules

Match on `reason`, never on the text: reasons are the contract's `ErrorReason`
names without prefix, e.g. "SANDBOX_NOT_FOUND"; "" when the peer gave none.
"""

from __future__ import annotations

import grpc

from cocoon_rpc.errors import CocoonError, from_rpc_error

# What a status would be over HTTP; 0 = the transport, not the node, failed.
_STATUS = {
    grpc.StatusCode.INVALID_ARGUMENT: 400,
    grpc.StatusCode.UNAUTHENTICATED: 401,
    grpc.StatusCode.PERMISSION_DENIED: 403,
    grpc.StatusCode.NOT_FOUND: 404,
    grpc.StatusCode.ALREADY_EXISTS: 409,
    grpc.StatusCode.FAILED_PRECONDITION: 409,
    grpc.StatusCode.RESOURCE_EXHAUSTED: 429,
    grpc.StatusCode.INTERNAL: 500,
    grpc.StatusCode.UNIMPLEMENTED: 501,
    grpc.StatusCode.UNAVAILABLE: 503,
    grpc.StatusCode.DEADLINE_EXCEEDED: 504,
}
_STATUS_OF_REASON = {"GUEST_UNREACHABLE": 502}
_KIND = {
    grpc.StatusCode.INVALID_ARGUMENT: "bad_request",
    grpc.StatusCode.FAILED_PRECONDITION: "bad_request",
    grpc.StatusCode.PERMISSION_DENIED: "bad_request",
    grpc.StatusCode.ALREADY_EXISTS: "bad_request",
    grpc.StatusCode.NOT_FOUND: "not_found",
    grpc.StatusCode.UNIMPLEMENTED: "unimplemented",
}
# The node's own words about a guest call, not the guest's.
_NODE_REASONS = frozenset({
    "TOKEN_REJECTED", "SANDBOX_NOT_FOUND", "SANDBOX_STATE_CONFLICT", "GUEST_UNREACHABLE", "NODE_STOPPING",
    "METHOD_NOT_RELAYED",
})  # fmt: skip
_STDERR_TAIL = 500


class SandboxError(Exception):
    """Base of everything this package raises on purpose."""


class SandboxTimeout(SandboxError, TimeoutError):  # noqa: N818 - the name users know
    """The caller's timeout or deadline passed."""


class APIError(SandboxError):
    """The node refused, or could not be reached (status 0)."""

    def __init__(
        self,
        verb: str,
        status: int,
        message: str,
        reply: object = None,
        *,
        reason: str = "",
        metadata: dict[str, str] | None = None,
        retry_after: float | None = None,
    ) -> None:
        """Takes the verb, an HTTP-like status, the text, and the contract's facts."""
        super().__init__(f"{verb}: {message}" + (f" ({reason})" if reason else ""))
        self.verb = verb
        self.status = status
        self.message = message
        self.reply = reply
        self.reason = reason
        self.metadata = metadata or {}
        self.retry_after = retry_after


class SilkdError(SandboxError):
    """The guest refused; kind is bad_request, not_found, unimplemented or internal."""

    def __init__(
        self, kind: str, message: str, *, reason: str = "", metadata: dict[str, str] | None = None
    ) -> None:
        """Takes the kind, the text, and the contract's facts."""
        super().__init__(f"{kind}: {message}")
        self.kind = kind
        self.message = message
        self.reason = reason
        self.metadata = metadata or {}


class ExitError(SandboxError):
    """A program ended with a status other than 0 (128 + n: signal n)."""

    def __init__(self, code: int, stderr: str, stdout: str = "") -> None:
        """Takes the status and what the program wrote."""
        tail = stderr[-_STDERR_TAIL:].strip()
        super().__init__(f"exit status {code}" + (f": {tail}" if tail else ""))
        self.code = code
        self.stderr = stderr
        self.stdout = stdout


class ProtocolError(SandboxError):
    """A stream ended before its last message, or sent what it may not."""


def from_node(verb: str, error: grpc.RpcError) -> SandboxError:
    """Returns the exception for a failed call of a node service."""
    known = from_rpc_error(error)
    if isinstance(known, CocoonError):
        reason = known.reason_name()
        return APIError(
            verb,
            _STATUS_OF_REASON.get(reason) or _STATUS.get(known.code, 500),
            known.message,
            reason=reason,
            metadata=known.metadata,
            retry_after=known.retry_after,
        )
    if known.code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return SandboxTimeout(f"{verb}: no answer in time")
    transport = known.code in {
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.UNKNOWN,
        grpc.StatusCode.CANCELLED,
    }
    return APIError(verb, 0 if transport else _STATUS.get(known.code, 500), known.message)


def from_guest(verb: str, error: grpc.RpcError) -> SandboxError:
    """Returns the exception for a failed guest call; the node's own refusals stay the node's."""
    known = from_rpc_error(error)
    if isinstance(known, CocoonError) and known.reason_name() not in _NODE_REASONS:
        kind = _KIND.get(known.code, "internal")
        return SilkdError(kind, known.message, reason=known.reason_name(), metadata=known.metadata)
    if known.code is grpc.StatusCode.UNIMPLEMENTED and not isinstance(known, CocoonError):
        # A guest older than the verb: its gRPC server says so by itself, without a reason.
        return SilkdError("unimplemented", f"{verb}: {known.message}")
    return from_node(verb, error)
