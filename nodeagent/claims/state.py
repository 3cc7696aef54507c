"""The life of a sandbox as a pure function: (state, event) → state.

What is not in the table is not allowed, and says which states are.
"""

from __future__ import annotations

import enum

from cocoon.types.v1 import sandbox_pb2
from cocoon_rpc.errors import SandboxStateConflictError


class State(enum.Enum):
    """Where a sandbox is in its life; values are the contract's."""

    RUNNING = sandbox_pb2.SANDBOX_STATE_RUNNING
    FAILED = sandbox_pb2.SANDBOX_STATE_FAILED
    GONE = sandbox_pb2.SANDBOX_STATE_GONE


class Event(enum.Enum):
    """What can happen to it."""

    CALL = "call"
    """A guest call arrives."""
    DIE = "die"
    """Its machine ended unasked."""
    RELEASE = "release"
    EXPIRE = "expire"
    STOP = "stop"
    """The node stops."""


_TABLE = {
    (State.RUNNING, Event.CALL): State.RUNNING,
    (State.RUNNING, Event.DIE): State.FAILED,
    **{(state, event): State.GONE for state in State for event in (Event.RELEASE, Event.EXPIRE, Event.STOP)},
}


def step(sandbox: str, state: State, event: Event) -> State:
    """Returns the state after an event.

    Raises:
        SandboxStateConflictError: the event is not allowed in this state.
    """
    try:
        return _TABLE[state, event]
    except KeyError:
        allowed = [s.value for s in State if (s, event) in _TABLE]
        raise SandboxStateConflictError(sandbox=sandbox, state=state.value, allowed_states=allowed) from None
