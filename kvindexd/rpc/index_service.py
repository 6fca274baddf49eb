"""The KVIndex service: how much of a prompt would each worker reuse."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import NamedTuple, Protocol, TypeVar

import structlog

from kvindexd import tracing
from kvindexd.fleet import NO_FILTER, Chosen, Filter, Member, Scope, select
from kvindexd.registration import RoleName
from kvindexd.rpc import codec, lines
from kvindexd.rpc.budget import Admission, in_time
from kvindexd.rpc.errors import Context, NotFound, RequestError, refuse
from kvindexd.rpc.explaining import Asked, add_groups, divergence
from kvindexd.rpc.prompt import query_of, tokenized
from kvindexd.scoring.picker import Choice, Picker
from kvindexd.scoring.query import Query
from kvindexd.scoring.quickrank import quick, quick_rank
from kvindexd.scoring.scorer import Scored, score
from kvindexd.tokens import Tokens
from kvindexd.v1 import index_pb2 as pb
from kvindexd.v1 import index_pb2_grpc

log = structlog.get_logger(__name__)
T = TypeVar("T")
_YIELD_SECONDS = 0.002
"""How long one call may hold the event loop before others get a turn."""


class Fleet(Protocol):
    """What the service asks of the replica; never of Redis."""

    def scope(self, namespace: str, model: str) -> Scope | None:
        """The model's table and ranks; with model "" the only one there is."""
        ...

    def models(self, namespace: str) -> list[str]:
        """Models that have a worker registered in the namespace."""
        ...

    def scopes(self) -> list[Scope]:
        """All models of all namespaces that have a registered rank."""
        ...

    def revision(self) -> str:
        """A name for what the replica has applied so far."""
        ...


class Observer(Protocol):
    """Where the service reports what it did (metrics)."""

    def scored(self, code: str, seconds: float, matched_ratio: float | None) -> None:
        """One scoring call ended."""
        ...


class _Answer(NamedTuple):
    """`reusable`: tokens, of the worker that holds most."""

    packed: lines.Packed
    reusable: int


class RequestLimits(NamedTuple):
    """Bounds on one call: tokens of a prompt, names of candidates, prompts of a batch, labels."""

    prompt_tokens: int = 1_048_576
    candidates: int = 4096
    batch: int = 1024
    labels: int = 64


