"""The gRPC server of a node: port, options, services, health, reflection."""

from __future__ import annotations

import grpc.aio
from google.protobuf.descriptor import FileDescriptor
from google.rpc import error_details_pb2 as rpc_details_pb2
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from cocoon.guest.v1 import file_service_pb2, guest_service_pb2, process_service_pb2
from cocoon.node.v1 import (
    node_service_pb2,
    node_service_pb2_grpc,
    pool_service_pb2,
    pool_service_pb2_grpc,
    sandbox_service_pb2,
    sandbox_service_pb2_grpc,
)
from cocoon.types.v1 import error_details_pb2, options_pb2
from cocoon_rpc.auth import auth_rule
from nodeagent.api.access import AccessInterceptor
from nodeagent.api.node_service import NodeService
from nodeagent.api.pool_service import PoolService
from nodeagent.api.sandbox_service import SandboxService
from nodeagent.config import Config, ConfigError, split_address
from nodeagent.guestlink.relay import GuestRelay

_NODE_FILES = (sandbox_service_pb2, pool_service_pb2, node_service_pb2)
_GUEST_FILES = (process_service_pb2, file_service_pb2, guest_service_pb2)
# Loaded so that reflection can show error details to grpcurl.
_DETAIL_FILES = (error_details_pb2, rpc_details_pb2)

_OPTIONS = (
    # A port somebody else holds is an error, not a share of their calls.
    ("grpc.so_reuseport", 0),
    # A client that merely vanished is noticed within 15 s: a ping after 10 s of
    # silence, 5 s for its answer (decision 18 allows 20 s).
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    # Clients may ping as often as we do.
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
)


def open_server(config: Config, interceptor: AccessInterceptor) -> tuple[grpc.aio.Server, str]:
    """Returns a server bound to `listen`, not started, and its address.

    Raises:
        ConfigError: the port cannot be had.
    """
    server = grpc.aio.server(interceptors=(interceptor,), options=_OPTIONS)
    host, _ = split_address(config.listen, "listen")
    try:
        port = server.add_insecure_port(config.listen)
    except RuntimeError as error:
        raise ConfigError(f"listen: cannot listen on {config.listen}; is the port in use?") from error
    return server, f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


async def add_services(
    server: grpc.aio.Server,
    *,
    sandbox: SandboxService,
    pool: PoolService,
    node: NodeService,
    relay: GuestRelay,
) -> None:
    """Adds everything the node serves; refuses a contract method without an auth rule."""
    sandbox_service_pb2_grpc.add_SandboxServiceServicer_to_server(sandbox, server)
    pool_service_pb2_grpc.add_PoolServiceServicer_to_server(pool, server)
    node_service_pb2_grpc.add_NodeServiceServicer_to_server(node, server)
    checker = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(checker, server)
    names = [*_services(_NODE_FILES), *_services(_GUEST_FILES)]
    for name in ("", *names):
        await checker.set(name, health_pb2.HealthCheckResponse.SERVING)
    reflection.enable_server_reflection((*names, health.SERVICE_NAME, reflection.SERVICE_NAME), server)
    # Last: it answers for every method that nobody above serves.
    server.add_generic_rpc_handlers((relay,))


def _services(modules: tuple[object, ...]) -> list[str]:
    names = []
    for module in modules:
        descriptor: FileDescriptor = module.DESCRIPTOR  # type: ignore[attr-defined]
        for service in descriptor.services_by_name.values():
            for method in service.methods:
                path = f"/{service.full_name}/{method.name}"
                assert auth_rule(path) != options_pb2.AUTH_RULE_UNSPECIFIED, f"{path} has no auth rule"
            names.append(service.full_name)
    return names
