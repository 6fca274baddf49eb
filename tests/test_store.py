"""Writing and reading one worker rank (03-index.md section 3), against real servers."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import msgspec
import pytest
from proxies import Proxy
from servers import Server, wait_until

from kvindexd.model import BatchDelta, Profile, WorkerKey
from kvindexd.store import (
    Damaged,
    Diverged,
    Fenced,
    Lease,
    NotRegistered,
    Store,
    StoreOptions,
    StoreUnavailable,
)
from kvindexd.store.checks import parse_info
from kvindexd.store.keys import shard_of, worker_keys

KEY = WorkerKey("", "w0", 0)
TTL = 5000


@pytest.fixture
async def store(redis_server: Server) -> AsyncIterator[Store]:
    async with Store(redis_server.url, StoreOptions(shards=2, deadline=5)) as s:
        await s.register(KEY, b"reg", False, 1.0)
        yield s


@pytest.fixture
async def lease(store: Store) -> Lease:
    return await store.acquire(KEY, "me", TTL)


def batch(seq: int, **kw: Any) -> BatchDelta:
    kw.setdefault("blocks", {b"h%d" % seq: b"record%d" % seq})
    kw.setdefault("mutations", b"%024d" % seq)
    return BatchDelta(seq=seq, ts=seq + 0.1, digest=2**64 - 1 - seq, **kw)


async def blocks_of(store: Store, key: WorkerKey = KEY) -> dict[bytes, bytes]:
    return {f: r async for f, r in (await store.load(key)).blocks()}


async def parked_of(store: Store, key: WorkerKey = KEY) -> dict[bytes, bytes]:
    return {f: r async for f, r in (await store.load(key)).parked()}


async def revisions(store: Store, start: str = "0-0") -> list[tuple[int, int]]:
    positions = dict.fromkeys(range(store.shards), start)
    read = await store.read_feed(positions, 0, 100_000)
    assert not read.trimmed
    return [(e.epoch, e.revision) for _, _, e in read.entries if not e.kind]


# -- one batch ------------------------------------------------------------------------------------


async def test_a_batch_changes_state_revision_and_feed_together(store: Store, lease: Lease) -> None:
    tail = await store.feed_tail()
    delta = batch(
        0,
        blocks={b"a": b"1", b"b": b"2"},
        parked={b"p": b"3"},
        profile=b"profile",
        state=b"state",
        counters={"gaps": 2, "orphans": 1},
        tier_blocks=(2, 1, 0, 0),
    )
    assert await store.apply(lease, [delta]) == (1, 1, 1, 0)
    second = batch(1, blocks={b"a": None, b"c": b"4"}, parked={b"p": None}, counters={"gaps": 1})
    assert await store.apply(lease, [second]) == (1, 2, 1, 0)
    assert (lease.epoch, lease.revision, lease.last_seq) == (1, 2, 1)

    record = await store.get_worker(KEY)
    assert (record.epoch, record.revision, record.last_seq) == (1, 2, 1)
    assert (record.last_ts, record.last_digest) == (1.1, 2**64 - 2)
    assert record.counters == {"gaps": 3, "orphans": 1}
    assert record.profile == b"profile"
    (listed,) = await store.list_workers()
    assert (listed.key, listed.revision, listed.tier_blocks) == (KEY, 2, (0, 0, 0, 0))
    snapshot = await store.load(KEY)
    assert (snapshot.profile, snapshot.state) == (b"profile", b"state")
    assert await blocks_of(store) == {b"b": b"2", b"c": b"4"}
    assert await parked_of(store) == {}

    read = await store.read_feed(tail, 1000, 10)
    first, then = (e for _, _, e in read.entries)
    assert (first.worker, first.epoch, first.revision, first.seq) == (KEY, 1, 1, 0)
    assert (first.ts, first.mutations, first.profile) == (0.1, delta.mutations, b"profile")
    assert (then.revision, then.profile, then.clear) == (2, None, False)


async def test_several_batches_in_one_call_are_several_revisions(
    store: Store, lease: Lease
) -> None:
    result = await store.apply(lease, [batch(i) for i in range(10)])
    assert result == (1, 10, 10, 0)
    assert await revisions(store) == [(1, r) for r in range(1, 11)]
    assert len(await blocks_of(store)) == 10


async def test_order_within_a_call_is_kept(store: Store, lease: Lease) -> None:
    deltas = [
        batch(0, blocks={b"x": b"1"}),
        batch(1, blocks={b"x": None}),
        batch(2, blocks={b"y": b"1"}),
        batch(3, blocks={b"y": b"2"}),
    ]
    await store.apply(lease, deltas)
    assert await blocks_of(store) == {b"y": b"2"}


@pytest.mark.parametrize("n", [1, 499, 500, 501, 3999, 4001, 40_000])
async def test_a_batch_of_any_size_is_stored_in_full(store: Store, lease: Lease, n: int) -> None:
    # Lua cannot unpack more than some 8,000 values at once.
    blocks: dict[bytes, bytes | None] = {b"%d" % i: os.urandom(30) for i in range(n)}
    await store.apply(lease, [batch(0, blocks=blocks)])
    assert await blocks_of(store) == blocks
    gone = dict.fromkeys(list(blocks)[: n // 2 + 1])
    await store.apply(lease, [batch(1, blocks=gone)])
    assert set(await blocks_of(store)) == set(blocks) - set(gone)


async def test_binary_content_survives(store: Store, lease: Lease) -> None:
    blocks: dict[bytes, bytes | None] = {bytes([i]) * 8: bytes(range(256)) for i in range(256)}
    await store.apply(lease, [batch(0, blocks=blocks, mutations=bytes(range(240)))])
    assert await blocks_of(store) == blocks
    read = await store.read_feed({0: "0-0", 1: "0-0"}, 0, 100)
    assert read.entries[-1][2].mutations == bytes(range(240))


# -- clear, forget --------------------------------------------------------------------------------


async def test_a_clear_starts_the_next_epoch_at_revision_1(store: Store, lease: Lease) -> None:
    await store.apply(
        lease, [batch(7, parked={b"p": b"1"}, profile=b"old", state=b"old"), batch(8)]
    )
    clear = batch(0, clear=True, profile=b"new", blocks={b"n": b"1"})
    assert await store.apply(lease, [clear]) == (2, 1, 1, 0)
    assert await blocks_of(store) == {b"n": b"1"}
    assert await parked_of(store) == {}
    snapshot = await store.load(KEY)
    assert (snapshot.profile, snapshot.state, snapshot.last_seq) == (b"new", None, 0)
    assert await revisions(store) == [(1, 1), (1, 2), (2, 1)]
    read = await store.read_feed({0: "0-0", 1: "0-0"}, 0, 100)
    assert read.entries[-1][2].clear
    # And the epoch goes on from the clear's seq.
    assert await store.apply(lease, [batch(0), batch(1)]) == (2, 2, 1, 1)


async def test_clears_inside_one_call(store: Store, lease: Lease) -> None:
    deltas = [batch(5), batch(6, clear=True), batch(7), batch(-1, clear=True, blocks={}), batch(0)]
    assert await store.apply(lease, deltas) == (3, 2, 5, 0)
    assert await blocks_of(store) == {b"h0": b"record0"}
    assert await revisions(store) == [(1, 1), (2, 1), (2, 2), (3, 1), (3, 2)]


async def test_deregister_leaves_nothing_but_a_feed_entry(
    store: Store, lease: Lease, redis_server: Server
) -> None:
    await store.apply(lease, [batch(0, parked={b"p": b"1"})])
    tail = await store.feed_tail()
    assert await store.deregister(KEY)
    assert not await store.deregister(KEY)
    shard = shard_of(KEY, 2)
    assert set(redis_server("KEYS", "*")) == {
        b"kvx:meta",
        b"kvx:{%d}:feed" % shard,
        b"kvx:{%d}:shard" % shard,
    }
    assert await store.list_workers() == []
    read = await store.read_feed(tail, 1000, 10)
    assert [e.kind for _, _, e in read.entries] == ["gone"]
    with pytest.raises(NotRegistered):
        await store.apply(lease, [batch(1)])
    # A worker of the same name again never gets an epoch that a replica may remember.
    assert (await store.register(KEY, b"again", False, 2.0)).epoch > lease.epoch


async def test_forgetting_a_large_worker_is_left_to_a_thread_of_the_server(
    store: Store, lease: Lease, redis_server: Server
) -> None:
    def freed_aside() -> int:
        return int(parse_info(redis_server("INFO").decode())["lazyfreed_objects"])

    redis_server("CONFIG", "SET", "lazyfree-lazy-user-del", "no")
    blocks: dict[bytes, bytes | None] = {b"%d" % i: b"r" * 30 for i in range(10_000)}

    async def forgetting(how: Callable[[], Awaitable[object]]) -> int:
        current = await store.acquire(KEY, "me", TTL)
        await store.apply(current, [batch(-1, clear=True, blocks=blocks)])
        before = freed_aside()
        await how()
        assert (await store.size_of(KEY)).blocks == 0
        await asyncio.to_thread(wait_until, lambda: freed_aside() > before, "freed aside")
        return freed_aside() - before

    async def clear() -> None:
        current = await store.acquire(KEY, "me", TTL)
        await store.apply(current, [batch(-1, clear=True, blocks={})])

    assert await forgetting(clear) >= 1
    assert await forgetting(lambda: store.reset(KEY)) >= 1
    assert await forgetting(lambda: store.deregister(KEY)) >= 1


# -- idempotent -----------------------------------------------------------------------------------


async def test_a_batch_at_or_below_the_recorded_seq_changes_nothing(
    store: Store, lease: Lease
) -> None:
    await store.apply(lease, [batch(0), batch(1)])
    again = [
        batch(0, blocks={b"h0": b"other"}, counters={"gaps": 1}),
        batch(1, blocks={b"h1": None}),
    ]
    assert await store.apply(lease, again) == (1, 2, 0, 2)
    assert await store.apply(lease, [batch(1), batch(2)]) == (1, 3, 1, 1)
    assert await blocks_of(store) == {b"h%d" % i: b"record%d" % i for i in range(3)}
    assert (await store.get_worker(KEY)).counters == {}
    assert await revisions(store) == [(1, 1), (1, 2), (1, 3)]


async def test_a_change_without_a_batch_is_never_taken_for_a_repeat(
    store: Store, lease: Lease
) -> None:
    await store.apply(lease, [batch(5)])
    for i in range(3):
        assert (await store.apply(lease, [batch(-1, blocks={b"x": b"%d" % i})])).applied == 1
    record = await store.get_worker(KEY)
    assert (record.last_seq, record.last_ts, record.revision) == (5, 5.1, 4)
    assert lease.last_seq == 5


async def test_a_lost_reply_is_repeated_without_effect(redis_server: Server) -> None:
    async with Proxy(redis_server.port) as proxy, Store(proxy.url, StoreOptions(deadline=5)) as s:
        await s.register(KEY, b"reg", False, 0.0)
        lease = await s.acquire(KEY, "me", TTL)
        for seq in range(5):
            proxy.lose_replies = 1
            result = await s.apply(lease, [batch(seq, counters={"n": 1})])
            assert result == (1, seq + 1, 1, 0)
        # The same for a clear and for changes without a seq, which no seq protects.
        proxy.lose_replies = 1
        assert await s.apply(lease, [batch(-1, clear=True, counters={"n": 1})]) == (2, 1, 1, 0)
        proxy.lose_replies = 1
        assert await s.apply(lease, [batch(-1, counters={"n": 1})]) == (2, 2, 1, 0)
        assert proxy.lost == 7
        assert (await s.get_worker(KEY)).counters == {"n": 7}
        assert await revisions(s) == [*((1, r) for r in range(1, 6)), (2, 1), (2, 2)]


async def test_lost_replies_of_every_other_operation(redis_server: Server) -> None:
    async with Proxy(redis_server.port) as proxy, Store(proxy.url, StoreOptions(deadline=5)) as s:
        # Make the scripts known: a lost NOSCRIPT reply would prove nothing.
        await s.register(KEY, b"reg", False, 0.0)
        warm = await s.acquire(KEY, "warm", TTL)
        await s.ask(KEY, "warm")
        await s.renew(warm)
        await s.release(warm)
        await s.deregister(KEY)
        first = (await s.register(KEY, b"reg", False, 0.0)).epoch
        await s.deregister(KEY)
        tail = await s.feed_tail()

        proxy.lose_replies = 1
        assert (await s.register(KEY, b"reg", False, 0.0)).epoch == first + 1
        proxy.lose_replies = 1
        assert (await s.register(KEY, b"reg", True, 0.0)).epoch == first + 2
        proxy.lose_replies = 1
        lease = await s.acquire(KEY, "me", TTL)
        assert lease.fence.startswith("1-")
        proxy.lose_replies = 1
        await s.ask(KEY, "resync")
        proxy.lose_replies = 1
        assert (await s.renew(lease)).ask == "resync"
        assert (await s.renew(lease)).ask is None
        await s.apply(lease, [batch(0)])
        proxy.lose_replies = 1
        await s.release(lease)
        proxy.lose_replies = 1
        await s.deregister(KEY)
        assert proxy.lost == 7
        read = await s.read_feed(tail, 0, 100)
        kinds = [e.kind.value for _, _, e in read.entries]
        assert kinds == ["reg", "clear", "reg", "lease", "ask", "", "lease", "gone"]


async def test_a_cancelled_write_may_be_repeated_with_more(redis_server: Server) -> None:
    """The caller cannot know whether it happened; sending it again, with more, is right both
    ways."""
    rng = random.Random(7)
    landed = set()
    async with Proxy(redis_server.port) as proxy, Store(proxy.url, StoreOptions(deadline=5)) as s:
        await s.register(KEY, b"reg", False, 0.0)
        lease = await s.acquire(KEY, "me", TTL)
        pending: list[BatchDelta] = []
        for n in range(60):
            pending.append(batch(-1, blocks={b"%d" % n: b"x"}, counters={"n": 1}))
            before = (await s.get_worker(KEY)).revision
            proxy.delay = 0.03
            proxy.lose_requests = rng.choice([0, 1000])
            task = asyncio.create_task(s.apply(lease, list(pending)))
            await asyncio.sleep(rng.choice([0.001, 0.005, 0.015]))
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            proxy.lose_requests = 0
            proxy.delay = 0.0
            landed.add((await s.get_worker(KEY)).revision > before)
            if n % 3 == 2:
                await s.apply(lease, pending)
                pending = []
        record = await s.get_worker(KEY)
        assert landed == {True, False}
        assert record.counters == {"n": 60}
        assert (record.revision, lease.revision) == (60, 60)
        assert len(await blocks_of(s)) == 60


async def test_a_call_that_arrives_late_is_refused_by_its_position(
    store: Store, lease: Lease, redis_server: Server
) -> None:
    """A copy of a call may sit in a dead connection's buffer while we go on."""
    captured: list[tuple[Any, ...]] = []
    run = store._core.run

    async def recorder(script: Any, key: Any, *args: Any) -> Any:
        captured.append((script, key, *args))
        return await run(script, key, *args)

    store._core.run = recorder  # type: ignore[method-assign]
    await store.apply(lease, [batch(-1, counters={"n": 1})])
    await store.apply(lease, [batch(-1, counters={"n": 1})])
    reply = await run(*captured[0])
    assert reply[0] == b"DIVERGED"
    assert (await store.get_worker(KEY)).counters == {"n": 2}


