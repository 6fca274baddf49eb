"""`kvindexd score` and `kvindexd explain`: ask about a prompt."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from kvindexd.cli.client import (
    CALL_TIMEOUT,
    DEFAULT_SERVER,
    NamespaceOption,
    ServerOption,
    connect,
)
from kvindexd.cli.options import (
    LabelOption,
    PromptArgument,
    RoleName,
    parse_labels,
    parse_prompt,
)
from kvindexd.cli.output import JsonOption, console, print_json, state_text, table
from kvindexd.v1 import index_pb2 as pb

ModelOption = Annotated[str, typer.Option(help="Model id; default: the only live one.")]
LoraOption = Annotated[str, typer.Option(help="Adapter name.")]
SaltOption = Annotated[str, typer.Option(help="The engine's cache salt.")]
CandidateOption = Annotated[
    list[str] | None,
    typer.Option("--candidate", help="Worker id or address to consider; repeatable."),
]
TopOption = Annotated[int, typer.Option("--top-k", min=0, help="Best N only; 0 = all.")]
StaleOption = Annotated[bool, typer.Option("--include-stale", help="Include STALE workers.")]
DeviceOption = Annotated[bool, typer.Option("--device-only", help="Count the device tier alone.")]
RoleOption = Annotated[RoleName | None, typer.Option(help="Only workers of this role.")]

STRIP_WIDTH = 64
"""Cells of a heat strip, at most; longer prompts put several blocks into a cell."""

# Of the blocks in one cell the worst is shown: missing, then predicted, storage, host, device.
_BADNESS = {1: 0, 2: 1, 3: 2, 4: 3, 0: 4}
_GLYPHS = {
    0: ("·", "red"),
    1: ("█", "green"),
    2: ("▓", "yellow"),
    3: ("▒", "magenta"),
    4: ("░", "cyan"),
}
_LEGEND = "█ device  ▓ host  ▒ storage  ░ predicted  · missing"


def register(app: typer.Typer) -> None:
    """Add the commands to the app."""
    app.command("score")(score)
    app.command("explain")(explain)


def score(
    prompt: PromptArgument,
    model: ModelOption = "",
    namespace: NamespaceOption = "",
    lora_name: LoraOption = "",
    cache_salt: SaltOption = "",
    explain: Annotated[
        bool, typer.Option("--explain", help="Say why each match stops where it does.")
    ] = False,
    candidate: CandidateOption = None,
    top_k: TopOption = 0,
    role: RoleOption = None,
    label: LabelOption = None,
    include_stale: StaleOption = False,
    device_only: DeviceOption = False,
    server: ServerOption = DEFAULT_SERVER,
    as_json: JsonOption = False,
) -> None:
    """Say how much of a prompt each worker would reuse, best first."""
    options = pb.ScoreOptions(
        explain=explain,
        top_k=top_k,
        role=None if role is None else role.name,
        labels=parse_labels(label),
        include_stale=include_stale,
        device_only=device_only,
    )
    what = _prompt(prompt, model, namespace, lora_name, cache_salt)
    request = pb.ScoreWorkersRequest(prompt=what, candidates=candidate or [], options=options)
    with connect(server) as client:
        answer = client.index.ScoreWorkers(request, timeout=CALL_TIMEOUT)
    if as_json:
        print_json(answer)
    else:
        _print_scores(answer, explain)


def explain(
    prompt: PromptArgument,
    model: ModelOption = "",
    namespace: NamespaceOption = "",
    lora_name: LoraOption = "",
    cache_salt: SaltOption = "",
    candidate: CandidateOption = None,
    top_k: TopOption = 0,
    role: RoleOption = None,
    label: LabelOption = None,
    include_stale: StaleOption = False,
    device_only: DeviceOption = False,
    server: ServerOption = DEFAULT_SERVER,
    as_json: JsonOption = False,
) -> None:
    """Show per worker, block by block, what is held and why the match stops."""
    options = pb.ScoreOptions(
        explain=True,
        top_k=top_k,
        role=None if role is None else role.name,
        labels=parse_labels(label),
        include_stale=include_stale,
        device_only=device_only,
    )
    what = _prompt(prompt, model, namespace, lora_name, cache_salt)
    request = pb.ScoreWorkersRequest(prompt=what, candidates=candidate or [], options=options)
    with connect(server) as client:
        answer = client.index.Explain(request, timeout=CALL_TIMEOUT)
    if as_json:
        print_json(answer)
    else:
        _print_explanation(answer)


def _prompt(
    argument: str, model: str, namespace: str, lora_name: str, cache_salt: str
) -> pb.Prompt:
    prompt = parse_prompt(argument)
    prompt.model, prompt.namespace = model, namespace
    prompt.lora_name, prompt.cache_salt = lora_name, cache_salt
    return prompt


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


def reusable(score: pb.WorkerScore) -> str:
    """Reusable tokens; with `<=` in front where they are an upper bound."""
    return f"{'<= ' if score.upper_bound else ''}{score.reusable_tokens:,}"


def _print_explanation(answer: pb.ExplainResponse) -> None:
    out = console()
    if not answer.workers:
        out.print("no worker matches; see `kvindexd workers list`")
        return
    for worker in answer.workers:
        s = worker.score
        head = Text(f"{s.worker_id} rank {s.dp_rank}  ", "bold")
        head.append_text(state_text(pb.WorkerState.Name(s.state)))
        head.append(f"  reuses {reusable(s)} tokens, matches {s.matched_tokens:,}")
        out.print(head)
        for run in worker.groups:
            _print_run(out, run)
        if s.reason:
            out.print(f"  {s.reason}")
        out.print()
    out.print(_LEGEND)


def _print_run(out: Console, run: pb.GroupRun) -> None:
    group = run.group
    per_cell = -(-len(run.held) // STRIP_WIDTH) or 1
    scale = f", {per_cell} blocks per cell" if per_cell > 1 else ""
    kind = group.kind or "(kind not on the wire)"
    out.print(
        f"  group {group.idx} {kind}, {group.treated_as}, {len(run.held):,} blocks of "
        f"{group.block_size}{scale}"
    )
    out.print(Text("  ").append_text(strip(run.held)))
    out.print(f"  stops at {run.stops_at:,} tokens" + (f": {run.why}" if run.why else ""))


def strip(held: bytes, width: int = STRIP_WIDTH) -> Text:
    """A heat strip: one cell per block, or per run of blocks, which then shows the worst one."""
    per_cell = -(-len(held) // width) or 1
    cells = Text()
    for start in range(0, len(held), per_cell):
        worst = max(held[start : start + per_cell], key=lambda b: _BADNESS.get(b, 4))
        glyph, style = _GLYPHS.get(worst, _GLYPHS[0])
        cells.append(glyph, style)
    return cells