class IndexService(index_pb2_grpc.KVIndexServicer):
    """KVIndex over a fleet. Every answer comes from memory."""

    def __init__(
        self,
        fleet: Fleet,
        observer: Observer,
        *,
        limits: RequestLimits,
        max_concurrent_calls: int,
        picker: Picker | None = None,
        refused: Callable[[str], None] = lambda _: None,
    ) -> None:
        """`refused`: told the reason of each call that is over a limit."""
        self._fleet = fleet
        self._observer = observer
        self.limits = limits
        self._refused = refused
        self._picker = picker or Picker()
        self._admission = Admission(max_concurrent_calls)
        self._searching = asyncio.Lock()
        self.tokens: Tokens | None = None
        """Makes token ids of text; without it, text is refused."""

    async def ScoreWorkers(
        self, request: pb.ScoreWorkersRequest, context: Context
    ) -> pb.ScoreWorkersResponse:
        """Score one prompt."""
        return pb.ScoreWorkersResponse.FromString(await self.score_packed(request, context))

    async def score_packed(self, request: pb.ScoreWorkersRequest, context: Context) -> bytes:
        """ScoreWorkers with its response serialised; see lines.py for why."""
        return (await self._answered(context, lambda: self._score(request))).body

    async def ScoreWorkersBatch(
        self, request: pb.ScoreWorkersBatchRequest, context: Context
    ) -> pb.ScoreWorkersBatchResponse:
        """Score many prompts; the first bad one fails the call, naming its place."""
        packed = await self.score_batch_packed(request, context)
        return pb.ScoreWorkersBatchResponse.FromString(packed)

    async def score_batch_packed(
        self, request: pb.ScoreWorkersBatchRequest, context: Context
    ) -> bytes:
        """ScoreWorkersBatch with its response serialised."""

        async def all_of_them() -> list[lines.Packed]:
            answers = []
            check_count("requests", len(request.requests), "max_batch", self.limits.batch)
            started = time.perf_counter()
            for i, one in enumerate(request.requests):
                try:
                    answers.append(await self._score(one))
                except RequestError as e:
                    raise type(e)(f"requests[{i}]: {e}", e.reason) from None
                if time.perf_counter() - started > _YIELD_SECONDS:
                    await asyncio.sleep(0)
                    in_time(context.time_remaining())
                    started = time.perf_counter()
            return answers

        return lines.batch(await self._answered(context, all_of_them))

    async def ScoreWorkersStream(
        self, request_iterator: AsyncIterator[pb.ScoreWorkersRequest], context: Context
    ) -> AsyncIterator[pb.ScoreWorkersResponse]:
        """Score prompts as they come, in order."""
        async for request in request_iterator:
            yield await self.ScoreWorkers(request, context)

    async def Explain(
        self, request: pb.ScoreWorkersRequest, context: Context
    ) -> pb.ExplainResponse:
        """Score one prompt and say block by block why."""
        return await self._answered(context, lambda: self._explain(request))

    async def explain(self, request: pb.ScoreWorkersRequest) -> pb.ExplainResponse:
        """Explain without a connection, for other front ends. Raises RequestError."""
        with self._admission.enter():
            return await self._explain(request)

    # -- the work -----------------------------------------------------------------------------

    async def _answered(self, context: Context, work: Callable[[], Awaitable[T]]) -> T:
        started = time.perf_counter()
        try:
            with self._admission.enter(context.time_remaining()):
                response = await work()
        except RequestError as e:
            self._observer.scored(e.code.name, time.perf_counter() - started, None)
            if e.reason:
                self._refused(e.reason)
            await refuse(context, e)
        self._observer.scored("OK", time.perf_counter() - started, _best_ratio(response))
        return response

    def _scope(self, prompt: pb.Prompt) -> Scope:
        scope = self._fleet.scope(prompt.namespace, prompt.model)
        if scope is not None:
            return scope
        known = self._fleet.models(prompt.namespace)
        if not prompt.model and len(known) > 1:
            raise RequestError(
                f"prompt.model: empty, but {len(known)} models are registered; "
                f"name one of: {', '.join(known)}"
            )
        listed = ", ".join(known) or "none"
        where = f" in namespace {prompt.namespace!r}" if prompt.namespace else ""
        raise NotFound(
            f"model {prompt.model!r}{where} has no registered worker; known models: {listed}"
        )

    def _check_counts(self, request: pb.ScoreWorkersRequest) -> None:
        named, labels = len(request.candidates), len(request.options.labels)
        check_count("candidates", named, "max_candidates", self.limits.candidates)
        check_count("options.labels", labels, "max_labels", self.limits.labels)

    async def _candidates(self, request: pb.ScoreWorkersRequest) -> tuple[Scope, Query, Chosen]:
        options = request.options
        prompt = request.prompt
        self._check_counts(request)
        if prompt.WhichOneof("content") in ("text", "openai_body"):
            prompt = await tokenized(prompt, self.tokens)
        query = query_of(prompt, self.limits.prompt_tokens)
        scope = self._scope(prompt)
        role: RoleName | None = None
        if options.HasField("role"):
            if options.role not in pb.Role.values():
                raise RequestError(f"options.role: {options.role} is unknown")
            role = pb.Role.Name(options.role)  # type: ignore[assignment]  # one of RoleName
        wanted = Filter(
            tuple(request.candidates), role, dict(options.labels), options.include_stale
        )
        chosen = scope.usual
        if wanted != NO_FILTER:
            chosen = Chosen(select(scope.members, wanted))
        with tracing.span("hash"):
            for unit in chosen.units:
                await query.hash(unit)
        return scope, query, chosen

    async def _score(self, request: pb.ScoreWorkersRequest) -> lines.Packed:
        scope, query, chosen = await self._candidates(request)
        with tracing.span("score") as span:
            answer = self._scored(request, scope, query, chosen)
            if span is not None:
                span.set(asked_for(request, query, len(chosen.members)))
                span.set({"kvindexd.reusable_tokens": answer.reusable})
            return answer.packed

    def _scored(
        self, request: pb.ScoreWorkersRequest, scope: Scope, query: Query, chosen: Chosen
    ) -> _Answer:
        options, members = request.options, chosen.members
        with tracing.span("match"):
            scored = score(
                scope.table,
                query,
                chosen.panel,
                device_only=options.device_only,
                explain=options.explain,
            )
        now = time.monotonic()
        scored = self._picker.with_predictions(query, members, scored, now)
        overlap = _overlap(request)
        if quick(self._picker):
            order = quick_rank(self._picker, query, chosen, scored, now, overlap)
        else:
            order = [
                (c.cost, c.ranked.place, c.load.active_blocks)
                for c in self._picker.rank(query, members, scored, now, overlap)
            ]
        if options.top_k:
            order = order[: options.top_k]
        size = scored[order[0][1]].block_size if order else 0
        rest = pb.ScoreWorkersResponse(
            prompt_tokens=query.tokens,
            prompt_blocks=query.tokens // (size or 16),
            index_revision=self._fleet.revision(),
        )
        best = max([s.reusable for s in scored], default=0)
        packed = lines.Packed(
            lines.answer(order, members, scored, rest),
            best / query.tokens if query.tokens else None,
        )
        return _Answer(packed, best)

    def _rank(
        self,
        request: pb.ScoreWorkersRequest,
        query: Query,
        members: Sequence[Member],
        scored: list[Scored],
    ) -> list[Choice]:
        """Predictions added, best first."""
        now = time.monotonic()
        scored = self._picker.with_predictions(query, members, scored, now)
        return self._picker.rank(query, members, scored, now, _overlap(request))

    async def _explain(self, request: pb.ScoreWorkersRequest) -> pb.ExplainResponse:
        scope, query, chosen = await self._candidates(request)
        scored = score(
            scope.table,
            query,
            chosen.panel,
            device_only=request.options.device_only,
            explain=True,
        )
        ranked = self._rank(request, query, chosen.members, scored)
        response = pb.ExplainResponse(prompt_tokens=query.tokens)
        adapters = self.tokens.adapters_of(scope.model) if self.tokens is not None else ()
        asked = Asked(scope, query, chosen, scored, adapters, self._searching)
        for choice in ranked[: request.options.top_k or len(ranked)]:
            add_groups(response.workers.add(score=line(choice)), asked, choice, self._picker)
        found = await divergence(asked, self._fleet)
        if found is not None:
            response.divergence.CopyFrom(found)
        return response


