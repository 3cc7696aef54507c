"""Between the contract's messages and the node's types."""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Mapping, Sequence
from typing import TypeVar

from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp

from cocoon.node.v1 import node_service_pb2, pool_service_pb2
from cocoon.types.v1 import sandbox_pb2
from cocoon_rpc.errors import InvalidFieldError
from nodeagent.claims.ids import ID_PATTERN
from nodeagent.claims.manager import Claim
from nodeagent.clock import Clock
from nodeagent.config import TEMPLATE_PATTERN
from nodeagent.model import Accelerator, Isolation, Net, PoolKey, Size, Tier
from nodeagent.pool.pool import GoldenStatus, Pool

NET = {Net.NONE: sandbox_pb2.NET_NONE, Net.EGRESS: sandbox_pb2.NET_EGRESS}
SIZE = {
    Size.SMALL: sandbox_pb2.SIZE_SMALL,
    Size.MEDIUM: sandbox_pb2.SIZE_MEDIUM,
    Size.LARGE: sandbox_pb2.SIZE_LARGE,
    Size.XLARGE: sandbox_pb2.SIZE_XLARGE,
    Size.XXLARGE: sandbox_pb2.SIZE_2XLARGE,
}
TIER = {
    Tier.WARM: sandbox_pb2.CLAIM_TIER_WARM,
    Tier.CLONE: sandbox_pb2.CLAIM_TIER_CLONE,
    Tier.COLD: sandbox_pb2.CLAIM_TIER_COLD,
}
ISOLATION = {
    Isolation.VM_HARDWARE: sandbox_pb2.ISOLATION_VM_HARDWARE,
    Isolation.VM_EMULATED: sandbox_pb2.ISOLATION_VM_EMULATED,
    Isolation.NONE: sandbox_pb2.ISOLATION_NONE,
}
ACCELERATOR = {
    Accelerator.KVM: node_service_pb2.ACCELERATOR_KVM,
    Accelerator.TCG: node_service_pb2.ACCELERATOR_TCG,
    Accelerator.NONE: node_service_pb2.ACCELERATOR_NONE,
}
GOLDEN = {
    GoldenStatus.BUILDING: pool_service_pb2.GOLDEN_STATE_BUILDING,
    GoldenStatus.READY: pool_service_pb2.GOLDEN_STATE_READY,
    GoldenStatus.FAILED: pool_service_pb2.GOLDEN_STATE_FAILED,
    GoldenStatus.UNSUPPORTED: pool_service_pb2.GOLDEN_STATE_UNSUPPORTED,
}
_NET_OF = {sandbox_pb2.NET_UNSPECIFIED: Net.NONE} | {v: k for k, v in NET.items()}
_SIZE_OF = {sandbox_pb2.SIZE_UNSPECIFIED: Size.SMALL} | {v: k for k, v in SIZE.items()}
_UUID = re.compile(r"[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}")
_METADATA_KEY = re.compile(r"[!-~]{1,128}")
_T = TypeVar("_T")


def timestamp(ns: int) -> Timestamp:
    """Returns a point in time from nanoseconds since the epoch."""
    seconds, nanos = divmod(ns, 10**9)
    return Timestamp(seconds=seconds, nanos=nanos)


def duration(ns: int) -> Duration:
    """Returns a span from nanoseconds, at least 0."""
    seconds, nanos = divmod(ns, 10**9)
    return Duration(seconds=seconds, nanos=nanos)


def duration_ns(span: Duration, field: str) -> int:
    """Returns a span in nanoseconds. Raises: InvalidFieldError for one that is no span."""
    if not -999_999_999 <= span.nanos <= 999_999_999 or abs(span.seconds) > 315_576_000_000:
        raise InvalidFieldError(field=field, rule="is not a valid duration")
    return int(span.seconds) * 10**9 + int(span.nanos)


def pool_key(template: str, net: int, size: int, prefix: str = "") -> PoolKey:
    """Returns the checked key. Raises: InvalidFieldError."""
    if not TEMPLATE_PATTERN.fullmatch(template):
        raise InvalidFieldError(
            field=prefix + "template", rule=f"must match {TEMPLATE_PATTERN.pattern}, e.g. 'rt'"
        )
    if net not in _NET_OF:
        raise InvalidFieldError(field=prefix + "net", rule="must be NET_NONE or NET_EGRESS")
    if size not in _SIZE_OF:
        names = ", ".join(s.label for s in Size)
        raise InvalidFieldError(field=prefix + "size", rule=f"must be one of the five sizes ({names})")
    return PoolKey(template, _NET_OF[net], _SIZE_OF[size])  # type: ignore[index]


