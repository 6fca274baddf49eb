"""What metrics say of the store and of a worker's first events."""

from __future__ import annotations

from functools import partial

import pytest
import servers
from prometheus_client import CollectorRegistry

from kvindexd.gauges import observe_store
from kvindexd.ingest.counting import RankCounters
from kvindexd.store import Store, StoreOptions
from kvindexd.store.errors import StoreUnavailable
from kvindexd.telemetry import Metrics


def value(metrics: Metrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(f"kvindexd_{name}", labels)


async def test_reconnects_outages_and_memory_are_seen() -> None:
    metrics = Metrics(CollectorRegistry())
    options = StoreOptions(timeout=0.3, connect_timeout=0.3, deadline=0.5)
    with servers.server(servers.VALKEY) as server:
        store = Store(server.url, options, partial(observe_store, metrics))
        await store.open()
        opened = value(metrics, "redis_connections_opened_total")
        assert opened == value(metrics, "redis_latency_seconds_count", op="connect") > 0
        assert value(metrics, "redis_up") == 1
        assert value(metrics, "redis_errors_total", op="ping") is None
        await store.ping()
        assert value(metrics, "redis_errors_total", op="ping") == 0
        assert value(metrics, "redis_connections_opened_total") == opened

        server("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
        await store.ping()
        assert value(metrics, "redis_connections_opened_total") == opened + 1

        server("CONFIG", "SET", "maxmemory", "100mb")
        used, limit = (await store.memory())[0]
        assert limit == 100 << 20
        assert 100_000 < used < limit
    with pytest.raises(StoreUnavailable):
        await store.ping()
    assert value(metrics, "redis_up") == 0
    assert value(metrics, "redis_errors_total", op="ping") == 1
    assert value(metrics, "redis_errors_total", op="connect") > 0
    assert value(metrics, "redis_connections_opened_total") == opened + 1
    await store.close()


def test_a_cancelled_call_is_no_error_of_the_store() -> None:
    metrics = Metrics(CollectorRegistry())
    observe_store(metrics, "apply", 0.1, "")
    observe_store(metrics, "apply", 0.1, "cancelled")
    assert value(metrics, "redis_errors_total", op="apply") == 0
    observe_store(metrics, "apply", 0.1, "StoreFull")
    assert value(metrics, "redis_errors_total", op="apply") == 1
    assert value(metrics, "redis_up") == 1  # it answered


def test_a_workers_first_loss_is_an_increase() -> None:
    metrics = Metrics(CollectorRegistry())
    counters = RankCounters("w#0", metrics)
    for name in ("seq_gaps", "lost_batches", "engine_restarts", "decode_errors", "orphans"):
        assert value(metrics, f"{name}_total", worker="w#0") == 0, name
    for outcome in ("complete", "timeout", "failed"):
        assert value(metrics, "replays_total", worker="w#0", outcome=outcome) == 0
    assert value(metrics, "events_dropped_total", worker="w#0", reason="store_full") == 0
    counters.add("lost_batches", 3)
    counters.add("stepped_down:deposed")
    counters.add("link:connected")
    assert value(metrics, "lost_batches_total", worker="w#0") == 3
    assert value(metrics, "leases_lost_total", worker="w#0", why="deposed") == 1
    assert value(metrics, "link_events_total", worker="w#0", event="connected") == 1
