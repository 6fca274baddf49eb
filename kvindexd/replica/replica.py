"""The replica: the whole index in memory, kept up to date by the tail of the store's feed."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import aclosing, suppress
from typing import Generic, NamedTuple

import numpy as np
import numpy.typing as npt
import structlog

from kvindexd.model import WorkerKey
from kvindexd.replica.book import Book
from kvindexd.replica.loader import Loader, SnapshotUnreadable
from kvindexd.replica.source import DecodeRecords, Reader, Source
from kvindexd.replica.view import Phase, R, ScopeView, WorkerView
from kvindexd.store import FeedEntry, Kind, StoreError, StoreUnavailable
from kvindexd.store.keys import shard_of

log = structlog.get_logger(__name__)

_LOADS = 4
"""Ranks loaded at once; entries are kept in memory for these only."""
_SLICE_COST = 4_000
"""Work done before others may run, in mutations (some 0.3 us each): one to two milliseconds."""
_RANK_COST = 200
"""What one more rank in a slice costs, in mutations."""
_READ_BYTES = 4 << 20
_MAX_ENTRIES = 1_000


class ReplicaOptions(NamedTuple):
    """Times in seconds. `poll`: how often leases and the lag are looked at, and states judged.
    `records`: how often the ingesters' counters are, which the feed does not carry. `block`: how
    long one read of the feed waits. `lag_limit`: entries behind the feed's end beyond which the
    replica is not ready."""

    poll: float = 1.0
    records: float = 2.0
    block: float = 1.0
    lag_limit: int = 5_000


class Stats(NamedTuple):
    """Sizes of the whole replica. `blocks`: distinct ones; `entries`: presence bits."""

    blocks: int
    entries: int
    bytes: int
    per_model: dict[tuple[str, str], int]
    counters: dict[str, int]


class Replica(Generic[R]):
    """All that queries read. `run` keeps it up to date; nothing else in it ever waits.

    Reads (everything but `run`) are plain calls for code on the same event loop. They work before
    `run`, on what is there; and while the store is away, when leases lapse unseen and the ranks'
    states turn STALE by age.
    """

    def __init__(
        self,
        source: Source,
        parse: Callable[[bytes], R],
        decode: DecodeRecords,
        *,
        on_applied: Callable[[WorkerKey, float], None] = lambda _worker, _ts: None,
        options: ReplicaOptions | None = None,
    ) -> None:
        """`parse`, `on_applied`: see Book; `decode`: records.decode_records."""
        self._source = source
        self._options = options or ReplicaOptions()
        self._watchers: list[Callable[[WorkerView[R]], None]] = []
        self._on_applied = on_applied
        self._book: Book[R] = Book(parse, self._applied, self._changed)
        self._loader = Loader(source, decode)
        self._positions: dict[int, str] = {}
        self._revision = ""
        self._lag: int | None = None
        self._reached_end = False
        self._wake_loads = asyncio.Event()
        self._wake_poll = asyncio.Event()
        self._wake_scrub = asyncio.Event()
        self._down = ""

    # -- reading

    def scope(self, namespace: str, model: str) -> ScopeView[R] | None:
        """One model's table and ranks; None if no rank of it was ever registered.

        With model "" the only model of the namespace that has a rank with a lease, or else the
        only one that has a rank at all.
        """
        if model:
            return self._book.scopes.get((namespace, model))
        now = time.monotonic()
        held = [s for (n, _), s in self._book.scopes.items() if n == namespace and s.members]
        live = [s for s in held if any(v.lease_until > now for v in s.members.values())]
        found = live or held
        return found[0] if len(found) == 1 else None

    def models(self, namespace: str) -> list[str]:
        """Models that had a rank registered in the namespace since this process started."""
        return sorted(model for n, model in self._book.scopes if n == namespace)

    def scopes(self) -> Sequence[ScopeView[R]]:
        """All of them."""
        return tuple(self._book.scopes.values())

    def worker(self, key: WorkerKey) -> WorkerView[R] | None:
        """One rank, None if it is not registered (or its registration cannot be read)."""
        return self._book.views.get(key)

    def workers(self) -> Sequence[WorkerView[R]]:
        """All ranks of all scopes."""
        return tuple(self._book.views.values())

    def revision(self) -> str:
        """A name for what has been applied so far: the feed position of every shard."""
        return self._revision

    @property
    def lag(self) -> int | None:
        """Feed entries yet to be applied, at the last look; None while that cannot be known."""
        return self._lag

    def not_ready(self) -> str:
        """Why queries should go elsewhere, in words; "" when the replica has caught up with every
        rank that has a lease. An outage of the store does not make a replica unready."""
        if not self._positions:
            return f"the store has not been read yet{self._down and f': {self._down}'}"
        loading = self._book.loading(time.monotonic())
        if loading:
            return f"{len(loading)} of {len(self._book.views)} workers are still being loaded"
        if not self._reached_end:
            return "the feed has not been read to its end yet"
        if (self._lag or 0) > self._options.lag_limit:
            return f"{self._lag} feed entries behind"
        return ""

    def stats(self) -> Stats:
        """Sizes, and what was dropped, reloaded or refused since the start."""
        tables = {key: s.table for key, s in self._book.scopes.items()}
        counters: Counter[str] = Counter(self._book.counters)
        counters["mutations_refused"] += sum(t.refused for t in tables.values())
        return Stats(
            sum(t.rows for t in tables.values()),
            sum(t.entries for t in tables.values()),
            sum(t.nbytes for t in tables.values()),
            {key: t.rows for key, t in tables.items()},
            dict(counters),
        )

    def watch(self, callback: Callable[[WorkerView[R]], None]) -> Callable[[], None]:
        """Have every change of a rank told (its registration, state, position of another epoch,
        removal: then `worker` finds it no more). Returns the way to end that."""
        self._watchers.append(callback)
        return lambda: self._watchers.remove(callback)

    def watch_mutations(self, callback: Callable[[WorkerKey, npt.NDArray[np.void]], None]) -> None:
        """Have every rank's mutations (model.MUTATION) told, once queries can see them; what a
        load from the store brings is not among them. For one watcher."""
        self._book.on_mutations = callback

    def _applied(self, key: WorkerKey, ts: float) -> None:
        view = self._book.views.get(key)
        if view is not None:
            view.lag_ms = max(0, round((time.time() - ts) * 1000))
        self._on_applied(key, ts)

    def _changed(self, view: WorkerView[R]) -> None:
        if view.key in self._book.views:
            _judge(view, time.monotonic())
        self._tell(view)

    def _tell(self, view: WorkerView[R]) -> None:
        for callback in tuple(self._watchers):
            callback(view)

    # -- keeping up

    async def run(self) -> None:
        """Keep the replica up to date until cancelled. Survives any outage of the store."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._tail(), name="replica-tail")
            tasks.create_task(self._poll(), name="replica-poll")
            tasks.create_task(self._age(), name="replica-age")
            tasks.create_task(self._scrub(), name="replica-scrub")
            for i in range(_LOADS):
                tasks.create_task(self._load(), name=f"replica-load-{i}")

    async def _tail(self) -> None:
        """Owns the feed reader and the positions."""
        async with aclosing(self._source.feed_reader()) as reader:
            count = 64
            while True:
                try:
                    if not self._positions:
                        await self._start_over(None)
                    count = await self._read(reader, count)
                except StoreUnavailable as e:
                    await self._unavailable(e, 0.2)
                except StoreError as e:
                    await self._unavailable(e, 5.0)

    async def _read(self, reader: Reader, count: int) -> int:
        """One read of the feed; how many entries to ask for next time."""
        try:
            # Until the end has been seen once, an idle feed must not keep the replica unready.
            block = int(self._options.block * 1000) if self._reached_end else 0
            read = await reader.read(self._positions, block, count)
        except (ValueError, LookupError) as e:
            self._book.counters["feed_unreadable"] += 1
            log.error("feed_unreadable", error=repr(e), action="loading all workers anew")
            await self._start_over(None)
            return count
        self._back()
        per_shard = Counter(shard for shard, _, _ in read.entries)
        if not read.unavailable and max(per_shard.values(), default=0) < count:
            self._reached_end = True
        await self._apply(read.entries)
        if read.trimmed:
            await self._start_over(read.trimmed)
        self._wake()
        size = sum(len(e.mutations) for _, _, e in read.entries) + 1
        return max(16, min(_MAX_ENTRIES, _READ_BYTES * max(1, len(read.entries)) // size))

    async def _apply(self, entries: Sequence[tuple[int, str, FeedEntry]]) -> None:
        """Take entries in, letting others run between slices; nobody sees half a slice."""
        work = 0
        for shard, position, entry in entries:
            self._book.take(entry, time.monotonic())
            if entry.kind is Kind.LEASE:
                self._wake_poll.set()
            self._positions[shard] = position
            work += len(entry.mutations) // 24
            if work + _RANK_COST * self._book.dirty >= _SLICE_COST:
                self._publish()
                work = 0
                await asyncio.sleep(0)
        self._publish()

    def _publish(self) -> None:
        self._book.flush()
        self._revision = ",".join(self._positions.values())

    async def _start_over(self, shards: Sequence[int] | None) -> None:
        """Read the feed from its end, and have all ranks of some shards (None = all) loaded."""
        tail = await self._source.feed_tail()
        records = await self._source.list_workers()
        if shards is None:
            self._positions = dict(tail)
        else:
            self._book.counters["feed_trimmed"] += len(shards)
            self._positions.update({s: tail[s] for s in shards})
        self._reached_end = False
        log.info("replica_loading", workers=len(records), shards=shards or "all")
        n = self._source.shards
        self._book.reconcile(
            records,
            lambda key: shards is None or shard_of(key, n) in shards,
            time.monotonic(),
        )
        self._publish()
        self._wake()

    async def _load(self) -> None:
        """Loads wanted ranks, one at a time."""
        book = self._book
        while True:
            key = next(iter(book.wanted), None)
            if key is None:
                self._wake_loads.clear()
                await self._wake_loads.wait()
                continue
            view = book.begin_load(key)
            if view is None:
                continue
            number = view.load
            try:
                await self._loader.load(book, view)
            except (StoreError, SnapshotUnreadable) as e:
                log.warning(
                    "worker_load_failed",
                    worker=str(key),
                    error=str(e),
                    cost="answers lack this worker; trying again",
                )
                await _pause(1.0 if isinstance(e, StoreUnavailable) else 5.0)
                if view.phase is Phase.LOADING and view.load == number:
                    reason = "failed" if isinstance(e, StoreError) else "unreadable"
                    book.fail_load(view, reason)
            self._wake()

    async def _poll(self) -> None:
        """Asks for leases, the lag, and less often for counters."""
        due = 0.0
        while True:
            try:
                if self._positions:
                    self._book.renewed(await self._source.leases(), time.monotonic())
                    self._lag = await self._behind()
                    if time.monotonic() >= due:
                        self._book.counted(await self._source.list_workers())
                        many = len(self._book.views) / 200  # a record is some 2 kB
                        due = time.monotonic() + max(self._options.records, many)
            except StoreError:
                self._lag = None  # the tail says so in the log
            with suppress(TimeoutError):
                async with asyncio.timeout(self._options.poll):
                    await self._wake_poll.wait()
            self._wake_poll.clear()

    async def _age(self) -> None:
        """Lets states age, also while the store does not answer."""
        while True:
            for view in self.workers():
                if _judge(view, time.monotonic()):
                    self._tell(view)
            await asyncio.sleep(self._options.poll)

    async def _behind(self) -> int:
        tail = await self._source.feed_tail()
        return sum(
            max(0, _number(last) - _number(self._positions.get(shard, last)))
            for shard, last in tail.items()
        )

    async def _scrub(self) -> None:
        """Cleans up behind ranks that were cleared or removed, a little at a time."""
        while True:
            self._wake_scrub.clear()
            for scope in self.scopes():
                more = True
                while more:
                    more = scope.table.scrub()
                    await asyncio.sleep(0)
            await self._wake_scrub.wait()

    def _wake(self) -> None:
        if self._book.wanted:
            self._wake_loads.set()
        if any(s.table.scrub_pending for s in self._book.scopes.values()):
            self._wake_scrub.set()

    async def _unavailable(self, error: StoreError, pause: float) -> None:
        if not self._down:
            log.warning(
                "replica_store_away",
                error=str(error),
                cost="answers go stale, and workers turn STALE by age",
            )
        self._down = str(error)
        self._lag = None
        await _pause(pause)

    def _back(self) -> None:
        if self._down:
            log.info("replica_store_back")
            self._down = ""


def _judge(view: WorkerView[R], now: float) -> bool:
    """Derive a rank's state anew; whether it is another one, which is logged once."""
    judged = view.judge(now)
    before, view.judged = view.judged, judged
    if judged.state is before.state:
        return False
    log.info(
        "worker_state",
        worker=str(view.key),
        state=judged.state.value,
        before=before.state.value,
        detail=judged.detail,
    )
    return True


async def _pause(seconds: float) -> None:
    await asyncio.sleep(random.uniform(seconds / 2, seconds))  # noqa: S311


def _number(position: str) -> int:
    return int(position.rpartition("-")[2])
