"""`kvindexd tail`: one worker rank's events as they come, and what becomes of each."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Annotated, Any, NamedTuple

import grpc
import typer
from rich.text import Text

from kvindexd.cli.client import (
    CALL_TIMEOUT,
    DEFAULT_SERVER,
    NamespaceOption,
    ServerOption,
    channel,
    connect,
    explain,
    status,
)
from kvindexd.cli.output import JsonOption, console, fail, note, plain, print_json
from kvindexd.v1 import index_pb2 as pb

KEPT = frozenset({"main", "auxiliary", "applied", "parked"})
"""Decisions by which an event changes the index, at once or once its parent is known."""

_FIRST_PAUSE, _LAST_PAUSE = 0.2, 2.0
_VERBS = {"BlockStored": "stored", "BlockRemoved": "removed", "AllBlocksCleared": "cleared"}


class Asked(NamedTuple):
    """What to follow, where. `patience`: seconds to try again after the connection was lost."""

    server: str
    request: pb.TailWorkerRequest
    patience: float


def register(app: typer.Typer) -> None:
    """Add the command to the app."""
    app.command("tail")(tail)


def tail(
    worker: Annotated[str, typer.Argument(metavar="WORKER", help="Worker id.")],
    dp_rank: Annotated[int, typer.Option("--dp-rank", "--rank", min=0, help="Rank.")] = 0,
    namespace: NamespaceOption = "",
    count: Annotated[int, typer.Option(min=0, help="Stop after N events; 0 = never.")] = 0,
    reconnect: Annotated[
        float,
        typer.Option(min=0, help="Seconds to try again after the connection was lost; 0 = end."),
    ] = 60.0,
    server: ServerOption = DEFAULT_SERVER,
    as_json: JsonOption = False,
) -> None:
    """Show a worker's decoded events as they come: kept or filtered, and why.

    Token counts are shown, never tokens. --json prints one object per line. Ctrl-C ends it.
    """
    request = pb.TailWorkerRequest(worker_id=worker, dp_rank=dp_rank, namespace=namespace)
    out, seen = console(), 0
    try:
        _check(server, request)
        for event in events(Asked(server, request, reconnect)):
            if as_json:
                print_json(plain(event) | {"kept": event.decision in KEPT}, line=True)
            else:
                out.print(line(event), soft_wrap=True)
            seen += 1
            if count and seen >= count:
                return
    except KeyboardInterrupt:
        note(f"ended; {seen} events shown")


def line(event: pb.TailWorkerResponse) -> Text:
    """An event on one line."""
    clock = time.strftime("%H:%M:%S", time.localtime(event.ts)) if event.ts else "--:--:--"
    text = Text(f"{event.seq:>8} {clock}.{int(event.ts * 1000) % 1000:03d}  ")
    text.append(f"{_VERBS.get(event.type, event.type):<8}")
    if event.type in ("BlockStored", "BlockRemoved"):
        group = f"group {event.group}" if event.HasField("group") else "no group"
        text.append(f"{group} {event.kind or '(kind not on the wire)'}, {_amount(event)}")
        text.append(f", {event.tier}" + (f" ({event.medium})" if event.medium else ""))
        text.append(f", adapter {event.lora_name}" if event.lora_name else "")
        text.append("  ")
    kept = event.decision in KEPT
    verdict = f"kept: {event.decision}" if kept else f"filtered: {event.decision}"
    text.append(verdict, "green" if kept else "yellow")
    return text.append(f"  ({event.reason})" if event.reason else "")


def _amount(event: pb.TailWorkerResponse) -> str:
    blocks = f"{event.blocks:,} block" + ("" if event.blocks == 1 else "s")
    if not event.block_size:
        return blocks
    return f"{blocks} of {event.block_size}, {event.tokens:,} tokens"


def _check(server: str, request: pb.TailWorkerRequest) -> None:
    """End the command here and now if there is no such worker, or no server."""
    named = pb.GetWorkerRequest(
        worker_id=request.worker_id, dp_rank=request.dp_rank, namespace=request.namespace
    )
    with connect(server) as client:
        client.admin.GetWorker(named, timeout=CALL_TIMEOUT)


def events(asked: Asked) -> Iterator[pb.TailWorkerResponse]:
    """Events for as long as there are any to be had; a lost connection is made again."""
    ever, last_seq = False, -1
    lost_at, pause = time.monotonic(), _FIRST_PAUSE
    while True:
        attached = threading.Event()
        try:
            with channel(asked.server) as client:
                resumed = ever
                for event in _attached(client.admin.TailWorker(asked.request), attached, ever):
                    if resumed and -1 < last_seq < event.seq - 1:
                        note(f"batches {last_seq + 1} to {event.seq - 1} were not shown")
                    resumed, last_seq = False, event.seq
                    yield event
            why = "the server ended it"
        except grpc.RpcError as error:
            why = explain(asked.server, error)
            gone = status(error)[0] is grpc.StatusCode.NOT_FOUND
            if gone or not asked.patience or not (ever or attached.is_set()):
                fail(why)
        if attached.is_set():
            ever, lost_at, pause = True, time.monotonic(), _FIRST_PAUSE
            note(f"lost: {why}; trying again for {asked.patience:g} s")
        if time.monotonic() - lost_at + pause > asked.patience:
            fail(f"not back within {asked.patience:g} s: {why}")
        time.sleep(pause)  # a command of its own: nothing else runs in it
        pause = min(_LAST_PAUSE, 2 * pause)


def _attached(call: Any, attached: threading.Event, again: bool) -> Iterator[pb.TailWorkerResponse]:
    """The call's events; says when the server has begun to listen, which only its headers tell."""

    def headers() -> None:
        try:
            metadata = dict(call.initial_metadata() or ())
        except grpc.RpcError:
            return
        if name := metadata.get("kvindexd-following"):
            attached.set()
            note(f"following {name}" + (" again" if again else "; Ctrl-C ends"))

    waiting = threading.Thread(target=headers, daemon=True)
    waiting.start()
    try:
        for event in call:
            attached.set()
            yield event
    finally:
        call.cancel()
        waiting.join(1.0)
