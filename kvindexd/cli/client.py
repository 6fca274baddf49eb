"""The way from a command to a server: one channel, deadlines, and errors in one line."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any, NamedTuple

import grpc
import typer

from kvindexd.cli.output import fail
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
    "failed to connect",
    "connection refused",
    "dns resolution failed",
    "unreachable",
)


class Client(NamedTuple):
    """Stubs of both services on one channel. Give every call `timeout=CALL_TIMEOUT`."""

    index: Any
    admin: Any


@contextmanager
def connect(server: str) -> Iterator[Client]:
    """Open a channel to `server`; any RpcError inside ends the command with status 1."""
    options = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
    with grpc.insecure_channel(server, options=options) as channel:
        try:
            yield Client(
                index_pb2_grpc.KVIndexStub(channel), index_pb2_grpc.KVIndexAdminStub(channel)
            )
        except grpc.RpcError as error:
            fail(explain(server, error))


def explain(server: str, error: grpc.RpcError) -> str:
    """One line for people: what went wrong with the call and, where it is plain, what to do."""
    code, text = _status(error)
    details = " ".join(text.split())
    if code is grpc.StatusCode.UNAVAILABLE and _no_connection(details):
        return (
            f"cannot reach kvindexd at {server}: is it running there? "
            "Start it with `kvindexd serve`, or name another with --server"
        )
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return f"kvindexd at {server} did not answer in time; see its log and `kvindexd doctor`"
    if code is grpc.StatusCode.UNIMPLEMENTED:
        return f"{server} does not offer this call: not kvindexd, not serving it, or an older one"
    return f"{details or error} ({code.name})"


def _status(error: Any) -> tuple[grpc.StatusCode, str]:
    # What the library raises is an RpcError and a Call at once, which no type says.
    if not hasattr(error, "code"):
        return grpc.StatusCode.UNKNOWN, ""
    return error.code(), error.details() or ""


def _no_connection(details: str) -> bool:
    low = details.lower()
    return any(sign in low for sign in _CANNOT_CONNECT)
