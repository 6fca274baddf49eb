"""The KVIndex service: how much of a prompt would each worker reuse."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, NoReturn, Protocol, TypeVar

import grpc
import structlog

from kvindexd.fleet import Filter, Member, Scope, select
from kvindexd.registration import RoleName
from kvindexd.rpc import codec
from kvindexd.rpc.budget import Admission
from kvindexd.rpc.errors import NotFound, RequestError
from kvindexd.rpc.prompt import query_of
from kvindexd.scoring.explain import MISSING, PREDICTED, Run, runs
from kvindexd.scoring.picker import Choice, Picker
from kvindexd.scoring.query import Query
from kvindexd.scoring.scorer import Probes, Scored, TablePresence, score
from kvindexd.v1 import index_pb2 as pb
from kvindexd.v1 import index_pb2_grpc

log = structlog.get_logger(__name__)
Context = grpc.aio.ServicerContext[Any, Any]
T = TypeVar("T")
MAX_BATCH = 1024


class Fleet(Protocol):
    """What the service asks of the replica; never of Redis."""

    def scope(self, namespace: str, model: str) -> Scope | None:
        """The model's table and ranks; with model "" the only one there is."""
        ...

    def models(self, namespace: str) -> list[str]:
        """Models that ever had a worker registered in the namespace."""
        ...

    def revision(self) -> str:
        """A name for what the replica has applied so far."""
        ...


class Observer(Protocol):
    """Where the service reports what it did (metrics)."""

    def scored(self, code: str, seconds: float, matched_ratio: float | None) -> None:
        """One scoring call ended."""
        ...


