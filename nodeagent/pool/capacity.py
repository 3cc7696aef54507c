"""Whether the node has room to make machines; one answer for all pools."""

from __future__ import annotations

from cocoon_rpc.errors import NodeAtCapacityError
from nodeagent.clock import Clock
from nodeagent.pool.target import CAPACITY_PAUSE_S


class Capacity:
    """Parks refilling node-wide for 30 s after a machine could not be made for lack of room."""

    def __init__(self, clock: Clock) -> None:
        """Starts with room."""
        self._clock = clock
        self._until = 0.0
        self.cause = ""
        self.retry_wall_ns = 0

    def exhausted(self, error: NodeAtCapacityError) -> None:
        """Notes that a resource ran out."""
        self._until = self._clock.monotonic() + CAPACITY_PAUSE_S
        self.retry_wall_ns = self._clock.wall_ns() + int(CAPACITY_PAUSE_S * 1e9)
        self.cause = error.message

    def succeeded(self) -> None:
        """Notes that a machine was made: there is room again."""
        self._until = 0.0
        self.cause = ""

    @property
    def parked(self) -> bool:
        """Whether refilling is parked now."""
        return self.pause_s > 0

    @property
    def pause_s(self) -> float:
        """Seconds until refilling goes on; 0 when it is not parked."""
        return max(0.0, self._until - self._clock.monotonic())
