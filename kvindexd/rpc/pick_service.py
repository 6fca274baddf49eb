"""KVIndex in full: scoring, and the calls that choose workers and learn how that went."""

from __future__ import annotations

import secrets
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from kvindexd import tracing
from kvindexd.fleet import Filter, Member, select
from kvindexd.model import WorkerKey
from kvindexd.rpc.errors import Context, RequestError, Unavailable, refuse
from kvindexd.rpc.index_service import IndexService, Observer, asked_for, check_count, line
from kvindexd.scoring.outcomes import Outcome
from kvindexd.scoring.pair import pairs
from kvindexd.scoring.picker import Choice
from kvindexd.scoring.query import BlindQuery, Query
from kvindexd.scoring.scorer import Scored, score
from kvindexd.telemetry import name_request
from kvindexd.v1 import index_pb2 as pb

MAX_LEASE = 24 * 3600.0
"""Seconds that a request may count as load without being completed."""

_MAX_ID = 256
_PICKABLE = ("LIVE", "SYNCING")
_PREFILL = ("PREFILL", "MIXED")
_DECODE = ("DECODE", "MIXED")


class PickObserver(Observer, Protocol):
    """Where picks and their ends are reported (metrics)."""

    def picked(self, worker: WorkerKey, prompt_tokens: int, reusable: int) -> None:
        """A request was sent to a worker rank that is to reuse so many of its tokens."""
        ...

    def completed(self, how: str, outcome: Outcome | None) -> None:
        """A request ended: `released` here, or `forwarded` to the scorers that may know it."""
        ...


class Peers(Protocol):
    """The other scorers of the fleet."""

    def completed_elsewhere(
        self, request_id: str, cached: int | None, prompt_tokens: int | None
    ) -> None:
        """Tell whoever picked the request that it has ended."""
        ...


class Taken(NamedTuple):
    """A pick that counts as load: the candidates best first, the request being on the first."""

    request_id: str
    query: Query
    ranked: list[Choice]
    lease: float


