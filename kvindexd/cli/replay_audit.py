"""An independent reading of a worker's replay buffer, compared with what the index credits."""

from __future__ import annotations

import asyncio
import random
from typing import NamedTuple

import grpc
import msgspec
import xxhash

from kvindexd.capturing.offline import SetPresence
from kvindexd.cli.client import CALL_TIMEOUT, Client
from kvindexd.ingest.actions import ReplayOutcome
from kvindexd.ingest.frame import Frame
from kvindexd.ingest.replay import ReplayClient, ReplayResult, ReplaySettings
from kvindexd.ingest.sockets import new_context
from kvindexd.rank_state import Options
from kvindexd.residency import Residency
from kvindexd.v1 import index_pb2 as pb
from kvindexd.wire import BatchError, decode_batch
from kvindexd.wire.events import AllBlocksCleared


class ReplayAudit(msgspec.Struct, frozen=True, kw_only=True):
    """What a replay says against what the index says. Counts are of blocks.

    `whole`: the replay reaches back to where the cache was empty, so that it names all that is
    held; else only what it names can be checked. `checked`: held by the replay and looked up;
    `missing`: of those, not credited to the worker by the index. `moved`: batches were applied
    meanwhile, so that a difference may be due to that. `finding`: what is wrong, "" if nothing is.
    """

    worker_id: str
    dp_rank: int
    batches: int
    first_seq: int
    last_seq: int
    whole: bool
    replay_blocks: int
    index_blocks: int
    checked: int
    missing: int
    moved: bool
    finding: str


class _Reader:
    """A rank's state as its replay tells it, up to a sequence number."""

    def __init__(self, worker: pb.Worker) -> None:
        self._until = worker.last_seq
        self.residency = Residency(Options(reports_reuse=worker.reports_reuse))
        self._presence = SetPresence()
        self.first, self.last = -1, -1
        self.batches = 0
        self.whole = False

    async def deliver(self, frames: list[Frame]) -> None:
        for frame in frames:
            if self.last < frame.seq <= self._until:
                self._apply(frame)

    def _apply(self, frame: Frame) -> None:
        try:
            batch = decode_batch(frame.payload)
        except BatchError:
            return
        if self.first < 0:
            self.first, self.whole = frame.seq, frame.seq == 0
        self.last = frame.seq
        self.batches += 1
        self.whole = self.whole or any(isinstance(e, AllBlocksCleared) for e in batch.events)
        digest = xxhash.xxh3_64_intdigest(frame.payload)
        delta = self.residency.apply(batch, seq=frame.seq, digest=digest, now=batch.ts)
        self._presence.apply(delta)

    @property
    def names(self) -> set[int]:
        """What blocks are called that are held on any tier, by any group."""
        return set().union(*self._presence.names.values())


class ReplayUnusable(Exception):
    """There is no replay to compare with; the message says why."""


async def _replay(worker: pb.Worker, reader: _Reader) -> ReplayResult:
    context = new_context()
    try:
        client = ReplayClient(ReplaySettings(endpoint=worker.replay_endpoint), context)
        return await client.run(0, reader.deliver)
    finally:
        context.destroy(0)


class _Lookup(NamedTuple):
    checked: int
    missing: int


def audit_replay(
    client: Client, worker_id: str, rank: int, namespace: str, sample: int
) -> ReplayAudit:
    """Compare one rank. At most `sample` blocks are looked up, chosen at random.

    Raises ReplayUnusable, and grpc.RpcError.
    """
    ask = pb.GetWorkerRequest(worker_id=worker_id, dp_rank=rank, namespace=namespace)
    worker = client.admin.GetWorker(ask, timeout=CALL_TIMEOUT).worker
    if not worker.replay_endpoint:
        raise ReplayUnusable(
            f"worker {worker_id}#{rank} has no replay_endpoint: its engine's history cannot be read"
        )
    reader = _Reader(worker)
    result = asyncio.run(_replay(worker, reader))
    if result.outcome is not ReplayOutcome.COMPLETE:
        raise ReplayUnusable(f"the replay at {worker.replay_endpoint} failed: {result.detail}")
    if not reader.batches:
        raise ReplayUnusable(
            f"the replay at {worker.replay_endpoint} holds no batch up to {worker.last_seq}, the "
            "last one that the index has: the engine was restarted, or never sent any"
        )
    found = _look_up(client, worker, reader, sample)
    after = client.admin.GetWorker(ask, timeout=CALL_TIMEOUT).worker
    moved = (after.epoch, after.last_seq) != (worker.epoch, worker.last_seq)
    held = sum(reader.residency.tier_blocks()[:3])
    index = sum(n for tier, n in worker.blocks.items() if tier != "other")
    return ReplayAudit(
        worker_id=worker_id,
        dp_rank=rank,
        batches=reader.batches,
        first_seq=reader.first,
        last_seq=reader.last,
        whole=reader.whole,
        replay_blocks=held,
        index_blocks=index,
        checked=found.checked,
        missing=found.missing,
        moved=moved,
        finding="" if moved else _finding(found, reader.whole, held, index),
    )


def _look_up(client: Client, worker: pb.Worker, reader: _Reader, sample: int) -> _Lookup:
    names = sorted(reader.names)
    chosen = names if len(names) <= sample else random.sample(names, sample)
    missing = 0
    for name in chosen:
        request = pb.GetBlockRequest(hash=name, model=worker.model)
        try:
            holders = client.admin.GetBlock(request, timeout=CALL_TIMEOUT).holders
        except grpc.RpcError as e:
            if e.code() is not grpc.StatusCode.NOT_FOUND:
                raise
            holders = ()
        mine = (worker.worker_id, worker.dp_rank)
        missing += mine not in {(h.worker_id, h.dp_rank) for h in holders}
    return _Lookup(len(chosen), missing)


def _finding(found: _Lookup, whole: bool, held: int, index: int) -> str:
    if found.missing:
        return (
            f"{found.missing} of {found.checked} blocks that the worker holds by its own replay "
            "are not in the index: it is credited with too little; `kvindexd workers resync` "
            "repairs it"
        )
    if whole and index > held:
        return (
            f"the index credits {index - held} blocks more than the worker holds by its own "
            "replay; `kvindexd workers resync` repairs it"
        )
    return ""
