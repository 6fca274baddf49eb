"""One rank's way from frames in order to the store: decode, apply, write, all or nothing."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable

import msgspec
import structlog

from kvindexd.ingest.actions import SequencerState
from kvindexd.ingest.counting import RankCounters
from kvindexd.ingest.deltas import records, removals
from kvindexd.ingest.frame import Frame
from kvindexd.model import BatchDelta, Profile
from kvindexd.registering import register_again
from kvindexd.registration import Registration
from kvindexd.residency import Options, Residency
from kvindexd.store import Store
from kvindexd.store.errors import (
    Damaged,
    Diverged,
    Fenced,
    LeaseHeld,
    NotRegistered,
    StoreError,
    StoreFull,
    StoreUnavailable,
)
from kvindexd.store.records import Lease, Snapshot
from kvindexd.wire import Batch, BatchError, decode_batch

log = structlog.get_logger(__name__)

BURST_RECORDS = 8192
"""Records in one write at most (but for a larger batch), so that it stays short."""
_ROOM = 2 * BURST_RECORDS
"""Records on their way to the store, or waiting for it, beyond which nothing more is applied."""
_SAVE_EVERY = 64
"""Batches after which the sequencer's history is saved anyway."""
_YIELD_SECONDS = 0.001
"""How long applying may hold the event loop before others get a turn."""


class SavedRank(msgspec.Struct, array_like=True):
    """The opaque `state` of a rank in the store: the residency's, and the sequencer's."""

    residency: bytes = b""
    sequencer: SequencerState | None = None


