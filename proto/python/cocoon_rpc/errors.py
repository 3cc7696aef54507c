"""The one place where errors become google.rpc.Status and come back.

One exception per `cocoon.types.v1.ErrorReason`, named after it::

    CocoonError
    ├── InvalidFieldError, StreamStartRequiredError, ...   (one per reason)
    └── RemoteError       a status without a reason of ours (proxy, transport)

The reason `FOO_BAR`, the detail message `FooBar` and the exception
`FooBarError` belong together by name; `DETAIL` on the class is the message.
Domain code raises these; `cocoon_rpc.interceptors` sends them, clients get them
back from `from_rpc_error`. Every fact of a message is also in the detail and in
ErrorInfo.metadata, so nobody parses text.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

import grpc
from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import DecodeError, Message
from google.rpc import error_details_pb2, status_pb2

from cocoon.types.v1 import error_details_pb2 as details
from cocoon.types.v1.error_reason_pb2 import ErrorReason

DOMAIN = "cocoon"
STATUS_KEY = "grpc-status-details-bin"
_PREFIX = "ERROR_REASON_"
_CODES = {code.value[0]: code for code in grpc.StatusCode}


class CocoonError(Exception):
    """An error of ours: a reason, its facts, and whether waiting helps.

    Subclasses take the fields of their detail message as keyword arguments.
    """

    CODE: ClassVar[grpc.StatusCode]
    DETAIL: ClassVar[type[Message]]
    TEXT: ClassVar[str]
    REASONS: ClassVar[dict[str, type[CocoonError]]] = {}

    def __init__(self, message: str | None = None, *, retry_after: float | None = None, **facts: Any) -> None:
        """Makes the error.

        Args:
            message: replaces the class's sentence.
            retry_after: seconds after which a retry is worth it; None = unsaid.
            **facts: fields of the detail message.
        """
        self.detail: Message = self.DETAIL(**facts)
        self.retry_after = retry_after
        self.message = message or self.TEXT.format(
            **{field.name: getattr(self.detail, field.name) for field in self.DETAIL.DESCRIPTOR.fields}
        )
        super().__init__(self.message)

    def __init_subclass__(cls) -> None:
        """Registers the class under its reason."""
        CocoonError.REASONS[cls.reason_name()] = cls

    @classmethod
    def reason_name(cls) -> str:
        """Returns the reason's name without its prefix, e.g. `SANDBOX_NOT_FOUND`."""
        name = cls.__name__.removesuffix("Error")
        return "".join("_" + c if c.isupper() and i else c for i, c in enumerate(name)).upper()

    @property
    def code(self) -> grpc.StatusCode:
        """The gRPC code it travels under."""
        return self.CODE

    @property
    def reason(self) -> ErrorReason.ValueType:
        """The reason as the contract's enum."""
        return ErrorReason.Value(_PREFIX + self.reason_name())

    @property
    def metadata(self) -> dict[str, str]:
        """Every fact as text, for ErrorInfo; lists joined by commas."""
        facts = {}
        for field in self.DETAIL.DESCRIPTOR.fields:
            value = getattr(self.detail, field.name)
            facts[field.name] = value if isinstance(value, str) else _as_text(value)
        return facts

    def to_status(self) -> status_pb2.Status:
        """Returns the status to send: ErrorInfo, the detail, RetryInfo if known."""
        info = error_details_pb2.ErrorInfo(reason=self.reason_name(), domain=DOMAIN, metadata=self.metadata)
        parts: list[Message] = [info, self.detail]
        if self.retry_after is not None:
            delay = Duration()
            delay.FromNanoseconds(int(self.retry_after * 1e9))
            parts.append(error_details_pb2.RetryInfo(retry_delay=delay))
        status = status_pb2.Status(code=self.code.value[0], message=self.message)
        for part in parts:
            status.details.add().Pack(part)
        return status


class RemoteError(Exception):
    """A status that carries no reason of ours: transport, proxy, foreign server."""

    def __init__(self, code: grpc.StatusCode, message: str) -> None:
        """Makes the error from a bare gRPC code and its text."""
        super().__init__(f"{code.name}: {message}")
        self.code = code
        self.message = message


def from_status(status: status_pb2.Status) -> CocoonError | RemoteError:
    """Returns the exception a status stands for; total, whatever the peer sent."""
    reason, retry_after, packed = "", None, list(status.details)
    for part in packed:
        info, retry = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo()
        if _unpack(part, info) and info.domain == DOMAIN:
            reason = info.reason
        elif _unpack(part, retry):
            retry_after = retry.retry_delay.ToNanoseconds() / 1e9
    error_class = CocoonError.REASONS.get(reason)
    if error_class is None:
        code = _CODES.get(status.code, grpc.StatusCode.UNKNOWN)
        return RemoteError(code, status.message)
    error = error_class(status.message, retry_after=retry_after)
    for part in packed:
        _unpack(part, error.detail)
    return error


