"""Connections: cancelled commands, waiting callers, timeouts, forgotten scripts, restarts."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator

import pytest
import servers
from conftest import SERVERS, binary_of
from proxies import Proxy
from servers import Server

from kvindexd.model import BatchDelta, WorkerKey
from kvindexd.store import Store, StoreError, StoreOptions, StoreUnavailable
from kvindexd.store.connect import Client, Limits
from kvindexd.store.url import parse_url

KEY = WorkerKey("", "w0", 0)


@pytest.fixture
async def slow(redis_server: Server) -> AsyncIterator[Proxy]:
    async with Proxy(redis_server.port) as proxy:
        yield proxy


async def test_a_cancelled_command_never_answers_the_next_caller(slow: Proxy) -> None:
    """The reply of a cancelled command arrives 100 ms later; it must reach nobody."""
    client = Client(parse_url(slow.url), Limits(connections=2, timeout=5, deadline=10))
    await client.call("warm", 0, "PING")
    slow.delay = 0.1

    async def echo(text: bytes, cancel_after: float | None) -> None:
        if cancel_after is None:
            assert await client.call("echo", 0, "ECHO", text) == text
            return
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(client.call("echo", 0, "ECHO", text), cancel_after)

    rng = random.Random(1)
    async with asyncio.TaskGroup() as group:
        for i in range(40):
            group.create_task(echo(b"%d" % i, rng.choice([None, 0.01, 0.05, 0.09])))
    await client.aclose()


async def test_a_command_that_timed_out_never_answers_the_next_caller(slow: Proxy) -> None:
    client = Client(parse_url(slow.url), Limits(connections=1, timeout=0.05, deadline=0.12))
    await client.call("warm", 0, "PING")
    slow.delay = 0.2
    with pytest.raises(StoreUnavailable, match="no answer from"):
        await client.call("echo", 0, "ECHO", "late")
    slow.delay = 0.0
    for i in range(20):
        assert await client.call("echo", 0, "ECHO", i) == b"%d" % i
    await client.aclose()


async def test_more_callers_than_connections_wait_their_turn(slow: Proxy) -> None:
    client = Client(parse_url(slow.url), Limits(connections=3, timeout=5, deadline=20))
    slow.delay = 0.01
    replies = await asyncio.gather(*(client.call("echo", 0, "ECHO", i) for i in range(60)))
    assert replies == [b"%d" % i for i in range(60)]
    assert slow.connections == 3
    await client.aclose()


async def test_cancelled_waiters_give_their_turn_on(slow: Proxy) -> None:
    client = Client(parse_url(slow.url), Limits(connections=1, timeout=5, deadline=20))
    slow.delay = 0.02
    tasks = [asyncio.create_task(client.call("echo", 0, "ECHO", i)) for i in range(30)]
    await asyncio.sleep(0.03)
    for task in tasks[::2]:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert [t.result() for t in tasks[1::2]] == [b"%d" % i for i in range(1, 30, 2)]
    assert await client.call("echo", 0, "ECHO", "end") == b"end"
    await client.aclose()


async def test_connections_that_all_died_cost_one_retry(redis_server: Server) -> None:
    async with Store(redis_server.url, StoreOptions(connections=16, deadline=20)) as store:
        await asyncio.gather(*(store.ping() for _ in range(64)))
        redis_server("CLIENT", "KILL", "TYPE", "normal")
        start = time.monotonic()
        await store.ping()
        # One by one, with growing pauses, they would cost ten seconds.
        assert time.monotonic() - start < 3


async def test_an_error_reply_keeps_the_connection(slow: Proxy) -> None:
    client = Client(parse_url(slow.url), Limits(connections=1))
    for _ in range(5):
        with pytest.raises(StoreError, match="unknown command"):
            await client.call("odd", 0, "NOSUCHCOMMAND")
    assert await client.call("echo", 0, "ECHO", "x") == b"x"
    assert slow.connections == 1
    await client.aclose()


async def test_a_pipeline_with_an_error_leaves_nothing_unread(slow: Proxy) -> None:
    client = Client(parse_url(slow.url), Limits(connections=1))
    with pytest.raises(StoreError):
        await client.call_many("mixed", 0, [("ECHO", "a"), ("NOSUCH",), ("ECHO", "b")])
    assert await client.call("echo", 0, "ECHO", "c") == b"c"
    await client.aclose()


async def test_scripts_that_the_server_forgot_are_sent_again(redis_server: Server) -> None:
    async with Store(redis_server.url) as store:
        await store.register(KEY, b"r", False, 0.0)
        lease = await store.acquire(KEY, "me", 5000)
        for seq in range(3):
            redis_server("SCRIPT", "FLUSH")
            await store.apply(lease, [BatchDelta(seq=seq, ts=0.0, digest=0)])
        assert lease.revision == 3


async def test_an_absent_server_is_reported_within_the_deadline() -> None:
    url = f"redis://u:s3cr3t@127.0.0.1:{servers.free_port()}"
    store = Store(url, StoreOptions(deadline=0.5, connect_timeout=0.2))
    start = time.monotonic()
    with pytest.raises(StoreUnavailable, match=r"within 0\.5 s; last: ") as e:
        await store.open()
    assert time.monotonic() - start < 2
    assert "s3cr3t" not in str(e.value)
    await store.close()


async def test_a_silent_server_is_reported_within_the_deadline(redis_server: Server) -> None:
    async with Store(
        redis_server.url, StoreOptions(deadline=0.6, timeout=0.2, connect_timeout=0.2)
    ) as store:
        redis_server.pause()
        try:
            start = time.monotonic()
            with pytest.raises(StoreUnavailable):
                await store.ping()
            assert time.monotonic() - start < 2
        finally:
            redis_server.resume()
        await store.ping()


async def test_operations_are_observed(redis_server: Server) -> None:
    seen: list[tuple[str, str]] = []
    store = Store(redis_server.url, observe=lambda op, seconds, error: seen.append((op, error)))
    await store.open()
    await store.register(KEY, b"r", False, 0.0)
    redis_server("CONFIG", "SET", "maxmemory", "1")
    with pytest.raises(StoreError):
        await store.register(WorkerKey("", "w1", 0), b"r", False, 0.0)
    await store.close()
    assert ("register", "") in seen
    assert seen[-1] == ("register", "StoreFull")


@pytest.mark.parametrize("kind", SERVERS)
async def test_a_restart_of_the_server_is_ridden_out(kind: str) -> None:
    with servers.server(binary_of(kind), *servers.DURABLE) as server:
        async with Store(server.url, StoreOptions(deadline=20)) as store:
            await store.register(KEY, b"r", False, 0.0)
            lease = await store.acquire(KEY, "me", 60_000)
            stop = asyncio.Event()

            async def write() -> int:
                seq = 0
                while not stop.is_set():
                    delta = BatchDelta(seq=seq, ts=0.0, digest=0, blocks={b"%d" % seq: b"x"})
                    await store.apply(lease, [delta])
                    seq += 1
                return seq

            writer = asyncio.create_task(write())
            for _ in range(2):
                await asyncio.sleep(0.3)
                await asyncio.to_thread(server.kill)
                await asyncio.to_thread(server.start)
            await asyncio.sleep(0.3)
            stop.set()
            written = await writer
            assert written > 50
            stored = {f async for f, _ in (await store.load(KEY)).blocks()}
            assert stored == {b"%d" % i for i in range(written)}
            assert lease.revision == written
            health = await store.verify()
            assert health.changed == (0,)
            assert not health.data_lost
            assert (await store.verify()).changed == ()


@pytest.mark.parametrize("kind", SERVERS)
async def test_a_restart_without_data_is_told_from_one_with(kind: str) -> None:
    with servers.server(binary_of(kind), *servers.VOLATILE) as server:
        async with Store(server.url, StoreOptions(deadline=20, shards=3)) as store:
            await store.register(KEY, b"r", False, 0.0)
            lease = await store.acquire(KEY, "me", 60_000)
            await store.apply(lease, [BatchDelta(seq=0, ts=0.0, digest=0)])
            assert await store.verify() == ((), False)
            await asyncio.to_thread(server.kill)
            await asyncio.to_thread(server.start)
            with pytest.raises(StoreError, match="not registered"):
                await store.apply(lease, [BatchDelta(seq=1, ts=0.0, digest=0)])
            health = await store.verify()
            assert health.data_lost
            assert health.changed == (0, 1, 2)
            assert await store.verify() == ((), False)
            # The store agrees with later processes again, on the same number of shards.
            async with Store(server.url) as other:
                assert other.shards == 3
