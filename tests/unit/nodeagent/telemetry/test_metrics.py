"""Names, types and labels of the metrics are a contract; values are read when asked for."""

from __future__ import annotations

import threading
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from nodeagent.telemetry.metrics import Metrics

GOLDEN = Path(__file__).parents[4] / "golden_fixtures" / "metrics.txt"


def filled() -> Metrics:
    """Returns metrics with one sample of each."""
    metrics = Metrics()
    metrics.claim_seconds.labels("warm").observe(0.001)
    metrics.rpc_seconds.labels("/a/B", "OK").observe(0.001)
    metrics.claims_ended.labels("released").inc()
    metrics.provision_failures.labels("boot").inc()
    metrics.machine_deaths.inc()
    state: dict[str, Any] = {"claimed": 2, "at_capacity": True, "pools": [(("rt", "none", "small"), 1, 3)]}
    metrics.watch(lambda: state)
    return metrics


def test_names_types_and_labels_are_the_golden_list() -> None:
    lines = []
    for family in filled().registry.collect():
        labels = sorted({label for s in family.samples for label in s.labels} - {"le"})
        lines.append(f"{family.name} {family.type} {','.join(labels)}".rstrip())
        assert family.documentation.endswith(".")
    assert sorted(lines) == GOLDEN.read_text().splitlines()


def test_gauges_say_what_the_node_holds_now() -> None:
    read = filled().registry.get_sample_value
    labels = {"template": "rt", "net": "none", "size": "small"}
    assert (read("cocoon_claimed"), read("cocoon_at_capacity")) == (2, 1)
    assert (read("cocoon_pool_warm", labels), read("cocoon_pool_target", labels)) == (1, 3)


def test_watching_reads_nothing_yet() -> None:
    def fail() -> dict[str, Any]:
        raise AssertionError("read too early")

    Metrics().watch(fail)


def test_the_port_serves_and_stops() -> None:
    before = threading.active_count()
    port, stop = filled().serve("127.0.0.1", 0)
    url = f"http://127.0.0.1:{port}/metrics"
    with urllib.request.urlopen(url, timeout=5) as answer:
        assert b"cocoon_claim_seconds_bucket" in answer.read()
    stop()
    assert threading.active_count() == before
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(url, timeout=5)
