"""`Picker.rank` for answers that need no more than each worker's cost: the same order, an object
per distinct score instead of several per worker."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from kvindexd.fleet import Member
from kvindexd.scoring.cost import IDLE, miss_blocks
from kvindexd.scoring.pick import DIGITS, Policy
from kvindexd.scoring.picker import Picker, block_keys, block_size
from kvindexd.scoring.query import Query
from kvindexd.scoring.scorer import Scored


class Place(NamedTuple):
    """A candidate's cost, and its place among the members given."""

    cost: float
    place: int
    active_blocks: int


def quick(picker: Picker) -> bool:
    """Whether `quick_rank` orders as this picker would: another policy may not."""
    return type(picker.policy) is Policy


def quick_rank(
    picker: Picker,
    query: Query,
    members: Sequence[Member],
    scored: Sequence[Scored],
    now: float,
    overlap: float | None = None,
) -> list[Place]:
    """All candidates, best first, as `Picker.rank` orders them. `members`: sorted by key."""
    ledger, picked = picker.ledger, picker.picked
    ledger.expire(now)
    loads = {key: ledger.load(key, now) for key in ledger.workers()}
    known: dict[tuple[int, int, str, int], float] = {}
    rows: list[tuple[float, int, float, int, int]] = []
    loaded = []
    for place, (m, s) in enumerate(zip(members, scored, strict=True)):
        registration = m.registration
        key = (id(s), id(m.candidate.geometry), registration.role, registration.block_size)
        cost = known.get(key)
        if cost is None:
            cost = known[key] = _cost(picker, query, m, s, overlap)
        load = loads.get(m.key, IDLE) if loads else IDLE
        if load is not IDLE:
            cost += load.total
            if load.active_blocks:
                loaded.append(place)
        at = picked.get(m.key, 0) if picked else 0
        rows.append((round(cost, DIGITS), 0, load.total, at, place))
    if loaded:
        _prefer_sharing(picker, query, members, scored, rows, loaded)
    rows.sort()
    return [
        Place(cost, place, loads[members[place].key].active_blocks if lot else 0)
        for cost, _, lot, _, place in rows
    ]


def _cost(picker: Picker, query: Query, m: Member, s: Scored, overlap: float | None) -> float:
    weights = picker.policy.weights
    weight = weights.of(m.registration.role) if overlap is None else overlap
    size = block_size(m, s)
    return weight * miss_blocks(s, m.candidate.geometry, query.tokens, size, weights).weighted


def _prefer_sharing(
    picker: Picker,
    query: Query,
    members: Sequence[Member],
    scored: Sequence[Scored],
    rows: list[tuple[float, int, float, int, int]],
    loaded: Sequence[int],
) -> None:
    """Of equal costs, the one first that has more of this very prompt in flight."""
    times = Counter(row[0] for row in rows)
    for place in loaded:
        cost, _, total, at, _ = rows[place]
        if times[cost] > 1:
            m = members[place]
            keys = block_keys(query, m, block_size(m, scored[place]))
            shared = 0 if keys is None else picker.ledger.shared(m.key, keys.tolist())
            rows[place] = (cost, -shared, total, at, place)
