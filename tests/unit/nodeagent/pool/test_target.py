"""When to make machines."""

import pytest

from nodeagent.model import Accelerator
from nodeagent.pool.target import Backoff, refill_concurrency, shortfall


@pytest.mark.parametrize(
    ("target", "warm", "refilling", "wanted"), [(6, 0, 0, 6), (6, 5, 0, 1), (6, 3, 3, 0), (2, 5, 0, 0)]
)
def test_shortfall(target: int, warm: int, refilling: int, wanted: int) -> None:
    assert shortfall(target=target, warm=warm, refilling=refilling) == wanted


@pytest.mark.parametrize(
    ("configured", "cpus", "accelerator", "slots"),
    [
        (3, 64, Accelerator.KVM, 3),
        (0, 2, Accelerator.KVM, 4),
        (0, 48, Accelerator.KVM, 32),
        (0, 1000, Accelerator.KVM, 256),
        (0, 2, Accelerator.TCG, 2),
    ],
)
def test_concurrency(configured: int, cpus: int, accelerator: Accelerator, slots: int) -> None:
    assert refill_concurrency(configured, cpus, accelerator) == slots


def test_backoff_waits_after_eight_and_doubles_to_thirty_seconds() -> None:
    state, pauses = Backoff(), []
    for _ in range(18):
        state = state.failed()
        pauses.append(state.pause_s)
    assert pauses[:7] == [0.0] * 7
    assert pauses[7:11] == [0.25, 0.5, 1.0, 2.0]
    assert pauses[-1] == 30.0
    assert state.succeeded().pause_s == 0.0
