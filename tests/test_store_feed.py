"""The feed: complete, in order, and loud about every hole; against real servers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

import pytest
import servers
from conftest import SERVERS, binary_of
from proxies import Proxy
from servers import Server

from kvindexd.model import BatchDelta, WorkerKey
from kvindexd.store import FeedEntry, Kind, Lease, Store, StoreOptions, StoreUnavailable
from kvindexd.store.feed import unpack_entry
from kvindexd.store.keys import feed_key, shard_key

KEY = WorkerKey("", "w0", 0)


@pytest.fixture
async def store(redis_server: Server) -> AsyncIterator[Store]:
    async with Store(redis_server.url, StoreOptions(deadline=5, feed_maxlen=200)) as s:
        await s.register(KEY, b"reg", False, 1.0)
        yield s


@pytest.fixture
async def lease(store: Store) -> Lease:
    return await store.acquire(KEY, "me", 60_000)


def batches(first: int, n: int) -> list[BatchDelta]:
    return [BatchDelta(seq=s, ts=s, digest=s, mutations=b"x" * 24) for s in range(first, first + n)]


async def test_a_tail_reader_sees_every_revision_once(store: Store, lease: Lease) -> None:
    positions = await store.feed_tail()
    seen: list[int] = []
    caught_up = asyncio.Event()

    async def follow() -> None:
        while len(seen) < 500:
            read = await store.read_feed(positions, 500, 7)
            assert not read.trimmed
            for shard, entry_id, entry in read.entries:
                positions[shard] = entry_id
                seen.append(entry.revision)
            caught_up.set()

    task = asyncio.create_task(follow())
    for first in range(0, 500, 5):
        await store.apply(lease, batches(first, 5))
        while len(seen) < first - 100:  # within feed_maxlen
            caught_up.clear()
            await caught_up.wait()
    await asyncio.wait_for(task, 10)
    assert seen == list(range(1, 501))


async def test_a_waiting_read_returns_as_soon_as_something_happens(
    store: Store, lease: Lease
) -> None:
    task = asyncio.create_task(store.read_feed(await store.feed_tail(), 10_000, 10))
    await asyncio.sleep(0.1)
    start = time.monotonic()
    await store.apply(lease, batches(0, 1))
    read = await task
    assert time.monotonic() - start < 1
    assert [e.revision for _, _, e in read.entries] == [1]


async def test_a_read_without_news_returns_empty_after_its_time(store: Store) -> None:
    start = time.monotonic()
    assert await store.read_feed(await store.feed_tail(), 200, 10) == ([], (), ())
    assert 0.15 < time.monotonic() - start < 2
    assert await store.read_feed(await store.feed_tail(), 0, 10) == ([], (), ())


async def test_blocked_readers_hold_no_connection_that_others_need(redis_server: Server) -> None:
    async with Store(redis_server.url, StoreOptions(connections=1, deadline=5)) as s:
        tail = await s.feed_tail()
        readers = [s.feed_reader() for _ in range(4)]
        tasks = [asyncio.create_task(r.read(tail, 20_000, 10)) for r in readers]
        await asyncio.sleep(0.05)
        start = time.monotonic()
        for _ in range(20):
            await s.ping()
        assert time.monotonic() - start < 1
        await s.register(KEY, b"r", False, 0.0)
        for read in await asyncio.gather(*tasks):
            assert [e.kind for _, _, e in read.entries] == [Kind.REG]
        for r in readers:
            await r.aclose()


async def test_the_feed_is_bounded_and_a_trimmed_position_is_reported(
    store: Store, lease: Lease, redis_server: Server
) -> None:
    early = await store.feed_tail()
    await store.apply(lease, batches(0, 100))
    middle = await store.feed_tail()
    for first in range(100, 3000, 100):
        await store.apply(lease, batches(first, 100))
    assert redis_server("XLEN", feed_key(0)) < 500
    for position in ({0: "0-0"}, early, middle):
        assert await store.read_feed(position, 0, 10_000) == ([], (0,), ())
    tail = await store.feed_tail()
    assert await store.read_feed(tail, 0, 10) == ([], (), ())
    await store.apply(lease, batches(3000, 1))
    assert len((await store.read_feed(tail, 0, 10)).entries) == 1


async def test_a_position_whose_own_entry_is_trimmed_but_nothing_after_it_still_reads(
    store: Store, lease: Lease, redis_server: Server
) -> None:
    await store.apply(lease, batches(0, 1))
    tail = await store.feed_tail()
    await store.apply(lease, batches(1, 3))
    redis_server("XTRIM", feed_key(0), "MAXLEN", 3)
    read = await store.read_feed(tail, 0, 10)
    assert [e.seq for _, _, e in read.entries] == [1, 2, 3]
    redis_server("XTRIM", feed_key(0), "MAXLEN", 2)
    assert (await store.read_feed(tail, 0, 10)).trimmed == (0,)


async def test_a_hole_inside_the_feed_is_reported(
    store: Store, lease: Lease, redis_server: Server
) -> None:
    tail = await store.feed_tail()
    await store.apply(lease, batches(0, 5))
    ids = [row[0] for row in redis_server("XRANGE", feed_key(0), "-", "+")]
    redis_server("XDEL", feed_key(0), ids[-3])
    assert (await store.read_feed(tail, 0, 10)).trimmed == (0,)


@pytest.mark.parametrize("what", ["feed", "shard", "both", "all"])
async def test_a_feed_that_was_deleted_is_reported_even_while_nothing_happens(
    store: Store, lease: Lease, redis_server: Server, what: str
) -> None:
    await store.apply(lease, batches(0, 5))
    tail = await store.feed_tail()
    behind = {0: (await store.read_feed({0: "0-0"}, 0, 10)).entries[3][1]}
    if what == "all":
        redis_server("FLUSHALL")
    else:
        gone = {"feed": [feed_key(0)], "shard": [shard_key(0)]}
        redis_server("DEL", *gone.get(what, [feed_key(0), shard_key(0)]))
    if what != "shard":  # alone, it loses no entry
        assert (await store.read_feed(behind, 0, 10)).trimmed == (0,)
    if what in ("both", "all"):
        assert (await store.read_feed(tail, 50, 10)).trimmed == (0,)
    # Writing goes on, and whoever reads from the tail misses nothing more.
    if what == "all":
        await store.register(KEY, b"reg", False, 1.0)
        lease = await store.acquire(KEY, "me", 60_000)
    fresh = await store.feed_tail()
    await store.apply(lease, batches(5, 2))
    read = await store.read_feed(fresh, 0, 10)
    assert [e.seq for _, _, e in read.entries] == [5, 6]


async def test_numbers_given_out_again_after_a_failover_are_reported(
    store: Store, lease: Lease, redis_server: Server
) -> None:
    """A promoted replica had not received the last entries that we read; other ones follow,
    with ids that may be older than our position if its clock is behind."""
    await store.apply(lease, batches(0, 3))
    old = redis_server("DUMP", feed_key(0)), redis_server("DUMP", shard_key(0))
    await store.apply(lease, batches(3, 2))
    position = await store.feed_tail()
    redis_server("RESTORE", feed_key(0), 0, old[0], "REPLACE")
    redis_server("RESTORE", shard_key(0), 0, old[1], "REPLACE")
    assert (await store.read_feed(position, 20, 10)).trimmed == (0,)
    await store.set_draining(KEY, True)
    assert (await store.read_feed(position, 20, 10)).trimmed == (0,)
    for draining in (False, True, False):
        await store.set_draining(KEY, draining)
    far = {0: f"{int(time.time() * 1000) + 60_000}-{position[0].split('-')[1]}"}
    assert (await store.read_feed(far, 20, 10)).trimmed == (0,)


async def test_ids_grow_though_the_clock_steps_back(
    store: Store, lease: Lease, redis_server: Server
) -> None:
    tail = await store.feed_tail()
    redis_server("HSET", shard_key(0), "ms", int(time.time() * 1000) + 3_600_000)
    await store.apply(lease, batches(0, 3))
    read = await store.read_feed(tail, 0, 10)
    assert [e.seq for _, _, e in read.entries] == [0, 1, 2]


@pytest.mark.parametrize("kind", SERVERS)
async def test_a_reader_rides_out_a_restart_and_reports_an_outage(kind: str) -> None:
    options = StoreOptions(deadline=20, shards=2)
    with servers.server(binary_of(kind), *servers.DURABLE) as server:
        async with Store(server.url, options) as store:
            await store.register(KEY, b"r", False, 0.0)
            lease = await store.acquire(KEY, "me", 60_000)
            positions = await store.feed_tail()
            await store.apply(lease, batches(0, 3))
            await asyncio.to_thread(server.kill)
            with pytest.raises(StoreUnavailable):
                await store.read_feed(positions, 1000, 10)
            with pytest.raises(StoreUnavailable):
                await store.read_feed(positions, 1000, 10)
            await asyncio.to_thread(server.start)
            read = await _next(store, positions)
            assert [e.seq for _, _, e in read] == [0, 1, 2]
            await store.apply(lease, batches(3, 1))
            assert [e.seq for _, _, e in await _next(store, positions)] == [3]


async def _next(store: Store, positions: dict[int, str]) -> list[tuple[int, str, FeedEntry]]:
    async with asyncio.timeout(20):
        while True:
            try:
                read = await store.read_feed(positions, 1000, 10)
            except StoreUnavailable:
                continue
            assert not read.trimmed
            for shard, entry_id, _ in read.entries:
                positions[shard] = entry_id
            if read.entries:
                return read.entries


async def test_a_cancelled_read_gives_no_entry_to_the_wrong_position(
    redis_server: Server,
) -> None:
    async with Proxy(redis_server.port) as proxy, Store(proxy.url, StoreOptions(deadline=5)) as s:
        await s.register(KEY, b"r", False, 0.0)
        lease = await s.acquire(KEY, "me", 60_000)
        positions = await s.feed_tail()
        seen: list[int] = []
        await s.apply(lease, batches(0, 60))
        while len(seen) < 60:
            proxy.delay = 0.02 if len(seen) % 2 else 0.0
            try:
                async with asyncio.timeout(0.01 if len(seen) % 2 else 1.0):
                    read = await s.read_feed(positions, 1000, 1)
            except TimeoutError:
                # The read goes on behind the scenes; the same positions get its answer.
                proxy.delay = 0.0
                read = await s.read_feed(positions, 1000, 1)
            for shard, entry_id, entry in read.entries:
                positions[shard] = entry_id
                seen.append(entry.seq)
        assert seen == list(range(60))


def test_an_entry_of_an_unknown_kind_is_told_as_such() -> None:
    entry = unpack_entry([b"k", b"new", b"w", b"/w0/0", b"e", b"1", b"r", b"2", b"z", b"?"])
    assert (entry.kind, entry.worker, entry.revision) == (Kind.OTHER, KEY, 2)
