"""Which candidate a prompt should go to: the policy, pure (04-scoring.md section 2)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

from kvindexd.model import WorkerKey
from kvindexd.scoring.cost import Load, Miss, Weights, miss_blocks
from kvindexd.scoring.geometry import Geometry
from kvindexd.scoring.scorer import Scored

DIGITS = 9
"""Costs that differ by less are equal: sums of floats in another order are no reason to prefer."""


class Option(NamedTuple):
    """One candidate of a pick.

    `size`: tokens per block, learned, registered or assumed. `role`: MIXED, PREFILL or DECODE.
    `picked_at`: running number of the last pick that went there, 0 = never.
    """

    key: WorkerKey
    scored: Scored
    geometry: Geometry
    size: int
    role: str
    load: Load
    picked_at: int


class Ranked(NamedTuple):
    """A candidate's place in the order. `place`: into the options; `cost`: lower is better."""

    place: int
    cost: float
    miss: Miss


class Policy:
    """The cost function and the order it gives. Weights are the server's; a request may bring an
    overlap weight of its own, which then holds for every role."""

    def __init__(self, weights: Weights | None = None) -> None:
        self.weights = weights or Weights()

    def cost(self, option: Option, miss: Miss, overlap: float) -> float:
        """overlap x missing blocks + load, in blocks of the worker's own size."""
        return overlap * miss.weighted + option.load.total

    def rank(
        self,
        options: Sequence[Option],
        tokens: int,
        *,
        overlap: float | None = None,
        shared: Callable[[int], int] = lambda _place: 0,
    ) -> list[Ranked]:
        """All options, best first.

        Of equal costs the one comes first whose load has more of this very prompt in it
        (`shared(place)`: leading blocks of the prompt that are in flight there, which cost nothing
        a second time); then lower load, then least recently picked, then by name. The order in
        which options are given never matters.
        """
        ranked = [
            Ranked(i, round(self.cost(option, miss, weight), DIGITS), miss)
            for i, (option, miss, weight) in enumerate(self._priced(options, tokens, overlap))
        ]
        ties = {cost for cost, n in Counter(r.cost for r in ranked).items() if n > 1}

        def order(r: Ranked) -> tuple[float, int, float, int, WorkerKey]:
            option = options[r.place]
            in_flight = r.cost in ties and option.load.active_blocks
            return (
                r.cost,
                -shared(r.place) if in_flight else 0,
                option.load.total,
                option.picked_at,
                option.key,
            )

        ranked.sort(key=order)
        return ranked

    def _priced(
        self, options: Sequence[Option], tokens: int, overlap: float | None
    ) -> list[tuple[Option, Miss, float]]:
        """Like workers share their scores, so that what they miss is computed once."""
        weights = self.weights
        by_role = {o.role: weights.of(o.role) if overlap is None else overlap for o in options}
        known: dict[tuple[int, int, int], Miss] = {}
        out = []
        for o in options:
            key = (id(o.scored), id(o.geometry), o.size)
            miss = known.get(key)
            if miss is None:
                miss = known[key] = miss_blocks(o.scored, o.geometry, tokens, o.size, weights)
            out.append((o, miss, by_role[o.role]))
        return out
