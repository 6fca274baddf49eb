"""TailWorker: one rank's decoded events with the filter's decision; counts, never tokens."""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Self

from kvindexd.groups import Treatment, contradicts, tier_of
from kvindexd.ingest.frame import Frame
from kvindexd.ingest.session import Session
from kvindexd.model import EngineHash, Tier
from kvindexd.rank_state import RankState
from kvindexd.rpc.codec import TIER_NAMES
from kvindexd.v1 import index_pb2 as pb
from kvindexd.wire import Batch, BlockRemoved, BlockStored, Rejected
from kvindexd.wire.events import Event

_QUEUE = 1024


class Tail:
    """Listens to one session. A reader that is too slow misses events, and is told how many."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self._queue: asyncio.Queue[pb.TailWorkerResponse] = asyncio.Queue(_QUEUE)
        self._missed = 0

    def __enter__(self) -> Self:
        self.session.listeners.add(self._heard)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.session.listeners.discard(self._heard)

    async def next(self, within: float) -> pb.TailWorkerResponse | None:
        """The next event, None where none came within some seconds."""
        try:
            async with asyncio.timeout(within):
                return await self._queue.get()
        except TimeoutError:
            return None

    def _heard(self, frame: Frame, batch: Batch) -> None:
        state = self.session.writer.residency
        earlier: set[EngineHash] = set()
        for event in batch.events:
            message = describe(event, state, earlier)
            message.seq, message.ts = frame.seq, batch.ts
            if isinstance(event, BlockStored):
                earlier.update(event.hashes)
            if self._missed:
                message.reason = f"{self._missed} events before this one were not shown; " + (
                    message.reason
                )
            try:
                self._queue.put_nowait(message)
                self._missed = 0
            except asyncio.QueueFull:
                self._missed += 1


def describe(event: Event, state: RankState, earlier: set[EngineHash]) -> pb.TailWorkerResponse:
    """One event and what becomes of it, before it is applied. `earlier`: hashes stored before it
    in its batch."""
    if isinstance(event, Rejected):
        return pb.TailWorkerResponse(
            type=event.tag or "?", decision="rejected", reason=f"{event.reason}: {event.detail}"
        )
    if not isinstance(event, BlockStored | BlockRemoved):
        return pb.TailWorkerResponse(type="AllBlocksCleared", decision="applied")
    kind = event.kind if isinstance(event, BlockStored) else None
    _, known = state.catalogue.classify(event.group_idx, kind)
    decision, reason = _decide(event, state, known, earlier)
    message = pb.TailWorkerResponse(
        type=type(event).__name__,
        kind=known,
        decision=decision,
        reason=reason,
        blocks=len(event.hashes),
        tier=TIER_NAMES[tier_of(event.medium)],
        medium=event.medium or "",
    )
    if event.group_idx is not None:
        message.group = event.group_idx
    if isinstance(event, BlockStored):
        message.tokens = event.num_tokens
        message.block_size = event.block_size
        message.lora_name = event.lora_name or ""
    return message


def _decide(
    event: BlockStored | BlockRemoved, state: RankState, kind: str, earlier: set[EngineHash]
) -> tuple[str, str]:
    """(decision, reason): what residency.py does with such an event, and why if it is filtered."""
    group = state.catalogue.get(event.group_idx)
    treated = group.treated_as if group is not None else state.catalogue.treat(kind)
    if treated is Treatment.IGNORED:
        return str(treated), f"groups of kind {kind!r} are not indexed"
    if isinstance(event, BlockStored):
        if group is not None and contradicts(group, event.kind):
            return "dropped", f"group {group.idx} has shown itself to be {group.kind!r}"
        if tier_of(event.medium) is Tier.OTHER:
            return "dropped", f"medium {event.medium!r} is of no known tier"
        found = event.parent is None or event.parent in earlier
        # A verified hash function finds parents that were never announced.
        found = found or event.parent in state.holdings.blocks or state.placer.saved() is not None
        if event.tokens and not found:
            return "parked", "its parent is not known; it waits for it"
    elif group is None and event.group_idx is not None:
        return "dropped", f"nothing was ever stored in group {event.group_idx}"
    else:
        blocks = state.holdings.blocks
        unknown = sum(h not in blocks and h not in earlier for h in event.hashes)
        if unknown:
            return str(treated), f"{unknown} of these hashes were never stored"
    return str(treated), ""
