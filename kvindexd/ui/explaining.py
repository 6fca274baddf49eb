"""The explain form: JSON in, the Explain rpc's own code, JSON out."""

from __future__ import annotations

import asyncio
from itertools import groupby
from typing import Annotated, Any, Protocol

import msgspec
import numpy as np
from msgspec import Meta

from kvindexd.rpc.errors import RequestError
from kvindexd.telemetry.http import Response
from kvindexd.v1 import index_pb2 as pb

MAX_BODY = 1 << 20
_TIMEOUT = 8.0
_AT_ONCE = 2
_STATUS = {
    "INVALID_ARGUMENT": 400,
    "FAILED_PRECONDITION": 400,
    "NOT_FOUND": 404,
    "RESOURCE_EXHAUSTED": 429,
    "UNAVAILABLE": 503,
    "DEADLINE_EXCEEDED": 504,
}
JSON = "application/json"

TokenId = Annotated[int, Meta(ge=0, lt=2**32)]


class Question(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """What the form sends; see the package for its fields."""

    text: str | None = None
    token_ids: list[TokenId] | None = None
    body: msgspec.Raw | None = None
    path: str = ""
    model: str = ""
    namespace: str = ""
    lora_name: str = ""
    cache_salt: str = ""
    candidates: list[str] = []
    top_k: Annotated[int, Meta(ge=1, le=50)] = 10
    include_stale: bool = True

    def request(self) -> pb.ScoreWorkersRequest:
        """The rpc's request. Raises RequestError without exactly one prompt."""
        given = [v for v in (self.text, self.token_ids, self.body) if v is not None]
        if len(given) != 1:
            raise RequestError("set exactly one of text, token_ids and body")
        prompt = pb.Prompt(
            model=self.model,
            namespace=self.namespace,
            lora_name=self.lora_name,
            cache_salt=self.cache_salt,
        )
        if self.text is not None:
            prompt.text = self.text
        elif self.token_ids is not None:
            prompt.token_ids = np.array(self.token_ids, "<u4").tobytes()
        elif self.body is not None:
            prompt.openai_body, prompt.openai_path = bytes(self.body), self.path
        options = pb.ScoreOptions(explain=True, top_k=self.top_k, include_stale=self.include_stale)
        return pb.ScoreWorkersRequest(prompt=prompt, candidates=self.candidates, options=options)


class Explains(Protocol):
    """IndexService, as far as the form needs it."""

    async def explain(self, request: pb.ScoreWorkersRequest) -> pb.ExplainResponse:
        """Raises RequestError."""
        ...


class Form:
    """Answers posted questions, a few at a time."""

    def __init__(self) -> None:
        self.index: Explains | None = None
        """Set once the service is up."""
        self._turns = asyncio.Semaphore(_AT_ONCE)

    async def answer(self, body: bytes) -> Response:
        """`/ui/api/explain`."""
        if self.index is None:
            return failed(503, "UNAVAILABLE", "still starting")
        if self._turns.locked():
            return failed(429, "RESOURCE_EXHAUSTED", "others are asking; try again in a moment")
        try:
            async with self._turns, asyncio.timeout(_TIMEOUT):
                # A megabyte of JSON takes milliseconds each way that scoring should not wait for.
                request = await asyncio.to_thread(_question, body)
                found = await self.index.explain(request)
                return Response(200, JSON, await asyncio.to_thread(_answer, found))
        except msgspec.MsgspecError as e:
            return failed(400, "INVALID_ARGUMENT", f"{e}")
        except RequestError as e:
            return failed(_STATUS.get(e.code.name, 500), e.code.name, f"{e}")
        except TimeoutError:
            return failed(504, "DEADLINE_EXCEEDED", f"no answer within {_TIMEOUT:g} s")


def failed(status: int, code: str, words: str) -> Response:
    """An error as the endpoints say it."""
    return Response(status, JSON, msgspec.json.encode({"error": words, "code": code}))


def _question(body: bytes) -> pb.ScoreWorkersRequest:
    return msgspec.json.decode(body, type=Question).request()


def _answer(found: pb.ExplainResponse) -> bytes:
    shown = {
        "prompt_tokens": found.prompt_tokens,
        "divergence": _divergence(found.divergence) if found.HasField("divergence") else None,
        "workers": [_worker(w) for w in found.workers],
    }
    return msgspec.json.encode(shown)


def _divergence(found: pb.Divergence) -> dict[str, Any]:
    return {
        "held_tokens": found.held_tokens,
        "before_token": found.before_token,
        "detail": found.detail,
        "variations": [
            {"detail": v.detail, "matched_tokens": v.matched_tokens, "workers": list(v.workers)}
            for v in found.variations
        ],
        "unknown": list(found.unknown),
    }


def _worker(explained: pb.WorkerExplanation) -> dict[str, Any]:
    score = explained.score
    names = (
        "worker_id",
        "dp_rank",
        "address",
        "block_size",
        "reusable_tokens",
        "matched_tokens",
        "device_tokens",
        "host_tokens",
        "storage_tokens",
        "predicted_tokens",
        "upper_bound",
        "cost",
        "reason",
    )
    shown = {name: getattr(score, name) for name in names}
    shown["state"] = pb.WorkerState.Name(score.state)
    return shown | {"groups": [_group(g) for g in explained.groups]}


def _group(run: pb.GroupRun) -> dict[str, Any]:
    return {
        "idx": run.group.idx,
        "kind": run.group.kind,
        "block_size": run.group.block_size,
        "window": run.group.sliding_window,
        "stops_at": run.stops_at,
        "why": run.why,
        "held": [[code, len(list(same))] for code, same in groupby(run.held)],
    }
