"""Logs, metrics, and the small HTTP server that shows them. No secret and no token id passes."""

from __future__ import annotations

import asyncio
import enum
import logging
import re
import sys
import time
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager, suppress
from typing import Any, Literal, TextIO

import msgspec
import numpy as np
import structlog
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.exposition import choose_encoder

from kvindexd._version import __version__

_USERINFO = re.compile(r"([a-zA-Z][a-zA-Z0-9+.\-]*://[^\s:/@\"']*):[^\s\"']*@")
_QUERY_SECRET = re.compile(r"([?&](?:password|token|secret)=)[^&\s\"']*", re.IGNORECASE)
_SECRET_KEY = re.compile(r"(^|_)(password|secret|authorization|credential)s?$", re.IGNORECASE)
_CONTENT_KEYS = frozenset(
    {"token_ids", "tokens", "lookahead_token_ids", "prompt", "text", "openai_body"}
)
_SCALARS = (type(None), bool, int, float)
_WITHHELD_TYPES = (str, bytes, bytearray, list, tuple, dict)


def mask_secrets(text: str) -> str:
    """Replace passwords in URLs by `***`. Masks too much rather than too little."""
    return _QUERY_SECRET.sub(r"\1***", _USERINFO.sub(r"\1:***@", text))


def redact(
    _logger: object, _method: str, event: MutableMapping[str, Any]
) -> MutableMapping[str, Any]:
    """The structlog processor that keeps secrets, prompts and token ids out of the log."""
    for key, value in event.items():
        if key != "_record":  # the standard library's own record; removed before rendering
            event[key] = _redact_value(key, value)
    return event


def _redact_value(key: str, value: object) -> object:
    if _SECRET_KEY.search(key) and value:
        return "***"
    if key in _CONTENT_KEYS and isinstance(value, _WITHHELD_TYPES):
        return f"<{len(value)} withheld>"
    if isinstance(value, str) and not isinstance(value, enum.Enum):
        return mask_secrets(value)
    if isinstance(value, dict):
        return {str(k): _redact_value(str(k), v) for k, v in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_redact_value("", v) for v in value]
    if isinstance(value, msgspec.Struct):
        return {k: _redact_value(k, v) for k, v in msgspec.structs.asdict(value).items()}
    return _redact_scalar(value)


def _redact_scalar(value: object) -> object:
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, enum.Enum):
        return value.name
    return value if type(value) in _SCALARS else mask_secrets(repr(value))


def _encode_json(event: object, **_: object) -> str:
    return msgspec.json.encode(event).decode()


def configure_logging(
    format: Literal["json", "console"] = "json",
    level: Literal["debug", "info", "warning", "error"] = "info",
    stream: TextIO | None = None,
) -> None:
    """Send structlog and the standard library's logging to `stream` (default: standard error).

    One JSON object per line, or aligned text for people; libraries' records take the same way,
    so that an error inside one of them is neither lost nor unmasked.
    """
    out = stream or sys.stderr
    shared: list[Any] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.StackInfoRenderer(),
    ]
    # Exceptions become text before `redact`, so that what they quote is masked as well.
    shared += [structlog.processors.format_exc_info, redact]
    last: Any = structlog.processors.JSONRenderer(serializer=_encode_json)
    if format == "console":
        last = structlog.dev.ConsoleRenderer(
            colors=out.isatty(), exception_formatter=structlog.dev.plain_traceback
        )
    number = logging.getLevelNamesMapping()[level.upper()]
    structlog.configure(
        processors=[*shared, last],
        wrapper_class=structlog.make_filtering_bound_logger(number),
        logger_factory=structlog.WriteLoggerFactory(file=out),
        cache_logger_on_first_use=False,
    )
    handler = logging.StreamHandler(out)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, last],
        )
    )
    logging.basicConfig(handlers=[handler], level=number, force=True)


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
        self._define_store()
        self._define_serving()
        self._gauge("build_info", "Version of the daemon", ("version",)).labels(__version__).set(1)

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
            "events_dropped", "Events not applied, by reason", ("worker", "reason")
        )
        self.decode_errors_total = counter("decode_errors", "Events not understood", worker)
        self.blocks = gauge("blocks", "Blocks held", ("worker", "tier"))
        self.seq_gaps_total = counter("seq_gaps", "Gaps in the event sequence", worker)
        self.replays_total = counter("replays", "Replays asked for", ("worker", "outcome"))
        self.engine_restarts_total = counter("engine_restarts", "Engine restarts seen", worker)
        self.worker_state = gauge(
            "worker_state", "1 for the state that the worker is in", ("worker", "state")
        )
        self.worker_silent = gauge("worker_silent", "1 = unheard for ingest.event_grace", worker)
        text = "1 when a worker stores blocks and none is admitted"
        self.worker_nothing_indexed = gauge("worker_nothing_indexed", text, worker)

    def _define_store(self) -> None:
        self.apply_lag_seconds = self._histogram(
            "apply_lag_seconds", "Engine timestamp to visible in the replica", _LAG_SECONDS
        )
        self.redis_latency_seconds = self._histogram(
            "redis_latency_seconds", "Time of a Redis call", _FAST_SECONDS, ("op",)
        )
        self.redis_errors_total = self._counter("redis_errors", "Failed Redis calls", ("op",))
        self.replica_revision_lag = self._gauge(
            "replica_revision_lag", "Batches in the store that the replica has yet to apply"
        )

    def _define_serving(self) -> None:
        self.score_requests_total = self._counter(
            "score_requests", "Scoring calls, by gRPC status code", ("code",)
        )
        self.score_latency_seconds = self._histogram(
            "score_latency_seconds", "Time to answer a scoring call", _FAST_SECONDS
        )
        self.matched_ratio = self._histogram(
            "matched_ratio", "Best worker's reusable tokens over prompt tokens", _RATIOS
        )
        self.predicted_vs_actual_tokens = self._histogram(
            "predicted_vs_actual_tokens",
            "Reusable tokens predicted minus cached tokens that the engine reported",
            _TOKEN_ERRORS,
            ("worker",),
        )
        self.picks_total = self._counter("picks", "Requests sent to a worker", ("worker",))
        self.completions_total = self._counter(
            "completions", "Requests reported as ended, by what that did", ("outcome",)
        )
        self.predictions_total = self._counter(
            "predictions", "Predicted blocks, by what became of them", ("outcome",)
        )
        self.requests_in_flight = self._gauge(
            "requests_in_flight", "Requests picked by this scorer that have not ended"
        )
        self.leases_ended_total = self._counter(
            "leases_ended",
            "Requests that were never reported as ended, by what let them go",
            ("why",),
        )
        self.worker_drifting = self._gauge(
            "worker_drifting",
            "1 while what a worker reuses differs from what is predicted",
            ("worker",),
        )
        self.ext_proc_requests_total = self._counter(
            "ext_proc_requests", "Requests through Envoy's external processor", ("outcome",)
        )

    def event(self, worker: str, type: str, count: int = 1) -> None:
        """Count decoded events of a type; the 51st distinct type and later count as "other"."""
        self.events_total.labels(worker, self._types(type)).inc(count)

    def filtered(self, worker: str, kind: str, count: int = 1) -> None:
        """Count events of a KV-cache group kind that is not indexed; kinds are bounded likewise."""
        self.events_filtered_total.labels(worker, self._kinds(kind)).inc(count)

    def dropped(self, worker: str, reason: str, count: int = 1) -> None:
        """Count events that were not applied; reasons are bounded likewise."""
        self.events_dropped_total.labels(worker, self._reasons(reason)).inc(count)

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


