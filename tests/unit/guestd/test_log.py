"""One record, one line of JSON with the node's keys."""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime
from typing import Any

from guestd.log import JsonFormatter


def _format(
    message: str, *arguments: object, extra: dict[str, Any] | None = None, exc_info: Any = None
) -> Any:
    record = logging.getLogger("test").makeRecord(
        "test", logging.WARNING, __file__, 1, message, arguments, exc_info, extra=extra
    )
    record.created = 1_700_000_000.5
    line = JsonFormatter().format(record)
    assert "\n" not in line
    return json.loads(line)


def test_log_line_has_event_level_and_timestamp() -> None:
    assert _format("guestd_refused") == {
        "event": "guestd_refused",
        "level": "warning",
        "timestamp": datetime.fromtimestamp(1_700_000_000.5, UTC).isoformat(),
    }


def test_log_extras_become_keys() -> None:
    facts = _format("event", extra={"cause": "refused\nhere", "count": 3, "kind": {"a": [1]}})
    assert (facts["cause"], facts["count"], facts["kind"]) == ("refused\nhere", 3, {"a": [1]})


def test_log_extra_that_json_does_not_know_becomes_text() -> None:
    assert _format("event", extra={"cause": OSError("x"), "raw": b"\xff"}) == {
        **_format("event"),
        "cause": "x",
        "raw": "b'\\xff'",
    }


def test_log_arguments_of_foreign_records_are_in_the_event() -> None:
    assert _format("took %d s", 5)["event"] == "took 5 s"


def test_log_exception_is_in_the_line() -> None:
    try:
        raise ValueError("why")
    except ValueError:
        facts = _format("failed", exc_info=sys.exc_info())
    assert facts["exception"].endswith("ValueError: why")
