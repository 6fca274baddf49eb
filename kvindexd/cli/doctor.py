"""`kvindexd doctor`: what is wrong with a deployment, what it costs, and what to do about it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec
import structlog
import typer
from rich.text import Text

from kvindexd.cli.client import DEFAULT_SERVER, ServerOption, channel
from kvindexd.cli.output import ConfigOption, JsonOption, console, print_json, progress, table
from kvindexd.config import Config, ConfigError, load
from kvindexd.doctor.catalogue import CHECKS
from kvindexd.doctor.facts import Facts, Missing
from kvindexd.doctor.gather import gather
from kvindexd.doctor.probing import Ask
from kvindexd.doctor.report import Check, Finding, NotChecked, Report, Severity, chosen, judge

_STYLES = {Severity.ERROR: "bold red", Severity.WARNING: "yellow", Severity.INFO: "cyan"}


def register(app: typer.Typer) -> None:
    """Add the command to the app."""
    app.command("doctor")(doctor)


def doctor(
    only: Annotated[
        list[str] | None,
        typer.Option("--only", metavar="ID", help="Only this check, or redis-*; repeatable."),
    ] = None,
    wait: Annotated[
        float,
        typer.Option(min=0, metavar="SECONDS", help="Listen and compare for so long; 0 = do not."),
    ] = 3.0,
    envoy: Annotated[
        list[Path] | None,
        typer.Option(metavar="FILE", help="Check this Envoy configuration too; repeatable."),
    ] = None,
    candidate: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="A name that gateways use for a worker; repeatable."),
    ] = None,
    outage: Annotated[
        float,
        typer.Option(min=0, metavar="SECONDS", help="Longest restart that replay should bridge."),
    ] = 60.0,
    replay: Annotated[
        bool, typer.Option("--replay/--no-replay", help="Ask the engines' replay sockets.")
    ] = True,
    timeout: Annotated[
        float, typer.Option(min=0.1, metavar="SECONDS", help="Longest wait for each answer.")
    ] = 3.0,
    metrics: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="kvindexd's metrics; default: as configured.")
    ] = "",
    redis: Annotated[
        str | None, typer.Option(metavar="URL", help="The store; default: as configured.")
    ] = None,
    list_: Annotated[bool, typer.Option("--list", help="List all checks, and run none.")] = False,
    config: ConfigOption = None,
    server: ServerOption = DEFAULT_SERVER,
    as_json: JsonOption = False,
) -> None:
    """Check a deployment: daemon, store, engines, gateway. Each finding comes with its fix.

    Give it the daemon's own settings (--config, KVINDEXD_*). Exit status 1 for a finding that is
    an error or a warning.
    """
    try:
        checks = chosen(CHECKS, only or [])
    except ValueError as e:
        raise typer.BadParameter(str(e), param_hint="--only") from None
    if list_:
        _print_checks(checks, as_json)
        return
    settings, problem = _settings(config, redis)
    ask = Ask(
        server=server,
        metrics=metrics,
        config=settings,
        config_problem=problem,
        needs={need for check in checks for need in _needs(check)},
        wait=wait,
        within=timeout,
        outage=outage,
        replay=replay,
        envoy=envoy or [],
        candidates=candidate or [],
    )
    report = judge(checks, _gathered(ask))
    if as_json:
        print_json(_plain(report))
    else:
        _print(report)
    if report.bad:
        raise typer.Exit(1)


def _needs(check: Check) -> tuple[str, ...]:
    # What a check looks at besides, where it is there, is gathered for it too.
    extra = {
        "server-unreachable": ("reach",),
        "server-not-ready": ("metrics",),
        "tokenizer-missing": ("metrics",),
    }
    return (*check.needs, *extra.get(check.id, ()))


def _settings(path: Path | None, redis: str | None) -> tuple[Config | Missing, str]:
    try:
        return load(path, flags={"redis.url": redis}).config, ""
    except ConfigError as e:
        return Missing(f"the settings cannot be used: {e}"), str(e)


def _gathered(ask: Ask) -> Facts:
    # What the parts that are tried would log is in the findings; standard output is the report's.
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    with channel(ask.server) as client, progress("looking at the deployment") as advance:
        return asyncio.run(gather(ask, client, advance))


# -- telling it -------------------------------------------------------------------------------


def _plain(report: Report) -> dict[str, Any]:
    counts = {s.value: sum(f.severity is s for f in report.findings) for s in Severity}
    plain: dict[str, Any] = msgspec.to_builtins(report)
    return plain | {"summary": counts | {"not_checked": len(report.not_checked)}}


def _print(report: Report) -> None:
    out = console()
    for finding in report.findings:
        out.print(_finding(finding))
        out.print()
    for line in _not_checked(report.not_checked):
        out.print(line, style="dim")
    counts = [
        f"{n} {s.value}{'s' if n != 1 and s is not Severity.INFO else ''}"
        for s in Severity
        if (n := sum(f.severity is s for f in report.findings))
    ]
    skipped = len({n.id for n in report.not_checked})
    tail = f"; {skipped} checks not run, or not everywhere" if skipped else ""
    out.print(f"{', '.join(counts) or 'nothing found'}; {len(report.sound)} checks sound{tail}")


def _finding(f: Finding) -> Text:
    shown = Text()
    shown.append(f.severity.upper(), _STYLES[f.severity])
    shown.append(f" {f.id}", "bold")
    shown.append(f"  {f.subject}: {f.what}\n")
    evidence = ", ".join(f"{k}={v!r}" for k, v in f.evidence.items())
    for name, text in (("evidence", evidence), ("cost", f.cost), ("fix", f.fix)):
        first, *more = text.splitlines() or [""]
        shown.append(f"  {name:8} ", "dim")
        shown.append("\n".join([first, *(f"  {'':8} {line}" for line in more)]) + "\n")
    shown.right_crop(1)
    return shown


def _not_checked(skipped: Sequence[NotChecked]) -> list[str]:
    """One line per reason, with the checks and subjects that it kept out."""
    by_why: dict[str, list[NotChecked]] = {}
    for n in skipped:
        by_why.setdefault(n.why, []).append(n)
    lines = []
    for why, group in by_why.items():
        ids = sorted({n.id for n in group})
        subjects = sorted({n.subject for n in group if n.subject})
        on = f" on {_few(subjects)}" if subjects else ""
        lines.append(f"not checked: {_few(ids)}{on}: {why}")
    return lines


def _few(names: Sequence[str], most: int = 6) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def _print_checks(checks: Sequence[Check], as_json: bool) -> None:
    rows = [
        {
            "id": c.id,
            "severity": c.severity.value,
            "provoked": c.provoked,
            "cost": c.cost,
            "fix": c.fix,
        }
        for c in checks
    ]
    if as_json:
        print_json({"checks": rows})
        return
    shown = table("ID, SEVERITY, PROVOKED BY")
    for row in rows:
        shown.add_row(row["id"], row["severity"], row["provoked"])
    console().print(shown)
