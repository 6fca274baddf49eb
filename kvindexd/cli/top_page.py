"""How `kvindexd top` looks: a table of workers, and a worker's own page."""

from __future__ import annotations

import time
from collections import Counter

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


def screen(
    snapshot: Snapshot, history: History, view: View, height: int | None, problem: str = ""
) -> RenderableType:
    """All that is shown. `height`: lines of the terminal, None = no limit, nor any keys."""
    parts: list[RenderableType] = [head(snapshot, view, problem)]
    if view.page is not None:
        parts.append(page(snapshot, history, view.page))
    else:
        rows = ordered(snapshot.rows, view.sort, view.reverse)
        if height is not None:
            rows = list(window(rows, view.marked, max(1, height - _CHROME)))
        parts.append(rows_table(rows, view))
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
    text = Text(f"{clock}  {len(snapshot.rows)} worker ranks")
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


def rows_table(rows: list[Row], view: View) -> Table:
    """One line per rank; the column that sorts is marked."""
    names = [n + ("*" if key and key == view.sort else "") for n, key in _COLUMNS.items()]
    left = {"WORKER", "STATE", "DETAIL"}
    made = table(", ".join(names), right=", ".join(n for n in names if n.rstrip("*") not in left))
    for r in rows:
        made.add_row(
            title(r.name),
            state_text(r.state),
            "-" if r.evidence_ms is None else ago(r.evidence_ms),
            *(f"{n:,}" for n in (r.device, r.host, r.storage)),
            _rate(r.stores),
            _rate(r.removes),
            "-" if r.lag_ms is None else ago(r.lag_ms) if r.lag_ms >= 1000 else f"{r.lag_ms} ms",
            *(f"{n:,}" for n in (r.gaps, r.orphans, r.filtered, r.dropped)),
            _percent(r.hit),
            _percent(r.reported),
            f"{r.picks:,}",
            r.detail,
            style="reverse" if r.name == view.marked else "",
        )
    return made


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
