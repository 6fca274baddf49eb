"""Owning and writing a worker rank: acquire, heartbeat, apply, release.

How a lease ends. Time is the server's alone. A lapsed lease that nobody took stays usable: the
next write or heartbeat of the same holder renews it, because nothing was written in between. As
soon as another holder acquires (or the worker is reset, re-registered anew or removed) the fence
changes, and the old holder, however long it slept, is refused with Fenced before anything changes.

How a write happens once. Every call names the (epoch, revision) it builds on and has an id of its
own. A repeat of the same call is recognised by its id; one that comes late, after others, fails
on its position; and a batch whose seq the epoch has seen is skipped.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping, Sequence
from itertools import takewhile

import msgspec

from kvindexd.model import BatchDelta, WorkerKey
from kvindexd.store import scripts
from kvindexd.store.core import Core
from kvindexd.store.encode import apply_args, removes_only
from kvindexd.store.errors import Damaged, Diverged, LeaseHeld, StoreFull
from kvindexd.store.records import ApplyResult, Lease, RenewResult, Unsure

_RECORDS_PER_CALL = 16_384
"""Records beyond which coalesced batches are written in several calls: a script blocks the whole
server, here for some 20 ms."""


async def acquire(core: Core, key: WorkerKey, owner: str, ttl_ms: int) -> Lease:
    """See Store.acquire."""
    nonce = secrets.token_hex(8)
    reply = await core.run(scripts.ACQUIRE, key, owner, nonce, ttl_ms, core.feed_maxlen)
    if reply[0] == b"HELD":
        raise LeaseHeld(str(key), reply[1].decode(), int(reply[2]) / 1000)
    _, fence, epoch, revision, seq, ts, digest, ask, intact, expires = reply
    return Lease(
        key=key,
        owner=owner,
        fence=fence.decode(),
        ttl_ms=ttl_ms,
        epoch=int(epoch),
        revision=int(revision),
        last_seq=int(seq),
        last_ts=float(ts),
        last_digest=int(digest),
        intact=bool(intact),
        expires_ms=int(expires),
        ask_seen=_ask(ask)[0],
    )


async def renew(
    core: Core, lease: Lease, ttl_ms: int | None, evidence: Mapping[str, object] | None
) -> RenewResult:
    """See Store.renew."""
    if ttl_ms is not None:
        lease.ttl_ms = ttl_ms
    packed = msgspec.msgpack.encode(evidence) if evidence is not None else b""
    reply = await core.run(
        scripts.RENEW, lease.key, lease.fence, lease.ttl_ms, packed, core.feed_maxlen
    )
    lease.expires_ms = int(reply[3])
    n, what = _ask(reply[4])
    fresh = n != lease.ask_seen
    lease.ask_seen = n
    position = (int(reply[1]), int(reply[2]))
    return RenewResult(lease.expires_ms, what if fresh else None, position)


async def release(core: Core, lease: Lease) -> bool:
    """See Store.release."""
    reply = await core.run(scripts.RELEASE, lease.key, lease.fence, core.feed_maxlen)
    return bool(reply)


def _ask(value: bytes) -> tuple[int, str]:
    """(running number, what) of a request; (0, "") if there is none."""
    if not value:
        return 0, ""
    n, _, what = value.decode().split(" ", 2)
    return int(n), what


async def apply(core: Core, lease: Lease, deltas: Sequence[BatchDelta]) -> ApplyResult:
    """See Store.apply."""
    applied = duplicate = 0
    async with lease.lock:
        for chunk in _chunks(deltas):
            done, total = await _write(core, lease, chunk, applied)
            applied += done
            duplicate += total - done
    return ApplyResult(lease.epoch, lease.revision, applied, duplicate)


def _chunks(deltas: Sequence[BatchDelta]) -> Iterator[Sequence[BatchDelta]]:
    start = size = 0
    for i, delta in enumerate(deltas):
        records = len(delta.blocks) + len(delta.parked)
        if i > start and size + records > _RECORDS_PER_CALL:
            yield deltas[start:i]
            start, size = i, 0
        size += records
    if start < len(deltas):
        yield deltas[start:]


async def _write(
    core: Core, lease: Lease, deltas: Sequence[BatchDelta], before: int
) -> tuple[int, int]:
    """One call of the script: (applied, of how many). `before`: applied by earlier calls."""
    stores, args = apply_args(deltas)
    lease.calls += 1
    call = f"{lease.fence}:{lease.calls}"
    try:
        reply = await core.run(
            scripts.APPLY,
            lease.key,
            lease.fence,
            lease.ttl_ms,
            call,
            lease.epoch,
            lease.revision,
            core.feed_maxlen,
            int(stores),
            *args,
        )
    except StoreFull as e:
        raise await _removals_before(core, lease, deltas, before, e) from e
    except BaseException:
        # All of them build on the same position, so that at most one can have happened.
        lease.unsure.append(Unsure(call, deltas))
        raise
    if reply[0] == b"DAMAGED":
        lease.intact = False
        raise Damaged(str(lease.key), int(reply[1]), int(reply[2]))
    if reply[0] == b"DIVERGED":
        return await _adopt_or_diverge(core, lease, deltas, before, reply)
    _, epoch, revision, applied, expires = reply
    _wrote(lease, deltas, int(epoch), int(revision))
    lease.expires_ms = int(expires)
    lease.unsure.clear()
    lease.intact = True
    return int(applied), len(deltas)


async def _adopt_or_diverge(
    core: Core,
    lease: Lease,
    deltas: Sequence[BatchDelta],
    before: int,
    reply: Sequence[bytes],
) -> tuple[int, int]:
    """The store is elsewhere than the lease: because of an own call whose reply was lost (then go
    on from there, without its deltas), or because we are no longer its continuation."""
    epoch, revision, last_call = int(reply[1]), int(reply[2]), reply[3].decode()
    unsure = next((u for u in lease.unsure if u.call == last_call), None)
    if unsure is None:
        raise Diverged(str(lease.key), lease.position, (epoch, revision))
    lease.unsure.clear()
    _wrote(lease, unsure.deltas, epoch, revision)
    n = len(unsure.deltas)
    if list(deltas[:n]) == list(unsure.deltas):
        if n == len(deltas):
            return 0, n
        applied, _ = await _write(core, lease, deltas[n:], before)
        return applied, len(deltas)
    return await _write(core, lease, deltas, before)


async def _removals_before(
    core: Core, lease: Lease, deltas: Sequence[BatchDelta], before: int, error: StoreFull
) -> StoreFull:
    """A full server refused the whole call: write at least what only removes and comes first."""
    first = list(takewhile(removes_only, deltas))
    if first and len(first) < len(deltas):
        applied, _ = await _write(core, lease, first, before)
        return StoreFull(str(error), before + applied)
    return StoreFull(str(error), before)


def _wrote(lease: Lease, deltas: Sequence[BatchDelta], epoch: int, revision: int) -> None:
    lease.epoch, lease.revision = epoch, revision
    for delta in deltas:
        if delta.clear or delta.seq > lease.last_seq:
            lease.last_seq = delta.seq
            lease.last_ts = delta.ts
            lease.last_digest = delta.digest
