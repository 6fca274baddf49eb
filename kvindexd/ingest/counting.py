"""One rank's counters, in the store and in Prometheus alike."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from kvindexd.ingest.actions import ReplayOutcome
from kvindexd.ingest.link import LinkEvent
from kvindexd.telemetry import Metrics
from kvindexd.wire.events import AllBlocksCleared, Batch, BlockRemoved, BlockStored

_BY_NAME = {
    "gaps": "seq_gaps_total",
    "lost_batches": "lost_batches_total",
    "restarts": "engine_restarts_total",
    "resyncs": "resyncs_total",
    "orphans": "orphans_total",
    "rewrites": "store_rewrites_total",
    "internal_errors": "internal_errors_total",
}


class RankCounters:
    """Counts by name. What `take` returns goes into the store with the next write; Prometheus is
    told at once. Names with a colon are families: `dropped:<reason>`, `filtered:<kind>`,
    `event:<type>`, `replay:<outcome>`, `link:<what happened>`, `stepped_down:<why>`,
    `tag:<unknown event>`."""

    def __init__(self, worker: str, metrics: Metrics) -> None:
        self._worker = worker
        self._metrics = metrics
        self._fresh: Counter[str] = Counter()
        self.total: Counter[str] = Counter()
        """Since this process took the rank over."""
        metrics.ingests(worker)
        for outcome in ReplayOutcome:
            metrics.replays_total.labels(worker, outcome.value)
        for event in LinkEvent:
            metrics.link_events_total.labels(worker, event.value)

    def add(self, name: str, n: int = 1) -> None:
        """Count n more."""
        self._fresh[name] += n
        self.total[name] += n
        family, _, label = name.partition(":")
        metrics, worker = self._metrics, self._worker
        if family == "dropped":
            metrics.dropped(worker, label, n)
        elif family == "filtered":
            metrics.filtered(worker, label, n)
        elif family == "event":
            metrics.event(worker, label, n)
        elif family == "replay":
            metrics.replays_total.labels(worker, label).inc(n)
        elif family == "link":
            metrics.link_events_total.labels(worker, label).inc(n)
        elif family == "stepped_down":
            metrics.leases_lost_total.labels(worker, label).inc(n)
        elif name in _BY_NAME:
            getattr(metrics, _BY_NAME[name]).labels(worker).inc(n)

    def add_all(self, counts: Mapping[str, int]) -> None:
        """Count everything in a mapping."""
        for name, n in counts.items():
            self.add(name, n)

    def batch(self, batch: Batch) -> None:
        """Count a decoded batch's events by type; undecodable ones are decode errors."""
        types: Counter[str] = Counter()
        for event in batch.events:
            if isinstance(event, BlockStored):
                types["BlockStored"] += 1
            elif isinstance(event, BlockRemoved):
                types["BlockRemoved"] += 1
            elif isinstance(event, AllBlocksCleared):
                types["AllBlocksCleared"] += 1
            else:
                self.decode_error()
        for name, n in types.items():
            self.add(f"event:{name}", n)

    def decode_error(self) -> None:
        """Count one payload or event that was not understood."""
        self.add("decode_errors")
        self._metrics.decode_errors_total.labels(self._worker).inc()

    def take(self) -> dict[str, int]:
        """What was counted since the last call."""
        fresh = dict(self._fresh)
        self._fresh.clear()
        return fresh

    def give_back(self, counts: Mapping[str, int]) -> None:
        """Return counts that could not be written."""
        for name, n in counts.items():
            self._fresh[name] += n
