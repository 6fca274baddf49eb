"""What `kvindexd top` knows: rows, rates between polls, order, and what keys do. Pure."""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from kvindexd.cli.output import plain, worker_name
from kvindexd.v1 import index_pb2 as pb

WINDOW = 8.0
"""Seconds over which rates are taken: counters reach a scorer every two seconds or so."""

Name = tuple[str, str, int]
"""(namespace, worker id, rank)."""


class Row(NamedTuple):
    """One worker rank at one poll. Ages and lag in ms, rates per second; None = not known.

    `hit`: part of their prompts that picks promised to be reused; `reported`: that engines said
    was. `dropped` counts what could not be used, decode errors included.
    """

    name: Name
    state: str
    model: str
    evidence_ms: int | None
    event_ms: int | None
    device: int
    host: int
    storage: int
    stores: float | None
    removes: float | None
    lag_ms: int | None
    gaps: int
    orphans: int
    filtered: int
    dropped: int
    hit: float | None
    reported: float | None
    picks: int
    picks_rate: float | None
    detail: str

    @property
    def blocks(self) -> int:
        """In all tiers that are credited."""
        return self.device + self.host + self.storage

    def as_json(self) -> dict[str, Any]:
        """By name, the worker's name spelled out."""
        namespace, worker_id, rank = self.name
        named: dict[str, Any] = {"namespace": namespace, "worker_id": worker_id, "dp_rank": rank}
        rest = self._asdict()
        del rest["name"]
        return named | rest


class Sample(NamedTuple):
    """Counters at a time (seconds, monotonic)."""

    at: float
    counters: Mapping[str, int]


def rate(older: Sample, newer: Sample, *names: str) -> float | None:
    """How fast the sum of some counters grew, per second. None where that cannot be said: no time
    passed, or a counter fell, because the worker was registered anew."""
    seconds = newer.at - older.at
    grown = [newer.counters.get(n, 0) - older.counters.get(n, 0) for n in names]
    if seconds <= 0 or any(n < 0 for n in grown):
        return None
    return sum(grown) / seconds


class History:
    """The last polls' counters by worker rank."""

    def __init__(self, window: float = WINDOW) -> None:
        self._window = window
        self._samples: dict[Name, deque[Sample]] = {}

    def add(self, at: float, workers: Iterable[pb.Worker]) -> None:
        """Take in a poll of all workers; those that are not in it are forgotten."""
        kept: dict[Name, deque[Sample]] = {}
        for w in workers:
            samples = kept[name_of(w)] = self._samples.get(name_of(w), deque())
            samples.append(Sample(at, dict(w.counters)))
            # The oldest sample is the last one outside the window, so that it is covered.
            while len(samples) > 2 and samples[1].at <= at - self._window:
                samples.popleft()
        self._samples = kept

    def rate(self, name: Name, *counters: str) -> float | None:
        """Per second over the window; None before the second poll."""
        samples = self._samples.get(name)
        if samples is None or len(samples) < 2:
            return None
        return rate(samples[0], samples[-1], *counters)


def name_of(worker: pb.Worker) -> Name:
    """What identifies a rank."""
    return worker.namespace, worker.worker_id, worker.dp_rank


def row(w: pb.Worker, history: History) -> Row:
    """A worker of the last poll as a row."""
    name, c = name_of(w), w.counters
    return Row(
        name,
        pb.WorkerState.Name(w.state),
        w.model,
        c.get("evidence_age_ms"),
        w.last_event_ms_ago if w.last_seq >= 0 else None,
        w.blocks.get("device", 0),
        w.blocks.get("host", 0),
        w.blocks.get("storage", 0),
        history.rate(name, "event:BlockStored"),
        history.rate(name, "event:BlockRemoved"),
        c.get("apply_lag_ms"),
        c.get("gaps", 0),
        c.get("orphans", 0),
        family(c, "filtered"),
        family(c, "dropped") + c.get("decode_errors", 0),
        _ratio(c.get("pick_reusable_tokens", 0), c.get("pick_prompt_tokens", 0)),
        _ratio(c.get("outcome_cached_tokens", 0), c.get("outcome_prompt_tokens", 0)),
        c.get("picks", 0),
        history.rate(name, "picks"),
        w.detail,
    )


def family(counters: Mapping[str, int], name: str) -> int:
    """The sum of a family of counters, `name:<reason>`."""
    return sum(n for key, n in counters.items() if key.startswith(f"{name}:"))


def _ratio(part: int, whole: int) -> float | None:
    return part / whole if whole else None


