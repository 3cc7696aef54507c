"""Exec ids are remembered for ten minutes, and not beyond ten thousand."""

from __future__ import annotations

import pytest

from cocoon_rpc.errors import ExecIdReusedError
from guestd.process.seen import MOST, REMEMBER_S, SeenIds


class FakeClock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_seen_refuses_an_id_it_remembers() -> None:
    seen = SeenIds(FakeClock())
    seen.admit("a")
    seen.admit("b")
    with pytest.raises(ExecIdReusedError) as caught:
        seen.admit("a")
    assert caught.value.metadata["exec_id"] == "a"


def test_seen_forgets_an_id_after_ten_minutes() -> None:
    clock = FakeClock()
    seen = SeenIds(clock)
    seen.admit("a")
    clock.now += REMEMBER_S - 0.001
    with pytest.raises(ExecIdReusedError):
        seen.admit("a")
    clock.now += 0.001
    seen.admit("a")


def test_seen_refusal_does_not_lengthen_the_memory() -> None:
    clock = FakeClock()
    seen = SeenIds(clock)
    seen.admit("a")
    clock.now += REMEMBER_S / 2
    with pytest.raises(ExecIdReusedError):
        seen.admit("a")
    clock.now += REMEMBER_S / 2
    seen.admit("a")


def test_seen_takes_an_id_again_that_was_taken_back() -> None:
    seen = SeenIds(FakeClock())
    seen.admit("a")
    seen.forget("a")
    seen.forget("never seen")
    seen.admit("a")


def test_seen_is_bounded_and_drops_the_oldest() -> None:
    seen = SeenIds(FakeClock())
    for number in range(MOST + 1):
        seen.admit(str(number))
    assert len(seen._seen) == MOST
    seen.admit("0")
    with pytest.raises(ExecIdReusedError):
        seen.admit(str(MOST))
