"""Errors go out and come back with everything they carry."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from google.protobuf import any_pb2
from google.rpc import error_details_pb2 as rpc_details_pb2
from google.rpc import status_pb2

from cocoon.types.v1 import error_details_pb2
from cocoon.types.v1.error_reason_pb2 import ErrorReason
from cocoon_rpc import errors
from cocoon_rpc.errors import CocoonError, RemoteError

PROTO = Path(__file__).resolve().parents[3] / "proto/cocoon/types/v1/error_reason.proto"
REASONS = sorted(name.removeprefix("ERROR_REASON_") for name in ErrorReason.keys())[:]  # noqa: SIM118
REASONS.remove("UNSPECIFIED")


def _filled(error_class: type[CocoonError]) -> dict[str, object]:
    facts: dict[str, object] = {}
    for field in error_class.DETAIL.DESCRIPTOR.fields:
        value: object = "x" if field.type == field.TYPE_STRING else 1
        facts[field.name] = [value] if field.is_repeated else value
    return facts


def test_every_reason_has_its_exception_and_no_other_does() -> None:
    assert sorted(CocoonError.REASONS) == REASONS


@pytest.mark.parametrize("reason", REASONS)
def test_reason_survives_the_wire(reason: str) -> None:
    error_class = CocoonError.REASONS[reason]
    sent = error_class(retry_after=1.5, **_filled(error_class))
    back = errors.from_status(status_pb2.Status.FromString(sent.to_status().SerializeToString()))
    assert type(back) is error_class
    assert isinstance(back, CocoonError)
    assert (back.detail, back.message, back.retry_after) == (sent.detail, sent.message, 1.5)
    assert back.metadata == sent.metadata


@pytest.mark.parametrize("reason", REASONS)
def test_reason_detail_and_exception_share_their_name(reason: str) -> None:
    camel = "".join(word.capitalize() for word in reason.split("_"))
    assert CocoonError.REASONS[reason].__name__ == camel + "Error"
    assert CocoonError.REASONS[reason].DETAIL is getattr(error_details_pb2, camel)


@pytest.mark.parametrize("reason", REASONS)
def test_reason_is_documented_with_its_code(reason: str) -> None:
    before, _, _ = PROTO.read_text().partition(f"ERROR_REASON_{reason} = ")
    comment = re.split(r" = [0-9]+;\n", before)[-1]
    assert CocoonError.REASONS[reason].CODE.name in comment


def test_status_of_a_foreign_server_is_a_remote_error() -> None:
    back = errors.from_status(status_pb2.Status(code=14, message="gone"))
    assert isinstance(back, RemoteError)
    assert back.code.name == "UNAVAILABLE"


def test_hostile_details_do_not_raise() -> None:
    info = any_pb2.Any()
    info.Pack(rpc_details_pb2.ErrorInfo(reason="SANDBOX_NOT_FOUND", domain="cocoon"))
    broken = any_pb2.Any(type_url="type.googleapis.com/cocoon.types.v1.SandboxNotFound", value=b"\xff\xff")
    back = errors.from_status(status_pb2.Status(code=999, message="m", details=[info, broken]))
    assert isinstance(back, errors.SandboxNotFoundError)
    assert isinstance(errors.from_status(status_pb2.Status(code=999)), RemoteError)


def test_another_domains_reason_is_not_ours() -> None:
    info = any_pb2.Any()
    info.Pack(rpc_details_pb2.ErrorInfo(reason="SANDBOX_NOT_FOUND", domain="elsewhere"))
    assert isinstance(errors.from_status(status_pb2.Status(code=5, details=[info])), RemoteError)
