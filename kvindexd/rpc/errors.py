"""Request errors with the gRPC status they become."""

from __future__ import annotations

import grpc


class RequestError(Exception):
    """A call that cannot be answered; `code` and the message go to the client."""

    code = grpc.StatusCode.INVALID_ARGUMENT


class NotFound(RequestError):
    """The model, worker or block is not known."""

    code = grpc.StatusCode.NOT_FOUND


class TooLarge(RequestError):
    """The prompt is over a configured limit."""

    code = grpc.StatusCode.RESOURCE_EXHAUSTED


class Unconfigured(RequestError):
    """The server lacks a piece of configuration that this call needs."""

    code = grpc.StatusCode.FAILED_PRECONDITION


class Unavailable(RequestError):
    """Nothing wrong with the call; it cannot be served right now."""

    code = grpc.StatusCode.UNAVAILABLE


class TimeUp(RequestError):
    """Nobody waits for the answer any more."""

    code = grpc.StatusCode.DEADLINE_EXCEEDED
