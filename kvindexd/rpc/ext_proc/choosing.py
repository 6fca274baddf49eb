"""From one HTTP request to the endpoints that should serve it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from google.protobuf import duration_pb2

from kvindexd import tracing
from kvindexd.fleet import names_of, normal
from kvindexd.registration import Registration
from kvindexd.rpc.budget import Admission
from kvindexd.rpc.errors import NotFound, RequestError, TooLarge, Unavailable
from kvindexd.rpc.ext_proc.usage import Usage
from kvindexd.rpc.pick_service import PickService, Taken, outcome_of
from kvindexd.tokens import BadBody, NoTokens, Request, is_inference, parse
from kvindexd.v1 import index_pb2 as pb

LEASE = 6 * 3600.0
"""Seconds. The end of the stream releases a pick; the lease is for streams that never end."""
_BYTES_PER_TOKEN = 4
"""A guess at a prompt's length where nobody counts its tokens."""
RANK_HEADER = "x-data-parallel-rank"


class Asked(NamedTuple):
    """What is known of a request when the pick is made. `subset`: endpoints that may be picked,
    None = any. `whole`: the body is all there; without it `why` says why not."""

    method: str
    path: str
    body: bytes
    subset: Sequence[str] | None
    whole: bool = True
    why: str = ""


class Refused(Exception):
    """The request gets this answer instead of a worker."""

    def __init__(self, status: int, code: str, text: str) -> None:
        super().__init__(text)
        self.status = status
        self.code = code


class Decision(NamedTuple):
    """A pick. `endpoints`: host:port, the picked one first. `why`: what kept it from looking at
    the prompt, "" where it did. `late`: that was the time it took."""

    taken: Taken
    endpoints: list[str]
    headers: dict[str, str]
    why: str
    late: bool = False

    def told(self) -> dict[str, str | int | float]:
        """How it was made, for the gateway's log; counts of tokens, never the tokens."""
        first = self.taken.ranked[0]
        return {
            "by": "load" if self.why else "cache",
            "why": self.why,
            "worker": first.member.key.worker_id,
            "dp_rank": first.member.key.dp_rank,
            "request_id": self.taken.request_id,
            "prompt_tokens": self.taken.query.tokens,
            "reusable_tokens": first.scored.reusable,
            "predicted_tokens": first.scored.predicted,
        }


class Tokens(Protocol):
    """Where token ids come from."""

    def base_of(self, model: str) -> tuple[str, str]:
        """(model as workers registered it, adapter name or "") of a model as clients name it."""
        ...

    async def ids(self, model: str, request: Request) -> bytes:
        """The prompt as packed little-endian uint32. Raises NoTokens or BadBody."""
        ...


