"""How a program ended, in the contract's words."""

from __future__ import annotations

import signal

from cocoon.guest.v1 import process_service_pb2 as pb
from cocoon_rpc.errors import InvalidFieldError


def exit_message(status: int, *, timed_out: bool) -> pb.Exit:
    """Returns the Exit of a wait status as subprocess gives it (negative: a signal)."""
    reason = pb.EXIT_REASON_TIMEOUT if timed_out else pb.EXIT_REASON_EXITED
    if status < 0:
        return pb.Exit(signal=_name(-status), reason=reason)
    return pb.Exit(code=status, reason=reason)


def signal_number(name: str) -> int:
    """Returns the number of "SIGTERM" or "TERM". Raises: InvalidFieldError."""
    full = name if name.startswith("SIG") else "SIG" + name
    try:
        return signal.Signals[full].value
    except KeyError:
        raise InvalidFieldError(field="signal.signal", rule=f"{name!r} is no signal; e.g. SIGTERM") from None


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        # Real-time signals between SIGRTMIN and SIGRTMAX have no names of their own.
        return f"SIGRTMIN+{number - signal.SIGRTMIN}"
