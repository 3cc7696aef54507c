"""Which exec ids were started lately: what makes a repeated start safe."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from cocoon_rpc.errors import ExecIdReusedError

REMEMBER_S = 600.0
MOST = 10_000


class SeenIds:
    """Ids of the last ten minutes, at most ten thousand; the oldest fall out first."""

    def __init__(self, monotonic: Callable[[], float]) -> None:
        """Takes the clock in seconds."""
        self._monotonic = monotonic
        self._seen: OrderedDict[str, float] = OrderedDict()

    def admit(self, exec_id: str) -> None:
        """Remembers an id. Raises: ExecIdReusedError if it is remembered already."""
        now = self._monotonic()
        while self._seen and (len(self._seen) >= MOST or next(iter(self._seen.values())) <= now - REMEMBER_S):
            self._seen.popitem(last=False)
        if exec_id in self._seen:
            raise ExecIdReusedError(exec_id=exec_id)
        self._seen[exec_id] = now

    def forget(self, exec_id: str) -> None:
        """Takes an id back: nothing was started under it."""
        self._seen.pop(exec_id, None)
