"""The life of a sandbox, as a table."""

from __future__ import annotations

import pytest

from cocoon.types.v1 import error_details_pb2
from cocoon_rpc.errors import SandboxStateConflictError
from nodeagent.claims.state import Event, State, step

ENDS = {Event.RELEASE, Event.EXPIRE, Event.STOP}


@pytest.mark.parametrize("state", list(State))
@pytest.mark.parametrize("event", list(Event))
def test_every_pair_has_an_answer(state: State, event: Event) -> None:
    if event in ENDS:
        assert step("s", state, event) is State.GONE
    elif state is State.RUNNING:
        assert step("s", state, event) is (State.FAILED if event is Event.DIE else State.RUNNING)
    else:
        with pytest.raises(SandboxStateConflictError) as caught:
            step("sandboxes/x", state, event)
        detail = caught.value.detail
        assert isinstance(detail, error_details_pb2.SandboxStateConflict)
        assert detail.state == state.value
        assert list(detail.allowed_states) == [State.RUNNING.value]
