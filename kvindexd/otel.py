"""OpenTelemetry behind kvindexd.tracing; importing this needs the extra `otel`."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from contextvars import Token
from types import TracebackType

import structlog
from opentelemetry import context as contexts
from opentelemetry import propagate, trace
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import ParentBasedTraceIdRatio, Sampler
from opentelemetry.trace import Status, StatusCode

from kvindexd._version import __version__
from kvindexd.config import ConfigError, TracingConfig
from kvindexd.tracing import Carrier, Kind, LongSpan, Span, Value

log = structlog.get_logger(__name__)
Count = Callable[[str, int], None]

_KINDS = {
    "internal": trace.SpanKind.INTERNAL,
    "server": trace.SpanKind.SERVER,
    "client": trace.SpanKind.CLIENT,
}
_EXPORTER_LOG = "opentelemetry.exporter.otlp.proto.grpc.exporter"
_ABORT_SECONDS = 0.5
"""What an export that is being cut off gets to notice."""


class Otel:
    """The process's tracer. Spans wait in a bounded queue, which a thread empties: whoever makes
    them never waits for the collector."""

    def __init__(self, settings: TracingConfig, count: Count) -> None:
        """Raises ConfigError for settings or OTEL_* variables that cannot be used."""
        _check_protocol()
        try:
            self._exporter = _Watched(_exporter(settings), count)
            self._provider = TracerProvider(
                sampler=_sampler(settings.ratio),
                resource=_resource(),
                shutdown_on_exit=False,
            )
            self._provider.add_span_processor(_Counted(count))
            self._provider.add_span_processor(BatchSpanProcessor(self._exporter))
        except Exception as e:  # each variable fails in its own way
            raise ConfigError(
                f"tracing: {e}; check [tracing] and the OTEL_* environment variables"
            ) from None
        self._tracer = self._provider.get_tracer("kvindexd", __version__)
        log.info("tracing_on", endpoint=self._exporter.endpoint, ratio=settings.ratio)

    def span(self, name: str, kind: Kind) -> _Scope:
        """A span under the current one."""
        return _Scope(self._tracer, name, _KINDS[kind])

    def begin(self, name: str, parent: Carrier) -> LongSpan:
        """A server's span, current for the rest of the task."""
        context = propagate.extract(parent)
        span = self._tracer.start_span(name, context, trace.SpanKind.SERVER)
        contexts.attach(trace.set_span_in_context(span, context))
        known = span.get_span_context()
        if known.is_valid:
            structlog.contextvars.bind_contextvars(trace_id=trace.format_trace_id(known.trace_id))
        return _Long(span)

    def adopt(self, parent: Carrier) -> None:
        """Make the caller's span current for the rest of the task."""
        contexts.attach(propagate.extract(parent))

    def headers(self) -> dict[str, str]:
        """`traceparent` and whatever else OTEL_PROPAGATORS asks for."""
        carrier: dict[str, str] = {}
        propagate.inject(carrier)
        return carrier

    async def close(self, seconds: float) -> None:
        """Send what is waiting; after `seconds`, cut the exporter off."""
        loop = asyncio.get_running_loop()
        done = asyncio.Event()

        def shut_down() -> None:
            try:
                self._provider.shutdown()
            finally:
                with contextlib.suppress(RuntimeError):  # nobody waits any more
                    loop.call_soon_threadsafe(done.set)

        _in_thread(shut_down)
        for patience, last in ((seconds, False), (_ABORT_SECONDS, True)):
            try:
                async with asyncio.timeout(patience):
                    await done.wait()
                return
            except TimeoutError:
                if not last:
                    log.warning(
                        "traces_cut_off",
                        waited=seconds,
                        cost="the spans that were waiting are lost",
                        endpoint=self._exporter.endpoint,
                    )
                    # Some versions wait here for the call that is under way.
                    _in_thread(self._exporter.abort)


