"""How far each of a set of like workers could resume a prompt: the engine's own rules.

The rules are 04-scoring.md section 1. Matrices are [boundary, worker] of bool; a row `i` of a
matrix with entries of e tokens speaks of the entry that ends at (i + 1) * e.
"""

from __future__ import annotations

import math
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from kvindexd.groups import CHUNK_KINDS, STATE_KINDS, WINDOW_KINDS
from kvindexd.model import Plane, Tier
from kvindexd.scoring.geometry import Geometry, Spec, blocks_back

Bools = npt.NDArray[np.bool_]
Ints = npt.NDArray[np.int64]


class Presence(Protocol):
    """Which workers of the set hold which entries of the prompt."""

    workers: int

    def held(self, plane: Plane, entry: int) -> Bools | None:
        """[tokens // entry, workers] for entries of `entry` tokens; None = nobody, nothing."""
        ...


class Match(NamedTuple):
    """Tokens per worker. `tiers[t]`: leading tokens that tier t adds; they sum to `reusable`.

    `limits`: per spec of the geometry, the largest boundary that group alone would allow.
    """

    matched: Ints
    reusable: Ints
    tiers: tuple[Ints, Ints, Ints]
    limits: tuple[Ints, ...]


class _View:
    """The held matrices of one query, with farther tiers added behind what nearer ones reach."""

    def __init__(self, presence: Presence, geometry: Geometry, tokens: int) -> None:
        self._presence = presence
        self._tokens = tokens
        self._cache: dict[tuple[Spec, int], Bools] = {}
        self.workers = presence.workers
        self.geometry = geometry

    def _tier(self, spec: Spec, entry: int, tier: int) -> Bools | None:
        """One tier's entries of `entry` tokens, larger chunks of it spread over their blocks."""
        found = None
        if entry in spec.sizes[tier]:
            found = self._presence.held(spec.plane(tier, entry), entry)
        if entry != spec.block_size:
            return found
        for size in spec.sizes[tier]:
            if size > entry and size % entry == 0:
                chunks = self._presence.held(spec.plane(tier, size), size)
                if chunks is None:
                    continue
                spread = np.zeros((self._tokens // entry, self.workers), bool)
                whole = np.repeat(chunks, size // entry, axis=0)
                spread[: len(whole)] = whole
                found = spread if found is None else found | spread
        return found

    def entries(self, spec: Spec, entry: int) -> Bools:
        """What counts as held so far."""
        key = (spec, entry)
        found = self._cache.get(key)
        if found is None:
            found = self._tier(spec, entry, Tier.DEVICE)
            if found is None:
                found = np.zeros((self._tokens // entry, self.workers), bool)
            self._cache[key] = found
        return found

    def add_tier(self, tier: int, reached: Ints) -> None:
        """Behind `reached` tokens only `tier` counts: a load resumes where the nearer ends."""
        for spec in self.geometry.main + self.geometry.auxiliary:
            for entry in {spec.block_size, *spec.partial}:
                ends = (np.arange(self._tokens // entry) + 1)[:, None] * entry
                kept = self.entries(spec, entry) & (ends <= reached[None, :])
                farther = self._tier(spec, entry, tier)
                self._cache[(spec, entry)] = kept if farther is None else kept | farther

    def any_tier(self, spec: Spec) -> Bools:
        """Full blocks held in whatever tier."""
        found = self.entries(spec, spec.block_size)
        for tier in (Tier.HOST, Tier.STORAGE):
            more = self._tier(spec, spec.block_size, tier)
            if more is not None:
                found = found | more
        return found


def match(
    presence: Presence, geometry: Geometry, tokens: int, *, device_only: bool = False
) -> Match:
    """Match one prompt of `tokens` tokens against workers of one geometry."""
    view = _View(presence, geometry, tokens)
    none = np.zeros(presence.workers, np.int64)
    if not geometry.main and not geometry.auxiliary:
        return Match(none, none, (none, none, none), ())
    matched = _matched(view, tokens, device_only=device_only)
    reach = [_reusable(view, tokens)]
    for tier in (Tier.HOST, Tier.STORAGE):
        if device_only or tier not in geometry.tiers:
            reach.append(reach[-1])
        else:
            view.add_tier(tier, reach[-1])
            farther = _reusable(view, tokens)
            least = _least_load(geometry, tier)
            reach.append(np.where(farther - reach[-1] >= least, farther, reach[-1]))
    most = np.full(view.workers, _cap(geometry, tokens), np.int64)
    limits = (
        *(_main_reach(view, s, most, 0) for s in geometry.main),
        *(_last(_valid(view, s, tokens), geometry.alignment) for s in geometry.auxiliary),
    )
    return Match(matched, reach[2], (reach[0], reach[1] - reach[0], reach[2] - reach[1]), limits)


def _least_load(geometry: Geometry, tier: int) -> int:
    """The fewest tokens that an engine loads from a tier: one chunk, where it keeps nothing
    smaller there."""
    return max((min(s.sizes[tier]) for s in geometry.main if s.sizes[tier]), default=1)


def _cap(geometry: Geometry, tokens: int) -> int:
    """The engine always computes the last token; with pairs n tokens make n - 1 units."""
    return max(0, tokens - (2 if geometry.pairs else 1))


def _prefix(held: Bools) -> Ints:
    """Leading rows that are all held, per worker."""
    if not len(held):
        return np.zeros(held.shape[1], np.int64)
    missing = ~held
    return np.where(missing.any(axis=0), missing.argmax(axis=0), len(held)).astype(np.int64)


def _runs(held: Bools) -> Ints:
    """Per row and worker, how many consecutive rows up to it are held."""
    rows = np.arange(len(held), dtype=np.int64)[:, None]
    last_gap = np.maximum.accumulate(np.where(held, -1, rows), axis=0)
    return rows - last_gap


def _matched(view: _View, tokens: int, *, device_only: bool) -> Ints:
    """The largest boundary common to all main groups, a partial entry at its end included where
    the engine would look for one."""
    geometry = view.geometry
    if not geometry.main:
        return np.zeros(view.workers, np.int64)
    ends = []
    for spec in geometry.main:
        held = view.entries(spec, spec.block_size) if device_only else view.any_tier(spec)
        end = _prefix(held) * spec.block_size
        for entry in spec.partial:
            most = np.full(view.workers, _cap(geometry, tokens), np.int64)
            end = _partial_end(view.entries(spec, entry), end, entry, spec, most)
        ends.append(end)
    lowest = np.minimum.reduce(ends)
    # Groups that end apart meet at a boundary of them all; a partial entry is no such boundary.
    grid = math.lcm(*(s.block_size for s in geometry.main))
    return np.asarray(np.where(lowest == np.maximum.reduce(ends), lowest, lowest // grid * grid))


def _main_reach(view: _View, spec: Spec, limit: Ints, drop: int) -> Ints:
    """How far a main spec alone reaches up to `limit` tokens: its run of full blocks, then the
    farthest partial entry inside the next one, less `drop` tokens where it reaches at all.

    Every boundary before that is as good: attention over fewer tokens of a block needs no more.
    """
    size, align = spec.block_size, view.geometry.alignment
    reach = np.minimum(_prefix(view.entries(spec, size)), limit // size) * size
    for entry in spec.partial:
        reach = _partial_end(view.entries(spec, entry), reach, entry, spec, limit)
    return np.asarray(np.maximum(reach - drop, 0) // align * align)


def _partial_end(held: Bools, full: Ints, entry: int, spec: Spec, limit: Ints) -> Ints:
    """The farthest partial entry inside the block behind the full run and within `limit`, or the
    run's own end."""
    best = full.copy()
    for j in range(1, spec.block_size // entry):
        end = full + j * entry
        row = end // entry - 1
        columns = np.nonzero((row < len(held)) & (end <= limit))[0]
        hit = np.zeros(len(full), bool)
        hit[columns] = held[row[columns], columns]
        best = np.where(hit, end, best)
    return best


def _valid(view: _View, spec: Spec, tokens: int, *, ahead: bool = False) -> Bools:
    """Per aligned boundary up to the cap, whether this auxiliary spec alone can resume there.

    `ahead`: the block behind the boundary must be held too, as EAGLE drops it.
    """
    geometry = view.geometry
    align, size = geometry.alignment, spec.block_size
    cap = _cap(geometry, tokens)
    ends = (np.arange(cap // align, dtype=np.int64) + 1) * align
    held = view.entries(spec, size)
    if ahead and spec.kind in WINDOW_KINDS:
        full = _valid_full(held, spec, ends + size, geometry.options.chunk_size, more=1)
        full &= (ends + size <= cap)[:, None]
    else:
        full = _valid_full(held, spec, ends, geometry.options.chunk_size)
    out: Bools = np.asarray(full & (ends % size == 0)[:, None])
    for entry in spec.partial:
        out |= _ends_at(view.entries(spec, entry), ends, entry)
    return out


def _valid_full(held: Bools, spec: Spec, ends: Ints, chunk: int, *, more: int = 0) -> Bools:
    """Validity by whole blocks at `ends` (read only where ends are multiples of the size).

    `more`: blocks needed beyond what a window alone asks for.
    """
    rows = ends // spec.block_size - 1
    safe = np.clip(rows, 0, max(0, len(held) - 1))
    if not len(held):
        return np.zeros((len(ends), held.shape[1]), bool)
    if spec.kind in STATE_KINDS:
        return np.asarray(held[safe] & (rows >= 0)[:, None])
    back = blocks_back(spec, chunk)
    if back is None:
        depth = _prefix(held)
        return np.asarray((rows + 1)[:, None] <= depth[None, :])
    if spec.kind in CHUNK_KINDS:
        need = rows + 1 - ends // chunk * chunk // spec.block_size
    else:
        need = np.minimum(rows + 1, back + more)
    return np.asarray(_runs(held)[safe] >= need[:, None])


def _ends_at(held: Bools, ends: Ints, entry: int) -> Bools:
    """Where an entry of `entry` tokens ends at each boundary: a state inside a block."""
    out = np.zeros((len(ends), held.shape[1]), bool)
    rows = ends // entry - 1
    keep = (ends % entry == 0) & (rows < len(held))
    out[keep] = held[rows[keep]]
    return out


def _last(valid: Bools, align: int) -> Ints:
    """The largest boundary that is valid, in tokens; 0 where none is."""
    if not len(valid):
        return np.zeros(valid.shape[1], np.int64)
    back = valid[::-1].argmax(axis=0)
    return np.where(valid.any(axis=0), (len(valid) - back) * align, 0).astype(np.int64)


def _reusable(view: _View, tokens: int) -> Ints:
    """The largest boundary valid for all groups at once, after what EAGLE drops."""
    geometry = view.geometry
    align, eagle = geometry.alignment, geometry.options.eagle
    cap = _cap(geometry, tokens)
    reach = np.full(view.workers, cap, np.int64)
    for spec in geometry.main:
        drop = min(align, spec.block_size) if eagle else 0
        margin = np.minimum(reach + drop, cap)
        reach = np.minimum(reach, _main_reach(view, spec, margin, drop))
    if not geometry.auxiliary:
        return reach
    ahead = eagle and not geometry.main
    valid = np.logical_and.reduce(
        [_valid(view, s, tokens, ahead=ahead) for s in geometry.auxiliary]
    )
    ends = (np.arange(len(valid), dtype=np.int64) + 1) * align
    return _last(valid & (ends[:, None] <= reach[None, :]), align)
