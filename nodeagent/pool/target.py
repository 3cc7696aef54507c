"""When to make machines: pure rules, no clock and no I/O of their own."""

from __future__ import annotations

from dataclasses import dataclass, replace

from nodeagent.model import Accelerator

FAILURE_STREAK = 8
FIRST_PAUSE_S = 0.25
LONGEST_PAUSE_S = 30.0
CAPACITY_PAUSE_S = 30.0
GOLDEN_RETRY_S = 30.0


def shortfall(*, target: int, warm: int, refilling: int) -> int:
    """Returns how many machines to start making now, so that target is met once."""
    return max(0, target - warm - refilling)


def refill_concurrency(configured: int, cpus: int, accelerator: Accelerator) -> int:
    """Returns how many machines may be made at a time on this node.

    With hardware virtualisation two thirds of the cpus, within 4 and 256. An
    emulated machine burns a whole cpu while it starts, so one for each cpu.
    """
    if configured:
        return configured
    if accelerator is Accelerator.KVM:
        return min(max(cpus * 2 // 3, 4), 256)
    return max(cpus, 1)


@dataclass(frozen=True, slots=True)
class Backoff:
    """The pause after failures in a row: none for the first seven, then 250 ms doubling to 30 s."""

    streak: int = 0

    def failed(self) -> Backoff:
        """Returns the state after one more failure."""
        return replace(self, streak=self.streak + 1)

    def succeeded(self) -> Backoff:
        """Returns the state after a success."""
        return Backoff()

    @property
    def pause_s(self) -> float:
        """Seconds to wait before the next try."""
        if self.streak < FAILURE_STREAK:
            return 0.0
        return float(min(FIRST_PAUSE_S * 2 ** (self.streak - FAILURE_STREAK), LONGEST_PAUSE_S))
