"""The external processor's gRPC server: streams, health, metrics."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import structlog
from prometheus_client import Counter

from kvindexd import tracing
from kvindexd.extproc.v1 import ext_proc_pb2 as ep
from kvindexd.rpc import traced
from kvindexd.rpc.budget import Admission
from kvindexd.rpc.errors import Overloaded
from kvindexd.rpc.ext_proc.choosing import Chooser, Decision, Refused
from kvindexd.rpc.ext_proc.exchange import Exchange
from kvindexd.rpc.ext_proc.messages import SERVICE, headers_of, refusal
from kvindexd.rpc.server import RpcServer
from kvindexd.telemetry import Metrics, frames_of, name_request

log = structlog.get_logger(__name__)
Context = grpc.aio.ServicerContext[Any, Any]
HEALTH_NAMES = ("", "liveness", "readiness", SERVICE)
_LEARN_SECONDS = 0.01
"""Wait for a body from an Envoy that does not say its mode (before 1.33): one that comes without
an answer to the headers means FULL_DUPLEX_STREAMED."""
_BLIND = "the worker that holds the prompt may not be the one that gets it"


def token_failures(metrics: Metrics) -> Counter:
    """Failures of tokenizers, by model; a model is one that the configuration names."""
    return metrics.tokenizer_failures_total


class ExtProcMetrics:
    """What became of the requests; the Observer of all exchanges."""

    def __init__(self, metrics: Metrics) -> None:
        self._requests = metrics.ext_proc_requests_total
        self._served = metrics.ext_proc_served_total
        self.seconds = metrics.ext_proc_pick_seconds
        for outcome in ("cache", "load", "500"):
            self._requests.labels(outcome)

    def decided(self, decision: Decision) -> None:
        """A worker was picked, by cache or by load alone."""
        self._requests.labels("load" if decision.why else "cache").inc()
        if decision.why and decision.taken.query.tokens:
            log.warning("picked_by_load", why=decision.why, cost=_BLIND)

    def refused(self, refused: Refused) -> None:
        """A request got an error instead."""
        self._requests.labels(str(refused.status)).inc()
        log.debug("request_refused", status=refused.status, code=refused.code)

    def served(self, how: str) -> None:
        """The gateway told who served."""
        self._served.labels(how).inc()

    def failed(self) -> None:
        """A fault of ours."""
        self._requests.labels("500").inc()


class ExtProcService:
    """ExternalProcessor/Process: one stream per HTTP request."""

    def __init__(
        self,
        chooser: Chooser,
        metrics: ExtProcMetrics,
        max_body_bytes: int,
        max_streams: int,
        refused: Callable[[str], None],
    ) -> None:
        """`refused`: told the reason when there are more than `max_streams`."""
        self._streams = Admission(max_streams, "limits.ext_proc_streams", "ext_proc_streams")
        self._refused = refused
        self._chooser = chooser
        self._metrics = metrics
        self._max_body = max_body_bytes

    async def process(
        self, _requests: AsyncIterator[ep.ProcessingRequest], context: Context
    ) -> None:
        """Answer one stream, unless there are too many."""
        try:
            with self._streams.enter():
                await self._serve(context)
        except Overloaded as e:
            self._refused(e.reason)
            self._metrics.refused(Refused(429, "overloaded", str(e)))
            await context.read()
            await context.write(refusal(429, "overloaded", str(e)))

    async def _serve(self, context: Context) -> None:
        """Whatever ends the stream, what was picked is released."""
        exchange = Exchange(self._chooser, self._metrics, self._max_body)
        reading: asyncio.Future[Any] | None = None
        span: tracing.LongSpan | None = None
        code = "OK"
        try:
            while not exchange.over:
                message = await (reading or context.read())
                reading = None
                if message is grpc.aio.EOF:
                    return
                if message.HasField("request_headers"):
                    span = span or _recognise(message.request_headers, context)
                if _mode_unknown(message):
                    reading = asyncio.ensure_future(context.read())
                    await asyncio.wait((reading,), timeout=_LEARN_SECONDS)
                    exchange.duplex = reading.done() and _is_body(reading)
                started, picked = time.perf_counter(), exchange.picked
                answers = await self._answer(exchange, message)
                if exchange.picked and not picked:
                    self._metrics.seconds.observe(time.perf_counter() - started)
                for answer in answers:
                    await context.write(answer)
        except asyncio.CancelledError:
            code = "CANCELLED"
            raise
        finally:
            if reading is not None:
                reading.cancel()
            if span is not None:
                span.set(exchange.traced())
                traced.end(span, code)
            exchange.end()

    async def _answer(
        self, exchange: Exchange, message: ep.ProcessingRequest
    ) -> list[ep.ProcessingResponse]:
        try:
            return await exchange.answer(message)
        except Exception as e:
            # In FULL_DUPLEX_STREAMED mode a stream that just ends sends an empty body upstream.
            log.error("ext_proc_failed", exception=frames_of(e), cost="the request gets status 500")
            self._metrics.failed()
            exchange.over = True
            return [refusal(500, "internal", "the endpoint picker failed; its log says how")]


def _recognise(message: ep.HttpHeaders, context: Context) -> tracing.LongSpan | None:
    """Begin what is said of this request from here on: its id in log lines, and its span."""
    headers = headers_of(message)
    name_request(headers.get("x-request-id", ""))
    if not tracing.on():
        return None
    # Envoy's metadata names the span of this very call where Envoy traces itself; the headers
    # name the span of whoever sent the request to Envoy.
    return traced.begin(
        f"{SERVICE}/Process", headers | traced.carrier_of(context.invocation_metadata())
    )


def _mode_unknown(message: ep.ProcessingRequest) -> bool:
    return (
        message.WhichOneof("request") == "request_headers"
        and not message.HasField("protocol_config")
        and not message.request_headers.end_of_stream
    )


def _is_body(read: asyncio.Future[Any]) -> bool:
    message = read.result() if read.exception() is None else None
    return isinstance(message, ep.ProcessingRequest) and message.WhichOneof("request") in (
        "request_body",
        "request_trailers",
    )


class ExtProcServer(RpcServer):
    """Owns the listening socket; a server of its own, since gateways reach it and no one else."""

    def __init__(
        self,
        listen: str,
        service: ExtProcService,
        max_message_bytes: int,
        grace_seconds: float,
        **options: Any,
    ) -> None:
        """`options`: see RpcServer."""
        options["setting"] = "ext_proc.listen"
        super().__init__(listen, max_message_bytes, grace_seconds, (SERVICE,), **options)
        handler = grpc.stream_stream_rpc_method_handler(
            service.process,
            ep.ProcessingRequest.FromString,
            ep.ProcessingResponse.SerializeToString,
        )
        self.add(SERVICE, {"Process": handler})

    async def start(self) -> str:
        """Bind and serve; the address really bound. Raises OSError, naming the setting."""
        bound = await super().start()
        await self.set_ready(False, HEALTH_NAMES)
        return bound
