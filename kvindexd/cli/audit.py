"""`kvindexd audit`: promises against what engines reported, and against a worker's own replay."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from kvindexd.cli.client import (
    CALL_TIMEOUT,
    DEFAULT_SERVER,
    NamespaceOption,
    ServerOption,
    connect,
)
from kvindexd.cli.output import JsonOption, console, print_json, table
from kvindexd.v1 import index_pb2 as pb

WorkerArgument = Annotated[str, typer.Argument(metavar="[WORKER]", help="Only this worker.")]


def register(app: typer.Typer) -> None:
    """Add the command to the app."""
    app.command("audit")(audit)


def audit(
    worker: WorkerArgument = "",
    namespace: NamespaceOption = "",
    server: ServerOption = DEFAULT_SERVER,
    as_json: JsonOption = False,
) -> None:
    """Compare what picks promised with what engines reported (CompleteRequest).

    Exit status 1 if a worker is marked as drifting.
    """
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
