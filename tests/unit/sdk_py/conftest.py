"""A node with a script: a real gRPC server in this process that answers as a test says."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, NoReturn

import grpc
import pytest

from cocoon.guest.v1 import (
    file_service_pb2,
    file_service_pb2_grpc,
    process_service_pb2,
    process_service_pb2_grpc,
)
from cocoon.node.v1 import (
    node_service_pb2,
    node_service_pb2_grpc,
    sandbox_service_pb2,
    sandbox_service_pb2_grpc,
)
from cocoon.types.v1 import sandbox_pb2
from cocoon_rpc.errors import STATUS_KEY, CocoonError
from cocoonsandbox import Client, Sandbox

ROOT_TOKEN = "root-secret"
SANDBOX_TOKEN = "sandbox-secret"
SANDBOX_ID = "sb_" + "a" * 26


@dataclass
class Call:
    """One call as the server saw it; requests of a stream in order, as far as they were read."""

    method: str
    metadata: dict[str, str]
    requests: list[Any] = field(default_factory=list)

    @property
    def request(self) -> Any:
        return self.requests[0]


class Script(
    sandbox_service_pb2_grpc.SandboxServiceServicer,
    node_service_pb2_grpc.NodeServiceServicer,
    process_service_pb2_grpc.ProcessServiceServicer,
    file_service_pb2_grpc.FileServiceServicer,
):
    """Answers with `on_<verb>`, each a function of (request or requests, context)."""

    def __init__(self) -> None:
        self.address = ""
        self.calls: list[Call] = []
        self.on_claim: Callable[..., Any] = lambda request, context: self.granted()
        self.on_get: Callable[..., Any] = lambda request, context: sandbox_service_pb2.GetResponse(
            sandbox=self.sandbox()
        )
        self.on_list: Callable[..., Any] = lambda request, context: sandbox_service_pb2.ListResponse()
        self.on_release: Callable[..., Any] = lambda request, context: sandbox_service_pb2.ReleaseResponse()
        self.on_info: Callable[..., Any] = lambda request, context: node_service_pb2.GetInfoResponse()
        self.on_exec: Callable[..., Any] = _exit_at_half_close
        self.on_read: Callable[..., Any] = lambda request, context: iter(())
        self.on_write: Callable[..., Any] = _write_all

    def sandbox(self) -> sandbox_pb2.Sandbox:
        """The sandbox that claims grant."""
        sandbox = sandbox_pb2.Sandbox(
            name=f"sandboxes/{SANDBOX_ID}",
            template_digest="sha256:" + "0" * 64,
            tier=sandbox_pb2.CLAIM_TIER_WARM,
            isolation=sandbox_pb2.ISOLATION_VM_EMULATED,
            guest_endpoint=self.address,
        )
        sandbox.provision_duration.FromNanoseconds(250_000)
        sandbox.expire_time.FromSeconds(1_800_000_000)
        return sandbox

    def granted(self) -> sandbox_service_pb2.ClaimResponse:
        return sandbox_service_pb2.ClaimResponse(sandbox=self.sandbox(), token=SANDBOX_TOKEN)

    def of(self, method: str) -> list[Call]:
        """The calls of a method."""
        return [call for call in self.calls if call.method == method]

    def _note(self, method: str, context: grpc.ServicerContext) -> Call:
        call = Call(method, {k: v for k, v in context.invocation_metadata() if isinstance(v, str)})
        self.calls.append(call)
        return call

    def _unary(self, method: str, request: Any, context: grpc.ServicerContext) -> None:
        self._note(method, context).requests.append(request)

    def _stream(self, method: str, requests: Iterator[Any], context: grpc.ServicerContext) -> Iterator[Any]:
        call = self._note(method, context)
        return (call.requests.append(request) or request for request in requests)

    def Claim(self, request: Any, context: grpc.ServicerContext) -> Any:
        self._unary("Claim", request, context)
        return self.on_claim(request, context)

    def Get(self, request: Any, context: grpc.ServicerContext) -> Any:
        self._unary("Get", request, context)
        return self.on_get(request, context)

    def List(self, request: Any, context: grpc.ServicerContext) -> Any:
        self._unary("List", request, context)
        return self.on_list(request, context)

    def Release(self, request: Any, context: grpc.ServicerContext) -> Any:
        self._unary("Release", request, context)
        return self.on_release(request, context)

    def GetInfo(self, request: Any, context: grpc.ServicerContext) -> Any:
        self._unary("GetInfo", request, context)
        return self.on_info(request, context)

    def Exec(self, requests: Iterator[Any], context: grpc.ServicerContext) -> Iterator[Any]:
        yield from self.on_exec(self._stream("Exec", requests, context), context)

    def Read(self, request: Any, context: grpc.ServicerContext) -> Iterator[Any]:
        self._unary("Read", request, context)
        yield from self.on_read(request, context)

    def Write(self, requests: Iterator[Any], context: grpc.ServicerContext) -> Any:
        return self.on_write(self._stream("Write", requests, context), context)


def refuse(context: grpc.ServicerContext, error: CocoonError) -> NoReturn:
    """Ends a call as a server of ours does."""
    context.set_trailing_metadata(((STATUS_KEY, error.to_status().SerializeToString()),))
    context.abort(error.code, error.message)


def stdout(data: bytes) -> process_service_pb2.ExecResponse:
    return process_service_pb2.ExecResponse(stdout=process_service_pb2.ExecOutput(data=data))


def stderr(data: bytes) -> process_service_pb2.ExecResponse:
    return process_service_pb2.ExecResponse(stderr=process_service_pb2.ExecOutput(data=data))


def exited(code: int | None = None, **exit_fields: Any) -> process_service_pb2.ExecResponse:
    return process_service_pb2.ExecResponse(exit=process_service_pb2.Exit(code=code, **exit_fields))


def _exit_at_half_close(requests: Iterator[Any], context: grpc.ServicerContext) -> Iterator[Any]:
    for _ in requests:
        pass
    yield exited(0)


def _write_all(requests: Iterator[Any], context: grpc.ServicerContext) -> Any:
    size = sum(len(request.chunk.data) for request in requests)
    return file_service_pb2.WriteResponse(size_bytes=size)


@pytest.fixture
def script() -> Iterator[Script]:
    """The scripted node, serving."""
    with ThreadPoolExecutor(8) as pool:
        server = grpc.server(pool)
        made = Script()
        sandbox_service_pb2_grpc.add_SandboxServiceServicer_to_server(made, server)
        node_service_pb2_grpc.add_NodeServiceServicer_to_server(made, server)
        process_service_pb2_grpc.add_ProcessServiceServicer_to_server(made, server)
        file_service_pb2_grpc.add_FileServiceServicer_to_server(made, server)
        made.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        made.server = server
        server.start()
        yield made
        server.stop(None).wait(10)


@pytest.fixture
def client(script: Script) -> Iterator[Client]:
    """A client of the scripted node."""
    with Client(script.address, ROOT_TOKEN, timeout=10.0) as made:
        yield made


@pytest.fixture
def sandbox(client: Client) -> Sandbox:
    """A sandbox of the scripted node, claimed."""
    return client.new("rt")
