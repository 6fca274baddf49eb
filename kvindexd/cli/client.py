"""The way from a command to a server: one channel, deadlines, and errors in one line."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any, NamedTuple

import grpc
import typer
from grpc_health.v1 import health_pb2_grpc

from kvindexd.cli.credentials import open_channel
from kvindexd.cli.output import fail, progress
from kvindexd.v1 import index_pb2_grpc

DEFAULT_SERVER = "127.0.0.1:50051"
CALL_TIMEOUT = 30.0
"""Seconds that one call may take, connecting included."""

ServerOption = Annotated[
    str,
    typer.Option("--server", envvar="KVINDEXD_SERVER", help="host:port of kvindexd's gRPC."),
]
NamespaceOption = Annotated[str, typer.Option(help="Tenant or routing group.")]

_CANNOT_CONNECT = (
    "failed to connect to all addresses",
    "connections to all backends failing",
    "dns resolution failed",
    "errors resolving",
)
"""How gRPC's own words begin. A daemon that answers may also tell of a refused connection: its own
to an engine."""


class Client(NamedTuple):
    """Stubs of both services, and of health checks, on one channel. Give every call
    `timeout=CALL_TIMEOUT`."""

    index: Any
    admin: Any
    health: Any


_OPTIONS = (
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    # A server that vanished without a word is noticed while a stream is silent.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
)


@contextmanager
def channel(server: str) -> Iterator[Client]:
    """Open a channel to `server`; its RpcErrors are the caller's."""
    with open_channel(server, _OPTIONS) as made:
        yield Client(
            index_pb2_grpc.KVIndexStub(made),
            index_pb2_grpc.KVIndexAdminStub(made),
            health_pb2_grpc.HealthStub(made),
        )


@contextmanager
def connect(server: str) -> Iterator[Client]:
    """Open a channel to `server`, for calls whose answers are waited for; any RpcError inside ends
    the command with status 1."""
    with channel(server) as client:
        try:
            with progress(f"asking kvindexd at {server}"):
                yield client
        except grpc.RpcError as error:
            fail(explain(server, error))


def explain(server: str, error: grpc.RpcError) -> str:
    """One line for people: what went wrong with the call and, where it is plain, what to do."""
    code, text = status(error)
    details = " ".join(text.split())
    if code is grpc.StatusCode.UNAVAILABLE and _no_connection(details):
        return (
            f"cannot reach kvindexd at {server}: is it running there? "
            "Start it with `kvindexd serve`, or name another with --server; "
            "give --ca if it speaks TLS, and only then"
        )
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return f"kvindexd at {server} did not answer in time; see its log and `kvindexd doctor`"
    if code is grpc.StatusCode.UNIMPLEMENTED:
        return f"{server} does not offer this call: not kvindexd, not serving it, or an older one"
    return f"{details or error} ({code.name})"


def status(error: Any) -> tuple[grpc.StatusCode, str]:
    """Code and details of a failed call."""
    # What the library raises is an RpcError and a Call at once, which no type says.
    if not hasattr(error, "code"):
        return grpc.StatusCode.UNKNOWN, ""
    return error.code(), error.details() or ""


def unreachable(error: grpc.RpcError) -> bool:
    """Whether nobody answers at the address at all."""
    code, details = status(error)
    return code is grpc.StatusCode.UNAVAILABLE and _no_connection(details)


def _no_connection(details: str) -> bool:
    return details.lower().startswith(_CANNOT_CONNECT)