class PickService(IndexService):
    """KVIndex over a fleet. Every answer comes from memory; nothing here waits for Redis."""

    def __init__(
        self, *args: Any, pick_observer: PickObserver, peers: Peers | None = None, **kwargs: Any
    ) -> None:
        """Further arguments: see IndexService."""
        super().__init__(*args, **kwargs)
        self._pick_observer = pick_observer
        self._peers = peers

    async def PickWorker(
        self, request: pb.PickWorkerRequest, context: Context
    ) -> pb.PickWorkerResponse:
        """Score, choose, and count the request as the worker's load."""
        name_request(request.request_id)
        return await self._answered(context, lambda: self.pick(request))

    async def CompleteRequest(
        self, request: pb.CompleteRequestRequest, context: Context
    ) -> pb.CompleteRequestResponse:
        """Release a pick's load and learn what the engine reused."""
        try:
            return self.complete(request)
        except RequestError as e:
            await refuse(context, e)

    async def PairWorkers(
        self, request: pb.PairWorkersRequest, context: Context
    ) -> pb.PairWorkersResponse:
        """Pair prefill with decode workers."""
        return await self._answered(context, lambda: self._pair(request))

    # -- picking ------------------------------------------------------------------------------

    async def pick(self, request: pb.PickWorkerRequest) -> pb.PickWorkerResponse:
        """PickWorker without a connection, for other front ends. Raises RequestError."""
        with tracing.span("pick") as span:
            taken = await self.choose(request)
            if span is not None:
                span.set(asked_for(request.score, taken.query, len(taken.ranked)))
                span.set(outcome_of(taken))
        ranked = taken.ranked
        rest = ranked[1 : request.score.options.top_k or len(ranked)]
        return pb.PickWorkerResponse(
            worker=line(ranked[0]),
            fallbacks=[line(choice) for choice in rest],
            request_id=taken.request_id,
            prompt_tokens=taken.query.tokens,
        )

    async def choose(self, request: pb.PickWorkerRequest) -> Taken:
        """Score, choose and count the request as load. Raises RequestError."""
        request_id = _request_id(request.request_id) or secrets.token_hex(12)
        lease = self._lease(request)
        asked = request.score
        scope, query, chosen = await self._candidates(asked)
        able = [m for m in chosen.members if m.state in _PICKABLE]
        if not able:
            raise Unavailable(_nobody(scope.members, asked))
        # From here to `take` nothing waits: the next pick sees this one.
        options = asked.options
        with tracing.span("score"):
            with tracing.span("match"):
                scored = score(
                    scope.table,
                    query,
                    [m.candidate for m in able],
                    device_only=options.device_only,
                    explain=options.explain,
                )
            ranked = self._rank(asked, query, able, scored)
        return self._take(request_id, query, ranked, lease)

    def choose_by_load(self, request: pb.PickWorkerRequest, tokens: int) -> Taken:
        """`choose` without looking at the prompt, of which only the length is known or guessed;
        with no model named, among the workers of all models. Raises RequestError."""
        asked = request.score
        prompt = asked.prompt
        models = [prompt.model] if prompt.model else self._fleet.models(prompt.namespace)
        members = [
            m
            for model in models
            for m in self._scope(pb.Prompt(namespace=prompt.namespace, model=model)).members
        ]
        able = [m for m in select(members, Filter(tuple(asked.candidates))) if m.state in _PICKABLE]
        if not able:
            raise Unavailable(_nobody(members, asked))
        query = BlindQuery(tokens)
        ranked = self._picker.rank(query, able, [Scored()] * len(able), time.monotonic(), 0.0)
        request_id = _request_id(request.request_id) or secrets.token_hex(12)
        return self._take(request_id, query, ranked, self._lease(request))

    def _take(self, request_id: str, query: Query, ranked: list[Choice], lease: float) -> Taken:
        ranked.sort(key=lambda choice: _PICKABLE.index(choice.member.state))
        self._picker.take(request_id, ranked[0], query, time.monotonic(), lease)
        self._picked(ranked[0], query)
        return Taken(request_id, query, ranked, lease)

    def _picked(self, choice: Choice, query: Query) -> None:
        self._pick_observer.picked(choice.member.key, query.tokens, choice.scored.reusable)

    def move(self, taken: Taken, place: int) -> Taken:
        """The request went to another candidate than the first: count it there."""
        self._picker.complete(taken.request_id, None, None, time.monotonic())
        ranked = [taken.ranked[place], *taken.ranked[:place], *taken.ranked[place + 1 :]]
        request_id = secrets.token_hex(12)
        self._picker.take(request_id, ranked[0], taken.query, time.monotonic(), taken.lease)
        self._picked(ranked[0], taken.query)
        return taken._replace(request_id=request_id, ranked=ranked)

    def _lease(self, request: pb.PickWorkerRequest) -> float:
        if not request.HasField("lease"):
            return self._picker.settings.lease
        seconds = float(request.lease.seconds + request.lease.nanos / 1e9)
        if not 0 < seconds <= MAX_LEASE:
            raise RequestError(f"lease: {seconds} s; expected more than 0 and at most {MAX_LEASE}")
        return seconds

    def complete(self, request: pb.CompleteRequestRequest) -> pb.CompleteRequestResponse:
        """CompleteRequest without a connection. Raises RequestError.

        A request that is not known here is no error: its lease has ended, or another scorer
        picked it, which is told.
        """
        request_id = _request_id(request.request_id)
        if not request_id:
            raise RequestError("request_id: empty; expected the one that PickWorker returned")
        cached = request.cached_tokens if request.HasField("cached_tokens") else None
        total = request.prompt_tokens if request.HasField("prompt_tokens") else None
        if cached is not None and total is not None and cached > total:
            raise RequestError(f"cached_tokens: {cached} of a prompt of {total} tokens")
        flight, outcome = self._picker.complete(request_id, cached, total, time.monotonic())
        if flight is None and self._peers is not None:
            self._peers.completed_elsewhere(request_id, cached, total)
        self._pick_observer.completed("forwarded" if flight is None else "released", outcome)
        return pb.CompleteRequestResponse()

    # -- pairs --------------------------------------------------------------------------------

    async def _pair(self, request: pb.PairWorkersRequest) -> pb.PairWorkersResponse:
        asked = request.prefill
        named = len(request.decode_candidates)
        check_count("decode_candidates", named, "max_candidates", self.limits.candidates)
        scope, query, chosen = await self._candidates(asked)
        members = chosen.members
        options = asked.options
        if not options.HasField("role"):
            members = [m for m in members if m.registration.role in _PREFILL]
        wanted = Filter(
            tuple(request.decode_candidates), None, dict(options.labels), options.include_stale
        )
        others = [m for m in select(scope.members, wanted) if m.registration.role in _DECODE]
        for unit in {m.candidate.geometry.unit for m in others}:
            await query.hash(unit)

        def ranked(side: Sequence[Member]) -> list[Choice]:
            candidates = [m.candidate for m in side]
            scored = score(
                scope.table,
                query,
                candidates,
                device_only=options.device_only,
                explain=options.explain,
            )
            return self._rank(asked, query, list(side), scored)

        found = pairs(ranked(members), ranked(others))
        return pb.PairWorkersResponse(
            pairs=[
                pb.WorkerPair(
                    prefill=line(pair.prefill),
                    decode=line(pair.decode),
                    transferable=pair.verdict.transferable,
                    reason=pair.verdict.reason,
                    cost=pair.cost,
                )
                for pair in found[: request.top_k or len(found)]
            ]
        )


def outcome_of(taken: Taken) -> dict[str, tracing.Value]:
    """What a span says of a pick."""
    first = taken.ranked[0]
    return {
        "kvindexd.request_id": taken.request_id,
        "kvindexd.worker": first.member.key.worker_id,
        "kvindexd.dp_rank": first.member.key.dp_rank,
        "kvindexd.matched_tokens": first.scored.matched,
        "kvindexd.reusable_tokens": first.scored.reusable,
        "kvindexd.predicted_tokens": first.scored.predicted,
    }


def _request_id(given: str) -> str:
    if len(given) > _MAX_ID:
        raise RequestError(f"request_id: {len(given)} characters, at most {_MAX_ID}")
    return given


def _nobody(members: Sequence[Member], asked: pb.ScoreWorkersRequest) -> str:
    """Why no worker can be picked: what there is, and in which state."""
    named = select(members, Filter(tuple(asked.candidates), None, {}, True))
    if asked.candidates and not named:
        return (
            f"none of the {len(asked.candidates)} candidates is a worker of this model; it has "
            f"{len(members)} workers"
        )
    states = Counter(m.state for m in named)
    listed = ", ".join(f"{n} {state}" for state, n in sorted(states.items())) or "no workers"
    return f"no LIVE or SYNCING worker suits the request; among the candidates: {listed}"
