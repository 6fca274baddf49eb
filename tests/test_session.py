"""Session: what its tasks do to each other; with an engine stand-in and a real store."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor

from proxies import Proxy
from reliability import stored
from servers import Server

from kvindexd.ingest.settings import IngestSettings
from kvindexd.ingest.transport import new_context
from kvindexd.ingest.worker import RankIngest
from kvindexd.registration import Registration
from kvindexd.security.gate import Gate
from kvindexd.store import Store
from kvindexd.telemetry import Metrics
from kvindexd.testing.engine import FakeEngine

QUICK = IngestSettings(owner="a", heartbeat=0.01, lease_ttl=2.0)


@contextlib.asynccontextmanager
async def following(store: Store, engine: FakeEngine) -> AsyncIterator[RankIngest]:
    """The engine's rank, registered and followed."""
    who = Registration(
        worker_id="w0", model="m", address="127.0.0.1:1", kv_events_endpoint=engine.endpoint()
    )
    await store.register(who.key, who.encode(), False, 1.0)
    context = new_context()
    rank = RankIngest(who, store, QUICK, Metrics(), context, Gate())
    task = asyncio.create_task(rank.run())
    try:
        await asyncio.to_thread(engine.wait_subscribed)
        yield rank
    finally:
        task.cancel()
        await asyncio.wait((task,))
        context.destroy(0)


async def indexed(store: Store, rank: RankIngest, blocks: int) -> None:
    while (await store.size_of(rank.key)).blocks != blocks:  # noqa: ASYNC110 - it changes without telling
        await asyncio.sleep(0.02)


async def until(condition: Callable[[], object]) -> None:
    while not condition():  # noqa: ASYNC110 - it changes without telling
        await asyncio.sleep(0.02)


async def test_the_heartbeat_does_not_take_an_own_new_lease_for_anothers(
    redis_server: Server,
) -> None:
    """While the store is written anew, the server ends the old lease before we hear of the new one.
    What is in memory is the only copy then."""
    with FakeEngine(replay_port=None) as engine:
        async with (
            Proxy(redis_server.port) as proxy,
            Store(proxy.url) as store,
            following(store, engine) as rank,
            asyncio.timeout(20),
        ):
            engine.publish([stored(0, 4)])
            await indexed(store, rank, 4)
            for _ in range(2):
                proxy.delay = 0.1  # a heartbeat nearly always meets the reply on its way
                redis_server("FLUSHALL")
                await until(lambda: redis_server("KEYS", "kvx:{0}:b:*"))
                proxy.delay = 0.0
                await indexed(store, rank, 4)
            assert rank.counters.total["rewrites"] == 2
            assert rank.counters.total["stepped_down:deposed"] == 0


async def register_elsewhere(url: str, who: Registration) -> None:
    async with Store(url) as store:
        await store.register(who.key, who.encode(), False, 1.0)


async def test_others_may_register_the_rank_again_before_its_owner_sees_that_the_data_was_lost(
    redis_server: Server,
) -> None:
    """What the owner has in memory is the only copy also where a follower was quicker."""
    with FakeEngine(replay_port=None) as engine, ThreadPoolExecutor(1) as elsewhere:
        async with (
            Store(redis_server.url) as store,
            following(store, engine) as rank,
            asyncio.timeout(20),
        ):
            engine.publish([stored(0, 4)])
            await indexed(store, rank, 4)
            redis_server("FLUSHALL")
            # Waits, with nothing else running here meanwhile.
            again = register_elsewhere(redis_server.url, rank.registration)
            elsewhere.submit(asyncio.run, again).result()
            await indexed(store, rank, 4)
            assert rank.counters.total["stepped_down:deposed"] == 0


async def test_a_rank_that_an_operator_resets_is_taken_anew(redis_server: Server) -> None:
    """Its lease is revoked too, but nothing was lost: what it held is not written again."""
    with FakeEngine(replay_port=None) as engine:
        async with (
            Store(redis_server.url) as store,
            following(store, engine) as rank,
            asyncio.timeout(20),
        ):
            engine.publish([stored(0, 4)])
            await indexed(store, rank, 4)
            await store.reset(rank.key)
            await until(lambda: rank.counters.total["stepped_down:deposed"] and rank.session)
            assert (await store.size_of(rank.key)).blocks == 0
            assert rank.counters.total["rewrites"] == 0