class _Scope:
    """A span in a `with` block."""

    def __init__(self, tracer: trace.Tracer, name: str, kind: trace.SpanKind) -> None:
        self._span = tracer.start_span(name, kind=kind)
        self._token: Token[Context] | None = None

    def __enter__(self) -> Span:
        self._token = contexts.attach(trace.set_span_in_context(self._span))
        return _Handle(self._span)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        _error: BaseException | None,
        _traceback: TracebackType | None,
    ) -> None:
        if kind is not None:
            _Handle(self._span).fail(kind.__name__)
        self._span.end()
        if self._token is not None:
            contexts.detach(self._token)


class _Handle:
    def __init__(self, span: trace.Span) -> None:
        self._span = span

    def set(self, attributes: Mapping[str, Value]) -> None:
        """Add attributes."""
        self._span.set_attributes(attributes)

    def fail(self, kind: str) -> None:
        """Mark as failed."""
        self._span.set_attribute("error.type", kind)
        self._span.set_status(Status(StatusCode.ERROR))


class _Long(_Handle):
    def end(self) -> None:
        """End it."""
        self._span.end()


class _Counted(SpanProcessor):
    """Counts the spans that are to be exported."""

    def __init__(self, count: Count) -> None:
        self._count = count

    def on_end(self, span: ReadableSpan) -> None:
        """One more."""
        if span.context is not None and span.context.trace_flags.sampled:
            self._count("recorded", 1)


class _LastWords(logging.Filter):
    """Keeps what an exporter last said instead of logging it, as it does at each attempt."""

    def __init__(self) -> None:
        super().__init__()
        self.text = ""

    def filter(self, record: logging.LogRecord) -> bool:
        """Never lets a record through."""
        self.text = record.getMessage()
        return False


class _Watched(SpanExporter):
    """Counts what an exporter sends, and logs when it stops and starts to work."""

    def __init__(self, inner: SpanExporter, count: Count) -> None:
        self._inner = inner
        self._count = count
        self._words = _LastWords()
        self._failing = False
        self._raw_endpoint = str(getattr(inner, "_endpoint", ""))
        self.endpoint = self._raw_endpoint.rpartition("@")[2]
        logging.getLogger(_EXPORTER_LOG).addFilter(self._words)

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Send; called by the queue's thread."""
        try:
            result = self._inner.export(spans)
        except Exception as e:  # the thread would log each one, and go on
            result, self._words.text = SpanExportResult.FAILURE, repr(e)
        good = result is SpanExportResult.SUCCESS
        self._count("exported" if good else "failed", len(spans))
        if good and self._failing:
            log.info("traces_exported_again", endpoint=self.endpoint)
        elif not good and not self._failing:
            log.warning(
                "traces_not_exported",
                endpoint=self.endpoint,
                error=self._words.text.replace(self._raw_endpoint, self.endpoint),
                cost="spans are lost until the collector takes them; requests are not held up",
            )
        self._failing = not good
        return result

    def abort(self) -> None:
        """End what is under way."""
        self._inner.shutdown()

    def shutdown(self) -> None:
        """The queue is closed."""
        self._inner.shutdown()


def _in_thread(work: Callable[[], None]) -> None:
    """Not by the loop's executor: its threads are waited for at the end of the process."""
    threading.Thread(target=work, name="traces-end", daemon=True).start()


def _check_protocol() -> None:
    for name in ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL"):
        protocol = os.environ.get(name)
        if protocol:
            break
    else:
        return
    if protocol != "grpc":
        raise ConfigError(
            f"{name} is {protocol!r}: kvindexd exports by gRPC alone; set it to grpc, and the "
            "endpoint to the collector's gRPC port (4317 is usual)"
        )


def _exporter(settings: TracingConfig) -> SpanExporter:
    # Without an endpoint of ours the OTEL_EXPORTER_OTLP_* variables say where, and all else.
    return OTLPSpanExporter(endpoint=settings.endpoint or None)


def _sampler(ratio: float) -> Sampler | None:
    """None: the OTEL_TRACES_SAMPLER variables decide; they too keep everything by default."""
    return None if ratio == 1.0 else ParentBasedTraceIdRatio(ratio)


def _resource() -> Resource:
    named = Resource.create({"service.version": __version__})
    if str(named.attributes.get("service.name", "")).startswith("unknown_service"):
        named = named.merge(Resource({"service.name": "kvindexd"}))
    return named
