"""TailWorker: one rank's decoded events with the filter's decision; counts, never tokens."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import TracebackType
from typing import Self

from kvindexd.groups import tier_of
from kvindexd.ingest.frame import Frame
from kvindexd.ingest.session import Session
from kvindexd.rpc.codec import TIER_NAMES
from kvindexd.v1 import index_pb2 as pb
from kvindexd.wire import Batch, BlockRemoved, BlockStored, Rejected
from kvindexd.wire.events import Event

_QUEUE = 1024


class Tail:
    """Listens to one session. A reader that is too slow misses events, and is told how many."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._queue: asyncio.Queue[pb.TailWorkerResponse] = asyncio.Queue(_QUEUE)
        self._missed = 0

    def __enter__(self) -> Self:
        self._session.listeners.add(self._heard)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None
    ) -> None:
        self._session.listeners.discard(self._heard)

    def __aiter__(self) -> AsyncIterator[pb.TailWorkerResponse]:
        return self._events()

    async def _events(self) -> AsyncIterator[pb.TailWorkerResponse]:
        while True:
            yield await self._queue.get()

    def _heard(self, frame: Frame, batch: Batch) -> None:
        for event in batch.events:
            message = describe(event, self._session)
            message.seq, message.ts = frame.seq, batch.ts
            if self._missed:
                message.reason = f"{self._missed} events before this one were not shown; " + (
                    message.reason
                )
            try:
                self._queue.put_nowait(message)
                self._missed = 0
            except asyncio.QueueFull:
                self._missed += 1


def describe(event: Event, session: Session) -> pb.TailWorkerResponse:
    """One event and what becomes of it, before it is applied."""
    if isinstance(event, Rejected):
        return pb.TailWorkerResponse(
            type=event.tag or "?", decision="rejected", reason=f"{event.reason}: {event.detail}"
        )
    if not isinstance(event, BlockStored | BlockRemoved):
        return pb.TailWorkerResponse(type="AllBlocksCleared", decision="applied")
    catalogue = session.writer.residency.catalogue
    kind = event.kind if isinstance(event, BlockStored) else None
    _, known = catalogue.classify(event.group_idx, kind)
    group = catalogue.get(event.group_idx)
    message = pb.TailWorkerResponse(
        type=type(event).__name__,
        kind=known,
        decision=str(group.treated_as) if group is not None else str(catalogue.treat(known)),
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
