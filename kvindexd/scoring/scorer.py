"""Score the candidates of one prompt against a table of presence bits, like workers together."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from kvindexd.model import Plane, Profile, Tier
from kvindexd.scoring.geometry import Geometry, WorkerOptions, geometry
from kvindexd.scoring.match import Bools, Match, match
from kvindexd.scoring.query import Names, Query
from kvindexd.survey import Links

Words = npt.NDArray[np.uint64]
Rows = npt.NDArray[np.int64]
Columns = npt.NDArray[np.int64]


class Table(Protocol):
    """Presence bits of one model scope (replica.table)."""

    def lookup(self, names: Names, *, prefix: bool = False) -> Rows:
        """The row of each name, -1 where nobody holds it; with `prefix`, only the leading run of
        held names matters."""
        ...

    def masks(self, rows: Rows, plane: int) -> Words:
        """[names, words]: bit `column` tells whether that worker holds the name in the plane."""
        ...

    def links(self, low: int, count: int) -> Links | None:
        """`count` rows from `low` on, 1 being the first; None behind the last row."""
        ...

    def find_plane(self, plane: Plane) -> int | None:
        """The number of a plane in use, None where nobody has shown it."""
        ...


class Scored(NamedTuple):
    """What one worker would reuse of the prompt, in tokens; `reason` says what limits it.

    `predicted`: the part of `reusable` that rests on predictions (scoring.predict), not on events.
    """

    matched: int = 0
    reusable: int = 0
    device: int = 0
    host: int = 0
    storage: int = 0
    block_size: int = 0
    upper_bound: bool = False
    reason: str = ""
    predicted: int = 0


class Candidate(NamedTuple):
    """One worker rank as scoring sees it: its column in the table and its geometry."""

    column: int
    geometry: Geometry
    unlocated: int = 0


_interned: dict[Geometry, Geometry] = {}


def candidate(column: int, profile: Profile, options: WorkerOptions, hybrid: bool) -> Candidate:
    """A candidate; equal geometries are one object, so that like workers are found by identity."""
    shape = geometry(profile, options, hybrid)
    if len(_interned) > 4096:
        _interned.clear()
    return Candidate(column, _interned.setdefault(shape, shape), profile.unlocated)


class Panel:
    """Candidates, sorted into those of like geometry once for many queries."""

    __slots__ = ("groups", "simple", "size")

    def __init__(self, candidates: Sequence[Candidate]) -> None:
        like: dict[int, list[int]] = {}
        for i, c in enumerate(candidates):
            like.setdefault(id(c.geometry), []).append(i)
        self.size = len(candidates)
        self.groups = [
            (
                candidates[indexes[0]].geometry,
                np.array([candidates[i].column for i in indexes], np.int64),
                [candidates[i].unlocated for i in indexes],
                indexes,
            )
            for indexes in like.values()
        ]
        self.simple = all(_is_simple(shape) for shape, *_ in self.groups)


class Probes:
    """Table rows of one query's names, looked up once per entry size.

    `prefix`: nobody will ask for more than the leading run.
    """

    def __init__(self, table: Table, query: Query, prefix: bool = False) -> None:
        self.table = table
        self.query = query
        self._prefix = prefix
        self._rows: dict[tuple[int, int, int], Rows] = {}

    def rows(self, unit: int, lookahead: int, entry: int) -> Rows | None:
        key = (unit, lookahead, entry)
        found = self._rows.get(key)
        if found is None:
            names = self.query.names(unit, lookahead, entry)
            if names is None:
                return None
            found = self._rows[key] = self.table.lookup(names, prefix=self._prefix)
        return found


class TablePresence:
    """match.Presence over a table for workers of one geometry."""

    def __init__(self, probes: Probes, shape: Geometry, columns: Sequence[int] | Columns) -> None:
        self._probes = probes
        self._shape = shape
        self._columns = np.asarray(columns, np.int64)
        self.workers = len(columns)

    def words(self, plane: Plane, entry: int) -> Words | None:
        """[entries, words] of a plane, every column of the table."""
        number = self._probes.table.find_plane(plane)
        rows = self._probes.rows(self._shape.unit, self._shape.lookahead, entry)
        if number is None or rows is None or not len(rows):
            return None
        return self._probes.table.masks(rows, number)

    def held(self, plane: Plane, entry: int) -> Bools | None:
        """[entries, workers] of a plane."""
        words = self.words(plane, entry)
        return None if words is None else _columns(words, self._columns)


def _columns(words: Words, columns: Columns) -> Bools:
    bits = np.unpackbits(np.ascontiguousarray(words).view(np.uint8), axis=1, bitorder="little")
    return bits[:, columns].view(np.bool_)


def score(
    table: Table,
    query: Query,
    candidates: Sequence[Candidate] | Panel,
    *,
    device_only: bool = False,
    explain: bool = False,
) -> list[Scored]:
    """Score all candidates, in their order; with `explain`, say what stops each match."""
    panel = candidates if isinstance(candidates, Panel) else Panel(candidates)
    probes = Probes(table, query, panel.simple and not explain)
    out: list[Scored] = [Scored()] * panel.size
    for shape, columns, unlocated, indexes in panel.groups:
        scored = _score_like(probes, shape, columns, unlocated, device_only, explain)
        if len(panel.groups) == 1:
            return scored
        for i, s in zip(indexes, scored, strict=True):
            out[i] = s
    return out


def _score_like(
    probes: Probes,
    shape: Geometry,
    columns: Columns,
    unlocated: Sequence[int],
    device_only: bool,
    explain: bool,
) -> list[Scored]:
    query = probes.query
    blank = Scored(block_size=shape.block_size, upper_bound=shape.options.hidden_groups)
    if not shape.block_size:
        return [blank._replace(reason="no block size learned yet: no events admitted")] * len(
            columns
        )
    why = _unanswerable(query, shape)
    if why:
        return [blank._replace(reason=why)] * len(columns)
    presence = TablePresence(probes, shape, columns)
    if _is_simple(shape) and not explain:
        return _score_simple(presence, shape, columns, query.tokens, blank)
    found = match(presence, shape, query.tokens, device_only=device_only)
    return [
        _scored(found, shape, i, n, blank, query.tokens if explain else 0)
        for i, n in enumerate(unlocated)
    ]


def _unanswerable(query: Query, shape: Geometry) -> str:
    if query.tokens < shape.block_size:
        return f"prompt of {query.tokens} tokens is shorter than one block of {shape.block_size}"
    if query.keys(shape.unit) is None:
        return f"the client's hashes are not for units of {shape.unit} tokens, as this worker needs"
    if query.names(shape.unit, shape.lookahead, shape.block_size) is None:
        return "this worker needs lookahead hashes and the client sent none"
    return ""


def _is_simple(shape: Geometry) -> bool:
    """One main spec on the device, nothing else: the leading run is the whole answer."""
    if len(shape.main) != 1 or shape.auxiliary or shape.options.eagle:
        return False
    spec = shape.main[0]
    return spec.sizes == ((spec.block_size,), (), ())


def _score_simple(
    presence: TablePresence, shape: Geometry, columns: Columns, tokens: int, blank: Scored
) -> list[Scored]:
    """By change points: AND the masks along the prompt and see where each bit falls. Workers with
    equal answers share one object."""
    spec = shape.main[0]
    words = presence.words(spec.plane(Tier.DEVICE, spec.block_size), spec.block_size)
    if words is None:
        return [blank] * len(columns)
    cap = max(0, tokens - (2 if shape.pairs else 1)) // spec.block_size
    size, bound = spec.block_size, blank.upper_bound
    return [_run(depth, cap, size, bound) for depth in leading_run(words, columns).tolist()]


@functools.lru_cache(maxsize=1 << 14)
def _run(depth: int, cap: int, size: int, upper_bound: bool) -> Scored:
    """`depth` leading blocks on the device, of which at most `cap` are of use."""
    reusable = min(depth, cap) * size
    return Scored(depth * size, reusable, reusable, 0, 0, size, upper_bound)


def leading_run(words: Words, columns: Sequence[int] | Columns) -> Columns:
    """Per column, how many leading rows of `words` [rows, words] have its bit set."""
    columns = np.asarray(columns, np.int64)
    total = len(words)
    if not total:
        return np.zeros(len(columns), np.int64)
    if words.shape[1] == 1:
        running = np.bitwise_and.accumulate(words[:, 0]).reshape(-1, 1)
    else:
        running = np.bitwise_and.accumulate(words, axis=0)
    if (running[0] == running[-1]).all():  # bits only fall: none has
        held = _columns(running[:1], columns)[0]
        return np.where(held, total, 0).astype(np.int64)
    changed = running[1:] != running[:-1]
    flat = changed[:, 0] if words.shape[1] == 1 else changed.any(axis=1)
    ends = np.append(flat.nonzero()[0], total - 1)  # last row of each equal stretch
    lengths = np.diff(ends, prepend=-1)
    depths: Columns = lengths @ _columns(running[ends], columns)
    return depths


def _scored(
    found: Match, shape: Geometry, i: int, unlocated: int, blank: Scored, tokens: int
) -> Scored:
    reusable = int(found.reusable[i])
    reasons = [why_it_stops(found, shape, i, tokens)] if tokens else []
    if unlocated:
        reasons.append(f"{unlocated} held blocks could not be placed and count as missing")
    return blank._replace(
        matched=int(found.matched[i]),
        reusable=reusable,
        device=int(found.tiers[0][i]),
        host=int(found.tiers[1][i]),
        storage=int(found.tiers[2][i]),
        reason="; ".join(r for r in reasons if r),
    )


def why_it_stops(found: Match, shape: Geometry, i: int, tokens: int) -> str:
    """Which group keeps the match from going on, in words; empty where nothing does."""
    reusable = int(found.reusable[i])
    limits = [
        (int(limit[i]), s)
        for limit, s in zip(found.limits, shape.main + shape.auxiliary, strict=True)
    ]
    most = max(0, tokens - (2 if shape.pairs else 1)) // shape.alignment * shape.alignment
    if reusable >= most or not limits:
        return ""
    lowest, spec = min(limits, key=lambda pair: pair[0])
    block = lowest // spec.block_size
    if lowest > reusable:
        names = ", ".join(f"{s.kind or 'attention'} up to {n}" for n, s in limits)
        tail = " (and EAGLE drops the last block)" if shape.options.eagle else ""
        return f"no boundary beyond {reusable} tokens suits all groups: {names}{tail}"
    kind = spec.kind or "attention"
    return f"group {spec.idx} ({kind}) stops the match at block {block} ({lowest} tokens)"
