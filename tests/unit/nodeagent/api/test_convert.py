"""Requests are checked field by field; nothing of the node's types lacks a value in the contract."""

from __future__ import annotations

from typing import Any

import pytest
from google.protobuf.duration_pb2 import Duration

from cocoon.types.v1 import sandbox_pb2
from cocoon_rpc.errors import InvalidFieldError
from nodeagent.api import convert
from nodeagent.model import Accelerator, Isolation, Net, PoolKey, Size, Tier
from nodeagent.pool.pool import GoldenStatus


@pytest.mark.parametrize(
    ("kind", "table"),
    [
        (Net, convert.NET),
        (Size, convert.SIZE),
        (Tier, convert.TIER),
        (Isolation, convert.ISOLATION),
        (Accelerator, convert.ACCELERATOR),
        (GoldenStatus, convert.GOLDEN),
    ],
)
def test_every_value_has_one_of_its_own_in_the_contract(kind: Any, table: dict[Any, int]) -> None:
    assert set(table) == set(kind)
    assert len(set(table.values())) == len(table)
    assert 0 not in table.values(), "0 is unspecified"


def test_unset_lane_and_size_have_their_defaults() -> None:
    assert convert.pool_key("rt", 0, 0) == PoolKey("rt", Net.NONE, Size.SMALL)
    assert convert.pool_key("rt", 0, sandbox_pb2.SIZE_2XLARGE).size is Size.XXLARGE


@pytest.mark.parametrize(
    ("template", "net", "size", "field"),
    [
        ("", 0, 0, "template"),
        ("-rt", 0, 0, "template"),
        ("r\0t", 0, 0, "template"),
        ("rt\n", 0, 0, "template"),
        ("x" * 81, 0, 0, "template"),
        ("rt", 99, 0, "net"),
        ("rt", 0, -1, "size"),
    ],
)
def test_bad_keys_name_their_field(template: str, net: int, size: int, field: str) -> None:
    with pytest.raises(InvalidFieldError) as caught:
        convert.pool_key(template, net, size, "pools[3].")
    assert caught.value.metadata["field"] == f"pools[3].{field}"


@pytest.mark.parametrize("ns", [0, 1, 10**9 - 1, 10**9, 300 * 10**9 + 5])
def test_spans_survive_there_and_back(ns: int) -> None:
    assert convert.duration_ns(convert.duration(ns), "ttl") == ns
    assert convert.timestamp(ns).ToNanoseconds() == ns


@pytest.mark.parametrize(
    "span", [Duration(nanos=10**9), Duration(nanos=-(10**9)), Duration(seconds=315_576_000_001)]
)
def test_what_is_no_span_is_refused(span: Duration) -> None:
    with pytest.raises(InvalidFieldError, match="ttl"):
        convert.duration_ns(span, "ttl")


def test_request_ids_are_uuids_in_one_spelling() -> None:
    text = "0B0E2F6C-6D7F-4A4B-9D1E-1F2A3B4C5D6E"
    assert convert.request_id(text) == convert.request_id(text.lower()) == text.lower()
    assert convert.request_id("") == ""
    for wrong in ("x", text + "\n", text[:-1], "{" + text + "}", text.replace("-", "")):
        with pytest.raises(InvalidFieldError, match="request_id"):
            convert.request_id(wrong)


@pytest.mark.parametrize(
    "name", ["", "sandboxes/", "sb_" + "a" * 26, "nodes/sb_" + "a" * 26, "sandboxes/sb_" + "A" * 26,
             "sandboxes/sb_" + "a" * 26 + "\n", "sandboxes/../sb_" + "a" * 26],
)  # fmt: skip
def test_names_that_name_no_sandbox_are_refused(name: str) -> None:
    with pytest.raises(InvalidFieldError, match="name"):
        convert.sandbox_id(name)


def test_a_name_holds_its_id() -> None:
    assert convert.sandbox_id("sandboxes/sb_" + "a" * 26) == "sb_" + "a" * 26


@pytest.mark.parametrize(
    "pairs",
    [
        {"": "x"},
        {"a b": "x"},
        {"a&b": "x"},
        {"a=b": "x"},
        {"ü": "x"},
        {"a": "x\0"},
        {"a": "ü" * 257},
        {"a" * 129: "x"},
        {str(i): "x" for i in range(17)},
        {str(i): "x" * 512 for i in range(9)},
    ],
)
def test_bad_labels_are_refused(pairs: dict[str, str]) -> None:
    with pytest.raises(InvalidFieldError, match="metadata"):
        convert.metadata(pairs)


def test_labels_at_their_limits_pass() -> None:
    pairs = {"k" * 128: "ü" * 256, "b": ""}
    assert convert.metadata(pairs) == pairs
    assert convert.claim_ref("x" * 256) == "x" * 256
    with pytest.raises(InvalidFieldError, match="claim_ref"):
        convert.claim_ref("ü" * 129)


def test_pages_join_to_the_whole_list() -> None:
    items, joined, token = list(range(120)), [], ""
    while True:
        part, token = convert.page(items, 0, token)
        assert len(part) <= 50
        joined += part
        if not token:
            break
    assert joined == items
    assert convert.page(items, 5000, "") == (items, "")
    assert convert.page([], 10, "") == ([], "")


@pytest.mark.parametrize("token", ["%", "LTE=", "eA==", "ü", "A"])
def test_page_tokens_of_others_are_refused(token: str) -> None:
    with pytest.raises(InvalidFieldError, match="page_token"):
        convert.page([1], 1, token)
