"""The rules of request streams that every server shares: checked messages, `start` first."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, TypeVar

from cocoon_rpc.errors import StreamStartRequiredError
from cocoon_rpc.interceptors import check_required

_R = TypeVar("_R")


async def checked(requests: AsyncIterator[_R]) -> AsyncIterator[_R]:
    """Yields the messages of a request stream, each checked for REQUIRED fields."""
    async for request in requests:
        check_required(request)
        yield request


async def first_start(requests: AsyncIterator[Any]) -> Any:
    """Returns the `start` that must be the first message of a stream.

    Raises:
        StreamStartRequiredError: another message came first, or none.
    """
    try:
        first = await anext(requests)
    except StopAsyncIteration:
        raise StreamStartRequiredError(got="") from None
    kind = first.WhichOneof("message")
    if kind != "start":
        raise StreamStartRequiredError(got=kind or "nothing")
    return first.start
