"""The contract says who may call what."""

from __future__ import annotations

import pytest

from cocoon.guest.host.v1 import host_service_pb2
from cocoon.guest.v1 import file_service_pb2, guest_service_pb2, process_service_pb2
from cocoon.node.v1 import node_service_pb2, pool_service_pb2, sandbox_service_pb2
from cocoon.types.v1 import options_pb2
from cocoon_rpc import auth

FILES = (
    file_service_pb2, guest_service_pb2, process_service_pb2, host_service_pb2,
    node_service_pb2, pool_service_pb2, sandbox_service_pb2,
)  # fmt: skip
METHODS = [
    (f"/{service.full_name}/{method.name}", service.file.package)
    for file in FILES
    for service in file.DESCRIPTOR.services_by_name.values()
    for method in service.methods
]


@pytest.mark.parametrize(("method", "package"), METHODS)
def test_every_method_has_the_rule_of_its_package(method: str, package: str) -> None:
    rule = auth.auth_rule(method)
    if package == "cocoon.guest.v1":
        assert rule == options_pb2.AUTH_RULE_SANDBOX
    elif package == "cocoon.guest.host.v1":
        assert rule == options_pb2.AUTH_RULE_HOST
    else:
        assert rule in {options_pb2.AUTH_RULE_ROOT, options_pb2.AUTH_RULE_ROOT_OR_SANDBOX}


def test_unknown_methods_have_no_rule() -> None:
    assert auth.auth_rule("/nobody/Knows") == options_pb2.AUTH_RULE_UNSPECIFIED


@pytest.mark.parametrize(
    ("metadata", "token"),
    [
        ([("authorization", "Bearer abc")], "abc"),
        ([], None),
        ([("authorization", "Basic abc")], None),
        ([("authorization", "Bearer a"), ("authorization", "Bearer b")], None),
    ],
)
def test_bearer(metadata: list[tuple[str, str | bytes]], token: str | None) -> None:
    assert auth.bearer(metadata) == token