class Snapshot(NamedTuple):
    """One poll. `at`: Unix seconds."""

    at: float
    rows: Sequence[Row]
    workers: Mapping[Name, pb.Worker]
    stats: pb.IndexStatsResponse

    @property
    def hit(self) -> float | None:
        """Of all picks' prompts together."""
        return self._sum("pick_reusable_tokens", "pick_prompt_tokens")

    @property
    def reported(self) -> float | None:
        """As `hit`, by what engines reported."""
        return self._sum("outcome_cached_tokens", "outcome_prompt_tokens")

    def _sum(self, part: str, whole: str) -> float | None:
        counters = [w.counters for w in self.workers.values()]
        return _ratio(sum(c.get(part, 0) for c in counters), sum(c.get(whole, 0) for c in counters))

    def as_json(self) -> dict[str, Any]:
        """The whole poll as plain data."""
        return {
            "at": self.at,
            "index": plain(self.stats),
            "picks": sum(r.picks for r in self.rows),
            "hit": self.hit,
            "reported": self.reported,
            "workers": [r.as_json() for r in self.rows],
        }


# -- order ------------------------------------------------------------------------------------

_BADNESS = {"STALE": 0, "UNKNOWN": 1, "SYNCING": 2, "DRAINING": 3, "LIVE": 4}
_AGE = float("inf")


class Sort(enum.StrEnum):
    """What rows are ordered by."""

    NAME = "name"
    STATE = "state"
    AGE = "age"
    BLOCKS = "blocks"
    STORES = "stores"
    REMOVES = "removes"
    LAG = "lag"
    GAPS = "gaps"
    ORPHANS = "orphans"
    FILTERED = "filtered"
    DROPPED = "dropped"
    HIT = "hit"
    PICKS = "picks"


# Except for the name, the most or worst comes first.
_BY: dict[Sort, Callable[[Row], Any]] = {
    Sort.NAME: lambda r: r.name,
    Sort.STATE: lambda r: _BADNESS.get(r.state, 1),
    Sort.AGE: lambda r: -(_AGE if r.evidence_ms is None else r.evidence_ms),
    Sort.BLOCKS: lambda r: -r.blocks,
    Sort.STORES: lambda r: -(r.stores or 0.0),
    Sort.REMOVES: lambda r: -(r.removes or 0.0),
    Sort.LAG: lambda r: -(r.lag_ms or 0),
    Sort.GAPS: lambda r: -r.gaps,
    Sort.ORPHANS: lambda r: -r.orphans,
    Sort.FILTERED: lambda r: -r.filtered,
    Sort.DROPPED: lambda r: -r.dropped,
    Sort.HIT: lambda r: 1.0 if r.hit is None else -r.hit,
    Sort.PICKS: lambda r: -r.picks,
}


def ordered(rows: Iterable[Row], sort: Sort, reverse: bool = False) -> list[Row]:
    """Rows in an order; equal ones by name, either way round."""
    return sorted(sorted(rows, key=lambda r: r.name), key=_BY[sort], reverse=reverse)


# -- keys -------------------------------------------------------------------------------------


class View(NamedTuple):
    """What is shown: the order, the row that is marked, or the worker whose page is open."""

    sort: Sort = Sort.NAME
    reverse: bool = False
    marked: Name | None = None
    page: Name | None = None
    paused: bool = False
    ended: bool = False


KEYS = {
    "n": Sort.NAME,
    "s": Sort.STATE,
    "a": Sort.AGE,
    "b": Sort.BLOCKS,
    "t": Sort.STORES,
    "m": Sort.REMOVES,
    "l": Sort.LAG,
    "g": Sort.GAPS,
    "o": Sort.ORPHANS,
    "f": Sort.FILTERED,
    "d": Sort.DROPPED,
    "h": Sort.HIT,
    "p": Sort.PICKS,
}
"""Keys that sort."""


def pressed(view: View, key: str, rows: Sequence[Row]) -> View:
    """The view after a key. `rows`: in the order in which they are shown."""
    if key in ("q", "ctrl-c"):
        return view._replace(ended=True)
    if key == "space":
        return view._replace(paused=not view.paused)
    if view.page is not None:
        return view._replace(page=None) if key in ("escape", "enter", "left") else view
    if key in KEYS:
        same = KEYS[key] == view.sort
        return view._replace(sort=KEYS[key], reverse=same and not view.reverse)
    if key == "r":
        return view._replace(reverse=not view.reverse)
    if key in ("up", "down", "k", "j") and rows:
        names = [r.name for r in rows]
        at = names.index(view.marked) if view.marked in names else -1
        step = 1 if key in ("down", "j") else -1
        at = min(len(names) - 1, max(0, at + step)) if at >= 0 else 0
        return view._replace(marked=names[at])
    if key in ("enter", "right") and rows:
        names = [r.name for r in rows]
        return view._replace(page=view.marked if view.marked in names else names[0])
    return view


def window(rows: Sequence[Row], marked: Name | None, height: int) -> Sequence[Row]:
    """The rows that fit into `height` lines, the marked one among them."""
    if len(rows) <= height:
        return rows
    at = next((i for i, r in enumerate(rows) if r.name == marked), 0)
    first = min(max(0, at - height // 2), len(rows) - height)
    return rows[first : first + height]


def title(name: Name) -> str:
    """A rank as people name it."""
    return f"{worker_name(name[0], name[1])}#{name[2]}"
