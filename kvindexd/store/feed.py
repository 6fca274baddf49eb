"""The feed: what its entries mean, and reading them without a hole.

Every entry has `w` (store id), `e` (epoch) and `r` (revision). Kinds, by field `k`:

- none: one batch was applied; the only kind that advances `r`. `q` seq, `t` engine ts, `m`
  mutations (model.MUTATION), `c` = 1 if the batch cleared first (then `r` is 1), `f` the profile
  if it changed.
- clear: the epoch was reset by somebody other than the owner: forget the worker. `e` is the new
  epoch, `r` 0, `q` and `t` as of the batch behind which its stream goes on.
- reg: a worker rank was registered, or its registration changed. `v` registration.
- gone: a worker rank was removed, with all it held.
- lease: the lease was taken (`o` owner) or released (`o` empty); lapsing writes nothing.
- beat: the owner's evidence changed. `v` msgpack map.
- drain: the draining mark changed. `d` 1 or 0.
- ask: somebody left the owner a request. `v` what.

Entry ids are `<server ms>-<n>`; n counts 1, 2, 3... per shard and is never reset while the data
lives, so a position says exactly which entry must come next.
"""

from __future__ import annotations

import asyncio
import enum
import random
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import structlog
from redis.exceptions import AskError, MovedError, ResponseError

from kvindexd.model import WorkerKey
from kvindexd.store.connect import Client
from kvindexd.store.errors import StoreError, StoreUnavailable
from kvindexd.store.keys import feed_key, shard_key, slot_of_shard
from kvindexd.store.pool import Link, pack
from kvindexd.store.replies import has_code, raise_if_denied, raise_reply, redirection
from kvindexd.store.topology import NETWORK_ERRORS

log = structlog.get_logger(__name__)

_PASSING = ("READONLY", "MASTERDOWN", "UNBLOCKED", "LOADING", "CLUSTERDOWN", "TRYAGAIN")

START = "0-0"
"""The position before the first entry that ever was."""


class Kind(enum.StrEnum):
    """What a feed entry is about; see the table above."""

    BATCH = ""
    CLEAR = "clear"
    REG = "reg"
    GONE = "gone"
    LEASE = "lease"
    BEAT = "beat"
    DRAIN = "drain"
    ASK = "ask"
    OTHER = "?"


class FeedEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One decoded entry. Fields that its kind does not have keep their defaults.

    An entry of a kind that a newer kvindexd wrote is OTHER: skip it.
    """

    worker: WorkerKey
    epoch: int
    revision: int
    kind: Kind = Kind.BATCH
    seq: int = -1
    ts: float = 0.0
    mutations: bytes = b""
    clear: bool = False
    profile: bytes | None = None
    value: bytes = b""
    owner: str = ""
    draining: bool = False


_KINDS = {k.value.encode(): k for k in Kind}


def unpack_entry(fields: Sequence[bytes]) -> FeedEntry:
    """Decode the alternating names and values of one entry. Raises KeyError or ValueError."""
    it = iter(fields)
    f = dict(zip(it, it, strict=True))
    worker = WorkerKey.parse(f[b"w"].decode())
    epoch, revision = int(f[b"e"]), int(f[b"r"])
    kind = f.get(b"k")
    if kind is None:
        return FeedEntry(
            worker=worker,
            epoch=epoch,
            revision=revision,
            seq=int(f[b"q"]),
            ts=float(f[b"t"]),
            mutations=f[b"m"],
            clear=b"c" in f,
            profile=f.get(b"f"),
        )
    return FeedEntry(
        worker=worker,
        epoch=epoch,
        revision=revision,
        kind=_KINDS.get(kind, Kind.OTHER),
        seq=int(f.get(b"q", b"-1")),
        ts=float(f.get(b"t", b"0")),
        value=f.get(b"v", b""),
        owner=f.get(b"o", b"").decode(),
        draining=f.get(b"d") == b"1",
    )


class FeedRead(NamedTuple):
    """One read. `entries`: (shard, id, entry), in order within a shard; the last id of a shard is
    its next position. `trimmed`: shards whose position is gone: load them anew, then go on from
    `feed_tail`. `unavailable`: shards that could not be read this time."""

    entries: list[tuple[int, str, FeedEntry]]
    trimmed: tuple[int, ...] = ()
    unavailable: tuple[int, ...] = ()


class FeedReader:
    """Reads the feeds of some shards over connections of its own. One `read` at a time."""

    def __init__(self, client: Client, shards: int) -> None:
        # One server takes all streams in one XREAD; in a cluster every shard is elsewhere.
        cluster = client.url.mode == "cluster"
        groups = [(s,) for s in range(shards)] if cluster else [tuple(range(shards))]
        self._tails = [_Tail(client, group) for group in groups]
        self._pending: dict[_Tail, tuple[dict[int, str], asyncio.Task[FeedRead]]] = {}

    async def read(self, positions: Mapping[int, str], block_ms: int, count: int) -> FeedRead:
        """Entries after `positions` (shard -> id), at most `count` per shard.

        Waits up to `block_ms` milliseconds for the first; 0 = does not wait. Raises
        StoreUnavailable when no shard could be read (after a pause, so that a loop need not
        wait), StoreDenied when the server refuses us.
        """
        tasks = {}
        for tail in self._tails:
            wanted = {s: positions[s] for s in tail.shards if s in positions}
            if wanted:
                tasks[await self._task(tail, wanted, block_ms, count)] = tail
        if not tasks:
            return FeedRead([])
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return self._collect({task: tasks[task] for task in done})

    async def _task(
        self, tail: _Tail, wanted: dict[int, str], block_ms: int, count: int
    ) -> asyncio.Task[FeedRead]:
        """The read of one group: the one that still waits where the last call left it, or new."""
        pending = self._pending.get(tail)
        if pending is not None:
            if pending[0] == wanted:
                return pending[1]
            await _cancel(pending[1])
        task = asyncio.create_task(tail.read(wanted, block_ms, count))
        self._pending[tail] = (wanted, task)
        return task

    def _collect(self, done: Mapping[asyncio.Task[FeedRead], _Tail]) -> FeedRead:
        entries: list[tuple[int, str, FeedEntry]] = []
        trimmed: list[int] = []
        failed: list[int] = []
        failure: StoreUnavailable | None = None
        for task, tail in done.items():
            del self._pending[tail]
            try:
                read = task.result()
            except StoreUnavailable as e:
                failure = e
                failed += tail.shards
                continue
            entries += read.entries
            trimmed += read.trimmed
        if failure is not None and len(failed) == sum(len(t.shards) for t in self._tails):
            raise failure
        return FeedRead(entries, tuple(trimmed), tuple(failed))

    async def aclose(self) -> None:
        """Stop reading and close the connections."""
        for _, task in self._pending.values():
            await _cancel(task)
        self._pending.clear()
        for tail in self._tails:
            await tail.drop()


async def _cancel(task: asyncio.Task[Any]) -> None:
    task.cancel()
    await asyncio.wait([task])
    if not task.cancelled():
        task.exception()  # retrieved, so that nothing is logged about it


class _Tail:
    """One connection that waits for entries of some shards in one slot (or one server)."""

    def __init__(self, client: Client, shards: tuple[int, ...]) -> None:
        self.shards = shards
        self._client = client
        self._slot = slot_of_shard(shards[0])
        self._link: Link | None = None
        self._failures = 0

    async def drop(self) -> None:
        link, self._link = self._link, None
        if link is not None:
            await link.drop()

    async def read(self, positions: dict[int, str], block_ms: int, count: int) -> FeedRead:
        if self._failures:
            limit = min(1.0, 0.05 * 2**self._failures)
            await asyncio.sleep(random.uniform(limit / 2, limit))  # noqa: S311
        try:
            link = await self._connected()
            read = await self._read(link, positions, block_ms, count)
        except (*NETWORK_ERRORS, StoreUnavailable) as e:
            endpoint = self._link.endpoint if self._link is not None else None
            await self.drop()
            if isinstance(e, ResponseError):
                await self._answered_error(e, endpoint)
            raise_if_denied(e, self._client.url)
            if endpoint is not None:
                await self._client.suspect(endpoint)
            self._failures += 1
            if self._failures == 1:
                log.warning(
                    "feed_interrupted",
                    shards=self.shards,
                    reason=str(e) or repr(e),
                    cost="answers go stale until it is back",
                )
            raise StoreUnavailable(f"feed of shards {self.shards}: {e or type(e).__name__}") from e
        except BaseException:
            # Cancelled mid-read: a late reply must not be taken for the next one.
            if self._link is not None and not self._link.alive:
                self._link = None
            raise
        if self._failures:
            log.info("feed_resumed", shards=self.shards, attempts=self._failures)
            self._failures = 0
        return read

    async def _connected(self) -> Link:
        """The open connection, unless the slot has another server by now."""
        endpoint = await self._client.endpoint(self._slot)
        if self._link is not None and (not self._link.alive or self._link.endpoint != endpoint):
            await self.drop()
        if self._link is None:
            self._link = await self._client.dedicated(self._slot)
        return self._link

    async def _answered_error(self, error: ResponseError, asked: Any) -> None:
        if isinstance(error, MovedError) and asked is not None:
            self._client.moved(self._slot, redirection(error, asked))
        elif isinstance(error, AskError):
            return  # the slot is on its way; wait until it has arrived
        elif not has_code(error, _PASSING):
            raise_reply(error, "feed", self._client.url)

    async def _read(
        self, link: Link, positions: dict[int, str], block_ms: int, count: int
    ) -> FeedRead:
        reply = await self._xread(link, positions, block_ms, count)
        if not reply:
            return FeedRead([], await self._lost_while_idle(link, positions))
        entries: list[tuple[int, str, FeedEntry]] = []
        trimmed = []
        by_key = {feed_key(s): s for s in positions}
        for name, rows in reply:
            shard = by_key[name]
            before = number(positions[shard])
            if any(number(row[0]) != before + i for i, row in enumerate(rows, 1)):
                log.warning(
                    "feed_trimmed",
                    shard=shard,
                    position=positions[shard],
                    action="loading the shard anew",
                    fix="raise limits.feed_maxlen if it comes often",
                )
                trimmed.append(shard)
                continue
            entries += [(shard, row[0].decode(), unpack_entry(row[1])) for row in rows]
        return FeedRead(entries, tuple(trimmed))

    async def _xread(
        self, link: Link, positions: dict[int, str], block_ms: int, count: int
    ) -> list[Any]:
        block = ("BLOCK", block_ms) if block_ms > 0 else ()
        keys = [feed_key(s) for s in positions]
        packed = pack("XREAD", "COUNT", count, *block, "STREAMS", *keys, *positions.values())
        reply = await self._one(link, packed, block_ms / 1000)
        return reply or []

    async def _lost_while_idle(self, link: Link, positions: dict[int, str]) -> tuple[int, ...]:
        """Shards that will never continue at our position: data lost, or a failover after which
        numbers that we have seen are given out again."""
        lost = []
        for shard, position in positions.items():
            n = int(await self._one(link, pack("HGET", shard_key(shard), "n"), 0) or 0)
            if n == number(position):
                continue
            # More than we know is normal (it came just now), unless we cannot see it.
            if n < number(position) or not await self._xread(link, {shard: position}, 0, 1):
                log.warning(
                    "feed_lost",
                    shard=shard,
                    position=position,
                    server_has=n,
                    action="loading the shard anew",
                )
                lost.append(shard)
        return tuple(lost)

    async def _one(self, link: Link, packed: bytes, blocking: float) -> Any:
        (reply,) = await link.call(packed, 1, blocking + self._client.limits.timeout)
        if isinstance(reply, ResponseError):
            raise reply
        return reply


def number(entry_id: str | bytes) -> int:
    """The running number in a feed id."""
    text = entry_id.decode() if isinstance(entry_id, bytes) else entry_id
    _, dash, n = text.partition("-")
    if not dash:
        raise StoreError(f"feed position {text!r}: expected <ms>-<n>")
    return int(n)
