"""`Picker.rank` for answers that need no more than each worker's cost: the same order, an object
per distinct score instead of several per worker."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from kvindexd.fleet import Chosen, Member
from kvindexd.scoring.cost import IDLE, blocks_of, ceiling, miss_blocks
from kvindexd.scoring.pick import DIGITS, Policy
from kvindexd.scoring.picker import Picker, block_keys, block_size
from kvindexd.scoring.query import Query
from kvindexd.scoring.scorer import Scored

Place = tuple[float, int, int]
"""A candidate's cost, its place among the members given, and its blocks in flight."""


def quick(picker: Picker) -> bool:
    """Whether `quick_rank` orders as this picker would: another policy may not."""
    return type(picker.policy) is Policy


def quick_rank(
    picker: Picker,
    query: Query,
    chosen: Chosen,
    scored: Sequence[Scored],
    now: float,
    overlap: float | None = None,
) -> list[Place]:
    """All candidates, best first, as `Picker.rank` orders them."""
    picker.ledger.expire(now)
    members = chosen.members
    idle = not (picker.picked or picker.ledger.workers())
    known: dict[tuple[int, int], float] = {}
    prices: dict[int, _Price] = {}
    costs = []
    for m, s, kind in zip(members, scored, chosen.kinds, strict=True):
        cost = known.get((id(s), kind))
        if cost is None:
            price = prices.get(kind)
            if price is None:
                price = prices[kind] = _Price(picker, query, m, overlap)
            cost = price(s)
            if idle and not cost.is_integer():
                cost = round(cost, DIGITS)
            known[id(s), kind] = cost
        costs.append(cost)
    if not idle:
        return _with_load(picker, query, members, scored, costs, now)
    places: Iterable[int] = range(len(costs))
    if len(known) > 1:
        places = sorted(places, key=costs.__getitem__)
    return [(costs[i], i, 0) for i in places]


def _with_load(
    picker: Picker,
    query: Query,
    members: Sequence[Member],
    scored: Sequence[Scored],
    costs: Sequence[float],
    now: float,
) -> list[Place]:
    ledger, picked = picker.ledger, picker.picked
    loads = {key: ledger.load(key, now) for key in ledger.workers()}
    rows: list[tuple[float, int, float, int, int]] = []
    loaded = []
    for place, m in enumerate(members):
        load = loads.get(m.key, IDLE)
        if load.active_blocks:
            loaded.append(place)
        total = load.total
        rows.append((round(costs[place] + total, DIGITS), 0, total, picked.get(m.key, 0), place))
    if loaded:
        _prefer_sharing(picker, query, members, scored, rows, loaded)
    rows.sort()
    return [
        (cost, place, loads[members[place].key].active_blocks if lot else 0)
        for cost, _, lot, _, place in rows
    ]


class _Price:
    """What missing blocks cost on workers of one kind: `cost.miss_blocks`, with what is the same
    for all of them computed once."""

    __slots__ = ("_ceiling", "_member", "_size", "_tokens", "_total", "_weight", "_weights")

    def __init__(self, picker: Picker, query: Query, m: Member, overlap: float | None) -> None:
        self._weights = picker.policy.weights
        self._weight = self._weights.of(m.registration.role) if overlap is None else overlap
        self._member, self._tokens = m, query.tokens
        shape = m.candidate.geometry
        self._size = shape.block_size
        self._total = blocks_of(query.tokens, self._size) if self._size else 0
        self._ceiling = ceiling(shape, query.tokens) if self._size else 0

    def __call__(self, s: Scored) -> float:
        """The missing blocks of one score, times their weight."""
        size = self._size
        plain = size and s.block_size == size and not (s.host or s.storage)
        if plain and s.reusable < self._ceiling:  # it lacks something, and holds on one tier
            return self._weight * max(0.0, self._total - s.device / size)
        m = self._member
        missing = miss_blocks(
            s, m.candidate.geometry, self._tokens, block_size(m, s), self._weights
        )
        return self._weight * missing.weighted


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