# -- loading --------------------------------------------------------------------------------------


async def test_a_snapshot_during_which_the_worker_changed_its_epoch_says_so(
    store: Store, lease: Lease
) -> None:
    blocks: dict[bytes, bytes | None] = {b"%d" % i: b"x" for i in range(20_000)}
    await store.apply(lease, [batch(0, blocks=blocks)])
    snapshot = await store.load(KEY)
    loading = snapshot.blocks()
    await anext(loading)
    # Ordinary writes do not disturb: the feed from before the snapshot repeats them.
    await store.apply(lease, [batch(1)])
    assert len({f async for f, _ in loading}) >= 19_999

    loading = snapshot.blocks()
    await anext(loading)
    await store.apply(lease, [batch(-1, clear=True, blocks={b"n": b"x"})])
    with pytest.raises(Diverged):
        [f async for f, _ in loading]
    loading = (await store.load(KEY)).blocks()
    await anext(loading)
    await store.deregister(KEY)
    with pytest.raises(NotRegistered):
        [f async for f, _ in loading]


async def test_a_snapshot_is_never_continued_on_another_connection(
    store: Store, lease: Lease, redis_server: Server
) -> None:
    """A cursor of one server process means nothing to the next."""
    blocks: dict[bytes, bytes | None] = {b"%d" % i: b"x" for i in range(20_000)}
    await store.apply(lease, [batch(0, blocks=blocks)])
    loading = (await store.load(KEY)).blocks()
    await anext(loading)
    redis_server("CLIENT", "KILL", "TYPE", "normal")
    with pytest.raises(StoreUnavailable, match="interrupted"):
        [f async for f, _ in loading]
    assert len(await blocks_of(store)) == 20_000


