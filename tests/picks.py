"""Helpers for tests that pick through a real daemon."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from typing import Any

from daemon import Daemon

from kvindexd.testing.engine import FakeEngine
from kvindexd.v1 import index_pb2 as pb

_hashes = itertools.count(1)
_seeds = itertools.count(1)


def fresh(blocks: int, extra: int = 0) -> list[int]:
    """A prompt that was never seen before: blocks of 16 tokens, and some tokens more."""
    source = random.Random(next(_seeds))
    return [source.randrange(100_000) for _ in range(16 * blocks + extra)]


def stored(tokens: Sequence[int], **more: Any) -> dict[str, Any]:
    """A BlockStored event of the full blocks of a prompt, from its root."""
    blocks = len(tokens) // 16
    return {
        "type": "BlockStored",
        "block_hashes": [next(_hashes) for _ in range(blocks)],
        "parent_block_hash": None,
        "token_ids": list(tokens[: blocks * 16]),
        "block_size": 16,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        "group_idx": 0,
        "kv_cache_spec_kind": "full_attention",
    } | more


def hold(daemon: Daemon, engine: FakeEngine, worker: str, *prompts: Sequence[int]) -> None:
    """Have a worker hold prompts, visibly to queries."""
    seq = -1
    for tokens in prompts:
        seq = engine.publish([stored(tokens)])
    daemon.until_seq(worker, seq)


class Holding:
    """What a gateway and a picker in a test have in common: a daemon, and engines that hold."""

    daemon: Daemon
    engines: dict[str, FakeEngine]

    def hold(self, worker: str, tokens: Sequence[int]) -> None:
        """Have a worker hold a prompt, and wait until every worker is live."""
        hold(self.daemon, self.engines[worker], worker, tokens)

        def live() -> bool:
            return all(s.state == pb.LIVE for s in self.daemon.score(tokens).values())

        # A worker that is still catching up comes behind those that are not.
        self.daemon.until(live, "all workers live")

    def active(self) -> dict[str, int]:
        """In-flight blocks by worker."""
        return {k: s.active_blocks for k, s in self.daemon.score(fresh(1)).items()}

    def released(self) -> None:
        """Wait until nothing is in flight."""
        self.daemon.until(lambda: not any(self.active().values()), "everything released")


def request(tokens: Sequence[int], **fields: Any) -> pb.PickWorkerRequest:
    """A PickWorker request; fields of the request, its ScoreOptions and `candidates` alike."""
    options = {
        k: fields.pop(k)
        for k in ("overlap_weight", "top_k", "role", "labels", "explain", "device_only")
        if k in fields
    }
    score = pb.ScoreWorkersRequest(
        prompt=pb.Prompt(model=fields.pop("model", "m"), tokens=pb.TokenIds(ids=tokens)),
        candidates=fields.pop("candidates", ()),
        options=pb.ScoreOptions(**options),
    )
    return pb.PickWorkerRequest(score=score, **fields)


def pick(daemon: Daemon, tokens: Sequence[int], **fields: Any) -> pb.PickWorkerResponse:
    """PickWorker."""
    return daemon.index.PickWorker(request(tokens, **fields), timeout=10)


def complete(daemon: Daemon, request_id: str, **fields: Any) -> None:
    """CompleteRequest."""
    daemon.index.CompleteRequest(
        pb.CompleteRequestRequest(request_id=request_id, **fields), timeout=10
    )
