"""`kvindexd audit`: promises against what engines reported, and against a worker's own replay."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
import typer

from kvindexd.cli.client import (
    CALL_TIMEOUT,
    DEFAULT_SERVER,
    NamespaceOption,
    ServerOption,
    connect,
)
from kvindexd.cli.output import JsonOption, console, fail, print_json, table
from kvindexd.cli.replay_audit import ReplayUnusable, audit_replay
from kvindexd.v1 import index_pb2 as pb

WorkerArgument = Annotated[str, typer.Argument(metavar="[WORKER]", help="Only this worker.")]


def register(app: typer.Typer) -> None:
    """Add the command to the app."""
    app.command("audit")(audit)


def audit(
    worker: WorkerArgument = "",
    namespace: NamespaceOption = "",
    replay: Annotated[
        bool, typer.Option("--replay", help="Compare with WORKER's own replay buffer instead.")
    ] = False,
    dp_rank: Annotated[
        int, typer.Option("--dp-rank", "--rank", min=0, help="Rank, with --replay.")
    ] = 0,
    sample: Annotated[
        int, typer.Option(min=1, help="Blocks to look up at most, with --replay.")
    ] = 1000,
    server: ServerOption = DEFAULT_SERVER,
    as_json: JsonOption = False,
) -> None:
    """Compare what picks promised with what engines reported (CompleteRequest).

    Exit status 1 if a worker is marked as drifting, or differs from its replay.
    """
    if replay:
        if not worker:
            raise typer.BadParameter("--replay needs a worker to ask", param_hint="WORKER")
        _replay(worker, dp_rank, namespace, sample, server, as_json)
        return
    request = pb.AuditRequest(worker_id=worker, namespace=namespace)
    with connect(server) as client:
        answer = client.admin.Audit(request, timeout=CALL_TIMEOUT)
    if as_json:
        print_json(answer)
    elif not answer.workers:
        console().print(
            "no outcomes yet: they come with CompleteRequest and its cached_tokens, on the server "
            "that made the pick"
        )
    else:
        _print(answer.workers)
    if any(w.drifting for w in answer.workers):
        raise typer.Exit(1)


def _replay(
    worker: str, dp_rank: int, namespace: str, sample: int, server: str, as_json: bool
) -> None:
    with connect(server) as client:
        try:
            found = audit_replay(client, worker, dp_rank, namespace, sample)
        except ReplayUnusable as e:
            fail(str(e))
    if as_json:
        print_json(msgspec.to_builtins(found))
    else:
        out = console()
        scope = "all that it holds" if found.whole else "only what it still buffers"
        out.print(
            f"replay of {found.worker_id}#{found.dp_rank}: batches {found.first_seq} to "
            f"{found.last_seq}, {scope}"
        )
        out.print(
            f"held by the replay {found.replay_blocks:,}, by the index {found.index_blocks:,}"
        )
        out.print(f"looked up {found.checked:,}, missing in the index {found.missing:,}")
        if found.moved:
            out.print("the worker went on meanwhile: differences may be due to that; ask again")
        out.print(found.finding or "ok")
    if found.finding:
        raise typer.Exit(1)


def _print(workers: Any) -> None:
    numbers = "REQUESTS, PREDICTED, ACTUAL, OFF, TOO MUCH, TOO LITTLE, MISCOUNTED, WINDOW OFF"
    shown = table(f"WORKER, RANK, {numbers}, RESYNCS, VERDICT", right=f"RANK, {numbers}, RESYNCS")
    for w in workers:
        off = (w.predicted_tokens - w.actual_tokens) / w.prompt_tokens if w.prompt_tokens else 0.0
        shown.add_row(
            w.worker_id,
            str(w.dp_rank),
            f"{w.outcomes:,}",
            f"{w.predicted_tokens:,}",
            f"{w.actual_tokens:,}",
            f"{off:+.1%}",
            f"{w.over:,}",
            f"{w.under:,}",
            f"{w.miscounted:,}",
            f"{w.window_error:.1%}",
            str(w.resyncs),
            _verdict(w),
        )
    console().print(shown)
    if any(w.miscounted for w in workers):
        console().print(
            "MISCOUNTED: the engine's prompt has another length than ours, so it tokenizes or "
            "templates prompts differently and can hardly match"
        )


def _verdict(w: Any) -> str:
    if w.drifting:
        return f"drifting: {w.window_error:.0%} of prompt tokens were predicted wrongly"
    return "ok" if w.window else "too early"