# -- diverged, damaged ----------------------------------------------------------------------------


async def test_a_store_that_lost_the_last_writes_is_noticed(
    store: Store, lease: Lease, redis_server: Server
) -> None:
    """As after a failover to a replica that had not received them."""
    keys = worker_keys(shard_of(KEY, 2), KEY.store_id)
    await store.apply(lease, [batch(0)])
    saved = redis_server("DUMP", keys.worker), redis_server("DUMP", keys.blocks)
    await store.apply(lease, [batch(1)])
    redis_server("RESTORE", keys.worker, 0, saved[0], "REPLACE")
    redis_server("RESTORE", keys.blocks, 0, saved[1], "REPLACE")
    with pytest.raises(Diverged) as e:
        await store.apply(lease, [batch(2)])
    assert (e.value.expected, e.value.found) == ((1, 2), (1, 1))
    # Loading anew is the way on; nothing was written meanwhile.
    lease = await store.acquire(KEY, "me", TTL)
    assert (lease.revision, lease.last_seq) == (1, 0)
    await store.apply(lease, [batch(1), batch(2)])
    assert set(await blocks_of(store)) == {b"h0", b"h1", b"h2"}


@pytest.mark.parametrize("what", ["all", "some", "parked"])
async def test_records_that_vanish_are_noticed(
    store: Store, lease: Lease, redis_server: Server, what: str
) -> None:
    keys = worker_keys(shard_of(KEY, 2), KEY.store_id)
    await store.apply(lease, [batch(0, blocks={b"a": b"1", b"b": b"2"}, parked={b"p": b"1"})])
    if what == "all":
        redis_server("DEL", keys.blocks)
    elif what == "some":
        redis_server("HDEL", keys.blocks, "a")
    else:
        redis_server("DEL", keys.parked)
    with pytest.raises(Damaged):
        await store.apply(lease, [batch(1)])
    lease = await store.acquire(KEY, "me", TTL)
    assert not lease.intact
    await store.apply(lease, [batch(-1, clear=True, blocks={}), batch(0)])
    assert lease.intact
    assert (await store.acquire(KEY, "me", TTL)).intact


