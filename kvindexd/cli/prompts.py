"""`kvindexd score` and `kvindexd explain`: ask about a prompt."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from kvindexd.cli import compare
from kvindexd.cli.asking import about_a_prompt
from kvindexd.cli.client import CALL_TIMEOUT, DEFAULT_SERVER, ServerOption, connect
from kvindexd.cli.explain_page import print_explanation, reusable
from kvindexd.cli.options import parse_prompt
from kvindexd.cli.output import JsonOption, console, plain, print_json, state_text, table
from kvindexd.v1 import index_pb2 as pb


def register(app: typer.Typer) -> None:
    """Add the commands to the app."""
    app.command("score")(about_a_prompt(score))
    app.command("explain")(about_a_prompt(explain))


def score(
    request: pb.ScoreWorkersRequest,
    explain: Annotated[
        bool, typer.Option("--explain", help="Say why each match stops where it does.")
    ] = False,
    server: ServerOption = DEFAULT_SERVER,
    as_json: JsonOption = False,
) -> None:
    """Say how much of a prompt each worker would reuse, best first."""
    request.options.explain = explain
    with connect(server) as client:
        answer = client.index.ScoreWorkers(request, timeout=CALL_TIMEOUT)
    if as_json:
        print_json(answer)
    else:
        _print_scores(answer, explain)


def explain(
    request: pb.ScoreWorkersRequest,
    against: Annotated[
        list[Path] | None,
        typer.Option(
            help="File with a second prompt, in the same form: say where they part; repeatable.",
            exists=True,
            dir_okay=False,
        ),
    ] = None,
    server: ServerOption = DEFAULT_SERVER,
    as_json: JsonOption = False,
) -> None:
    """Show per worker, block by block, what is held and why the match stops.

    Where nothing is held, forms of the prompt that mistakes make of it are looked for: with or
    without a BOS, another adapter or salt, another model or namespace. The index holds hashes
    only; --against compares with a prompt that you have, such as the one that the engine saw.
    """
    request.options.explain = True
    differences = _compared(request.prompt, against or [])
    if not as_json:
        # Needs no server, so that it is there even without one.
        _print_differences(console(), differences)
    with connect(server) as client:
        answer = client.index.Explain(request, timeout=CALL_TIMEOUT)
    sizes = sorted({w.score.block_size for w in answer.workers if w.score.block_size})
    if as_json:
        compared = [compare.as_json(name, d, sizes) for name, d in differences]
        print_json(plain(answer) | ({"against": compared} if compared else {}))
        return
    if sizes:
        _print_blocks(console(), differences, sizes)
    print_explanation(console(), answer)


def _compared(prompt: pb.Prompt, files: list[Path]) -> list[tuple[str, compare.Difference]]:
    out = []
    for path in files:
        try:
            out.append((str(path), compare.compare(prompt, parse_prompt(f"@{path}"))))
        except compare.Incomparable as e:
            raise typer.BadParameter(f"{path}: {e}", param_hint="--against") from None
    return out


def _print_differences(out: Console, differences: list[tuple[str, compare.Difference]]) -> None:
    for name, d in differences:
        out.print(compare.sentence(name, d))
    if len(differences) > 1:
        name = differences[compare.nearest([d for _, d in differences])][0]
        out.print(f"nearest: {name}")


def _print_blocks(
    out: Console, differences: list[tuple[str, compare.Difference]], sizes: list[int]
) -> None:
    """In which of the workers' blocks the prompts part, which only the workers tell."""
    for name, d in differences:
        if d.form == "tokens" and d.at is not None:
            out.print(f"parts from {name} in {', '.join(compare.block(d, s) for s in sizes)}")
    if differences:
        out.print()


def _print_scores(answer: pb.ScoreWorkersResponse, explain: bool) -> None:
    out = console()
    out.print(f"prompt: {answer.prompt_tokens:,} tokens; index {answer.index_revision}")
    if not answer.scores:
        out.print("no worker matches; see `kvindexd workers list`")
        return
    numbers = "REUSABLE, MATCHED, DEVICE, HOST, STORAGE, PREDICTED, ACTIVE, COST"
    shown = table(
        f"WORKER, RANK, STATE, {numbers}, ADDRESS" + (", REASON" if explain else ""),
        right=f"RANK, {numbers}",
    )
    for s in answer.scores:
        shown.add_row(
            s.worker_id,
            str(s.dp_rank),
            state_text(pb.WorkerState.Name(s.state)),
            reusable(s),
            *(f"{n:,}" for n in (s.matched_tokens, s.device_tokens, s.host_tokens)),
            *(f"{n:,}" for n in (s.storage_tokens, s.predicted_tokens, s.active_blocks)),
            f"{s.cost:.2f}",
            s.address,
            *([s.reason] if explain else []),
        )
    out.print(shown)
