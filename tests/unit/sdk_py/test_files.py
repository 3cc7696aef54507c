from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from typing import Any

import grpc
import pytest

from cocoon.guest.v1 import file_service_pb2 as pb
from cocoon_rpc.errors import FileSystemFullError
from cocoonsandbox import APIError, Client, ProtocolError, Sandbox, SandboxTimeout, SilkdError
from tests.unit.sdk_py.conftest import Script, refuse


def content(data: bytes, chunk: int = 65536, sent: int | None = None) -> Iterator[pb.ReadResponse]:
    """A whole Read: start, chunks, done."""
    yield pb.ReadResponse(start=pb.ReadStart(size_bytes=len(data)))
    for at in range(0, len(data), chunk):
        yield pb.ReadResponse(chunk=pb.FileChunk(data=data[at : at + chunk], offset=at))
    yield pb.ReadResponse(done=pb.ReadDone(sent_bytes=len(data) if sent is None else sent))


@pytest.mark.parametrize("size", [0, 1, 65536, 2**20 + 3])
def test_read_returns_the_content(script: Script, sandbox: Sandbox, size: int) -> None:
    data = os.urandom(size)
    script.on_read = lambda request, context: content(data)
    assert sandbox.read_file("/etc/x") == data
    assert script.of("Read")[0].request.path == "/etc/x"


def test_read_that_stops_half_way_is_a_protocol_error(script: Script, sandbox: Sandbox) -> None:
    def half(request: Any, context: grpc.ServicerContext) -> Iterator[Any]:
        yield from list(content(b"abc"))[:-1]

    script.on_read = half
    with pytest.raises(ProtocolError, match="without its last message"):
        sandbox.read_file("/x")


@pytest.mark.parametrize("sent", [2, 4])
def test_read_that_lost_bytes_is_a_protocol_error(script: Script, sandbox: Sandbox, sent: int) -> None:
    script.on_read = lambda request, context: content(b"abc", sent=sent)
    with pytest.raises(ProtocolError, match="3 bytes came"):
        sandbox.read_file("/x")


def test_read_that_fails_half_way_is_typed(script: Script, sandbox: Sandbox) -> None:
    def broken(request: Any, context: grpc.ServicerContext) -> Iterator[Any]:
        yield from list(content(b"abc"))[:-1]
        context.abort(grpc.StatusCode.UNAVAILABLE, "connection reset")

    script.on_read = broken
    with pytest.raises(APIError) as caught:
        sandbox.read_file("/x")
    assert caught.value.status == 0


@pytest.mark.parametrize("size", [0, 1, 256 * 1024, 256 * 1024 + 1, 2**20 + 3])
def test_write_sends_start_chunks_with_offsets_and_done(script: Script, sandbox: Sandbox, size: int) -> None:
    data = os.urandom(size)
    sandbox.write_file("/root/x", data, mode=0o755)
    start, *chunks, done = script.of("Write")[0].requests
    assert (start.start.path, start.start.mode) == ("/root/x", 0o755)
    assert done.WhichOneof("message") == "done"
    assert b"".join(request.chunk.data for request in chunks) == data
    assert [request.chunk.offset for request in chunks] == list(range(0, size, 256 * 1024))


def test_write_encodes_text_and_leaves_the_mode_to_the_guest(script: Script, sandbox: Sandbox) -> None:
    sandbox.write_file("/root/x", "沙箱\n")
    start, chunk, _ = script.of("Write")[0].requests
    assert chunk.chunk.data == "沙箱\n".encode()
    assert not start.start.HasField("mode")


def test_write_refused_by_the_guest_is_typed_even_while_bytes_are_sent(
    script: Script, sandbox: Sandbox
) -> None:
    def full(requests: Iterator[Any], context: grpc.ServicerContext) -> Any:
        next(requests)
        refuse(context, FileSystemFullError(path="/root/x"))

    script.on_write = full
    with pytest.raises(SilkdError) as caught:
        sandbox.write_file("/root/x", bytes(32 * 2**20))
    assert caught.value.reason == "FILE_SYSTEM_FULL"
    assert caught.value.metadata == {"path": "/root/x"}


def test_write_of_which_not_all_was_written_is_a_protocol_error(script: Script, sandbox: Sandbox) -> None:
    script.on_write = lambda requests, context: pb.WriteResponse(size_bytes=len(list(requests)) * 0)
    with pytest.raises(ProtocolError, match="3 bytes were sent, 0 written"):
        sandbox.write_file("/x", b"abc")


@pytest.mark.parametrize(("path", "mode"), [("/x\ud800", None), ("/x", -1), ("/x", 2**32)])
def test_write_of_what_the_contract_cannot_carry_is_a_value_error_without_a_call(
    script: Script, sandbox: Sandbox, path: str, mode: int | None
) -> None:
    with pytest.raises(ValueError):
        sandbox.write_file(path, b"", mode=mode)
    assert script.of("Write") == []


def test_silent_guest_ends_at_the_clients_timeout_and_the_call_is_cancelled(script: Script) -> None:
    ended = threading.Event()

    def hang(request: Any, context: grpc.ServicerContext) -> Iterator[Any]:
        context.add_callback(ended.set)
        yield from list(content(b"abc"))[:-1]
        ended.wait(20)

    script.on_read = hang
    with Client(script.address, timeout=0.3) as client:
        sandbox = client.new("rt")
        began = time.monotonic()
        with pytest.raises(SandboxTimeout):
            sandbox.read_file("/x")
        assert time.monotonic() - began < 5
    assert ended.wait(10)