# -- admin ----------------------------------------------------------------------------------------


async def test_registrations_persist_and_change(store: Store) -> None:
    tail = await store.feed_tail()
    first = await store.register(KEY, b"reg", False, 5.0)
    assert first == (1, 0, False)
    lease = await store.acquire(KEY, "me", TTL)
    await store.apply(lease, [batch(0)])
    assert await store.register(KEY, b"reg2", False, 6.0) == (1, 1, False)
    await store.apply(lease, [batch(1)])
    assert await store.register(KEY, b"reg3", True, 7.0) == (2, 0, False)
    with pytest.raises(Fenced):
        await store.apply(lease, [batch(2)])
    record = await store.get_worker(KEY)
    assert (record.registration, record.owner, record.last_seq) == (b"reg3", "", -1)
    assert await blocks_of(store) == {}
    read = await store.read_feed(tail, 1000, 100)
    seen = [(e.kind.value, e.epoch, e.revision, e.value) for _, _, e in read.entries]
    assert seen == [
        ("lease", 1, 0, b""), ("", 1, 1, b""), ("reg", 1, 1, b"reg2"), ("", 1, 2, b""),
        ("clear", 2, 0, b""), ("reg", 2, 0, b"reg3"),
    ]  # fmt: skip


async def test_a_reset_from_outside_fences_the_owner(store: Store, lease: Lease) -> None:
    await store.apply(lease, [batch(0, profile=b"p", state=b"s", parked={b"p": b"1"})])
    assert await store.reset(KEY) == 2
    with pytest.raises(Fenced):
        await store.apply(lease, [batch(1)])
    snapshot = await store.load(KEY)
    assert (snapshot.epoch, snapshot.revision, snapshot.profile, snapshot.state) == (
        2,
        0,
        None,
        None,
    )
    assert await blocks_of(store) == await parked_of(store) == {}
    lease = await store.acquire(KEY, "me", TTL)
    assert lease.last_seq == 0, "the stream goes on where it was"
    assert await store.apply(lease, [batch(0), batch(1)]) == (2, 1, 1, 1)


