"""Logs withhold secrets and tokens; metrics have the promised names and bounded labels."""

import asyncio
import io
import json
import logging
from collections.abc import AsyncIterator

import msgspec
import numpy as np
import pytest
import structlog
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from kvindexd.config import RedisConfig
from kvindexd.telemetry import (
    BoundedLabel,
    Metrics,
    MetricsServer,
    configure_logging,
    mask_secrets,
    redact,
)


@pytest.mark.parametrize(
    ("text", "masked"),
    [
        ("redis://:pa@ss@h:6379/0", "redis://:***@h:6379/0"),
        ("rediss://user:p/a,s@h", "rediss://user:***@h"),
        ("failed for redis://u:p@h, retrying", "failed for redis://u:***@h, retrying"),
        ("redis://h:6379/0?password=x&db=1", "redis://h:6379/0?password=***&db=1"),
        ("redis://h:6379/0", "redis://h:6379/0"),
        ("tcp://127.0.0.1:5557", "tcp://127.0.0.1:5557"),
    ],
)
def test_passwords_in_urls_are_masked(text: str, masked: str) -> None:
    assert mask_secrets(text) == masked


def test_redaction_reaches_into_values_and_withholds_tokens() -> None:
    event = redact(
        None,
        "info",
        {
            "event": "x",
            "redis": RedisConfig(url="redis://:s3cret@h"),
            "nested": {"urls": ["redis://:s3cret@h"], "redis_password": "s3cret"},
            "error": ValueError("redis://:s3cret@h"),
            "token_ids": [11, 12],
            "tokens": 2,
            "text": "private words",
        },
    )
    shown = json.dumps(event)
    assert "s3cret" not in shown
    assert "private" not in shown
    assert event["token_ids"] == "<2 withheld>"
    assert event["tokens"] == 2


@pytest.fixture
def log() -> AsyncIterator[io.StringIO]:
    root = logging.getLogger()
    before = root.handlers[:], root.level
    yield io.StringIO()
    structlog.reset_defaults()
    root.handlers[:], root.level = before[0], before[1]


def test_json_log_lines(log: io.StringIO) -> None:
    configure_logging("json", "info", log)
    structlog.get_logger().info("ready", grpc="127.0.0.1:1", lag=np.float64(0.5), n=np.int64(3))
    structlog.get_logger().debug("hidden")
    try:
        raise RuntimeError("cannot reach redis://:s3cret@h")
    except RuntimeError:
        logging.getLogger("some.library").exception("call to %s failed", "redis://:s3cret@h")
    first, second = (json.loads(line) for line in log.getvalue().splitlines())
    assert (first["event"], first["level"], first["lag"], first["n"]) == ("ready", "info", 0.5, 3)
    assert first["timestamp"].endswith("Z")
    assert second["event"] == "call to redis://:***@h failed"
    assert "RuntimeError" in second["exception"]
    assert "s3cret" not in log.getvalue()


@pytest.mark.filterwarnings("error")
def test_console_log_masks_exceptions_too(log: io.StringIO) -> None:
    configure_logging("console", "warning", log)
    try:
        raise RuntimeError("redis://:s3cret@h")
    except RuntimeError:
        structlog.get_logger().exception("failed")
    structlog.get_logger().info("hidden")
    assert "RuntimeError: redis://:***@h" in log.getvalue()
    assert "hidden" not in log.getvalue()


PROMISED = {
    "kvindexd_events_total": {"worker", "type"},
    "kvindexd_events_filtered_total": {"worker", "kind"},
    "kvindexd_events_dropped_total": {"worker", "reason"},
    "kvindexd_decode_errors_total": {"worker"},
    "kvindexd_blocks": {"worker", "tier"},
    "kvindexd_seq_gaps_total": {"worker"},
    "kvindexd_replays_total": {"worker", "outcome"},
    "kvindexd_engine_restarts_total": {"worker"},
    "kvindexd_apply_lag_seconds_count": set(),
    "kvindexd_redis_latency_seconds_count": {"op"},
    "kvindexd_redis_errors_total": {"op"},
    "kvindexd_score_requests_total": {"code"},
    "kvindexd_score_latency_seconds_count": set(),
    "kvindexd_matched_ratio_count": set(),
    "kvindexd_predicted_vs_actual_tokens_bucket": {"worker", "le"},
    "kvindexd_worker_state": {"worker", "state"},
    "kvindexd_replica_revision_lag": set(),
    "kvindexd_picks_total": {"worker"},
}


