"""Request errors with the gRPC status they become."""

from __future__ import annotations

import random
import re
from typing import Any, NoReturn

import grpc
import structlog

log = structlog.get_logger(__name__)
Context = grpc.aio.ServicerContext[Any, Any]

_FIELD = re.compile(r"[a-z_]+(\[\d+\])?(\.[a-z_]+)*(?=: )")
"""The field that a message begins with; what follows may quote the request, and is not logged."""

_PUSHBACK = (10, 60)
"""Milliseconds that a client which is shed should wait, spread so that they do not all return at
once."""


class RequestError(Exception):
    """A call that cannot be answered; `code` and the message go to the client.

    `reason`: of a refusal that is counted, "" = an ordinary error of the caller's.
    """

    code = grpc.StatusCode.INVALID_ARGUMENT
    retry = False
    """Whether the same call may well succeed in a moment."""

    def __init__(self, text: str, reason: str = "") -> None:
        super().__init__(text)
        self.reason = reason


class NotFound(RequestError):
    """The model, worker or block is not known."""

    code = grpc.StatusCode.NOT_FOUND


class TooLarge(RequestError):
    """The request is over a configured limit."""

    code = grpc.StatusCode.RESOURCE_EXHAUSTED


class Overloaded(TooLarge):
    """Too much is under way already; the client is told when to come again."""

    retry = True


class Unconfigured(RequestError):
    """The server lacks a piece of configuration that this call needs."""

    code = grpc.StatusCode.FAILED_PRECONDITION


class Unavailable(RequestError):
    """Nothing wrong with the call; it cannot be served right now."""

    code = grpc.StatusCode.UNAVAILABLE


class TimeUp(RequestError):
    """Nobody waits for the answer any more."""

    code = grpc.StatusCode.DEADLINE_EXCEEDED


class Unauthenticated(RequestError):
    """Nobody knows who is calling."""

    code = grpc.StatusCode.UNAUTHENTICATED


class Denied(RequestError):
    """The caller is known and may not do this."""

    code = grpc.StatusCode.PERMISSION_DENIED


async def refuse(context: Context, error: RequestError) -> NoReturn:
    """End a call with an error's status and message, and with `grpc-retry-pushback-ms` where
    trying again makes sense: gRPC's own retries obey it."""
    named = _FIELD.match(str(error))
    log.debug("call_ended_in_error", code=error.code.name, field=named[0] if named else "")
    trailers: tuple[tuple[str, str], ...] = ()
    if error.retry:
        trailers = (("grpc-retry-pushback-ms", str(random.randint(*_PUSHBACK))),)  # noqa: S311
    await context.abort(error.code, str(error), trailers)
    raise AssertionError("abort does not return")  # for the type checker
