"""How `kvindexd top` looks: a table of workers, and a worker's own page."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from kvindexd.cli.output import ago, state_text, table
from kvindexd.cli.top_view import (
    History,
    Name,
    Row,
    Snapshot,
    View,
    name_of,
    ordered,
    title,
    window,
)
from kvindexd.cli.worker_page import worker_tables

KEYS_LINE = (
    "sort: n)ame s)tate a)ge b)locks t) stores m) removes l)ag g)aps o)rphans f)iltered d)ropped "
    "h)it p)icks  r)everse  up/down mark  Enter worker  space pause  q)uit"
)
PAGE_LINE = "Esc back  space pause  q)uit"
_CHROME = 6
"""Lines around the rows."""

_COLUMNS = {
    "WORKER": "name",
    "STATE": "state",
    "AGE": "age",
    "DEVICE": "blocks",
    "HOST": "",
    "STORAGE": "",
    "STORES/S": "stores",
    "REMOVES/S": "removes",
    "LAG": "lag",
    "GAPS": "gaps",
    "ORPHANS": "orphans",
    "FILTERED": "filtered",
    "DROPPED": "dropped",
    "HIT": "hit",
    "REPORTED": "",
    "PICKS": "picks",
    "DETAIL": "",
}
_LEFT = ("WORKER", "STATE", "DETAIL")
_LEAST_FIRST = (
    "DETAIL", "REPORTED", "STORAGE", "HOST", "DROPPED", "ORPHANS", "REMOVES/S", "FILTERED", "LAG",
    "PICKS", "AGE", "GAPS", "HIT",
)  # fmt: skip
"""What is left out where there is no room."""
_SOME_DETAIL = 24


def screen(
    snapshot: Snapshot,
    history: History,
    view: View,
    height: int | None,
    width: int,
    problem: str = "",
) -> RenderableType:
    """All that is shown. `height`, `width`: of the terminal; height None = no limit, nor keys."""
    parts: list[RenderableType] = [head(snapshot, view, problem)]
    if view.page is not None:
        parts.append(page(snapshot, history, view.page))
    else:
        rows = ordered(snapshot.rows, view.sort, view.reverse)
        if height is not None:
            rows = list(window(rows, view.marked, max(1, height - _CHROME)))
        parts.append(rows_table(rows, view, width))
        if not rows:
            parts.append(Text("no workers; register one with `kvindexd workers add`"))
    if height is not None:
        parts += [Text(), Text(PAGE_LINE if view.page else KEYS_LINE, "dim", no_wrap=True)]
    return Group(*parts)


def head(snapshot: Snapshot, view: View, problem: str = "") -> Text:
    """The fleet in two lines."""
    s = snapshot.stats
    states = Counter(r.state for r in snapshot.rows)
    clock = time.strftime("%H:%M:%S", time.localtime(snapshot.at))
    text = Text(f"{clock}  {len(snapshot.rows)} worker ranks", no_wrap=True, overflow="ellipsis")
    for state, n in sorted(states.items()):
        text.append(f", {n} ").append_text(state_text(state))
    text.append(f"; {s.blocks:,} blocks, {s.entries:,} entries, {s.bytes / 1e6:,.0f} MB")
    text.append(f", {s.replica_lag:,} feed entries behind\n")
    picks = sum(r.picks for r in snapshot.rows)
    text.append(f"picks of this server: {picks:,}")
    if snapshot.hit is not None:
        text.append(f", {_percent(snapshot.hit)} of their tokens promised to be reused")
    if snapshot.reported is not None:
        text.append(f", {_percent(snapshot.reported)} reported by engines")
    text.append("  (paused)" if view.paused else "", "yellow")
    text.append(f"\n{problem}" if problem else "", "red")
    return text


def rows_table(rows: list[Row], view: View, width: int) -> Table:
    """One line per rank; the column that sorts is marked. What does not fit is left out, the least
    telling first."""
    lines = [_cells(r) for r in rows]
    wide = {
        name: max([len(name) + 1, *(len(cells[name]) for cells in lines)]) + 2 for name in _COLUMNS
    }
    shown = fitting(wide, width)
    marked = {n: n + ("*" if _COLUMNS[n] and _COLUMNS[n] == view.sort else "") for n in shown}
    right = ", ".join(marked[n] for n in shown if n not in _LEFT)
    made = table(", ".join(marked.values()), right=right)
    room = width - sum(wide[n] for n in shown if n != "DETAIL")
    for r, cells in zip(rows, lines, strict=True):
        cells["DETAIL"].truncate(max(0, room), overflow="ellipsis")
        made.add_row(*(cells[n] for n in shown), style="reverse" if r.name == view.marked else "")
    return made


def fitting(wide: Mapping[str, int], width: int) -> list[str]:
    """The columns of these widths that fit side by side; DETAIL fits where a part of it does."""
    shown = list(wide)
    for name in _LEAST_FIRST:
        needed = sum(min(wide[n], _SOME_DETAIL) if n == "DETAIL" else wide[n] for n in shown)
        if needed <= width:
            break
        shown.remove(name)
    return shown


def _cells(r: Row) -> dict[str, Text]:
    lag = "-" if r.lag_ms is None else ago(r.lag_ms) if r.lag_ms >= 1000 else f"{r.lag_ms} ms"
    plain = {
        "WORKER": title(r.name),
        "AGE": "-" if r.evidence_ms is None else ago(r.evidence_ms),
        "DEVICE": f"{r.device:,}",
        "HOST": f"{r.host:,}",
        "STORAGE": f"{r.storage:,}",
        "STORES/S": _rate(r.stores),
        "REMOVES/S": _rate(r.removes),
        "LAG": lag,
        "GAPS": f"{r.gaps:,}",
        "ORPHANS": f"{r.orphans:,}",
        "FILTERED": f"{r.filtered:,}",
        "DROPPED": f"{r.dropped:,}",
        "HIT": _percent(r.hit),
        "REPORTED": _percent(r.reported),
        "PICKS": f"{r.picks:,}",
        "DETAIL": r.detail,
    }
    return {"STATE": state_text(r.state)} | {name: Text(value) for name, value in plain.items()}


def page(snapshot: Snapshot, history: History, name: Name) -> RenderableType:
    """All that is known of one rank, each counter with its rate."""
    worker = snapshot.workers.get(name)
    if worker is None:
        return Text(f"{title(name)} is not registered any more", "red")
    counters = table("COUNTER, VALUE, PER SECOND", right="VALUE, PER SECOND")
    for counter, n in sorted(worker.counters.items()):
        aged = counter in ("evidence_age_ms", "apply_lag_ms")
        speed = None if aged else history.rate(name_of(worker), counter)
        counters.add_row(counter, f"{n:,}", "" if aged else _rate(speed))
    parts: list[RenderableType] = [Text(title(name), "bold")]
    for part in (*worker_tables(worker, counters=False), counters):
        parts += [part, Text()]
    return Group(*parts)


def _rate(value: float | None) -> str:
    return "-" if value is None else f"{value:,.1f}"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"
