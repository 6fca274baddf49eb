"""Class Store: the operations on the shared truth, each one atomic on the server."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import structlog

from kvindexd.model import BatchDelta, WorkerKey
from kvindexd.store import checks, leases, scripts
from kvindexd.store.connect import Client, Limits, Observer
from kvindexd.store.core import Core
from kvindexd.store.errors import NotRegistered, SchemaMismatch
from kvindexd.store.feed import START, FeedRead, FeedReader
from kvindexd.store.keys import (
    META,
    META_SLOT,
    SCHEMA,
    feed_key,
    shard_key,
    slot_of_shard,
    worker_key,
    workers_key,
)
from kvindexd.store.load import read_loads
from kvindexd.store.records import (
    ApplyResult,
    Identity,
    Lease,
    LoadReport,
    Registered,
    RenewResult,
    Snapshot,
    StoreHealth,
    WorkerRecord,
    WorkerSize,
    ms_of,
    record_of_reply,
)
from kvindexd.store.snapshot import take_snapshot
from kvindexd.store.url import parse_url

log = structlog.get_logger(__name__)

_LIST_CHUNK = 64


@dataclass(frozen=True, kw_only=True)
class StoreOptions:
    """How to use the servers. Times in seconds.

    `shards`: for a fresh store only; an existing one says itself how many it has. `feed_maxlen`:
    entries kept per shard, about; a replica that falls further behind loads anew. `deadline`: of
    one operation with all retries; what outlasts it raises StoreUnavailable.
    """

    shards: int = 1
    feed_maxlen: int = 65_536
    connections: int = 16
    connect_timeout: float = 2.0
    timeout: float = 3.0
    deadline: float = 15.0


class Store:
    """The shared truth of one kvindexd fleet. `open` before use, `close` after; any number of
    tasks may use it. Unless said otherwise, every method raises StoreUnavailable, StoreDenied or
    StoreError (see store/errors.py), and may be repeated after StoreUnavailable."""

    def __init__(
        self, url: str, options: StoreOptions | None = None, observe: Observer | None = None
    ) -> None:
        """`url`: see store/url.py; ValueError if malformed. `observe(op, seconds, error)` is
        told of every operation, error being "" or the name of what went wrong."""
        self.url = parse_url(url)
        self.options = options or StoreOptions()
        o = self.options
        limits = Limits(o.connections, o.connect_timeout, o.timeout, o.deadline)
        self._client = Client(self.url, limits, observe)
        self._core = Core(self._client, o.shards, o.feed_maxlen)
        self._birth = ""
        self._identities: dict[int, Identity] = {}
        self._reader: FeedReader | None = None

    # -- opening ------------------------------------------------------------------------------

    async def open(self) -> None:
        """Check the servers and agree with the other processes on schema and shards.

        Raises UnfitServer or SchemaMismatch when this Redis must not be used as it is.
        """
        checks.check_fit(await checks.identify(self._client, META_SLOT), self.url)
        self._birth = await self._agree()
        for shard, identity in (await self.server_identity()).items():
            checks.check_fit(identity, self.url, shard)
            self._identities[shard] = identity
        first = self._identities[0]
        log.info(
            "store_open",
            url=str(self.url),
            server=f"{first.server} {first.version}",
            shards=self.shards,
        )

    async def _agree(self) -> str:
        """Read or write `kvx:meta`; returns the birth name of the data."""
        args = (SCHEMA, self._core.shards, secrets.token_hex(8))
        schema, shards, birth = await self._client.eval(
            "meta", META_SLOT, scripts.META, [META], args
        )
        if schema is None or int(schema) != SCHEMA:
            found = schema.decode() if schema else "none"
            raise SchemaMismatch(
                f"{self.url}: {META.decode()} says schema {found}, this kvindexd writes "
                f"{SCHEMA}: run one version of kvindexd, or give each its own Redis"
            )
        if int(shards) != self._core.shards:
            log.warning("store_shards_differ", in_use=int(shards), fix="set redis.shards to that")
            self._core = Core(self._client, int(shards), self.options.feed_maxlen)
        return str(birth.decode())

    async def close(self) -> None:
        """Close all connections. Harmless when not open."""
        if self._reader is not None:
            await self._reader.aclose()
            self._reader = None
        await self._client.aclose()

    async def __aenter__(self) -> Self:
        try:
            await self.open()
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self.close()

    @property
    def shards(self) -> int:
        """Number of shards of this store."""
        return self._core.shards

    @property
    def birth(self) -> str:
        """A name for the data: another one after `verify` means that the servers lost theirs."""
        return self._birth

    async def ping(self) -> None:
        """Return if every shard's server answers."""
        for shard in range(self.shards):
            await self._client.call("ping", slot_of_shard(shard), "PING")

    async def server_identity(self) -> dict[int, Identity]:
        """Who serves each shard now."""
        return {
            shard: await checks.identify(self._client, slot_of_shard(shard))
            for shard in range(self.shards)
        }

    async def memory(self) -> dict[int, tuple[int, int]]:
        """(bytes used, limit in bytes; 0 = none) of each shard's server."""
        return {
            shard: await checks.memory(self._client, slot_of_shard(shard))
            for shard in range(self.shards)
        }

    async def verify(self) -> StoreHealth:
        """Compare the servers and their data with what was there at the last look.

        Call after an outage: a changed server may lack the last second of writes (their owners
        notice by Diverged), and with `data_lost` everything must be registered anew.
        """
        before, self._identities = self._identities, await self.server_identity()
        changed = tuple(
            s for s, i in self._identities.items() if s in before and before[s].run_id != i.run_id
        )
        birth, self._birth = self._birth, await self._agree()
        health = StoreHealth(changed, bool(birth) and birth != self._birth)
        if health.changed or health.data_lost:
            names = list(changed)
            log.warning("store_changed", shards=names, data_lost=health.data_lost, action="a check")
        return health

    # -- registration -------------------------------------------------------------------------

    async def register(
        self,
        key: WorkerKey,
        registration: bytes,
        incarnation_changed: bool,
        now: float,
        instead_of: bytes | None = None,
    ) -> Registered:
        """Add or update a worker rank. `registration`: opaque; `now`: seconds, for display.

        `incarnation_changed`: what it held is void (next epoch, any lease revoked). `instead_of`:
        only where this is what is registered (b"" = nothing); Changed otherwise. Raises StoreFull
        for a new worker on a full server.
        """
        reply = await self._core.run(
            scripts.REGISTER,
            key,
            registration,
            int(incarnation_changed),
            repr(float(now)),
            secrets.token_hex(8),
            self._core.feed_maxlen,
            *(() if instead_of is None else ("if", instead_of)),
        )
        return Registered(int(reply[1]), int(reply[2]), bool(reply[3]))

    async def deregister(self, key: WorkerKey, only: bytes = b"") -> bool:
        """Remove a worker rank with all it held, if its registration is `only` (b"" = any); False
        if nothing was removed."""
        return bool(await self._core.run(scripts.DEREGISTER, key, self._core.feed_maxlen, only))

    async def reset(self, key: WorkerKey) -> int:
        """Forget what a worker rank holds, as an operator: revokes the lease, so that the owner
        is Fenced and goes on, empty, where the stream was. Returns the new epoch. Raises
        NotRegistered."""
        reply = await self._core.run(scripts.RESET, key, self._core.feed_maxlen)
        return int(reply[1])

    async def set_draining(self, key: WorkerKey, draining: bool, by: str = "") -> None:
        """Set or lift the draining mark; with `by` (no operator), lift only what it has set.
        Raises NotRegistered."""
        await self._core.run(scripts.DRAIN, key, int(draining), self._core.feed_maxlen, by)

    async def ask(self, key: WorkerKey, what: str) -> None:
        """Leave the owner a request, such as "resync": it gets the latest one with its next
        `renew`. Raises NotRegistered."""
        nonce = secrets.token_hex(8)
        await self._core.run(scripts.ASK, key, what, nonce, self._core.feed_maxlen)

    async def report_load(self, key: WorkerKey, source: str, payload: bytes) -> None:
        """Publish what one scorer has in flight on a worker rank; b"" withdraws it. Not in the
        feed. Raises NotRegistered."""
        await self._core.run(scripts.LOAD, key, source, payload)

    async def loads(self) -> dict[WorkerKey, dict[str, LoadReport]]:
        """What scorers published last, by worker rank and source; ranks without it left out."""
        return await read_loads(self._client, self.shards)

    async def get_worker(self, key: WorkerKey) -> WorkerRecord:
        """One worker rank. Raises NotRegistered."""
        slot, keys = self._core.where(key)
        score, now, fields = await self._client.call_many(
            "get_worker",
            slot,
            [
                ("ZSCORE", keys.workers, key.store_id),
                ("TIME",),
                ("HGETALL", keys.worker),
            ],
        )
        record = record_of_reply(key, float(score or 0), now, fields)
        if record is None:
            raise NotRegistered(f"worker {key} is not registered")
        return record

    async def list_workers(self) -> list[WorkerRecord]:
        """All registered worker ranks, by shard and then by lease expiry."""
        return [r for shard in range(self.shards) for r in await self._list_shard(shard)]

    async def _list_shard(self, shard: int) -> list[WorkerRecord]:
        _, members = await self._members(shard)
        out = []
        for start in range(0, len(members), _LIST_CHUNK):
            chunk = members[start : start + _LIST_CHUNK]
            commands = [("HGETALL", worker_key(shard, name)) for name, _ in chunk]
            now, *found = await self._client.call_many(
                "list_workers", slot_of_shard(shard), [("TIME",), *commands]
            )
            for (name, expiry), fields in zip(chunk, found, strict=True):
                record = record_of_reply(WorkerKey.parse(name), expiry, now, fields)
                if record is not None:  # removed since we read the list
                    out.append(record)
        return out

    async def _members(self, shard: int) -> tuple[int, list[tuple[str, float]]]:
        """(server ms, [(store id, lease expiry)])."""
        now, flat = await self._client.call_many(
            "list_workers",
            slot_of_shard(shard),
            [("TIME",), ("ZRANGE", workers_key(shard), 0, -1, "WITHSCORES")],
        )
        it = iter(flat)
        pairs = [(name.decode(), float(score)) for name, score in zip(it, it, strict=True)]
        return ms_of(now), pairs

    async def leases(self) -> dict[WorkerKey, float]:
        """Seconds until each worker rank's lease lapses; negative = lapsed, -inf = no owner.

        One small command per shard: what a scorer asks every second or so.
        """
        out = {}
        for shard in range(self.shards):
            now, members = await self._members(shard)
            for name, expiry in members:
                left = (expiry - now) / 1000 if expiry else float("-inf")
                out[WorkerKey.parse(name)] = left
        return out

    async def size_of(self, key: WorkerKey) -> WorkerSize:
        """How much a worker rank holds, as the server estimates it."""
        slot, keys = self._core.where(key)
        blocks, parked, block_bytes, parked_bytes = await self._client.call_many(
            "size",
            slot,
            [
                ("HLEN", keys.blocks),
                ("HLEN", keys.parked),
                ("MEMORY", "USAGE", keys.blocks, "SAMPLES", 50),
                ("MEMORY", "USAGE", keys.parked, "SAMPLES", 50),
            ],
        )
        return WorkerSize(blocks, parked, (block_bytes or 0) + (parked_bytes or 0))

    # -- owning and writing -------------------------------------------------------------------

    async def acquire(self, key: WorkerKey, owner: str, ttl_ms: int) -> Lease:
        """Become the one writer of a worker rank for `ttl_ms`, renewed by every write.

        `owner` names this process, uniquely among all that run: acquiring again under the same
        name takes over from oneself. Works on a full server. Raises LeaseHeld, NotRegistered.
        """
        return await leases.acquire(self._core, key, owner, ttl_ms)

    async def renew(
        self,
        lease: Lease,
        ttl_ms: int | None = None,
        evidence: Mapping[str, object] | None = None,
    ) -> RenewResult:
        """Heartbeat; also revives a lapsed lease that nobody took. Raises Fenced, NotRegistered.

        `evidence`: what other processes should see of this rank (detail, time of the last event,
        ...), msgpack-able; replaces the last one and goes into the feed when it differs.
        """
        return await leases.renew(self._core, lease, ttl_ms, evidence)

    async def release(self, lease: Lease) -> bool:
        """Give the lease back; False if it was not ours any more."""
        return await leases.release(self._core, lease)

    async def apply(self, lease: Lease, deltas: Sequence[BatchDelta]) -> ApplyResult:
        """Write batches of one worker rank, in order and atomically (beyond 16,384 records: in
        several atomic steps). Renews the lease.

        A batch whose seq this epoch has seen is skipped and counted as duplicate; seq -1 without
        `clear` marks a change that no engine batch carries, and is never skipped. After
        StoreUnavailable or a cancellation call again with the same batches, or with these first:
        whatever had been written is not written twice.

        Raises Fenced (stop), NotRegistered, Diverged (acquire and load again), Damaged (write a
        delta with `clear`), StoreFull (removals still work; `applied` batches were written).
        """
        return await leases.apply(self._core, lease, deltas)

    async def load(self, key: WorkerKey) -> Snapshot:
        """What is stored of a worker rank. Raises NotRegistered; iterating: StoreUnavailable,
        Diverged."""
        return await take_snapshot(self._core, key)

    # -- feed ---------------------------------------------------------------------------------

    async def feed_tail(self) -> dict[int, str]:
        """Position after the last entry of every shard. Read it *before* taking snapshots."""
        return {shard: await self._tail_of(shard) for shard in range(self.shards)}

    async def _tail_of(self, shard: int) -> str:
        slot = slot_of_shard(shard)
        n, ms = await self._client.call("feed_tail", slot, "HMGET", shard_key(shard), "n", "ms")
        if n is not None:
            return f"{ms.decode()}-{n.decode()}"
        last = await self._client.call(
            "feed_tail", slot, "XREVRANGE", feed_key(shard), "+", "-", "COUNT", 1
        )
        return last[0][0].decode() if last else START

    def feed_reader(self) -> FeedReader:
        """A reader of its own, for a second consumer in this process; close it with `aclose`."""
        return FeedReader(self._client, self.shards)

    async def read_feed(
        self, positions: Mapping[int, str], block_ms: int = 1000, count: int = 1000
    ) -> FeedRead:
        """Entries after `positions` (shard -> id); see FeedReader.read. For one consumer."""
        if self._reader is None:
            self._reader = self.feed_reader()
        return await self._reader.read(positions, block_ms, count)
