"""Clean-up that cancellation cannot cut short."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

_T = TypeVar("_T")


async def complete(work: Coroutine[Any, Any, _T]) -> _T:
    """Runs `work` to its end even if the caller is cancelled meanwhile.

    Returns or raises what the work does; a cancellation that came meanwhile is
    raised after it. The work must bound itself.
    """
    task = asyncio.get_running_loop().create_task(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError as error:
            cancelled = error
    result = task.result()
    if cancelled is not None:
        raise cancelled
    return result