class RankWriter:
    """Owns the residency of one rank under one lease.

    `apply` and `reset` change it in memory and queue what to write; `flush` writes everything
    queued. One task applies while another writes (`run`): what is queued during a write makes up
    the next one. After any StoreError other than StoreUnavailable and StoreFull the writer must be
    thrown away and the rank be loaded anew.
    """

    def __init__(
        self,
        store: Store,
        lease: Lease,
        options: Options,
        registration: Registration,
        counters: RankCounters,
        sequencer_state: Callable[[], SequencerState],
    ) -> None:
        self._store = store
        self.lease = lease
        self._registration = registration
        self._birth = store.birth
        self._counters = counters
        self._sequencer_state = sequencer_state
        self.residency = Residency(options)
        self.last_ts = 0.0
        self.claimed_rank: int | None = None
        """A rank other than the registered one that the engine's batches name, if they do."""
        self._flight: list[BatchDelta] = []  # being written, or to be written again
        self._queue: list[BatchDelta] = []  # behind them
        self._records = 0  # in both
        self._wanted, self._landed = asyncio.Event(), asyncio.Event()
        self._whole = asyncio.Lock()  # held while a batch is applied: between, all is consistent
        self._residency_state = b""
        self._since_save = 0
        self._full = False
        self._applying = False
        self._turn = 0.0  # when others last had theirs
        self._stand = (lease.last_seq, lease.last_ts, lease.last_digest)  # after all that is queued
        self.moving = False
        """The lease is being acquired anew: the one that is known may have ended by that."""
        self._events: Callable[[Frame, Batch], None] | None = None

    async def load(self, snapshot: Snapshot) -> SequencerState:
        """Take over what is stored; returns where the sequence stands."""
        saved = _decode_saved(snapshot.state)
        profile = (
            msgspec.msgpack.decode(snapshot.profile, type=Profile)
            if snapshot.profile
            else Profile()
        )
        blocks = [pair async for pair in snapshot.blocks()]
        parked = [pair async for pair in snapshot.parked()]
        self.residency.restore(profile, saved.residency or None, blocks, iter(parked))
        self._residency_state = saved.residency
        self.last_ts = snapshot.last_ts
        return SequencerState.resume(
            snapshot.last_seq, snapshot.last_ts, snapshot.last_digest, saved.sequencer
        )

    def watch(self, listener: Callable[[Frame, Batch], None] | None) -> None:
        """Show every decoded batch to `listener` (TailWorker), before it is applied."""
        self._events = listener

    # -- changes ------------------------------------------------------------------------------

    async def apply(self, frame: Frame) -> None:
        """Decode and apply one frame. A payload that is no batch still takes up its number."""
        try:
            batch = decode_batch(frame.payload)
        except BatchError as e:
            self._counters.decode_error()
            self._counters.add(f"dropped:{e.reason}")
            log.debug("payload_rejected", worker=str(self.lease.key), seq=frame.seq, error=str(e))
            batch = Batch(frame.ts if frame.ts is not None else self.last_ts, [])
        self._counters.batch(batch)
        if batch.rank is not None and batch.rank != self.lease.key.dp_rank:
            self._another_rank(batch.rank)
        if self._events is not None:
            self._events(frame, batch)
        async with self._whole:
            await self._apply_whole(frame, batch)

    async def _apply_whole(self, frame: Frame, batch: Batch) -> None:
        self._applying = True
        try:
            await self._apply_batch(batch)
        except Exception as e:
            # A fault of ours. Failing here again and again on the same batch would stop the rank
            # for good; half-applied claims would be wrong. So it costs what the rank holds.
            log.exception(
                "apply_failed",
                worker=str(self.lease.key),
                seq=frame.seq,
                error=repr(e),
                cost="the rank's claims are dropped",
            )
            self._counters.add("internal_errors")
            self.residency.reset(incarnation=True)
        self._applying = False
        self.last_ts = batch.ts
        self._take(frame.seq, batch.ts, frame.digest)

    async def _apply_batch(self, batch: Batch) -> None:
        for _ in self.residency.apply_steps(batch, now=time.time()):
            if time.perf_counter() - self._turn > _YIELD_SECONDS:
                await asyncio.sleep(0)
                self._turn = time.perf_counter()

    def _another_rank(self, claimed: int) -> None:
        """What a stream says belongs to the rank that it is registered as, whatever it claims."""
        self._counters.add("rank_mismatch")
        if self.claimed_rank != claimed:
            self.claimed_rank = claimed
            log.warning(
                "rank_mismatch",
                worker=str(self.lease.key),
                registered=self.lease.key.dp_rank,
                claimed=claimed,
                cost="none, if the endpoint is right: what comes from it is the registered rank's",
            )

    def reset(self, *, incarnation: bool) -> None:
        """Drop every claim; with `incarnation`, what the engine has shown of itself too."""
        self.residency.reset(incarnation=incarnation)

    def _take(self, seq: int, ts: float, digest: int) -> None:
        self._counters.add_all(self.residency.counters)
        delta = self.residency.take_delta(seq=seq, ts=ts, digest=digest)
        delta.counters = self._counters.take()
        if seq >= 0 or delta.clear:
            self._stand = (seq, ts, digest)
        if delta.clear:
            # Nothing queued before a clear matters to anyone any more.
            self._forget(self._queue)
        if delta.state is not None:
            self._residency_state = delta.state
        self._since_save += 1
        if delta.state is not None or self._since_save >= _SAVE_EVERY:
            self._since_save = 0
            saved = SavedRank(self._residency_state, self._sequencer_state())
            delta.state = msgspec.msgpack.encode(saved)
        self._queue.append(delta)
        self._records += records((delta,))

    def _start(self) -> tuple[int, float, int]:
        """Where a sequence stands whose batches are yet to come: a clear that is told with the
        number of a batch before it would have them taken for repeats."""
        return -1, self.last_ts, 0

    def _forget(self, deltas: list[BatchDelta]) -> None:
        for dropped in deltas:
            self._counters.give_back(dropped.counters)
        self._records -= records(deltas)
        deltas.clear()

    def save(self) -> None:
        """Queue where the sequence stands, as before a release."""
        if not self._applying:
            self._since_save = _SAVE_EVERY
            self._take(*self._start())

    # -- writing ------------------------------------------------------------------------------

    async def run(self) -> None:
        """Write whatever `wake` tells of, for ever. Raises as `persist` does."""
        while True:
            await self._wanted.wait()
            self._wanted.clear()
            await self.persist()

    def wake(self) -> None:
        """There may be something to write."""
        self._wanted.set()

    async def room(self) -> None:
        """Wait until the store has taken enough of what was applied."""
        while self._records > _ROOM:
            self._landed.clear()
            self.wake()
            await self._landed.wait()

    async def flush(self) -> None:
        """Write everything queued. Raises StoreUnavailable with it kept for a retry."""
        if self.residency.has_changes and not self._applying:
            self._take(*self._start())
        while self._flight or self._queue:
            self._embark()
            batch = list(self._flight)
            try:
                await self._store.apply(self.lease, batch)
            except StoreFull as e:
                self._records -= records(self._flight[: e.applied])
                del self._flight[: e.applied]
                async with self._whole:
                    self._shed(str(e))
                continue
            self._records -= records(batch)
            self._flight.clear()
            self._landed.set()
            if self._full:
                self._full = False
                log.info("store_has_room", worker=str(self.lease.key))

    def _embark(self) -> None:
        """What to write next: what could not be written before, else the head of the queue."""
        if any(delta.clear for delta in self._queue):
            self._forget(self._flight)  # it matters to nobody any more
        if self._flight:
            return
        size = count = 0
        for delta in self._queue:
            size += records((delta,))
            if count and size > BURST_RECORDS:
                break
            count += 1
        self._flight = self._queue[:count]
        del self._queue[:count]

    async def persist(self) -> None:
        """Flush until the store takes it; one line when it goes away and one when it is back.

        A store that lost writes (a failover, deleted keys, a restart without its data) is written
        anew from memory, which is the continuation of what the engine said. Raises Fenced when
        somebody else owns the rank by then, NotRegistered when it was deregistered.
        """
        attempt = 0
        rewind: StoreError | None = None
        while True:
            try:
                if rewind is not None:
                    await self._rewrite(rewind)
                    rewind = None
                await self.flush()
            except (StoreUnavailable, StoreFull) as e:  # full: too full to register and acquire
                if attempt == 0:
                    log.warning(
                        "store_unavailable",
                        worker=str(self.lease.key),
                        error=str(e),
                        cost="batches wait in memory and in the socket; answers go stale",
                    )
                attempt += 1
                await asyncio.sleep(_pause(attempt))
            except (Diverged, Damaged, NotRegistered) as e:
                if isinstance(e, NotRegistered) and isinstance(rewind, NotRegistered):
                    raise  # not lost: deregistered on purpose
                rewind = e
            except Fenced as e:
                if e.owner or e is rewind:
                    raise
                rewind = e  # revoked, or registered again by others after the data was lost
            else:
                if attempt:
                    log.info("store_back", worker=str(self.lease.key), attempts=attempt)
                return

    async def _rewrite(self, why: StoreError) -> None:
        """Own the rank anew and queue everything that is in memory, behind a clear."""
        key, lease = self.lease.key, self.lease
        self.moving = True
        if isinstance(why, Fenced):
            await self._store.verify()
            if self._store.birth == self._birth:
                raise why
            self._birth = self._store.birth
        elif isinstance(why, NotRegistered):
            self._birth = await register_again(self._store, self._registration, self._birth, why)
        self._counters.add("rewrites")
        log.warning(
            "store_rewritten",
            worker=str(key),
            reason=str(why),
            blocks=len(self.residency.holdings.blocks),
            cost="answers lack this worker until its blocks are written again",
        )
        # Nothing may come between the new lease and the clear: with it, what was queued under the
        # old one could be written without the profile that it needs.
        async with self._whole:
            try:
                self.lease = await self._store.acquire(key, lease.owner, lease.ttl_ms)
            except LeaseHeld as e:
                raise Fenced(str(key), e.owner) from e
            self.moving = False
            seq, ts, digest = self._start() if self.residency.cleared else self._stand
            self._forget(self._flight)
            self._forget(self._queue)
            self.residency.rewrite()
            self._since_save = _SAVE_EVERY
            self._take(seq, ts, digest)

    def _shed(self, why: str) -> None:
        """The server is full: what could not be written is forgotten (under-report), and what
        remains to be written is removals, which a full server still takes."""
        if not self._full:
            self._full = True
            log.error(
                "store_full",
                worker=str(self.lease.key),
                cost="new blocks are not indexed",
                error=why,
            )
        queue = [*self._flight, *self._queue]
        last = next((d for d in reversed(queue) if d.seq >= 0 or d.clear), queue[-1])
        seq, ts, digest = last.seq, last.ts, last.digest
        if self.residency.cleared:
            self._stand = seq, ts, digest = self._start()
        self._flight.clear()
        self._queue.clear()
        lost = self.residency.shed(queue)
        self._counters.add("dropped:store_full", lost)
        for delta in queue:
            self._counters.give_back(delta.counters)
        rest = self.residency.take_delta(seq=seq, ts=ts, digest=digest)
        self._queue.append(removals(queue, rest))
        self._records = records(self._queue)
        self.residency.forget_saved()


def _pause(attempt: int) -> float:
    return min(5.0, 0.1 * 2.0 ** min(attempt, 6)) * random.uniform(0.5, 1.0)  # noqa: S311 - jitter


def _decode_saved(state: bytes | None) -> SavedRank:
    if not state:
        return SavedRank()
    try:
        return msgspec.msgpack.decode(state, type=SavedRank)
    except msgspec.MsgspecError:
        log.warning("saved_state_unreadable", cost="what the engine had shown is learned again")
        return SavedRank()