_STATUS = {
    200: "OK",
    400: "Bad Request",
    404: "Not Found",
    405: "Method Not Allowed",
    503: "Service Unavailable",
}
_TEXT = "text/plain; charset=utf-8"
_REQUEST_TIMEOUT = 10.0
_MAX_HEAD = 16_384


class MetricsServer:
    """Serves /metrics, /healthz (process alive) and /readyz over HTTP/1.1, one request each.

    `ready` returns "" when queries may be sent here, else why not, in words.
    """

    def __init__(
        self,
        registry: CollectorRegistry,
        ready: Callable[[], str],
        host: str = "127.0.0.1",
        port: int = 9400,
    ) -> None:
        self._registry = registry
        self._ready = ready
        self._host, self._port = host, port
        self._server: asyncio.Server | None = None

    async def start(self) -> tuple[str, int]:
        """Bind, and return the host and port really bound. Raises OSError with the address."""
        try:
            self._server = await asyncio.start_server(
                self._serve, self._host, self._port, limit=_MAX_HEAD
            )
        except OSError as error:
            where = f"{self._host}:{self._port}"
            raise OSError(
                error.errno, f"metrics: cannot listen on {where}: {error}; change metrics.listen"
            ) from error
        host, port = self._server.sockets[0].getsockname()[:2]
        return str(host), int(port)

    async def close(self) -> None:
        """Stop listening. Harmless when not started."""
        if self._server is not None:
            self._server.close()
            await self._server.wait_closed()
            self._server = None

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(_REQUEST_TIMEOUT):
                head = await reader.readuntil(b"\r\n\r\n")
                writer.write(await self._respond(head.decode("latin-1")))
                await writer.drain()
        except asyncio.LimitOverrunError:
            writer.write(_http(400, _TEXT, b"request head too long\n"))
        except (TimeoutError, asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()
            with suppress(ConnectionError, TimeoutError):
                await writer.wait_closed()

    async def _respond(self, head: str) -> bytes:
        lines = head.split("\r\n")
        words = lines[0].split(" ")
        if len(words) != 3:
            return _http(400, _TEXT, b"not an HTTP request\n")
        method, path = words[0], words[1].split("?")[0]
        if method not in ("GET", "HEAD"):
            return _http(405, _TEXT, b"only GET and HEAD\n")
        status, kind, body = await self._page(path, _header(lines[1:], "accept"))
        return _http(status, kind, body, with_body=method == "GET")

    async def _page(self, path: str, accept: str) -> tuple[int, str, bytes]:
        if path == "/metrics":
            encode, kind = choose_encoder(accept)
            # Rendering thousands of series takes milliseconds that scoring should not wait for.
            return 200, kind, await asyncio.to_thread(encode, self._registry)
        if path == "/healthz":
            return 200, _TEXT, b"ok\n"
        if path == "/readyz":
            why = self._ready()
            return (503, _TEXT, f"{why}\n".encode()) if why else (200, _TEXT, b"ready\n")
        return 404, _TEXT, b"see /metrics, /healthz and /readyz\n"


def _header(lines: list[str], name: str) -> str:
    for line in lines:
        key, _, value = line.partition(":")
        if key.strip().lower() == name:
            return value.strip()
    return ""


def _http(status: int, kind: str, body: bytes, *, with_body: bool = True) -> bytes:
    head = (
        f"HTTP/1.1 {status} {_STATUS[status]}\r\nContent-Type: {kind}\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + (body if with_body else b"")
