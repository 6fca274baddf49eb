"""RankWriter: one task applies while another writes; against a real store."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
import redis.asyncio as aioredis
from reliability import stored
from servers import Server
from waiting import becomes as until

from kvindexd.ingest.actions import SequencerState
from kvindexd.ingest.counting import RankCounters
from kvindexd.ingest.frame import Frame
from kvindexd.ingest.writer import RankWriter
from kvindexd.model import WorkerKey
from kvindexd.rank_state import Options
from kvindexd.registration import Registration
from kvindexd.store import Store, StoreError, StoreOptions
from kvindexd.telemetry import Metrics
from kvindexd.testing.wire import encode_batch

KEY = WorkerKey("", "w0", 0)
WHO = Registration(
    worker_id="w0", model="m", address="127.0.0.1:1", kv_events_endpoint="tcp://127.0.0.1:2"
)


@pytest.fixture
async def store(redis_server: Server) -> AsyncIterator[Store]:
    async with Store(redis_server.url, StoreOptions(deadline=5)) as s:
        await s.register(KEY, WHO.encode(), False, 1.0)
        yield s


async def writer(store: Store) -> RankWriter:
    lease = await store.acquire(KEY, "a", 10_000)
    counters = RankCounters(str(KEY), Metrics())
    return RankWriter(store, lease, Options(), WHO, counters, SequencerState)


def frame(seq: int, first: int, count: int = 4) -> Frame:
    root = stored(first, count) | {"parent_block_hash": None}
    payload = encode_batch(1.0 + seq, [root])
    return Frame(b"", seq, payload, 1.0 + seq, seq, 0.0)


async def written(store: Store) -> RankWriter:
    """What another process would take over."""
    other = await writer(store)
    await other.load(await store.load(KEY))
    return other


async def test_what_is_applied_during_a_write_makes_up_the_next(store: Store) -> None:
    one = await writer(store)
    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(one.run())
        for seq in range(50):
            await one.apply(frame(seq, 10 * seq))
            one.wake()
            if seq % 7 == 0:
                await asyncio.sleep(0)
        await until(lambda: one.lease.last_seq == 49)
        task.cancel()
    assert 1 < one.lease.calls < 50, "several batches per write, while the one before is under way"
    assert (await written(store)).residency.holdings.blocks.keys() == {
        10 * seq + i + 1 for seq in range(50) for i in range(4)
    }


async def test_a_clear_during_a_write_comes_after_it(store: Store) -> None:
    one = await writer(store)
    await one.apply(frame(0, 0))
    flushing = asyncio.create_task(one.flush())
    await asyncio.sleep(0)
    one.reset(incarnation=True)
    await one.apply(frame(0, 100))
    await flushing
    await one.flush()
    assert set((await written(store)).residency.holdings.blocks) == {101, 102, 103, 104}


async def test_a_rewrite_that_is_cut_off_leaves_nothing_half_said(
    store: Store, redis_server: Server
) -> None:
    """A new lease, and batches that were queued under the old one, without the profile that says
    what they mean."""
    one = await writer(store)
    await one.apply(frame(0, 0))
    await one.flush()
    async with aioredis.Redis.from_url(redis_server.url) as raw:
        await raw.flushall()
    await one.apply(frame(1, 100))
    async with one._whole:  # a batch is being applied
        writing = asyncio.create_task(one.persist())
        known = [await store.get_worker(KEY) for _ in range(20) if await store.leases()]
        while not known:
            known = [await store.get_worker(KEY) for _ in range(20) if await store.leases()]
        writing.cancel()
        await asyncio.wait((writing,))
    one.save()  # the session ends, and saves what it can
    with pytest.raises(StoreError):
        await one.flush()
    other = await written(store)
    assert other.residency.holdings.blocks == {}, "and whoever comes next can read it"


@pytest.mark.parametrize("trouble", ["full", "lost"])
async def test_a_new_incarnation_that_begins_during_a_failed_write_is_written(
    store: Store, redis_server: Server, trouble: str
) -> None:
    """Its numbers begin anew: behind a clear that was told with the number of an old batch, the
    store would take them for repeats."""
    one = await writer(store)
    for seq in range(5):
        await one.apply(frame(seq, 10 * seq))
    await one.flush()
    async with aioredis.Redis.from_url(redis_server.url) as raw:
        await (raw.config_set("maxmemory", "1mb") if trouble == "full" else raw.flushall())
        await one.apply(frame(5, 100))
        writing = asyncio.create_task(one.persist())
        await asyncio.sleep(0)
        one.reset(incarnation=True)  # its first batch is yet to come
        await writing
        await raw.config_set("maxmemory", "0")
    await one.apply(frame(0, 200))
    await one.flush()
    assert set((await written(store)).residency.holdings.blocks) == {201, 202, 203, 204}
    assert one.lease.last_seq == 0


async def test_a_store_that_lost_its_data_and_is_full_is_written_anew_once_it_has_room(
    store: Store, redis_server: Server
) -> None:
    one = await writer(store)
    await one.apply(frame(0, 0))
    await one.flush()
    async with aioredis.Redis.from_url(redis_server.url) as raw:
        await raw.flushall()
        await raw.config_set("maxmemory", "1mb")
        one.save()
        writing = asyncio.create_task(one.persist())
        done, _ = await asyncio.wait((writing,), timeout=0.3)
        assert not done, "what is in memory is the only copy"
        await raw.config_set("maxmemory", "0")
    await writing
    assert set((await written(store)).residency.holdings.blocks) == {1, 2, 3, 4}