def from_rpc_error(error: grpc.RpcError) -> CocoonError | RemoteError:
    """Returns the exception behind a failed call, of grpc or of grpc.aio."""
    packed = _status_bytes(error.trailing_metadata() or ())
    if packed is not None:
        status = status_pb2.Status()
        try:
            status.ParseFromString(packed)
        except DecodeError:
            pass
        else:
            return from_status(status)
    return RemoteError(error.code(), error.details() or "")


def _status_bytes(metadata: Iterable[Any]) -> bytes | None:
    for key, value in metadata:
        if key == STATUS_KEY and isinstance(value, bytes):
            return value
    return None


def _unpack(part: AnyMessage, into: Message) -> bool:
    """Unpacks if the type fits and the bytes parse; a hostile peer may send neither."""
    try:
        return part.Unpack(into)
    except DecodeError:
        return False


def _as_text(value: Any) -> str:
    if isinstance(value, (int, float)):
        return str(value)
    return ",".join(str(item) for item in value)


class InvalidFieldError(CocoonError):
    """INVALID_FIELD."""

    CODE = grpc.StatusCode.INVALID_ARGUMENT
    DETAIL = details.InvalidField
    TEXT = "{field}: {rule}"


class StreamStartRequiredError(CocoonError):
    """STREAM_START_REQUIRED."""

    CODE = grpc.StatusCode.INVALID_ARGUMENT
    DETAIL = details.StreamStartRequired
    TEXT = "the first message of this stream must be 'start', got '{got}'"


class StreamMessageUnexpectedError(CocoonError):
    """STREAM_MESSAGE_UNEXPECTED."""

    CODE = grpc.StatusCode.INVALID_ARGUMENT
    DETAIL = details.StreamMessageUnexpected
    TEXT = "message '{got}' is not allowed here: {rule}"


class RequestIdReusedError(CocoonError):
    """REQUEST_ID_REUSED."""

    CODE = grpc.StatusCode.INVALID_ARGUMENT
    DETAIL = details.RequestIdReused
    TEXT = "request_id {request_id} was used with other content; make a new one"


class TokenRejectedError(CocoonError):
    """TOKEN_REJECTED."""

    CODE = grpc.StatusCode.UNAUTHENTICATED
    DETAIL = details.TokenRejected
    TEXT = "missing or invalid token"


class MethodNotRelayedError(CocoonError):
    """METHOD_NOT_RELAYED."""

    CODE = grpc.StatusCode.UNIMPLEMENTED
    DETAIL = details.MethodNotRelayed
    TEXT = "{method} is not a method of this node or of its guests"


class InternalError(CocoonError):
    """INTERNAL."""

    CODE = grpc.StatusCode.INTERNAL
    DETAIL = details.Internal
    TEXT = "internal error; the log has the rest under incident {incident_id}"


class CapabilityMissingError(CocoonError):
    """CAPABILITY_MISSING."""

    CODE = grpc.StatusCode.FAILED_PRECONDITION
    DETAIL = details.CapabilityMissing
    TEXT = "engine {engine} has no {capability}"


class SandboxNotFoundError(CocoonError):
    """SANDBOX_NOT_FOUND."""

    CODE = grpc.StatusCode.NOT_FOUND
    DETAIL = details.SandboxNotFound
    TEXT = "no sandbox {sandbox} for this token"


class TemplateNotFoundError(CocoonError):
    """TEMPLATE_NOT_FOUND."""

    CODE = grpc.StatusCode.NOT_FOUND
    DETAIL = details.TemplateNotFound
    TEXT = "no template {template} on this node"


class SandboxStateConflictError(CocoonError):
    """SANDBOX_STATE_CONFLICT."""

    CODE = grpc.StatusCode.FAILED_PRECONDITION
    DETAIL = details.SandboxStateConflict
    TEXT = "{sandbox} is in a state that does not allow this"


class LaneUnavailableError(CocoonError):
    """LANE_UNAVAILABLE."""

    CODE = grpc.StatusCode.FAILED_PRECONDITION
    DETAIL = details.LaneUnavailable
    TEXT = "this node has no attachment for that network lane; use NET_NONE"


class ClaimLimitReachedError(CocoonError):
    """CLAIM_LIMIT_REACHED."""

    CODE = grpc.StatusCode.RESOURCE_EXHAUSTED
    DETAIL = details.ClaimLimitReached
    TEXT = "the node holds its limit of {limit} claims; release some or retry later"