class IndexService(index_pb2_grpc.KVIndexServicer):
    """KVIndex over a fleet. Every answer comes from memory."""

    def __init__(
        self,
        fleet: Fleet,
        observer: Observer,
        *,
        max_prompt_tokens: int,
        max_concurrent_calls: int,
        picker: Picker | None = None,
    ) -> None:
        self._fleet = fleet
        self._observer = observer
        self._max_tokens = max_prompt_tokens
        self._picker = picker or Picker()
        self._admission = Admission(max_concurrent_calls)

    async def ScoreWorkers(
        self, request: pb.ScoreWorkersRequest, context: Context
    ) -> pb.ScoreWorkersResponse:
        """Score one prompt."""
        return await self._answered(context, lambda: self._score(request))

    async def ScoreWorkersBatch(
        self, request: pb.ScoreWorkersBatchRequest, context: Context
    ) -> pb.ScoreWorkersBatchResponse:
        """Score many prompts; the first bad one fails the call, naming its place."""
        if len(request.requests) > MAX_BATCH:
            error = f"requests: {len(request.requests)} of them, at most {MAX_BATCH} per call"
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, error)

        async def all_of_them() -> pb.ScoreWorkersBatchResponse:
            response = pb.ScoreWorkersBatchResponse()
            for i, one in enumerate(request.requests):
                try:
                    response.responses.append(await self._score(one))
                except RequestError as e:
                    raise type(e)(f"requests[{i}]: {e}") from None
            return response

        return await self._answered(context, all_of_them)

    async def ScoreWorkersStream(
        self, request_iterator: AsyncIterator[pb.ScoreWorkersRequest], context: Context
    ) -> AsyncIterator[pb.ScoreWorkersResponse]:
        """Score prompts as they come, in order."""
        async for request in request_iterator:

            async def one(request: pb.ScoreWorkersRequest = request) -> pb.ScoreWorkersResponse:
                return await self._score(request)

            yield await self._answered(context, one)

    async def Explain(
        self, request: pb.ScoreWorkersRequest, context: Context
    ) -> pb.ExplainResponse:
        """Score one prompt and say block by block why."""
        return await self._answered(context, lambda: self._explain(request))

    # -- the work -----------------------------------------------------------------------------

    async def _answered(self, context: Context, work: Callable[[], Awaitable[T]]) -> T:
        started = time.perf_counter()
        try:
            with self._admission.enter():
                response = await work()
        except RequestError as e:
            self._observer.scored(e.code.name, time.perf_counter() - started, None)
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

    async def _candidates(
        self, request: pb.ScoreWorkersRequest
    ) -> tuple[Scope, Query, list[Member]]:
        options = request.options
        role: RoleName | None = None
        if options.HasField("role"):
            if options.role not in pb.Role.values():
                raise RequestError(f"options.role: {options.role} is unknown")
            role = pb.Role.Name(options.role)  # type: ignore[assignment]  # one of RoleName
        query = query_of(request.prompt, self._max_tokens)
        scope = self._scope(request.prompt)
        wanted = Filter(
            tuple(request.candidates), role, dict(options.labels), options.include_stale
        )
        members = select(scope.members, wanted)
        for unit in {m.candidate.geometry.unit for m in members}:
            await query.hash(unit)
        return scope, query, members

    async def _score(self, request: pb.ScoreWorkersRequest) -> pb.ScoreWorkersResponse:
        scope, query, members = await self._candidates(request)
        options = request.options
        scored = score(
            scope.table,
            query,
            [m.candidate for m in members],
            device_only=options.device_only,
            explain=options.explain,
        )
        ranked = self._rank(request, query, members, scored)
        if options.top_k:
            ranked = ranked[: options.top_k]
        size = ranked[0].scored.block_size if ranked else 0
        return pb.ScoreWorkersResponse(
            scores=[line(choice) for choice in ranked],
            prompt_tokens=query.tokens,
            prompt_blocks=query.tokens // (size or 16),
            index_revision=self._fleet.revision(),
        )

    def _rank(
        self,
        request: pb.ScoreWorkersRequest,
        query: Query,
        members: list[Member],
        scored: list[Scored],
    ) -> list[Choice]:
        """Predictions added, best first."""
        now = time.monotonic()
        scored = self._picker.with_predictions(query, members, scored, now)
        options = request.options
        overlap = options.overlap_weight if options.HasField("overlap_weight") else None
        return self._picker.rank(query, members, scored, now, overlap)

    async def _explain(self, request: pb.ScoreWorkersRequest) -> pb.ExplainResponse:
        scope, query, members = await self._candidates(request)
        candidates = [m.candidate for m in members]
        scored = score(scope.table, query, candidates, explain=True)
        ranked = self._rank(request, query, members, scored)
        response = pb.ExplainResponse()
        for choice in ranked[: request.options.top_k or len(ranked)]:
            shape = choice.member.candidate
            explained = response.workers.add(score=line(choice))
            presence = TablePresence(Probes(scope.table, query), shape.geometry, [shape.column])
            if not shape.geometry.block_size or query.keys(shape.geometry.unit) is None:
                continue
            for run in runs(presence, shape.geometry, query.tokens):
                explained.groups.add(
                    group=pb.Group(
                        idx=max(0, run.spec.idx),
                        kind=run.spec.kind,
                        block_size=run.spec.block_size,
                        sliding_window=run.spec.window,
                    ),
                    held=self._with_predicted(query, choice, run),
                    stops_at=run.stops_at,
                    why=run.why,
                )
        return response

    def _with_predicted(self, query: Query, choice: Choice, run: Run) -> bytes:
        """A run's bytes with the blocks that are missing and predicted marked as such."""
        predicted = self._picker.predicted_blocks(
            query, choice.member, run.spec.block_size, time.monotonic()
        )
        held = bytearray(run.held)
        for i, yes in enumerate(predicted):
            if yes and held[i] == MISSING:
                held[i] = PREDICTED
        return bytes(held)


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


def _best_ratio(response: object) -> float | None:
    if not isinstance(response, pb.ScoreWorkersResponse) or not response.prompt_tokens:
        return None
    best = max((s.reusable_tokens for s in response.scores), default=0)
    return best / response.prompt_tokens


async def refuse(context: Context, error: RequestError) -> NoReturn:
    """End a call with an error's status and message."""
    await context.abort(error.code, str(error))
    raise AssertionError("abort does not return")  # for the type checker
