"""The rules of request streams."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from cocoon.guest.v1 import process_service_pb2 as pb
from cocoon_rpc.errors import InvalidFieldError, StreamStartRequiredError
from cocoon_rpc.streams import checked, first_start

START = pb.ExecRequest(start=pb.ExecStart(argv=["true"]))


async def _stream(*messages: pb.ExecRequest) -> AsyncIterator[pb.ExecRequest]:
    for message in messages:
        yield message


async def test_start_is_returned_and_the_rest_is_left() -> None:
    requests = _stream(START, pb.ExecRequest(stdin_close=pb.ExecStdinClose()))
    assert (await first_start(requests)).argv == ["true"]
    assert [r.WhichOneof("message") async for r in requests] == ["stdin_close"]


@pytest.mark.parametrize(
    ("messages", "got"),
    [
        ((), ""),
        ((pb.ExecRequest(),), "nothing"),
        ((pb.ExecRequest(stdin_close=pb.ExecStdinClose()), START), "stdin_close"),
    ],
)
async def test_anything_else_first_is_refused(messages: Any, got: str) -> None:
    with pytest.raises(StreamStartRequiredError) as caught:
        await first_start(_stream(*messages))
    assert caught.value.metadata == {"got": got}


async def test_each_message_is_checked_for_required_fields() -> None:
    with pytest.raises(InvalidFieldError, match=r"start\.argv"):
        await anext(checked(_stream(pb.ExecRequest(start=pb.ExecStart()))))