def request_id(value: str) -> str:
    """Returns a checked request_id. Raises: InvalidFieldError."""
    if value and not _UUID.fullmatch(value):
        raise InvalidFieldError(field="request_id", rule="must be a UUID of 36 characters, or empty")
    return value.lower()


def sandbox_id(name: str) -> str:
    """Returns the id in `sandboxes/{id}`. Raises: InvalidFieldError."""
    collection, _, found = name.partition("/")
    if collection != "sandboxes" or not ID_PATTERN.fullmatch(found):
        raise InvalidFieldError(field="name", rule="must be sandboxes/sb_ and 26 of [a-z2-7]")
    return found


def metadata(pairs: Mapping[str, str]) -> dict[str, str]:
    """Returns checked labels. Raises: InvalidFieldError."""
    if len(pairs) > 16:
        raise InvalidFieldError(field="metadata", rule="at most 16 pairs")
    for key, value in pairs.items():
        if not _METADATA_KEY.fullmatch(key) or "=" in key or "&" in key:
            raise InvalidFieldError(
                field="metadata", rule="keys are 1 to 128 printable ASCII characters without space, = and &"
            )
        if len(value.encode()) > 512 or not value.isprintable():
            raise InvalidFieldError(field="metadata", rule="values are at most 512 bytes of printable text")
    if sum(len(k) + len(v.encode()) for k, v in pairs.items()) > 4096:
        raise InvalidFieldError(field="metadata", rule="at most 4 KiB together")
    return dict(pairs)


def claim_ref(value: str) -> str:
    """Returns a checked reference. Raises: InvalidFieldError."""
    if len(value.encode()) > 256:
        raise InvalidFieldError(field="claim_ref", rule="at most 256 bytes")
    return value


def page(items: Sequence[_T], page_size: int, page_token: str) -> tuple[Sequence[_T], str]:
    """Returns one page and the next page's token. Raises: InvalidFieldError."""
    if page_size < 0:
        raise InvalidFieldError(field="page_size", rule="must not be negative")
    try:
        start = int(base64.urlsafe_b64decode(page_token.encode())) if page_token else 0
    except (ValueError, binascii.Error):
        start = -1
    if start < 0:
        raise InvalidFieldError(field="page_token", rule="is not one this list gave")
    end = start + min(page_size or 50, 1000)
    token = base64.urlsafe_b64encode(str(end).encode()).decode() if end < len(items) else ""
    return items[start:end], token


def sandbox(claim: Claim, node_id: str, guest_endpoint: str) -> sandbox_pb2.Sandbox:
    """Returns a claim as the contract's Sandbox."""
    record = claim.record
    return sandbox_pb2.Sandbox(
        name=claim.name,
        template=record.template,
        template_digest=record.digest,
        net=NET[record.net],
        size=SIZE[record.size],
        state=claim.state.value,
        tier=TIER[record.tier],
        isolation=ISOLATION[record.isolation],
        provision_duration=duration(record.provision_ns),
        claim_time=timestamp(record.claim_ns),
        expire_time=timestamp(record.expire_ns),
        node=f"nodes/{node_id}",
        guest_endpoint=guest_endpoint,
        claim_ref=record.claim_ref,
        metadata=record.metadata,
    )


def pool(source: Pool, clock: Clock) -> pool_service_pb2.Pool:
    """Returns a pool as the contract's Pool."""
    key = source.key
    pause_s = source.paused_s
    return pool_service_pb2.Pool(
        spec=pool_service_pb2.PoolSpec(
            template=key.template, net=NET[key.net], size=SIZE[key.size], warm=source.target
        ),
        template_digest=source.image.digest,
        warm=source.warm,
        refilling=source.refilling,
        golden=GOLDEN[source.golden_status],
        last_error=source.last_error,
        parked_until_time=timestamp(clock.wall_ns() + int(pause_s * 1e9)) if pause_s else None,
    )
