"""Prometheus metrics of a node, on a port of their own.

Labels come from closed sets only: never a sandbox id, never a caller's text.
`golden_fixtures/metrics.txt` lists every name, type and label.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import prometheus_client
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

# From 50 microseconds (a warm claim's inside) to a minute (a cold boot under emulation).
_SECONDS = (
    0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05,
    0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60,
)  # fmt: skip


class Metrics:
    """The node's counters and histograms, in a registry of their own."""

    def __init__(self) -> None:
        """Makes the metrics, all at zero."""
        self.registry = prometheus_client.CollectorRegistry()
        self.claim_seconds = prometheus_client.Histogram(
            "cocoon_claim_seconds",
            "Time from receiving a claim to granting it. A rise in warm: the node is overloaded; "
            "many clone or cold: pools are too small.",
            ["tier"],
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.rpc_seconds = prometheus_client.Histogram(
            "cocoon_rpc_seconds",
            "Time in a call, by method and gRPC code. Streams count until they end.",
            ["rpc", "code"],
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.claims_ended = prometheus_client.Counter(
            "cocoon_claims_ended_total",
            "Claims that ended, by reason. A rise in lost or stopped: the node restarts.",
            ["reason"],
            registry=self.registry,
        )
        self.provision_failures = prometheus_client.Counter(
            "cocoon_provision_failures_total",
            "Machines that could not be made, by stage. Any rise wants a look at the log.",
            ["stage"],
            registry=self.registry,
        )
        self.machine_deaths = prometheus_client.Counter(
            "cocoon_machine_deaths_total",
            "Machines that ended unasked. Any rise wants a look at the log.",
            registry=self.registry,
        )

    def watch(self, state: Callable[[], dict[str, Any]]) -> None:
        """Adds gauges that read the node's state when scraped."""
        self.registry.register(_Gauges(state))

    def serve(self, host: str, port: int) -> tuple[int, Callable[[], None]]:
        """Serves `/metrics` from a thread; returns the bound port and how to stop it."""
        server, thread = prometheus_client.start_http_server(port, host, registry=self.registry)

        def stop() -> None:
            server.shutdown()
            server.server_close()
            thread.join()

        return server.server_port, stop


class _Gauges(Collector):
    """Reads state at scrape time, so that no gauge can drift from it."""

    def __init__(self, state: Callable[[], dict[str, Any]]) -> None:
        self._state = state

    def describe(self) -> Iterable[GaugeMetricFamily]:
        """Returns the families without samples: registering must not read state."""
        return self._families()

    def collect(self) -> Iterable[GaugeMetricFamily]:
        """Returns the families with what the node holds now."""
        families = self._families()
        claimed, capacity, warm, target = families
        state = self._state()
        claimed.add_metric([], state["claimed"])
        capacity.add_metric([], float(state["at_capacity"]))
        for labels, pool_warm, pool_target in state["pools"]:
            warm.add_metric(labels, pool_warm)
            target.add_metric(labels, pool_target)
        return families

    @staticmethod
    def _families() -> tuple[GaugeMetricFamily, ...]:
        labels = ["template", "net", "size"]
        return (
            GaugeMetricFamily("cocoon_claimed", "Live claims."),
            GaugeMetricFamily("cocoon_at_capacity", "1 while making machines is parked for lack of room."),
            GaugeMetricFamily("cocoon_pool_warm", "Machines ready to be claimed.", labels=labels),
            GaugeMetricFamily("cocoon_pool_target", "Machines the pool is to keep ready.", labels=labels),
        )
