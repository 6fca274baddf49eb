"""Owning a worker rank: leases, fencing, two writers, paused writers; against real servers."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import time
from collections.abc import AsyncIterator
from multiprocessing.connection import Connection

import pytest
from servers import Server

from kvindexd.model import BatchDelta, WorkerKey
from kvindexd.store import Fenced, LeaseHeld, NotRegistered, Store, StoreOptions

KEY = WorkerKey("", "w0", 0)


@pytest.fixture
async def store(redis_server: Server) -> AsyncIterator[Store]:
    async with Store(redis_server.url, StoreOptions(deadline=5)) as s:
        await s.register(KEY, b"reg", False, 1.0)
        yield s


def batch(seq: int, by: bytes = b"") -> BatchDelta:
    return BatchDelta(seq=seq, ts=1.0, digest=seq, blocks={b"%d" % seq: by}, counters={"n": 1})


async def test_a_live_lease_keeps_others_out_and_says_for_how_long(store: Store) -> None:
    await store.acquire(KEY, "a", 4000)
    with pytest.raises(LeaseHeld, match="owned by 'a'") as e:
        await store.acquire(KEY, "b", 4000)
    assert e.value.owner == "a"
    assert 3.0 < e.value.expires_in <= 4.0


async def test_a_lapsed_lease_is_taken_over_and_its_holder_refused(store: Store) -> None:
    old = await store.acquire(KEY, "a", 50)
    await store.apply(old, [batch(0)])
    new = await _acquire_soon(store, "b")
    assert (new.epoch, new.revision, new.last_seq) == (1, 1, 0)
    for attempt in (store.apply(old, [batch(1)]), store.renew(old)):
        with pytest.raises(Fenced) as e:
            await attempt
        assert e.value.owner == "b"
    assert not await store.release(old)
    await store.apply(new, [batch(1)])
    assert (await store.get_worker(KEY)).owner == "b"


async def _acquire_soon(store: Store, owner: str, ttl_ms: int = 4000):  # type: ignore[no-untyped-def]
    while True:
        try:
            return await store.acquire(KEY, owner, ttl_ms)
        except LeaseHeld as e:
            await asyncio.sleep(e.expires_in)


@pytest.mark.parametrize("how", ["apply", "renew"])
async def test_a_lapsed_lease_that_nobody_took_goes_on(store: Store, how: str) -> None:
    lease = await store.acquire(KEY, "a", 30)
    await asyncio.sleep((await store.leases())[KEY])
    assert (await store.leases())[KEY] <= 0
    lease.ttl_ms = 5000
    if how == "apply":
        await store.apply(lease, [batch(0)])
    else:
        await store.renew(lease)
    with pytest.raises(LeaseHeld):
        await store.acquire(KEY, "b", 1000)


async def test_every_write_and_heartbeat_extends_the_lease(store: Store) -> None:
    lease = await store.acquire(KEY, "a", 300)
    start = time.monotonic()
    seq = 0
    while time.monotonic() - start < 1.0:
        if seq % 2:
            await store.renew(lease)
        else:
            await store.apply(lease, [batch(seq)])
        seq += 1
        with pytest.raises(LeaseHeld):
            await store.acquire(KEY, "b", 300)
        await asyncio.sleep(0.02)
    record = await store.get_worker(KEY)
    assert record.owner == "a"
    assert record.expires_in_ms is not None
    assert record.expires_in_ms > 0
    assert record.heartbeat_ms is not None
    assert record.heartbeat_ms < 300


async def test_acquiring_again_under_the_same_name_fences_oneself(store: Store) -> None:
    first = await store.acquire(KEY, "a", 4000)
    second = await store.acquire(KEY, "a", 4000)
    assert first.fence != second.fence
    with pytest.raises(Fenced):
        await store.apply(first, [batch(0)])
    await store.apply(second, [batch(0)])


async def test_a_released_lease_is_free_at_once_and_useless(store: Store) -> None:
    lease = await store.acquire(KEY, "a", 60_000)
    assert await store.release(lease)
    assert not await store.release(lease)
    assert (await store.leases())[KEY] == float("-inf")
    with pytest.raises(Fenced):
        await store.apply(lease, [batch(0)])
    await store.acquire(KEY, "b", 1000)


async def test_nobody_owns_what_is_not_registered(store: Store) -> None:
    other = WorkerKey("", "other", 0)
    with pytest.raises(NotRegistered):
        await store.acquire(other, "a", 1000)
    lease = await store.acquire(KEY, "a", 1000)
    await store.deregister(KEY)
    with pytest.raises(NotRegistered):
        await store.renew(lease)
    await store.register(KEY, b"reg", False, 0.0)
    with pytest.raises(Fenced):
        await store.apply(lease, [batch(0)])


async def test_a_fence_is_never_minted_twice_even_when_the_counter_is_lost(
    store: Store, redis_server: Server
) -> None:
    """A failover may lose an acquisition; the next one must not get the loser's fence."""
    first = await store.acquire(KEY, "a", 30)
    await store.deregister(KEY)
    await store.register(KEY, b"reg", False, 0.0)
    second = await store.acquire(KEY, "a", 30)
    assert first.fence.split("-")[0] == second.fence.split("-")[0]
    assert first.fence != second.fence


