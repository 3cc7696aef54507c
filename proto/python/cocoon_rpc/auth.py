"""Who may call what: read from the contract, the same for every server and client."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache

from google.protobuf import descriptor_pool
from google.protobuf.descriptor import MethodDescriptor

from cocoon.types.v1 import options_pb2

SANDBOX_KEY = "cocoon-sandbox-id"
AUTHORIZATION_KEY = "authorization"
_SCHEME = "Bearer "


def bearer(metadata: Iterable[tuple[str, str | bytes]]) -> str | None:
    """Returns the bearer token of a call; None without one or with two."""
    found = [v for k, v in metadata if k == AUTHORIZATION_KEY]
    if len(found) != 1 or not isinstance(found[0], str) or not found[0].startswith(_SCHEME):
        return None
    return found[0].removeprefix(_SCHEME)


def sandbox_id(metadata: Iterable[tuple[str, str | bytes]]) -> str | None:
    """Returns the sandbox id of a guest call; None without one or with two."""
    found = [v for k, v in metadata if k == SANDBOX_KEY]
    return found[0] if len(found) == 1 and isinstance(found[0], str) else None


@cache
def method_descriptor(method: str) -> MethodDescriptor | None:
    """Returns the descriptor of `/package.Service/Method`, if it is loaded."""
    service, _, name = method.removeprefix("/").rpartition("/")
    try:
        found = descriptor_pool.Default().FindServiceByName(service)
    except KeyError:
        return None
    result: MethodDescriptor | None = found.methods_by_name.get(name)
    return result


@cache
def auth_rule(method: str) -> options_pb2.AuthRule.ValueType:
    """Returns the method's rule; AUTH_RULE_UNSPECIFIED if it has none or is unknown."""
    descriptor = method_descriptor(method)
    if descriptor is None:
        return options_pb2.AUTH_RULE_UNSPECIFIED
    rule: options_pb2.AuthRule.ValueType = descriptor.GetOptions().Extensions[options_pb2.auth]
    return rule


def guest_metadata(sandbox: str, token: str) -> tuple[tuple[str, str], ...]:
    """Returns the metadata of a guest call."""
    return ((SANDBOX_KEY, sandbox), (AUTHORIZATION_KEY, _SCHEME + token))
