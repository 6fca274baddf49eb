"""Spans of the gRPC calls that this server answers, under the caller's `traceparent`."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import grpc

from kvindexd import tracing

Context = grpc.aio.ServicerContext[Any, Any]

_OURS = "/kvindexd."
_NUMBERS = {code.name: int(code.value[0]) for code in grpc.StatusCode}
_NAMES = {number: name for name, number in _NUMBERS.items()}
_SERVER_FAULTS = frozenset(
    {"UNKNOWN", "DEADLINE_EXCEEDED", "UNIMPLEMENTED", "INTERNAL", "UNAVAILABLE", "DATA_LOSS"}
)
"""What OpenTelemetry's conventions call an error of a server; other codes are the client's."""


def carrier_of(metadata: Any) -> dict[str, str]:
    """A call's metadata as far as it is text."""
    return {key.lower(): value for key, value in metadata or () if isinstance(value, str)}


def begin(method: str, parent: tracing.Carrier) -> tracing.LongSpan | None:
    """The span of one call; `method` with or without its leading slash."""
    name = method.lstrip("/")
    span = tracing.begin(name, parent)
    if span is not None:
        service, _, short = name.rpartition("/")
        span.set({"rpc.system": "grpc", "rpc.service": service, "rpc.method": short})
    return span


def end(span: tracing.LongSpan, code: str) -> None:
    """The call has ended with a status code."""
    span.set({"rpc.grpc.status_code": _NUMBERS[code], "rpc.response.status_code": code})
    if code in _SERVER_FAULTS:
        span.fail(code)
    span.end()


class TracedCalls(grpc.aio.ServerInterceptor):
    """A span for each unary call of kvindexd's services. A stream may live for days: what it does
    is put under its caller's span instead, call by call."""

    async def intercept_service(
        self,
        continuation: Callable[
            [grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]
        ],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        """The handler, with a span around it."""
        handler = await continuation(handler_call_details)
        method = handler_call_details.method
        if handler is None or not method.startswith(_OURS):
            return handler
        parent = carrier_of(handler_call_details.invocation_metadata)
        if handler.request_streaming or handler.response_streaming:
            tracing.adopt(parent)
            return handler
        return grpc.unary_unary_rpc_method_handler(
            _in_span(handler.unary_unary, method, parent),
            handler.request_deserializer,
            handler.response_serializer,
        )


def _in_span(
    inner: Any, method: str, parent: tracing.Carrier
) -> Callable[[Any, Context], Awaitable[Any]]:
    async def call(request: Any, context: Context) -> Any:
        span = begin(method, parent)
        if span is None:
            return await inner(request, context)
        code = "UNKNOWN"
        try:
            answer = await inner(request, context)
            code = "OK"
            return answer
        except grpc.aio.AbortError:
            code = _name_of(context.code())
            raise
        except asyncio.CancelledError:
            code = "CANCELLED"
            raise
        finally:
            end(span, code)

    return call


def _name_of(code: Any) -> str:
    """grpc gives the number where its annotations promise the enum."""
    return code.name if isinstance(code, grpc.StatusCode) else _NAMES.get(code, "UNKNOWN")
