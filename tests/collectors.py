"""A small OTLP collector for tests: takes traces over gRPC, and keeps them."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from concurrent import futures
from typing import Any, NamedTuple

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as service
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as service_grpc


class Seen(NamedTuple):
    """One span, ids in hex; `status`: 0 unset, 1 ok, 2 error."""

    name: str
    trace: str
    span: str
    parent: str
    kind: int
    status: int
    message: str
    attributes: dict[str, Any]
    resource: dict[str, Any]


class Collector(service_grpc.TraceServiceServicer):
    """Keeps spans; `status`: what exporters are answered with instead, when set."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._spans: list[Seen] = []
        self.raw = b""
        self.status: grpc.StatusCode | None = None
        self.refused = 0
        self.address = ""

    def Export(
        self, request: service.ExportTraceServiceRequest, context: grpc.ServicerContext
    ) -> service.ExportTraceServiceResponse:
        if self.status is not None:
            self.refused += 1
            context.abort(self.status, "not now")
        with self._lock:
            self.raw += request.SerializeToString()
            for group in request.resource_spans:
                resource = _attributes(group.resource.attributes)
                for scope in group.scope_spans:
                    self._spans += [_seen(s, resource) for s in scope.spans]
        return service.ExportTraceServiceResponse()

    def spans(self, trace: str = "") -> list[Seen]:
        """What has come; of one trace alone when given."""
        with self._lock:
            return [s for s in self._spans if trace in ("", s.trace)]

    def until(self, trace: str, names: set[str], deadline: float = 20.0) -> dict[str, Seen]:
        """Wait for spans of one trace; by name."""
        end = time.monotonic() + deadline
        while time.monotonic() < end:
            found = {s.name: s for s in self.spans(trace)}
            if names <= found.keys():
                return found
            time.sleep(0.02)
        raise AssertionError(f"no {sorted(names - found.keys())} among {sorted(found)}")


def _attributes(pairs: Any) -> dict[str, Any]:
    return {p.key: getattr(p.value, str(p.value.WhichOneof("value"))) for p in pairs}


def _seen(span: Any, resource: dict[str, Any]) -> Seen:
    return Seen(
        span.name,
        span.trace_id.hex(),
        span.span_id.hex(),
        span.parent_span_id.hex(),
        span.kind,
        span.status.code,
        span.status.message,
        _attributes(span.attributes),
        resource,
    )


@contextlib.contextmanager
def collecting() -> Iterator[Collector]:
    """A collector on a free port."""
    collector = Collector()
    server = grpc.server(futures.ThreadPoolExecutor(2))
    service_grpc.add_TraceServiceServicer_to_server(collector, server)
    collector.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        yield collector
    finally:
        server.stop(0)
