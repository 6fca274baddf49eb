"""What is looked at now and then instead of being counted when it happens: gauges of the fleet,
the index, the store and the event loop."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable

from kvindexd.ingest.supervisor import Supervisor
from kvindexd.model import WorkerKey
from kvindexd.registration import Registration
from kvindexd.replica.replica import Replica
from kvindexd.replica.view import WorkerView
from kvindexd.rpc.codec import TIER_NAMES
from kvindexd.store import Store, StoreError
from kvindexd.telemetry import Metrics

INTERVAL = 2.0
_MEMORY_INTERVAL = 15.0
_LOOP_INTERVAL = 0.25
_YIELD_SECONDS = 0.002
"""How long one look may hold the event loop before others get a turn."""
_NEVER = 2**32 - 1
_CODES = (
    "OK",
    "INVALID_ARGUMENT",
    "NOT_FOUND",
    "FAILED_PRECONDITION",
    "RESOURCE_EXHAUSTED",
    "DEADLINE_EXCEEDED",
    "UNAVAILABLE",
)


def observe_store(metrics: Metrics, op: str, seconds: float, error: str) -> None:
    """One command to the store ended; `error`: "" or the name of what went wrong."""
    errors = metrics.redis_errors_total.labels(op)  # there from the first call on, at 0
    metrics.redis_latency_seconds.labels(op).observe(seconds)
    if error == "cancelled":
        return
    if error:
        errors.inc()
    if op == "connect":
        metrics.redis_connections_opened_total.inc(not error)
    else:
        metrics.redis_up.set(error not in ("unavailable", "StoreUnavailable"))


class Gauges:
    """Sets the gauges of one process; without a replica those of ingest alone."""

    def __init__(
        self,
        metrics: Metrics,
        store: Store,
        replica: Replica[Registration] | None,
        supervisor: Supervisor | None,
        not_ready: Callable[[], str],
    ) -> None:
        self._metrics = metrics
        self._store = store
        self._replica = replica
        self._supervisor = supervisor
        self._not_ready = not_ready
        self._known: dict[WorkerKey, tuple[str, ...]] = {}
        self._faults: Counter[str] = Counter()
        if replica is not None:
            for code in _CODES:  # there from the start, so that the first one is an increase
                metrics.score_requests_total.labels(code)

    async def run(self) -> None:
        """Until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._often(), name="gauges-fleet")
            tasks.create_task(self._memory(), name="gauges-memory")
            tasks.create_task(self._loop(), name="gauges-loop")

    async def _often(self) -> None:
        while True:
            self._metrics.ready.set(not self._not_ready())
            if self._supervisor is not None:
                self._metrics.leases_held.set(self._supervisor.owned)
            if self._replica is not None:
                await self._fleet(self._replica)
                self._index(self._replica)
            await asyncio.sleep(INTERVAL)

    async def _memory(self) -> None:
        while True:
            try:
                for shard, (used, limit) in (await self._store.memory()).items():
                    self._metrics.redis_memory_bytes.labels(str(shard)).set(used)
                    self._metrics.redis_memory_limit_bytes.labels(str(shard)).set(limit)
            except StoreError:
                pass  # counted as a failed call, and redis_up says so
            await asyncio.sleep(_MEMORY_INTERVAL)

    async def _loop(self) -> None:
        """A timer that is late by how long others kept the loop busy."""
        while True:
            due = time.perf_counter() + _LOOP_INTERVAL
            await asyncio.sleep(_LOOP_INTERVAL)
            self._metrics.event_loop_lag_seconds.observe(max(0.0, time.perf_counter() - due))

    # -- the replica --------------------------------------------------------------------------

    async def _fleet(self, replica: Replica[Registration]) -> None:
        """Per-rank gauges, as this process sees the fleet."""
        started = time.perf_counter()
        for view in replica.workers():
            if replica.worker(view.key) is view:  # not removed while others had their turn
                self._worker(view)
            if time.perf_counter() - started > _YIELD_SECONDS:
                await asyncio.sleep(0)
                started = time.perf_counter()
        for key in [k for k in self._known if replica.worker(k) is None]:
            del self._known[key]
            self._metrics.forget_worker(str(key))  # looks at every series there is
            await asyncio.sleep(0)

    def _worker(self, view: WorkerView[Registration]) -> None:
        metrics, name, now = self._metrics, str(view.key), time.monotonic()
        self._info(view, name)
        metrics.set_worker_state(name, view.judge(now).state)
        stale = view.staleness_ms(now)
        if stale < _NEVER:
            metrics.worker_staleness_seconds.labels(name).set(stale / 1000)
        if view.lag_ms >= 0:
            metrics.worker_apply_lag_seconds.labels(name).set(view.lag_ms / 1000)
        blocks = view.tier_blocks()
        for tier, tier_name in enumerate(TIER_NAMES):
            held = next((n for t, n in blocks.items() if t == tier), 0)
            metrics.blocks.labels(name, tier_name).set(held)

    def _info(self, view: WorkerView[Registration], name: str) -> None:
        r = view.registration
        labels = (name, r.model, r.namespace, r.role, r.engine)
        known = self._known.get(view.key)
        if known == labels:
            return
        if known is None:
            for metric in (self._metrics.picks_total, self._metrics.completed_prompt_tokens_total):
                metric.labels(name)
        else:
            self._metrics.worker_info.remove(*known)
        self._known[view.key] = labels
        self._metrics.worker_info.labels(*labels).set(1)

    def _index(self, replica: Replica[Registration]) -> None:
        metrics, stats = self._metrics, replica.stats()
        metrics.replica_revision_lag.set(replica.lag or 0)
        metrics.index_blocks.set(stats.blocks)
        metrics.index_entries.set(stats.entries)
        metrics.index_bytes.set(stats.bytes)
        now = Counter(stats.counters)
        for kind, n in (now - self._faults).items():
            metrics.replica_faults_total.labels(kind).inc(n)
        self._faults = now
