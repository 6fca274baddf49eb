"""Metrics of discovery."""

from __future__ import annotations

from prometheus_client import Counter, Gauge

from kvindexd.telemetry import Metrics


class DiscoveryMetrics:
    """By source, each named by the configuration."""

    def __init__(self, metrics: Metrics) -> None:
        registry = metrics.registry
        self.errors = Counter(
            "discovery_errors",
            "Failed looks, and found things that cannot be used as workers",
            ("source",),
            namespace="kvindexd",
            registry=registry,
        )
        self.workers = Gauge(
            "discovery_workers",
            "Worker ranks that a source finds now",
            ("source",),
            namespace="kvindexd",
            registry=registry,
        )
        self.conflicts = Gauge(
            "discovery_conflicts",
            "Worker ranks that a source finds and that belong to another one",
            ("source",),
            namespace="kvindexd",
            registry=registry,
        )
        self.changes = Counter(
            "discovery_changes",
            "Registrations changed: added, updated, replaced, removed, draining or undrained",
            ("source", "change"),
            namespace="kvindexd",
            registry=registry,
        )

    def show(self, source: str, workers: int, conflicts: int) -> None:
        """Set the gauges of a source; its error counter is there from then on."""
        self.errors.labels(source)
        self.workers.labels(source).set(workers)
        self.conflicts.labels(source).set(conflicts)

    def forget(self, source: str) -> None:
        """A source is no more."""
        for metric in (self.errors, self.workers, self.conflicts, self.changes):
            metric.remove_by_labels({"source": source})
