"""Picking with memory: what is in flight, what is predicted, and how the promises turned out.

Pure: time is an argument (seconds, monotonic) and nothing here waits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import xxhash

from kvindexd.fleet import Member
from kvindexd.model import WorkerKey
from kvindexd.scoring.cost import UNKNOWN_SIZE, Load, Weights, blocks_of, ceiling
from kvindexd.scoring.geometry import Geometry
from kvindexd.scoring.load import Flight, Keys, LoadLedger
from kvindexd.scoring.outcomes import DriftOptions, DriftWatch, Outcome
from kvindexd.scoring.pick import Option, Policy, Ranked
from kvindexd.scoring.predict import Predictions
from kvindexd.scoring.query import Query
from kvindexd.scoring.scorer import Scored


class PickSettings(NamedTuple):
    """Times in seconds. `prediction_ttl`: 0 = no predictions. `lease`: of a request that brings
    none. `half_life`: of what recent picks made a worker compute."""

    weights: Weights = Weights()
    prediction_ttl: float = 2.0
    lease: float = 300.0
    half_life: float = 0.1
    max_requests: int = 100_000
    drift: DriftOptions = DriftOptions()


class Tally(NamedTuple):
    """What picks promised of a rank since the start, in tokens: of all their prompts together."""

    picks: int = 0
    prompt_tokens: int = 0
    reusable_tokens: int = 0


class Choice(NamedTuple):
    """One candidate of an answer, priced."""

    member: Member
    scored: Scored
    load: Load
    ranked: Ranked

    @property
    def cost(self) -> float:
        """04-scoring.md section 2; lower is better."""
        return self.ranked.cost


class Picker:
    """One scorer's picks. All methods are plain calls for code on one event loop."""

    def __init__(self, settings: PickSettings | None = None, policy: Policy | None = None) -> None:
        self.settings = settings or PickSettings()
        self.policy = policy or Policy(self.settings.weights)
        self.ledger = LoadLedger(self.settings.half_life, self.settings.max_requests)
        self.predictions = Predictions(self.settings.prediction_ttl)
        self.drift = DriftWatch(self.settings.drift)
        self.picked: dict[WorkerKey, int] = {}
        """Running number of the last pick that went to a rank."""
        self.tallies: dict[WorkerKey, Tally] = {}
        self._picks = 0

    # -- scoring ------------------------------------------------------------------------------

    def with_predictions(
        self, query: Query, members: Sequence[Member], scored: Sequence[Scored], now: float
    ) -> list[Scored]:
        """Scores with what recent picks are expected to add; `Scored.predicted` says how much."""
        if not len(self.predictions):
            return list(scored)
        lists: dict[tuple[int, int, int], list[int]] = {}
        out = []
        for m, s in zip(members, scored, strict=True):
            if self.predictions.has(m.key, now):
                s = self._predicted(query, m, s, now, lists)
            out.append(s)
        return out

    def _predicted(
        self,
        query: Query,
        m: Member,
        s: Scored,
        now: float,
        lists: dict[tuple[int, int, int], list[int]],
    ) -> Scored:
        shape = m.candidate.geometry
        grain = _grain(m)
        wanted = (shape.unit, shape.lookahead, grain)
        if wanted not in lists:
            made = query.names(*wanted)
            lists[wanted] = [] if made is None else made.tolist()
        names = lists[wanted]
        if shape.auxiliary:
            places = {name: i for i, name in enumerate(names)}
            end = self.predictions.farthest_end(m.key, places, now) + 1
        else:
            end = self.predictions.run(m.key, names, s.matched // grain, now)
        held = end * grain
        if held <= (s.reusable if shape.auxiliary else s.matched):
            return s
        reusable = max(s.reusable, _resumable(shape, grain, held, query.tokens))
        return s._replace(
            matched=max(s.matched, held) if shape.main or not shape.block_size else s.matched,
            reusable=reusable,
            device=s.device + reusable - s.reusable,
            predicted=reusable - s.reusable,
        )

    def predicted_blocks(self, query: Query, m: Member, size: int, now: float) -> list[bool]:
        """Per block of `size` tokens, whether it is predicted on a rank."""
        shape = m.candidate.geometry
        if size % shape.unit or not self.predictions.has(m.key, now):
            return []
        names = query.names(shape.unit, shape.lookahead, size)
        if names is None:
            return []
        return [self.predictions.holds(m.key, name, now) for name in names.tolist()]

    # -- ranking ------------------------------------------------------------------------------

    def rank(
        self,
        query: Query,
        members: Sequence[Member],
        scored: Sequence[Scored],
        now: float,
        overlap: float | None = None,
    ) -> list[Choice]:
        """All candidates, best first. `overlap`: the request's own weight, None = by role."""
        ledger = self.ledger
        ledger.expire(now)
        options = [
            Option(
                m.key,
                s,
                m.candidate.geometry,
                block_size(m, s),
                m.registration.role,
                ledger.load(m.key, now),
                self.picked.get(m.key, 0),
            )
            for m, s in zip(members, scored, strict=True)
        ]

        def shared(i: int) -> int:
            keys = block_keys(query, members[i], options[i].size)
            return 0 if keys is None else ledger.shared(members[i].key, keys.tolist())

        ranked = self.policy.rank(options, query.tokens, overlap=overlap, shared=shared)
        return [
            Choice(members[r.place], options[r.place].scored, options[r.place].load, r)
            for r in ranked
        ]

    # -- picking ------------------------------------------------------------------------------

    def take(self, request_id: str, choice: Choice, query: Query, now: float, lease: float) -> None:
        """Count a request as in flight on the chosen worker, and predict what that adds there."""
        member, scored = choice.member, choice.scored
        size = block_size(member, scored)
        keys = block_keys(query, member, size)
        if keys is None or query.tokens < size:
            keys = _private_keys(request_id, blocks_of(query.tokens, size))
        flight = Flight(
            request_id,
            member.key,
            keys,
            now + lease,
            now,
            request_number(request_id),
            query.tokens,
            scored.reusable,
            scored.predicted,
            size,
            not scored.upper_bound,
        )
        self.ledger.add(flight, min(len(keys), round(choice.ranked.miss.computed)), now)
        self._picks += 1
        self.picked[member.key] = self._picks
        t = self.tallies.get(member.key, Tally())
        self.tallies[member.key] = Tally(
            t.picks + 1, t.prompt_tokens + query.tokens, t.reusable_tokens + scored.reusable
        )
        self._predict(query, member, now)

    def _predict(self, query: Query, member: Member, now: float) -> None:
        shape, grain = member.candidate.geometry, _grain(member)
        names = query.names(shape.unit, shape.lookahead, grain)
        if names is None or not len(names):
            return
        listed = names.tolist()
        ends = ceiling(shape, query.tokens) // grain if shape.block_size else 0
        end = listed[ends - 1] if ends else 0
        blocks = [] if shape.auxiliary else listed
        self.predictions.add(member.key, member.epoch, blocks, end, now)

    def complete(
        self, request_id: str, cached: int | None, prompt_tokens: int | None, now: float
    ) -> tuple[Flight | None, Outcome | None]:
        """A request has ended: release it and, where the engine said what it reused, record the
        outcome. (None, None) for a request that is not in flight here."""
        flight = self.ledger.release(request_id, now)
        if flight is None or cached is None:
            return flight, None
        outcome = Outcome(
            flight.worker,
            flight.predicted_tokens,
            flight.resting,
            cached,
            prompt_tokens or flight.prompt_tokens,
            flight.prompt_tokens,
            flight.block_size,
            flight.exact,
        )
        self.drift.record(outcome, now)
        return flight, outcome

    def forget(self, worker: WorkerKey) -> None:
        """A worker rank has been removed."""
        self.ledger.forget(worker)
        self.predictions.forget(worker)
        self.drift.forget(worker)
        self.picked.pop(worker, None)
        self.tallies.pop(worker, None)


def block_size(m: Member, s: Scored) -> int:
    """Tokens per block of a rank: learned, else registered, else assumed."""
    return s.block_size or m.registration.block_size or UNKNOWN_SIZE


def request_number(request_id: str) -> int:
    """What scorers call a request among each other."""
    return xxhash.xxh3_64_intdigest(request_id.encode())


def _grain(m: Member) -> int:
    """Tokens between boundaries at which predictions are kept."""
    shape = m.candidate.geometry
    return shape.alignment if shape.block_size else shape.unit


def _resumable(shape: Geometry, grain: int, held: int, tokens: int) -> int:
    """What an engine would reuse of a prefix of `held` tokens that it holds in every group."""
    if not shape.block_size:
        return min(held, max(0, tokens - 1) // grain * grain)
    if not shape.options.eagle or shape.auxiliary:
        return min(held, ceiling(shape, tokens))
    dropped = max(0, held - shape.block_size) // shape.alignment * shape.alignment
    return min(dropped, ceiling(shape, tokens))


def block_keys(query: Query, m: Member, size: int) -> Keys | None:
    """The chain key at every block boundary of a prompt; None where they cannot be known."""
    unit = m.candidate.geometry.unit
    return query.names(unit, 0, size) if size % unit == 0 else None


def _private_keys(request_id: str, count: int) -> Keys:
    """Names for blocks that no other request shares."""
    first = xxhash.xxh3_64_intdigest(request_id.encode(), seed=1)
    return np.arange(count, dtype=np.uint64) + np.uint64(first & ~0xFFFFFFFF)