async def test_a_request_is_delivered_once_and_only_the_latest(store: Store) -> None:
    await store.ask(KEY, "before the lease")
    lease = await store.acquire(KEY, "a", 1000)
    assert (await store.renew(lease)).ask is None
    await store.ask(KEY, "purge")
    await store.ask(KEY, "resync")
    assert (await store.renew(lease)).ask == "resync"
    assert (await store.renew(lease)).ask is None
    await store.ask(KEY, "resync")
    assert (await store.renew(lease)).ask == "resync"


async def test_racing_ingesters_never_interleave(redis_server: Server) -> None:
    """Many holders with leases far shorter than their pauses: the result must be one history."""
    turns: list[tuple[int, str]] = []

    async def ingester(name: str, rounds: int) -> None:
        async with Store(redis_server.url, StoreOptions(deadline=5)) as s:
            for _ in range(rounds):
                lease = await _acquire_soon(s, name, 20)
                try:
                    for _ in range(5):
                        seq = lease.last_seq + 1
                        await s.apply(lease, [batch(seq, name.encode())])
                        turns.append((seq, name))
                        await asyncio.sleep(0.004 if seq % 3 else 0.03)
                except Fenced:
                    continue

    async with Store(redis_server.url) as s:
        await s.register(KEY, b"reg", False, 0.0)
        await asyncio.gather(*(ingester(f"i{i}", 12) for i in range(4)))
        seqs = [seq for seq, _ in turns]
        assert sorted(seqs) == list(range(len(seqs))), "a batch was written twice, or lost"
        assert len({name for _, name in turns}) == 4
        stored = {f: r async for f, r in (await s.load(KEY)).blocks()}
        assert stored == {b"%d" % seq: name.encode() for seq, name in turns}
        record = await s.get_worker(KEY)
        assert record.counters == {"n": len(turns)}
        read = await s.read_feed({0: "0-0"}, 0, 100_000)
        history = [(e.revision, e.seq) for _, _, e in read.entries if not e.kind]
        assert history == [(i + 1, i) for i in range(len(turns))]


def _ingest_forever(url: str, pipe: Connection) -> None:
    async def run() -> None:
        async with Store(url) as s:
            lease = await s.acquire(KEY, "paused", 200)
            try:
                for seq in range(1_000_000):
                    await s.apply(lease, [batch(seq, b"paused")])
                    if seq == 20:
                        pipe.send("writing")
            except Fenced as e:
                pipe.send(e.owner)

    asyncio.run(run())


async def test_a_paused_process_that_wakes_up_after_a_takeover_writes_nothing(
    store: Store, redis_server: Server
) -> None:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_ingest_forever, args=(redis_server.url, theirs))
    process.start()
    assert process.pid is not None
    try:
        assert await asyncio.to_thread(ours.poll, 30)
        assert ours.recv() == "writing"
        os.kill(process.pid, signal.SIGSTOP)
        lease = await _acquire_soon(store, "successor")
        seq = lease.last_seq
        await store.apply(lease, [batch(i, b"successor") for i in range(seq + 1, seq + 11)])
        os.kill(process.pid, signal.SIGCONT)
        assert await asyncio.to_thread(ours.poll, 30)
        assert ours.recv() == "successor"
        stored = {f: r async for f, r in (await store.load(KEY)).blocks()}
        assert len(stored) == seq + 11
        late = {f for f, r in stored.items() if r == b"paused" and int(f) > seq}
        assert not late
    finally:
        process.kill()
        process.join(10)