def _fill(metrics: Metrics, worker: str) -> None:
    metrics.event(worker, "BlockStored", 3)
    metrics.filtered(worker, "encoder_only_attention")
    metrics.dropped(worker, "duplicate")
    metrics.decode_errors_total.labels(worker).inc()
    metrics.blocks.labels(worker, "device").set(7)
    metrics.seq_gaps_total.labels(worker).inc()
    metrics.replays_total.labels(worker, "complete").inc()
    metrics.engine_restarts_total.labels(worker).inc()
    metrics.predicted_vs_actual_tokens.labels(worker).observe(-32)
    metrics.set_worker_state(worker, "LIVE")
    metrics.worker_nothing_indexed.labels(worker).set(0)
    metrics.picks_total.labels(worker).inc()
    with metrics.redis_call("write"):
        pass
    with pytest.raises(OSError, match="away"), metrics.redis_call("write"):
        raise OSError("away")
    metrics.score_requests_total.labels("OK").inc()


def _samples(body: str) -> dict[str, list[dict[str, str]]]:
    found: dict[str, list[dict[str, str]]] = {}
    for family in text_string_to_metric_families(body):
        for sample in family.samples:
            found.setdefault(sample.name, []).append(sample.labels)
    return found


@pytest.fixture
async def served() -> AsyncIterator[tuple[Metrics, list[str], int]]:
    metrics = Metrics(CollectorRegistry())
    why = [""]
    server = MetricsServer(metrics.registry, lambda: why[0], port=0)
    host, port = await server.start()
    assert host == "127.0.0.1"
    yield metrics, why, port
    await server.close()


async def _get(port: int, path: str, method: str = "GET") -> tuple[int, str]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"{method} {path} HTTP/1.1\r\nHost: x\r\nAccept: text/plain\r\n\r\n".encode())
    head, _, body = (await reader.read()).decode().partition("\r\n\r\n")
    writer.close()
    return int(head.split()[1]), body


async def test_metrics_page_has_every_promised_name(
    served: tuple[Metrics, list[str], int],
) -> None:
    metrics, _, port = served
    _fill(metrics, "w0#0")
    status, body = await _get(port, "/metrics")
    assert status == 200
    samples = _samples(body)
    missing = {name for name, labels in PROMISED.items() if set(samples[name][0]) != labels}
    assert not missing


async def test_forgotten_worker_leaves_no_series(served: tuple[Metrics, list[str], int]) -> None:
    metrics, _, port = served
    _fill(metrics, "w0#0")
    _fill(metrics, "w1#0")
    metrics.forget_worker("w0#0")
    body = (await _get(port, "/metrics"))[1]
    assert "w0#0" not in body
    assert "w1#0" in body


async def test_health_and_readiness(served: tuple[Metrics, list[str], int]) -> None:
    _, why, port = served
    assert await _get(port, "/healthz") == (200, "ok\n")
    assert (await _get(port, "/readyz"))[0] == 200
    why[0] = "the replica is 3 batches behind w0"
    assert await _get(port, "/readyz") == (503, "the replica is 3 batches behind w0\n")
    assert (await _get(port, "/healthz"))[0] == 200
    assert (await _get(port, "/nothing"))[0] == 404
    assert (await _get(port, "/metrics", "POST"))[0] == 405
    assert await _get(port, "/healthz", "HEAD") == (200, "")


async def test_bad_clients_do_no_harm(served: tuple[Metrics, list[str], int]) -> None:
    port = served[2]
    for rubbish in (b"", b"\x00\xff\r\n\r\n", b"GET /" + b"a" * 100_000):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(rubbish)
        writer.write_eof()
        await reader.read()
        writer.close()
    assert (await _get(port, "/healthz"))[0] == 200


async def test_taken_port_is_named(served: tuple[Metrics, list[str], int]) -> None:
    taken = served[2]
    with pytest.raises(OSError, match=rf"metrics: cannot listen on 127\.0\.0\.1:{taken}"):
        await MetricsServer(CollectorRegistry(), lambda: "", port=taken).start()


def test_labels_off_the_wire_are_bounded() -> None:
    metrics = Metrics()
    for i in range(60):
        metrics.event("w", f"Unknown{i}")
    values = {
        sample.labels["type"]: sample.value
        for family in metrics.events_total.collect()
        for sample in family.samples
        if sample.name.endswith("_total")
    }
    assert len(values) == 51
    assert values["other"] == 10


def test_bounded_label_keeps_early_values() -> None:
    fold = BoundedLabel(2)
    assert [fold(v) for v in ("a", "b", "c", "a")] == ["a", "b", "other", "a"]


def test_one_state_at_a_time() -> None:
    metrics = Metrics()
    metrics.set_worker_state("w", "LIVE")
    metrics.set_worker_state("w", "stale")
    on = [
        s.labels["state"] for f in metrics.worker_state.collect() for s in f.samples if s.value == 1
    ]
    assert on == ["stale"]
    with pytest.raises(ValueError, match="expected one of unknown, live"):
        metrics.set_worker_state("w", "fine")


def test_log_values_of_any_type_can_be_encoded(log: io.StringIO) -> None:
    class Pair(msgspec.Struct):
        left: bytes

    configure_logging("json", "info", log)
    structlog.get_logger().info("x", pair=Pair(b"\xff"), path={1: {2, 3}}, other=object())
    assert json.loads(log.getvalue())["pair"] == {"left": "b'\\xff'"}
