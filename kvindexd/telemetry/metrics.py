"""Every metric of the daemon, on one registry."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
)

from kvindexd._version import __version__

# When each series began, as a series of its own: twice as many, which nobody here asks for.
disable_created_metrics()  # type: ignore[no-untyped-call]  # has no annotations


class BoundedLabel:
    """Folds the values of a label that comes off the wire: the first `limit`, then "other"."""

    def __init__(self, limit: int = 50) -> None:
        self._limit = limit
        self._seen: set[str] = set()

    def __call__(self, value: str) -> str:
        """The value itself, or "other" when `limit` distinct ones came before it."""
        if value in self._seen:
            return value
        if len(self._seen) >= self._limit:
            return "other"
        self._seen.add(value)
        return value


WORKER_STATES = ("unknown", "live", "syncing", "stale", "draining")

_FAST_SECONDS = (
    5e-5, 1e-4, 2e-4, 3e-4, 5e-4, 1e-3, 2e-3, 3e-3, 5e-3, 1e-2, 2e-2, 5e-2, 0.1, 0.25, 0.5, 1, 2.5,
)  # fmt: skip
_LAG_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_PICK_SECONDS = (0.0005, 0.001, 0.002, 0.003, 0.005, 0.01, 0.02, 0.03, 0.05, 0.1, 0.25, 0.5, 1, 2.5)
_LOOP_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)
_RATIOS = (0.0, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99, 1.0)
_TOKEN_ERRORS = (-16384, -4096, -1024, -256, -64, -16, -1, 0, 15, 63, 255, 1023, 4095, 16383)


class Metrics:
    """Every metric of the daemon, on a registry that the caller owns.

    Attributes are plain prometheus_client objects. Labels named `type`, `kind` or `reason` carry
    text off the wire: count those through `event`, `filtered` and `dropped`, which bound it.
    """

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        self.registry = registry if registry is not None else CollectorRegistry()
        self._types = BoundedLabel()
        self._kinds = BoundedLabel()
        self._reasons = BoundedLabel()
        self._by_worker: list[Counter | Gauge | Histogram] = []
        self._define_ingest()
        self._define_workers()
        self._define_store()
        self._define_replica()
        self._define_scoring()
        self._define_picking()
        self._define_front_ends()
        self._define_process()

    def _counter(self, name: str, text: str, labels: tuple[str, ...] = ()) -> Counter:
        made = Counter(name, text, labels, namespace="kvindexd", registry=self.registry)
        self._note(made, labels)
        return made

    def _gauge(self, name: str, text: str, labels: tuple[str, ...] = ()) -> Gauge:
        made = Gauge(name, text, labels, namespace="kvindexd", registry=self.registry)
        self._note(made, labels)
        return made

    def _histogram(
        self, name: str, text: str, buckets: tuple[float, ...], labels: tuple[str, ...] = ()
    ) -> Histogram:
        made = Histogram(
            name, text, labels, namespace="kvindexd", buckets=buckets, registry=self.registry
        )
        self._note(made, labels)
        return made

    def _note(self, metric: Counter | Gauge | Histogram, labels: tuple[str, ...]) -> None:
        if "worker" in labels:
            self._by_worker.append(metric)

    def _define_ingest(self) -> None:
        counter, gauge, worker = self._counter, self._gauge, ("worker",)
        self.events_total = counter("events", "Events decoded", ("worker", "type"))
        self.events_filtered_total = counter(
            "events_filtered", "Events of KV-cache groups that are not indexed", ("worker", "kind")
        )
        self.events_dropped_total = counter(
            "events_dropped", "Events or frames not applied, by reason", ("worker", "reason")
        )
        self.decode_errors_total = counter("decode_errors", "Events not understood", worker)
        self.orphans_total = counter("orphans", "Stores whose parent was not known yet", worker)
        self.seq_gaps_total = counter("seq_gaps", "Gaps in the event sequence", worker)
        self.lost_batches_total = counter(
            "lost_batches", "Batches that no replay brought back", worker
        )
        self.replays_total = counter("replays", "Replays that ended", ("worker", "outcome"))
        self.engine_restarts_total = counter("engine_restarts", "Engine restarts seen", worker)
        self.resyncs_total = counter(
            "resyncs", "Times that a worker was forgotten and read anew because asked to", worker
        )
        self.link_events_total = counter(
            "link_events", "What happened to the connection to an engine", ("worker", "event")
        )
        self.leases_lost_total = counter(
            "leases_lost", "Times that a worker's ingester stepped down", ("worker", "why")
        )
        self.leases_held = gauge("leases_held", "Workers whose lease this process holds")
        self.store_rewrites_total = counter(
            "store_rewrites", "Times that a worker was written anew: the store had lost it", worker
        )
        self.internal_errors_total = counter(
            "internal_errors", "Faults of ours that cost a worker its claims or a restart", worker
        )
        self._of_ingest = (
            self.decode_errors_total,
            self.orphans_total,
            self.seq_gaps_total,
            self.lost_batches_total,
            self.engine_restarts_total,
            self.resyncs_total,
            self.store_rewrites_total,
            self.internal_errors_total,
        )

    def _define_workers(self) -> None:
        gauge, worker = self._gauge, ("worker",)
        self.worker_info = gauge(
            "worker_info",
            "1; what the worker is registered as",
            ("worker", "model", "namespace", "role", "engine"),
        )
        self.worker_state = gauge(
            "worker_state", "1 for the state that the worker is in", ("worker", "state")
        )
        self.worker_staleness_seconds = gauge(
            "worker_staleness_seconds", "Since the last applied batch or heartbeat", worker
        )
        self.worker_apply_lag_seconds = gauge(
            "worker_apply_lag_seconds", "apply_lag_seconds of the worker's last batch", worker
        )
        self.blocks = gauge("blocks", "Blocks held", ("worker", "tier"))
        self.worker_silent = gauge("worker_silent", "1 = unheard for ingest.event_grace", worker)
        text = "1 when a worker stores blocks and none is admitted"
        self.worker_nothing_indexed = gauge("worker_nothing_indexed", text, worker)
        self.worker_drifting = gauge(
            "worker_drifting",
            "1 while what a worker reuses differs from what is predicted",
            worker,
        )

    def _define_store(self) -> None:
        self.redis_latency_seconds = self._histogram(
            "redis_latency_seconds", "Time of a Redis call with its retries", _FAST_SECONDS, ("op",)
        )
        self.redis_errors_total = self._counter("redis_errors", "Failed Redis calls", ("op",))
        self.redis_connections_opened_total = self._counter(
            "redis_connections_opened", "Connections to Redis opened"
        )
        self.redis_up = self._gauge("redis_up", "1 while Redis answers")
        self.redis_memory_bytes = self._gauge(
            "redis_memory_bytes", "Memory that the server of a shard uses", ("shard",)
        )
        self.redis_memory_limit_bytes = self._gauge(
            "redis_memory_limit_bytes", "maxmemory of the server of a shard; 0 = none", ("shard",)
        )

    def _define_replica(self) -> None:
        self.apply_lag_seconds = self._histogram(
            "apply_lag_seconds", "Engine timestamp to visible in the replica", _LAG_SECONDS
        )
        self.replica_revision_lag = self._gauge(
            "replica_revision_lag", "Batches in the store that the replica has yet to apply"
        )
        self.replica_faults_total = self._counter(
            "replica_faults", "What the replica had to load anew, refuse or leave out", ("kind",)
        )
        self.ready = self._gauge("ready", "1 when /readyz says so")
        self.index_blocks = self._gauge("index_blocks", "Distinct blocks in the replica")
        self.index_entries = self._gauge(
            "index_entries", "Block and holder pairs in the replica, per tier and group"
        )
        self.index_bytes = self._gauge("index_bytes", "Memory of the replica's tables")

    def _define_scoring(self) -> None:
        self.score_requests_total = self._counter(
            "score_requests", "Scoring calls, by gRPC status code", ("code",)
        )
        self.score_latency_seconds = self._histogram(
            "score_latency_seconds", "Time to answer a scoring call", _FAST_SECONDS
        )
        self.matched_ratio = self._histogram(
            "matched_ratio", "Best worker's reusable tokens over prompt tokens", _RATIOS
        )
        self.tokenizer_failures_total = self._counter(
            "tokenizer_failures", "Prompts that a tokenizer could not be used for", ("model",)
        )

    def _define_picking(self) -> None:
        counter, worker = self._counter, ("worker",)
        self.picks_total = counter("picks", "Requests sent to a worker", worker)
        self.picked_prompt_tokens_total = counter(
            "picked_prompt_tokens", "Prompt tokens of the requests sent to a worker", worker
        )
        self.picked_reusable_tokens_total = counter(
            "picked_reusable_tokens", "Of these, tokens that it was expected to reuse", worker
        )
        self.predicted_vs_actual_tokens = self._histogram(
            "predicted_vs_actual_tokens",
            "Reusable tokens predicted minus cached tokens that the engine reported",
            _TOKEN_ERRORS,
            worker,
        )
        self.completed_prompt_tokens_total = counter(
            "completed_prompt_tokens", "Prompt tokens of requests that an engine reported", worker
        )
        self.completed_predicted_tokens_total = counter(
            "completed_predicted_tokens", "Of these, tokens that were predicted as reused", worker
        )
        self.completed_cached_tokens_total = counter(
            "completed_cached_tokens", "Of these, tokens that the engine did reuse", worker
        )
        self.completions_total = counter(
            "completions", "Requests reported as ended, by what that did", ("outcome",)
        )
        self.predictions_total = counter(
            "predictions", "Predicted blocks, by what became of them", ("outcome",)
        )
        self.requests_in_flight = self._gauge(
            "requests_in_flight", "Requests picked by this scorer that have not ended"
        )
        self.leases_ended_total = counter(
            "leases_ended",
            "Requests that were never reported as ended, by what let them go",
            ("why",),
        )

    def _define_front_ends(self) -> None:
        self.ext_proc_requests_total = self._counter(
            "ext_proc_requests", "Requests through Envoy's external processor", ("outcome",)
        )
        self.spans_total = self._counter(
            "spans",
            "Spans of traces: recorded, exported or failed; the rest waits, or was dropped",
            ("outcome",),
        )
        self.ext_proc_served_total = self._counter(
            "ext_proc_served",
            "Requests by who served them: the picked worker, a fallback, or another",
            ("how",),
        )
        self.ext_proc_pick_seconds = self._histogram(
            "ext_proc_pick_seconds", "Time from the last needed message to the pick", _PICK_SECONDS
        )

    def _define_process(self) -> None:
        self._gauge("build_info", "Version of the daemon", ("version",)).labels(__version__).set(1)
        self.event_loop_lag_seconds = self._histogram(
            "event_loop_lag_seconds", "By how much a timer of the event loop is late", _LOOP_SECONDS
        )
        ProcessCollector(registry=self.registry)

    def count_spans(self, outcome: str, count: int) -> None:
        """Count spans of traces; from any thread."""
        self.spans_total.labels(outcome).inc(count)

    def event(self, worker: str, type: str, count: int = 1) -> None:
        """Count decoded events of a type; the 51st distinct type and later count as "other"."""
        self.events_total.labels(worker, self._types(type)).inc(count)

    def filtered(self, worker: str, kind: str, count: int = 1) -> None:
        """Count events of a KV-cache group kind that is not indexed; kinds are bounded likewise."""
        self.events_filtered_total.labels(worker, self._kinds(kind)).inc(count)

    def dropped(self, worker: str, reason: str, count: int = 1) -> None:
        """Count events that were not applied; reasons are bounded likewise."""
        self.events_dropped_total.labels(worker, self._reasons(reason)).inc(count)

    def ingests(self, worker: str) -> None:
        """Start a worker's counters at 0, so that the first thing counted shows as an increase."""
        for metric in self._of_ingest:
            metric.labels(worker)
        self.events_dropped_total.labels(worker, "store_full")

    def set_worker_state(self, worker: str, state: str) -> None:
        """Mark one of `WORKER_STATES` (any case) as the worker's state, and no other."""
        wanted = state.lower()
        if wanted not in WORKER_STATES:
            raise ValueError(f"worker state {state!r}: expected one of {', '.join(WORKER_STATES)}")
        for name in WORKER_STATES:
            self.worker_state.labels(worker, name).set(name == wanted)

    @contextmanager
    def redis_call(self, op: str) -> Iterator[None]:
        """Time a Redis call, and count it as failed when it raises (cancellation aside)."""
        start = time.perf_counter()
        try:
            yield
        except Exception:
            self.redis_errors_total.labels(op).inc()
            raise
        finally:
            self.redis_latency_seconds.labels(op).observe(time.perf_counter() - start)

    def forget_worker(self, worker: str) -> None:
        """Drop every series of a deregistered worker."""
        for metric in self._by_worker:
            metric.remove_by_labels({"worker": worker})