def asked_for(
    request: pb.ScoreWorkersRequest, query: Query, candidates: int
) -> dict[str, tracing.Value]:
    """What a span says of a prompt: how long it is, never what is in it."""
    return {
        "gen_ai.request.model": request.prompt.model,
        "kvindexd.namespace": request.prompt.namespace,
        "kvindexd.prompt_tokens": query.tokens,
        "kvindexd.candidates": candidates,
    }


def line(choice: Choice) -> pb.WorkerScore:
    """One line of an answer."""
    member = choice.member
    return codec.score_message(
        member.key,
        member.registration.address,
        choice.scored,
        state=pb.WorkerState.Value(member.state),
        staleness_ms=member.staleness_ms,
        cost=choice.cost,
        active_blocks=choice.load.active_blocks,
    )


def _overlap(request: pb.ScoreWorkersRequest) -> float | None:
    """The request's own overlap weight, None where it leaves that to the server."""
    options = request.options
    if not options.HasField("overlap_weight"):
        return None
    weight = options.overlap_weight
    if not 0 <= weight < math.inf:  # NaN is neither
        raise RequestError(f"options.overlap_weight: {weight}; expected a finite number from 0 on")
    return weight


def _best_ratio(response: object) -> float | None:
    return response.ratio if isinstance(response, lines.Packed) else None


def check_count(field: str, count: int, setting: str, limit: int) -> None:
    """Raise RequestError where a field has more entries than `limits.<setting>` allows."""
    if count > limit:
        text = f"{field}: {count} of them, at most limits.{setting} = {limit} per call"
        raise RequestError(text, setting.removeprefix("max_"))
