"""An explanation for people: strips of blocks, what stops each match, where the prompt leaves."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from kvindexd.cli.output import state_text
from kvindexd.v1 import index_pb2 as pb

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
_LEGEND = "█ device  ▓ host  ▒ storage  ░ predicted  · missing  ^ the block where a group stops"


def print_explanation(out: Console, answer: pb.ExplainResponse) -> None:
    """All of an answer."""
    for worker in answer.workers:
        _print_worker(out, worker)
    if answer.workers:
        out.print(_LEGEND)
    else:
        out.print("no worker matches; see `kvindexd workers list`")
    if answer.HasField("divergence"):
        out.print()
        _print_divergence(out, answer.divergence)


def _print_worker(out: Console, worker: pb.WorkerExplanation) -> None:
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


def reusable(score: pb.WorkerScore) -> str:
    """Reusable tokens; with `<=` in front where they are an upper bound."""
    return f"{'<= ' if score.upper_bound else ''}{score.reusable_tokens:,}"


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
    if run.stops_at < len(run.held):
        out.print("  " + " " * (run.stops_at // per_cell) + "^")
    where = f"  stops at block {run.stops_at:,} (token {run.stops_at * group.block_size:,})"
    out.print(where + (f": {run.why}" if run.why else ""))


def strip(held: bytes, width: int = STRIP_WIDTH) -> Text:
    """A heat strip: one cell per block, or per run of blocks, which then shows the worst one."""
    per_cell = -(-len(held) // width) or 1
    cells = Text()
    for start in range(0, len(held), per_cell):
        worst = max(held[start : start + per_cell], key=lambda b: _BADNESS.get(b, 4))
        glyph, style = _GLYPHS.get(worst, _GLYPHS[0])
        cells.append(glyph, style)
    return cells


def _print_divergence(out: Console, found: pb.Divergence) -> None:
    out.print(Text("where the prompt leaves the index", "bold"))
    out.print(f"  {found.detail}")
    if found.held_tokens < found.before_token:
        last = found.before_token - 1
        between = f"from {found.held_tokens:,} to {last:,}" if last > found.held_tokens else "0"
        out.print(f"  first differing token, if one differs: position {between}")
    for v in found.variations:
        names = ", ".join(v.workers)
        out.print(f"  held {v.detail}: {v.matched_tokens:,} tokens on {names}")
    if found.tried:
        none = "" if found.variations else "; none of these is held"
        out.print(f"  tried: {'; '.join(found.tried)}{none}")
    for what in found.unknown:
        out.print(f"  not known: {what}")