async def test_draining_asking_and_load_are_seen_by_others(store: Store, lease: Lease) -> None:
    tail = await store.feed_tail()
    await store.set_draining(KEY, True)
    await store.set_draining(KEY, True)
    await store.ask(KEY, "resync now")
    await store.report_load(KEY, "scorer-1", b"17")
    await store.renew(lease, evidence={"detail": "no events yet", "last_event_ms": 12})
    await store.renew(lease, evidence={"detail": "no events yet", "last_event_ms": 12})
    record = await store.get_worker(KEY)
    assert record.draining
    assert record.load["scorer-1"].payload == b"17"
    assert record.load["scorer-1"].age_ms < 5000
    assert record.evidence == {"detail": "no events yet", "last_event_ms": 12}
    read = await store.read_feed(tail, 1000, 10)
    seen = [(e.kind.value, e.draining, e.value) for _, _, e in read.entries]
    assert seen == [
        ("drain", True, b""),
        ("ask", False, b"resync now"),
        ("beat", False, msgspec.msgpack.encode(record.evidence)),
    ]
    await store.report_load(KEY, "scorer-1", b"")
    await store.set_draining(KEY, False)
    record = await store.get_worker(KEY)
    assert (record.draining, record.load) == (False, {})


@pytest.mark.parametrize("name", ["a{b}c", "a:b/c", "ü b", "{", "}", "%7B", "*", ""])
async def test_any_name_keeps_its_keys_in_its_shard(store: Store, name: str) -> None:
    key = WorkerKey(name, name or "w", 3)
    await store.register(key, b"r", False, 0.0)
    lease = await store.acquire(key, "me", TTL)
    await store.apply(lease, [batch(0)])
    assert key in {r.key for r in await store.list_workers()}
    assert await blocks_of(store, key) == {b"h0": b"record0"}
    for k in worker_keys(shard_of(key, 2), key.store_id):
        assert k.count(b"{") == k.count(b"}") == 1


async def test_many_workers_are_listed_over_all_shards(store: Store) -> None:
    keys = [WorkerKey("ns", f"w{i}", i % 3) for i in range(150)]
    await asyncio.gather(*(store.register(k, str(k).encode(), False, 0.0) for k in keys))
    records = await store.list_workers()
    assert {r.key for r in records} == {KEY, *keys}
    assert len({shard_of(k, 2) for k in keys}) == 2
    assert all(r.registration == str(r.key).encode() for r in records if r.key != KEY)
    assert set(await store.leases()) == {KEY, *keys}


async def test_a_profile_fits(store: Store, lease: Lease) -> None:
    profile = msgspec.msgpack.encode(Profile())
    await store.apply(lease, [batch(0, profile=profile)])
    stored = (await store.get_worker(KEY)).profile
    assert stored is not None
    assert msgspec.msgpack.decode(stored, type=Profile) == Profile()


async def test_memory_is_measured(store: Store, lease: Lease) -> None:
    blocks: dict[bytes, bytes | None] = {os.urandom(8): os.urandom(30) for _ in range(5000)}
    await store.apply(lease, [batch(0, blocks=blocks)])
    size = await store.size_of(KEY)
    assert size.blocks == 5000
    assert 38 < size.bytes / 5000 < 250
