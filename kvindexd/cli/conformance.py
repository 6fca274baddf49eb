"""`kvindexd conformance`: captures through the rules in process, beside the engine's answers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from kvindexd.capturing.checking import RankReport, Report, Result, check
from kvindexd.capturing.lines import CaptureError
from kvindexd.capturing.reader import open_capture
from kvindexd.cli.output import JsonOption, console, fail, print_json, table

_NUMBERS = "PROBES, EXACT, OVER, UNDER, MATCHED!, ATTENTION-ONLY, A-OVER, A-UNDER"
_NOTHING_SAID = (
    "no probes: the files hold no answers of the engine to compare with; below is what their "
    "streams say of themselves"
)
_MASKED = (
    "masked: no engine hash can be reproduced, so that blocks which the engine names only by its "
    "hash are missing; fewer tokens may be found than in the original"
)


def register(app: typer.Typer) -> None:
    """Add the command to the app."""
    app.command("conformance")(conformance)


def conformance(
    captures: Annotated[
        list[Path],
        typer.Argument(metavar="FILE...", help="Capture files, or folders with frames.jsonl."),
    ],
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Print every difference, and every stream.")
    ] = False,
    allow_over: Annotated[
        int, typer.Option(min=0, help="Probes per file that may find more than the engine.")
    ] = 0,
    allow_under: Annotated[
        int, typer.Option(min=0, help="Probes per file that may find less than the engine.")
    ] = 0,
    as_json: JsonOption = False,
) -> None:
    """Run captures through decoder, state machine and scoring, and compare with the engine.

    Exit status 1 if more differs than allowed. A file without probes cannot differ.
    """
    reports = [_check(path) for path in captures]
    if as_json:
        print_json({r.name: _plain(r) for r in reports})
    else:
        _print(reports, verbose)
    if any(r.exact.over > allow_over or r.exact.under > allow_under for r in reports):
        raise typer.Exit(1)


def _check(path: Path) -> Report:
    try:
        return check(open_capture(path))
    except CaptureError as e:
        fail(str(e))
    except OSError as e:
        fail(f"cannot read {path}: {e.strerror}")


def _plain(report: Report) -> dict[str, Any]:
    data: dict[str, Any] = msgspec.to_builtins(report)
    return data | {
        "exact": report.exact._asdict(),
        "attention_only": report.attention_only._asdict(),
        "differences": [d._asdict() for d in report.differences],
        "ranks": [
            r | {"findings": rank.findings}
            for r, rank in zip(data["ranks"], report.ranks, strict=True)
        ],
    }


def _print(reports: Sequence[Report], verbose: bool) -> None:
    out = console()
    asked = [r for r in reports if r.exact.probes]
    if asked:
        shown = table(f"CAPTURE, {_NUMBERS}", right=_NUMBERS)
        for report in asked:
            shown.add_row(report.name, *_cells(report.exact, report.attention_only))
        if len(asked) > 1:
            total = [_sum([r.exact for r in asked]), _sum([r.attention_only for r in asked])]
            shown.add_row("total", *_cells(*total))
        out.print(shown)
    else:
        out.print(_NOTHING_SAID)
    for report in reports:
        if report.cut:
            out.print(f"{report.name}: {report.cut}")
        if report.unknown:
            out.print(f"{report.name}: {report.unknown:,} records of unknown types left out")
        if report.unasked:
            out.print(f"{report.name}: {report.unasked:,} probes without their prompt left out")
        if report.masked:
            out.print(f"{report.name}: {_MASKED}")
        if verbose:
            _print_differences(report)
        if verbose or not report.exact.probes:
            for rank in report.ranks:
                _print_rank(report.name, rank)


def _cells(exact: Result, simple: Result) -> list[str]:
    return [f"{n:,}" for n in (*exact, simple.exact, simple.over, simple.under)]


def _sum(results: Sequence[Result]) -> Result:
    return Result(*map(sum, zip(*results, strict=True)))


def _print_differences(report: Report) -> None:
    for d in report.differences:
        bound = ", where the wire tells an upper bound only" if d.upper_bound else ""
        matched = "" if d.engine_matched is None else f"; matched {d.matched}, {d.engine_matched}"
        console().print(
            f"  {report.name} {d.src} seq {d.last_seq} {d.prompt}: {d.reusable}, engine "
            f"{d.engine}{matched}{bound}"
        )


def _print_rank(name: str, rank: RankReport) -> None:
    out = console()
    out.print(f"{name} {rank.src}: {rank.frames:,} frames, {rank.first_seq} to {rank.last_seq}")
    out.print(f"  events   {_counts(rank.events)}")
    out.print(f"  blocks   {_counts(rank.blocks)}")
    filtered = {k: n for k, n in rank.counters.items() if k.startswith("filtered:")}
    if filtered:
        out.print(f"  filtered {_counts(filtered)}")
    rest = {k: n for k, n in rank.counters.items() if k not in filtered}
    out.print(f"  counters {_counts(rest)}")
    for g in rank.groups:
        window = f", window {g['window']}" if g["window"] else ""
        out.print(
            f"  group {g['idx']}: {g['kind'] or 'no kind'}, blocks of {g['block_size']}{window}, "
            f"treated as {g['treated_as']}, {g['stores']:,} stores"
        )
    for finding in rank.findings:
        out.print(f"  finding: {finding}")


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{k} {n:,}" for k, n in counts.items()) or "none"