class NodeAtCapacityError(CocoonError):
    """NODE_AT_CAPACITY."""

    CODE = grpc.StatusCode.RESOURCE_EXHAUSTED
    DETAIL = details.NodeAtCapacity
    TEXT = "the node is out of {resource}: {cause}; retry later"


class ImageMissingError(CocoonError):
    """IMAGE_MISSING."""

    CODE = grpc.StatusCode.FAILED_PRECONDITION
    DETAIL = details.ImageMissing
    TEXT = "{image} is not on this node; build it with: {command}"


class ProvisionFailedError(CocoonError):
    """PROVISION_FAILED."""

    CODE = grpc.StatusCode.UNAVAILABLE
    DETAIL = details.ProvisionFailed
    TEXT = "could not provide a machine ({stage}): {cause}"


class IdentityRenewalFailedError(CocoonError):
    """IDENTITY_RENEWAL_FAILED."""

    CODE = grpc.StatusCode.INTERNAL
    DETAIL = details.IdentityRenewalFailed
    TEXT = "could not renew {step}: {cause}"


class GuestUnreachableError(CocoonError):
    """GUEST_UNREACHABLE."""

    CODE = grpc.StatusCode.UNAVAILABLE
    DETAIL = details.GuestUnreachable
    TEXT = "the guest of {sandbox} does not answer"


class NodeStoppingError(CocoonError):
    """NODE_STOPPING."""

    CODE = grpc.StatusCode.UNAVAILABLE
    DETAIL = details.NodeStopping
    TEXT = "{node} is stopping"


class ProgramNotFoundError(CocoonError):
    """PROGRAM_NOT_FOUND."""

    CODE = grpc.StatusCode.INVALID_ARGUMENT
    DETAIL = details.ProgramNotFound
    TEXT = "no program {program}"


class ProgramNotExecutableError(CocoonError):
    """PROGRAM_NOT_EXECUTABLE."""

    CODE = grpc.StatusCode.INVALID_ARGUMENT
    DETAIL = details.ProgramNotExecutable
    TEXT = "cannot execute {program}: {cause}"


class CwdNotUsableError(CocoonError):
    """CWD_NOT_USABLE."""

    CODE = grpc.StatusCode.INVALID_ARGUMENT
    DETAIL = details.CwdNotUsable
    TEXT = "cannot use {cwd} as working directory: {cause}"


class UserNotFoundError(CocoonError):
    """USER_NOT_FOUND."""

    CODE = grpc.StatusCode.INVALID_ARGUMENT
    DETAIL = details.UserNotFound
    TEXT = "no user {user} in the guest"


class ExecIdReusedError(CocoonError):
    """EXEC_ID_REUSED."""

    CODE = grpc.StatusCode.ALREADY_EXISTS
    DETAIL = details.ExecIdReused
    TEXT = "exec_id {exec_id} was started before and is not started again"


class ProcessLimitReachedError(CocoonError):
    """PROCESS_LIMIT_REACHED."""

    CODE = grpc.StatusCode.RESOURCE_EXHAUSTED
    DETAIL = details.ProcessLimitReached
    TEXT = "the guest cannot start another process: out of {resource}"


class FileNotFoundError(CocoonError):  # noqa: A001 - named by its reason; never star-imported
    """FILE_NOT_FOUND."""

    CODE = grpc.StatusCode.NOT_FOUND
    DETAIL = details.FileNotFound
    TEXT = "no such file: {path}"


class FileNotRegularError(CocoonError):
    """FILE_NOT_REGULAR."""

    CODE = grpc.StatusCode.FAILED_PRECONDITION
    DETAIL = details.FileNotRegular
    TEXT = "{path} is not a regular file but a {kind}"


class FileAccessDeniedError(CocoonError):
    """FILE_ACCESS_DENIED."""

    CODE = grpc.StatusCode.PERMISSION_DENIED
    DETAIL = details.FileAccessDenied
    TEXT = "access to {path} was denied"


class FileSystemFullError(CocoonError):
    """FILE_SYSTEM_FULL."""

    CODE = grpc.StatusCode.RESOURCE_EXHAUSTED
    DETAIL = details.FileSystemFull
    TEXT = "no space left for {path}; nothing was changed"


class FileOperationFailedError(CocoonError):
    """FILE_OPERATION_FAILED."""

    CODE = grpc.StatusCode.FAILED_PRECONDITION
    DETAIL = details.FileOperationFailed
    TEXT = "{path}: {errno}"
