"""Wait statuses in the contract's words, and signal names back."""

from __future__ import annotations

import signal

import pytest

from cocoon.guest.v1 import process_service_pb2 as pb
from cocoon_rpc.errors import InvalidFieldError
from guestd.process.exit import exit_message, signal_number


@pytest.mark.parametrize("code", [0, 1, 255])
def test_exit_code_is_the_status(code: int) -> None:
    found = exit_message(code, timed_out=False)
    assert found == pb.Exit(code=code, reason=pb.EXIT_REASON_EXITED)
    assert found.WhichOneof("status") == "code"


@pytest.mark.parametrize(
    ("status", "name"),
    [(-9, "SIGKILL"), (-6, "SIGABRT"), (-34, "SIGRTMIN"), (-40, "SIGRTMIN+6"), (-64, "SIGRTMAX")],
)
def test_exit_signal_has_its_name(status: int, name: str) -> None:
    assert exit_message(status, timed_out=False) == pb.Exit(signal=name, reason=pb.EXIT_REASON_EXITED)


def test_exit_after_the_timeout_says_so() -> None:
    assert exit_message(-9, timed_out=True) == pb.Exit(signal="SIGKILL", reason=pb.EXIT_REASON_TIMEOUT)


@pytest.mark.parametrize("member", signal.Signals)
def test_signal_number_takes_every_name_with_and_without_prefix(member: signal.Signals) -> None:
    assert signal_number(member.name) == member.value
    assert signal_number(member.name.removeprefix("SIG")) == member.value


@pytest.mark.parametrize("name", ["", "SIG", "sigterm", "9", "SIGSIGTERM", "TERM ", "_DFL"])
def test_signal_number_refuses_what_is_no_name(name: str) -> None:
    with pytest.raises(InvalidFieldError) as caught:
        signal_number(name)
    assert caught.value.metadata["field"] == "signal.signal"
