"""What the store hands out: leases, worker records, snapshots, results."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from kvindexd.model import BatchDelta, WorkerKey
from kvindexd.store.errors import StoreError

Position = tuple[int, int]
"""(epoch, revision) of a worker rank."""


@dataclass(eq=False)
class Lease:
    """The right to write one worker rank, and what the store held when it was acquired.

    `epoch`, `revision`: of the last write through this lease; the store's own by then must be
    equal, or Diverged is raised. `last_seq`, `last_ts`, `last_digest`: of the last engine batch
    before acquisition, kept up to date by `apply`. `intact`: False when records are missing that
    nobody removed through us; only a delta with `clear` is accepted then. `expires_ms`: server
    time. Not to be shared between tasks that do not know of each other.
    """

    key: WorkerKey
    owner: str
    fence: str
    ttl_ms: int
    epoch: int
    revision: int
    last_seq: int
    last_ts: float
    last_digest: int
    intact: bool
    expires_ms: int
    ask_seen: int = 0
    calls: int = 0
    unsure: list[Unsure] = field(default_factory=list)
    lock: asyncio.Lock = field(default_factory=asyncio.Lock, repr=False)

    @property
    def position(self) -> Position:
        """(epoch, revision) that the next write builds on."""
        return self.epoch, self.revision


class Unsure(NamedTuple):
    """A write whose reply was lost: it may or may not have happened, or may still."""

    call: str
    deltas: Sequence[BatchDelta]


class ApplyResult(NamedTuple):
    """Where a worker rank stands after `apply`. `duplicate`: deltas that were written before."""

    epoch: int
    revision: int
    applied: int
    duplicate: int


class RenewResult(NamedTuple):
    """Answer to a heartbeat. `ask`: a request left for the owner (`Store.ask`), each once.
    `position`: what is stored; behind the lease's own, the server lost writes."""

    expires_ms: int
    ask: str | None
    position: Position


class LoadReport(NamedTuple):
    """What one scorer said it has in flight: its own bytes, and how long ago by server time."""

    age_ms: int
    payload: bytes


class WorkerRecord(msgspec.Struct, kw_only=True):
    """All that the store knows of a worker rank besides its blocks.

    `registration` and `profile` are the bytes that were stored (None = never). `expires_in_ms`:
    of the lease, by the server's clock, negative when lapsed, None without an owner.
    `heartbeat_ms`: time since the owner's last write or heartbeat, None = never. `evidence`: what
    the owner's heartbeats carried. `drained_by`: who set the draining mark, "" = an operator.
    """

    key: WorkerKey
    registration: bytes
    registered_at: float
    epoch: int
    revision: int
    last_seq: int
    last_ts: float
    last_digest: int
    owner: str
    expires_in_ms: int | None
    heartbeat_ms: int | None
    draining: bool
    drained_by: str
    profile: bytes | None
    evidence: Mapping[str, object]
    counters: Mapping[str, int]
    tier_blocks: tuple[int, int, int, int]
    load: Mapping[str, LoadReport]


class Registered(NamedTuple):
    """Answer to `register`."""

    epoch: int
    revision: int
    created: bool


Pairs = AsyncIterator[tuple[bytes, bytes]]


class Snapshot(NamedTuple):
    """A worker rank as stored. `blocks()` and `parked()` iterate (field, record) in bounded
    chunks; fields may come twice and, if somebody writes meanwhile, be of different moments.
    Both raise Diverged at their end if the epoch changed on the way: then start over."""

    key: WorkerKey
    epoch: int
    revision: int
    last_seq: int
    last_ts: float
    last_digest: int
    profile: bytes | None
    state: bytes | None
    blocks: Callable[[], Pairs]
    parked: Callable[[], Pairs]


class WorkerSize(NamedTuple):
    """Records and bytes that a worker rank takes on the server."""

    blocks: int
    parked: int
    bytes: int


class Identity(NamedTuple):
    """One server process as it describes itself. A restart changes `run_id`."""

    run_id: str
    version: str
    server: str
    master: bool
    policy: str
    cluster: bool


class StoreHealth(NamedTuple):
    """What changed since the last look: servers of these shards are other processes than before
    (restarted, or failed over: the last second of writes may be missing), or all data is gone."""

    changed: tuple[int, ...]
    data_lost: bool


def record_of(key: WorkerKey, expiry: int, now_ms: int, h: Mapping[bytes, bytes]) -> WorkerRecord:
    """Decode a worker's HASH; `expiry`, `now_ms`: server ms. Raises KeyError if it is none."""
    owner = h.get(b"ow", b"").decode()
    tiers = [int(n) for n in h.get(b"tb", b"0,0,0,0").split(b",")]
    evidence = msgspec.msgpack.decode(h[b"hb"]) if b"hb" in h else {}
    return WorkerRecord(
        key=key,
        registration=h[b"reg"],
        registered_at=float(h.get(b"at", b"0")),
        epoch=int(h[b"ep"]),
        revision=int(h[b"rv"]),
        last_seq=int(h[b"sq"]),
        last_ts=float(h[b"ts"]),
        last_digest=int(h[b"dg"]),
        owner=owner,
        expires_in_ms=expiry - now_ms if owner else None,
        heartbeat_ms=max(0, now_ms - int(h[b"ha"])) if b"ha" in h else None,
        draining=h.get(b"dr") == b"1",
        drained_by=h.get(b"db", b"").decode(),
        profile=h.get(b"pf"),
        evidence=evidence,
        counters={f[2:].decode(): int(v) for f, v in h.items() if f.startswith(b"c:")},
        tier_blocks=(tiers[0], tiers[1], tiers[2], tiers[3]),
        load={f[2:].decode(): _load(v, now_ms) for f, v in h.items() if f.startswith(b"l:")},
    )


def ms_of(time_reply: Sequence[bytes]) -> int:
    """Milliseconds of a reply to TIME."""
    return int(time_reply[0]) * 1000 + int(time_reply[1]) // 1000


def record_of_reply(
    key: WorkerKey, expiry: float, time_reply: Sequence[bytes], flat: Sequence[bytes]
) -> WorkerRecord | None:
    """A worker's record from its HGETALL; None where there is none. Raises StoreError."""
    it = iter(flat)
    fields = dict(zip(it, it, strict=True))
    if b"reg" not in fields:
        return None
    try:
        return record_of(key, int(expiry), ms_of(time_reply), fields)
    except (KeyError, ValueError) as e:
        raise StoreError(f"worker {key}: its record in the store is unreadable: {e!r}") from e


def loads_of(flat: Sequence[bytes], now_ms: int) -> dict[str, LoadReport]:
    """Load reports from the fields and values, alternating, that hold them."""
    it = iter(flat)
    return {f[2:].decode(): _load(v, now_ms) for f, v in zip(it, it, strict=True)}


def _load(value: bytes, now_ms: int) -> LoadReport:
    at, _, payload = value.partition(b":")
    return LoadReport(max(0, now_ms - int(at)), payload)
