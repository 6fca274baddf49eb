"""Stands before every call: who calls, how large it is, how much is under way already.

Wraps the handlers of a service when they are registered. An interceptor would do the same, but
it sees neither the client's certificate nor the message, and costs every call a lookup.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractContextManager, aclosing, nullcontext
from typing import Any, NamedTuple, TypeAlias

import grpc
import structlog

from kvindexd.rpc.budget import Admission, Shares
from kvindexd.rpc.errors import Context, Denied, RequestError, TooLarge, Unauthenticated, refuse
from kvindexd.security.certificates import names_of_grpc
from kvindexd.security.credentials import Access

log = structlog.get_logger(__name__)

Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"  # no generic at runtime
_LOG_EVERY = 10.0
"""Seconds between log lines about refused callers: a flood of them is no reason for another."""


class Refusals:
    """Counts and tells what was refused. `auth` and `limit` are told a reason each."""

    def __init__(
        self,
        auth: Callable[[str], None] = lambda _: None,
        limit: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.auth = auth
        self.limit = limit
        self._told = float("-inf")
        self._untold = 0

    def of_caller(self, reason: str, method: str, peer: str) -> None:
        """Somebody may not make a call."""
        self.auth(reason)
        self._untold += 1
        now = time.monotonic()
        if now - self._told >= _LOG_EVERY:
            log.warning(
                "call_refused",
                reason=reason,
                method=method,
                peer=peer,
                count=self._untold,
                fix="give that client credentials that may, or see [auth]",
            )
            self._told, self._untold = now, 0


class _Oversized(NamedTuple):
    """Stands for a message that was not decoded. `size` in bytes."""

    size: int


class Guard:
    """Guards the services of one server."""

    def __init__(
        self,
        access: Access | None = None,
        refusals: Refusals | None = None,
        *,
        max_message_bytes: int = 0,
        streams: Shares | None = None,
    ) -> None:
        """`access`: None = anybody. `max_message_bytes`: 0 = whatever the transport lets through.
        `streams`: bounds streaming calls; None = no bound."""
        self._access = access
        self._refusals = refusals or Refusals()
        self._max_bytes = max_message_bytes
        self._streams = streams

    def transport_bytes(self, max_message_bytes: int) -> int:
        """The limit of gRPC itself, which refuses without a word that could be counted. It is
        twice ours where we count, so that most of what is too large is."""
        return min(2 * self._max_bytes, (1 << 31) - 1) if self._max_bytes else max_message_bytes

    def wrap(
        self, service: str, handlers: Mapping[str, Handler], calls: Admission | None = None
    ) -> dict[str, Handler]:
        """The same handlers, guarded. `calls`: bounds unary calls, None where the service does so
        itself."""
        return {name: self._wrapped(f"{service}/{name}", h, calls) for name, h in handlers.items()}

    def _wrapped(self, method: str, h: Handler, calls: Admission | None) -> Handler:
        decode = self._decoder(h.request_deserializer)
        if h.unary_unary is not None:
            guarded = self._unary(method, h.unary_unary, calls)
            return grpc.unary_unary_rpc_method_handler(guarded, decode, h.response_serializer)
        if h.unary_stream is not None:
            guarded = self._streaming(method, h.unary_stream)
            return grpc.unary_stream_rpc_method_handler(guarded, decode, h.response_serializer)
        if h.stream_stream is not None:
            guarded = self._streaming(method, h.stream_stream)
            return grpc.stream_stream_rpc_method_handler(guarded, decode, h.response_serializer)
        raise TypeError(f"{method}: no such kind of call is served here")

    def _decoder(self, decode: Any) -> Any:
        limit = self._max_bytes
        if not limit or decode is None:
            return decode

        def bounded(data: bytes) -> Any:
            return decode(data) if len(data) <= limit else _Oversized(len(data))

        return bounded

    def _unary(self, method: str, inner: Any, calls: Admission | None) -> Any:
        async def call(request: Any, context: Context) -> Any:
            await self._admit(method, request, context)
            if calls is None:
                return await inner(request, context)
            try:
                with calls.enter(context.time_remaining()):
                    return await inner(request, context)
            except RequestError as e:
                await self._refuse(context, e)

        return call

    def _streaming(self, method: str, inner: Any) -> Any:
        """Of the same form as `inner`: a generator, or a coroutine that reads and writes."""

        async def generator(request: Any, context: Context) -> AsyncIterator[Any]:
            await self._admit(method, request, context)
            try:
                with self._share(context):
                    if hasattr(request, "__aiter__"):
                        request = self._each(request, context)
                    async with aclosing(inner(request, context)) as answers:
                        async for answer in answers:
                            yield answer
            except RequestError as e:
                await self._refuse(context, e)

        async def coroutine(request: Any, context: Context) -> None:
            await self._admit(method, None, context)
            try:
                with self._share(context):
                    await inner(request, context)
            except RequestError as e:
                await self._refuse(context, e)

        return generator if inspect.isasyncgenfunction(inner) else coroutine

    def _share(self, context: Context) -> AbstractContextManager[None]:
        if self._streams is None:
            return nullcontext()
        return self._streams.enter(_client_of(context.peer()))

    async def _each(self, requests: AsyncIterator[Any], context: Context) -> AsyncIterator[Any]:
        async for request in requests:
            if type(request) is _Oversized:
                await self._refuse_size(request, context)
            yield request

    # -- checks -------------------------------------------------------------------------------

    async def _admit(self, method: str, request: Any, context: Context) -> None:
        if self._access is not None:
            await self._authorize(self._access, method, context)
        if type(request) is _Oversized:
            await self._refuse_size(request, context)

    async def _authorize(self, access: Access, method: str, context: Context) -> None:
        peer = context.peer()
        if peer.startswith("unix:"):
            return  # our own further processes, in a folder that only this user can enter
        sent = [str(v) for k, v in context.invocation_metadata() or () if k == "authorization"]
        refusal = access.judge(method, sent, lambda: names_of_grpc(context.auth_context()))
        if refusal is not None:
            self._refusals.of_caller(refusal.reason, method, _client_of(peer))
            kind = Denied if refusal.known else Unauthenticated
            await refuse(context, kind(refusal.text))

    async def _refuse_size(self, message: _Oversized, context: Context) -> None:
        text = (
            f"a message of {message.size} bytes is larger than server.max_message_bytes = "
            f"{self._max_bytes}"
        )
        await self._refuse(context, TooLarge(text, "message_bytes"))

    async def _refuse(self, context: Context, error: RequestError) -> None:
        if error.reason:
            self._refusals.limit(error.reason)
        await refuse(context, error)


def _client_of(peer: str) -> str:
    """A peer without its port: `ipv4:10.0.0.7`."""
    return peer if peer.startswith("unix:") else peer.rpartition(":")[0]
