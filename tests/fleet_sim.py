"""A fleet in memory for tests of picking: workers that cache what they are sent, and a clock."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Sequence

from kvindexd import chain
from kvindexd.fleet import Member
from kvindexd.model import GroupInfo, Plane, Profile, WorkerKey
from kvindexd.registration import Registration
from kvindexd.scoring.cost import IDLE, Miss
from kvindexd.scoring.geometry import WorkerOptions
from kvindexd.scoring.pick import Option, Policy
from kvindexd.scoring.picker import Choice, Picker, PickSettings
from kvindexd.scoring.query import Query
from kvindexd.scoring.scorer import Scored, candidate

SIZE = 16
_PROFILE = Profile(
    groups=(GroupInfo(0, "full_attention", SIZE, 0, "main", 1),),
    planes=(Plane(0, "full_attention", SIZE, 0, SIZE),),
)


class AlwaysFirst(Policy):
    """Degenerate: whoever is named first."""

    def rank(self, options, tokens, **_):  # type: ignore[no-untyped-def]
        ranked = super().rank(options, tokens)
        return sorted(ranked, key=lambda r: r.place)


class NoCacheTerm(Policy):
    """Degenerate: what a worker holds counts for nothing, in ties either."""

    def cost(self, option: Option, miss: Miss, overlap: float) -> float:
        return option.load.total

    def rank(self, options, tokens, *, overlap=None, **_):  # type: ignore[no-untyped-def]
        return super().rank(options, tokens, overlap=overlap)


class NoLoadTerm(Policy):
    """Degenerate: what a worker is doing counts for nothing, in ties either."""

    def rank(self, options, tokens, *, overlap=None, **_):  # type: ignore[no-untyped-def]
        idle = [o._replace(load=IDLE) for o in options]
        return super().rank(idle, tokens, overlap=overlap)


DEGENERATE = [AlwaysFirst, NoCacheTerm, NoLoadTerm]
_serial = itertools.count(1)


def prompt(blocks: int, seed: int, extra: int = 0) -> list[int]:
    """Tokens of a prompt of its own: full blocks and some tokens more."""
    source = random.Random(seed)
    return [source.randrange(100_000) for _ in range(blocks * SIZE + extra)]


def fresh(blocks: int, extra: int = 0) -> list[int]:
    """A prompt that was never seen before."""
    return prompt(blocks, 1_000_000 + next(_serial), extra)


class Fleet:
    """Workers by name, and one scorer's picker. `caching`: workers hold what they are sent, as
    soon as `delay` seconds have passed and the events are in."""

    def __init__(
        self,
        names: Sequence[str],
        policy: type[Policy] = Policy,
        *,
        caching: bool = True,
        delay: float = 0.0,
        settings: PickSettings | None = None,
    ) -> None:
        settings = settings or PickSettings()
        self.picker = Picker(settings, policy(settings.weights))
        self.now = 1000.0
        self.names = list(names)
        self.held: dict[str, set[int]] = {name: set() for name in names}
        self.sent: Counter[str] = Counter()
        self.weight: float | None = None
        self._caching, self._delay = caching, delay
        self._due: list[tuple[float, str, list[int]]] = []

    def hold(self, name: str, tokens: Sequence[int], blocks: int) -> None:
        """Let a worker hold the first blocks of a prompt."""
        self.held[name].update(chain.prompt_keys(tokens)[:blocks])

    def member(self, name: str) -> Member:
        registration = Registration(worker_id=name, model="m")
        shape = candidate(self.names.index(name), _PROFILE, WorkerOptions(), True)
        return Member(WorkerKey("", name, 0), registration, shape, "LIVE", 0, 1)

    def ranked(self, tokens: Sequence[int], among: Sequence[str] | None = None) -> list[Choice]:
        """All candidates, best first."""
        self._events()
        query = Query(chain.pack_tokens(tokens))
        members = [self.member(name) for name in among or self.names]
        scored = [self._score(query, m) for m in members]
        scored = self.picker.with_predictions(query, members, scored, self.now)
        return self.picker.rank(query, members, scored, self.now, self.weight)

    def _score(self, query: Query, member: Member) -> Scored:
        keys = query.keys(SIZE)
        assert keys is not None
        held, n = self.held[member.key.worker_id], 0
        while n < len(keys) and int(keys[n]) in held:
            n += 1
        reusable = min(n, max(0, query.tokens - 1) // SIZE) * SIZE
        return Scored(matched=n * SIZE, reusable=reusable, device=reusable, block_size=SIZE)

    def cost(self, name: str, tokens: Sequence[int]) -> float:
        return next(c.cost for c in self.ranked(tokens) if c.member.key.worker_id == name)

    def pick(
        self, tokens: Sequence[int], among: Sequence[str] | None = None, *, done: bool = False
    ) -> str:
        """Pick a worker; with `done` the request is over at once. Its name."""
        choice = self.ranked(tokens, among)[0]
        name = choice.member.key.worker_id
        self.last = f"r{next(_serial)}"
        query = Query(chain.pack_tokens(tokens))
        self.picker.take(self.last, choice, query, self.now, 300.0)
        self.sent[name] += 1
        if self._caching:
            self._due.append((self.now + self._delay, name, chain.prompt_keys(tokens)))
        if done:
            self.complete(self.last)
        return name

    def complete(self, request_id: str, cached: int | None = None) -> None:
        self.picker.complete(request_id, cached, None, self.now)

    def _events(self) -> None:
        for due in [d for d in self._due if d[0] <= self.now]:
            self._due.remove(due)
            _, name, keys = due
            self.held[name].update(keys)
            self.picker.predictions.seen(WorkerKey("", name, 0), keys, [])