class Chooser:
    """Makes picks, counts them as load, and ends them."""

    def __init__(
        self,
        service: PickService,
        tokens: Tokens,
        *,
        namespace: str,
        budget: float,
        fallbacks: int,
        max_concurrent: int,
    ) -> None:
        """`budget`: seconds for a pick, after which it is made by load alone."""
        self._service = service
        self._tokens = tokens
        self._namespace = namespace
        self._budget = budget
        self._fallbacks = fallbacks
        self._admission = Admission(max_concurrent)

    async def choose(self, asked: Asked) -> Decision:
        """Pick, and count the request as load. Raises Refused."""
        if asked.subset is not None and not asked.subset:
            raise Refused(503, "no_endpoint", "the gateway's subset hint names no endpoint")
        try:
            with tracing.span("pick") as span, self._admission.enter():
                decision = await self._choose(asked)
                if span is not None:
                    span.set(_traced(decision))
                return decision
        except TooLarge as e:
            raise Refused(429, "overloaded", str(e)) from None

    async def _choose(self, asked: Asked) -> Decision:
        why, model, late = asked.why, "", False
        if asked.method == "POST" and is_inference(asked.path) and not (why and not asked.body):
            try:
                request = parse(asked.path, asked.body)
                model = self._tokens.base_of(request.model)[0]
                if not why:
                    return await self._by_cache(asked, request)
            except BadBody as e:
                if asked.whole:
                    raise Refused(400, "invalid_body", str(e)) from None
            except TimeoutError:
                why, late = f"no answer within {self._budget * 1000:g} ms", True
            except NoTokens as e:
                why = str(e)
        decision = self._by_load(asked, model, why or "the request carries no prompt")
        return decision._replace(late=late)

    async def _by_cache(self, asked: Asked, request: Request) -> Decision:
        model, lora = self._tokens.base_of(request.model)
        async with asyncio.timeout(self._budget):
            ids = await self._tokens.ids(model, request)
            prompt = pb.Prompt(
                model=model,
                namespace=self._namespace,
                token_ids=ids,
                lora_name=lora,
                cache_salt=request.cache_salt,
            )
            try:
                taken = await self._service.choose(self._request(prompt, asked))
            except RequestError as e:
                raise _refused(e) from None
        return self._decision(taken, asked, "")

    def _by_load(self, asked: Asked, model: str, why: str) -> Decision:
        prompt = pb.Prompt(model=model, namespace=self._namespace)
        tokens = len(asked.body) // _BYTES_PER_TOKEN
        try:
            taken = self._service.choose_by_load(self._request(prompt, asked), tokens)
        except RequestError as e:
            raise _refused(e) from None
        return self._decision(taken, asked, why)

    def _request(self, prompt: pb.Prompt, asked: Asked) -> pb.PickWorkerRequest:
        return pb.PickWorkerRequest(
            score=pb.ScoreWorkersRequest(prompt=prompt, candidates=asked.subset or ()),
            lease=duration_pb2.Duration(seconds=int(LEASE)),
        )

    def _decision(self, taken: Taken, asked: Asked, why: str) -> Decision:
        first = taken.ranked[0].member
        headers = {}
        if first.registration.dp_size > 1:
            headers[RANK_HEADER] = str(first.key.dp_rank)
        endpoints: list[str] = []
        for choice in taken.ranked:
            m = choice.member
            # Fallbacks are sent the same headers, and so must have the rank that these name.
            if headers and m.registration.dp_size <= first.key.dp_rank:
                continue
            endpoint = endpoint_of(m.registration, asked.subset)
            if endpoint not in endpoints:
                endpoints.append(endpoint)
            if len(endpoints) > self._fallbacks:
                break
        return Decision(taken, endpoints, headers, why)

    # -- afterwards ---------------------------------------------------------------------------

    def served(self, decision: Decision, endpoint: str) -> tuple[Decision, str]:
        """The gateway says who served: the load is counted there; (decision, what it was):
        `picked`, `fallback`, or `other` where nobody of the candidates has that address."""
        for place, choice in enumerate(decision.taken.ranked):
            if normal(endpoint) in names_of(choice.member.registration):
                if choice.member.registration == decision.taken.ranked[0].member.registration:
                    return decision, "picked"
                taken = self._service.move(decision.taken, place)
                return decision._replace(taken=taken), "fallback"
        return decision, "other"

    def end(self, decision: Decision, usage: Usage, *, elsewhere: bool = False) -> None:
        """The response has ended, or was given up. `elsewhere`: it was not the picked worker
        that served, so that what the engine says is nothing to learn from."""
        request = pb.CompleteRequestRequest(request_id=decision.taken.request_id)
        if usage.cached is not None and not decision.why and not elsewhere:
            # An engine may count the last token in; what it says must not fail the release.
            total = usage.prompt or decision.taken.query.tokens
            request.cached_tokens = min(usage.cached, total)
            request.prompt_tokens = total
        self._service.complete(request)


def _traced(decision: Decision) -> dict[str, tracing.Value]:
    first = decision.taken.ranked[0].member
    return {
        "gen_ai.request.model": first.registration.model,
        "kvindexd.by": "load" if decision.why else "cache",
        "kvindexd.budget_exceeded": decision.late,
        "kvindexd.candidates": len(decision.taken.ranked),
        "kvindexd.prompt_tokens": decision.taken.query.tokens,
        **outcome_of(decision.taken),
    }


def endpoint_of(registration: Registration, subset: Sequence[str] | None) -> str:
    """Where a gateway reaches a worker: as its subset hint spells it, else as registered, or by an
    alias that is host:port where the registered address is none."""
    if subset:
        names = names_of(registration)
        port = registration.address.rpartition(":")[2]
        for entry in subset:
            if normal(entry) in names or entry in names:
                return entry if _has_port(entry) else _joined(entry, port)
    for address in (registration.address, *registration.aliases):
        if _has_port(address):
            return address
    return registration.address


def _has_port(address: str) -> bool:
    host, colon, port = address.rpartition(":")
    bare_v6 = ":" in host and not host.endswith("]")
    return bool(colon and host and port.isdigit() and not bare_v6)


def _joined(host: str, port: str) -> str:
    return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"


def _refused(error: RequestError) -> Refused:
    if isinstance(error, Unavailable):
        return Refused(503, "no_endpoint", str(error))
    if isinstance(error, NotFound):
        return Refused(404, "model_not_found", str(error))
    return Refused(400, "invalid_request", str(error))
