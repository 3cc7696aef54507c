"""Whole files in a sandbox."""

from __future__ import annotations

from collections.abc import Iterator

import grpc

from cocoon.guest.v1 import file_service_pb2 as pb
from cocoon.guest.v1 import file_service_pb2_grpc
from cocoonsandbox.errors import ProtocolError, from_guest

_CHUNK = 256 * 1024
Metadata = tuple[tuple[str, str], ...]


def write(
    channel: grpc.Channel, metadata: Metadata, path: str, data: bytes, mode: int | None, timeout: float
) -> None:
    """Writes a file atomically. Raises: SilkdError, APIError, SandboxTimeout."""
    # Made here, so that a value the contract cannot carry is the caller's ValueError.
    start = pb.WriteRequest(start=pb.WriteStart(path=path, mode=mode))
    view = memoryview(data)

    def requests() -> Iterator[pb.WriteRequest]:
        yield start
        for at in range(0, len(view), _CHUNK):
            yield pb.WriteRequest(chunk=pb.FileChunk(data=bytes(view[at : at + _CHUNK]), offset=at))
        yield pb.WriteRequest(done=pb.WriteDone())

    try:
        answer = file_service_pb2_grpc.FileServiceStub(channel).Write(
            requests(), metadata=metadata, timeout=timeout
        )
    except grpc.RpcError as error:
        raise from_guest("write_file", error) from error
    if answer.size_bytes != len(view):
        raise ProtocolError(f"write_file: {len(view)} bytes were sent, {answer.size_bytes} written")


def read(channel: grpc.Channel, metadata: Metadata, path: str, timeout: float) -> bytes:
    """Returns a file's content. Raises: SilkdError, APIError, SandboxTimeout, ProtocolError."""
    call = file_service_pb2_grpc.FileServiceStub(channel).Read(
        pb.ReadRequest(path=path), metadata=metadata, timeout=timeout
    )
    parts: list[bytes] = []
    try:
        for response in call:
            kind = response.WhichOneof("message")
            if kind == "chunk":
                parts.append(response.chunk.data)
            elif kind == "done":
                content = b"".join(parts)
                if len(content) != response.done.sent_bytes:
                    raise ProtocolError(
                        f"read_file: {len(content)} bytes came, {response.done.sent_bytes} were sent"
                    )
                return content
    except grpc.RpcError as error:
        raise from_guest("read_file", error) from error
    finally:
        call.cancel()
    raise ProtocolError("read_file: the stream ended without its last message")
