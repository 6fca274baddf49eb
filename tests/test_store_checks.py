"""Servers and stores that must not be used as they are, and a server that is full."""

from __future__ import annotations

import os

import pytest
import servers
from conftest import SERVERS, binary_of
from servers import Server

from kvindexd.model import BatchDelta, WorkerKey
from kvindexd.store import (
    SchemaMismatch,
    Store,
    StoreFull,
    StoreOptions,
    UnfitServer,
    parse_url,
)
from kvindexd.store.checks import check_fit, identity_of, parse_info

KEY = WorkerKey("", "w0", 0)


@pytest.mark.parametrize("policy", ["allkeys-lru", "volatile-ttl", "allkeys-random"])
async def test_a_server_that_evicts_is_refused(redis_server: Server, policy: str) -> None:
    redis_server("CONFIG", "SET", "maxmemory-policy", policy)
    with pytest.raises(UnfitServer, match=f"maxmemory-policy is {policy}.*noeviction"):
        async with Store(redis_server.url):
            pass
    assert redis_server("DBSIZE") == 0


async def test_a_replica_is_refused(redis_server: Server) -> None:
    redis_server("CONFIG", "SET", "repl-diskless-sync-delay", 0)
    with servers.server(redis_server.binary, *servers.VOLATILE) as replica:
        replica("REPLICAOF", "127.0.0.1", redis_server.port)
        servers.wait_until(lambda: b"master_link_status:up" in replica("INFO", "replication"))
        with pytest.raises(UnfitServer, match="replica"):
            async with Store(replica.url, StoreOptions(deadline=1)):
                pass


def test_versions() -> None:
    def fit(info: str) -> None:
        check_fit(identity_of(parse_info(info)), parse_url("redis://h"))

    common = "\nrole:master\nmaxmemory_policy:noeviction"
    for fine in ("redis_version:6.2.0", "redis_version:7.4.1", "redis_version:8.0.0"):
        fit(fine + common)
    fit("redis_version:7.2.4\nvalkey_version:9.1.0\nserver_name:valkey" + common)
    for old in ("redis_version:6.0.16", "redis_version:5.0.7"):
        with pytest.raises(UnfitServer, match=r"too old; 6\.2"):
            fit(old + common)


async def test_a_store_with_another_schema_is_refused(redis_server: Server) -> None:
    async with Store(redis_server.url):
        pass
    redis_server("HSET", "kvx:meta", "schema", 99)
    with pytest.raises(SchemaMismatch, match=r"schema 99.*writes 1"):
        async with Store(redis_server.url):
            pass


async def test_the_stored_number_of_shards_wins(redis_server: Server) -> None:
    async with Store(redis_server.url, StoreOptions(shards=5)) as first:
        await first.register(KEY, b"r", False, 0.0)
        async with Store(redis_server.url, StoreOptions(shards=2)) as second:
            assert (first.shards, second.shards) == (5, 5)
            assert (await second.get_worker(KEY)).registration == b"r"


# -- a full server --------------------------------------------------------------------------------


def fill(server: Server) -> None:
    """Put the server at its maxmemory, as another user of it may do at any time."""
    used = int(parse_info(server("INFO", "memory").decode())["used_memory"])
    server("CONFIG", "SET", "maxmemory", used - 100_000)


def batch(seq: int, n: int = 1, **kw: object) -> BatchDelta:
    if "blocks" not in kw:
        kw["blocks"] = {os.urandom(8): os.urandom(30) for _ in range(n)}
    return BatchDelta(seq=seq, ts=0.0, digest=0, mutations=b"m" * 24 * n, **kw)  # type: ignore[arg-type]


async def test_a_full_server_refuses_stores_whole_and_takes_removals(
    redis_server: Server,
) -> None:
    async with Store(redis_server.url, StoreOptions(deadline=5)) as store:
        await store.register(KEY, b"r", False, 0.0)
        lease = await store.acquire(KEY, "me", 60_000)
        first = batch(0, 5000, parked={b"p": b"1"})
        await store.apply(lease, [first])
        tail = await store.feed_tail()
        fill(redis_server)
        for _ in range(2):
            with pytest.raises(StoreFull, match="maxmemory"):
                await store.apply(lease, [batch(1, 64)])
        record = await store.get_worker(KEY)
        assert (record.revision, record.last_seq) == (1, 0)
        assert (await store.size_of(KEY)).blocks == 5000

        names = list(first.blocks)
        # Neither does a batch that changes nothing, the first write of which would be the feed's.
        assert await store.apply(lease, [batch(1, blocks={})]) == (1, 2, 1, 0)
        removal = batch(2, blocks=dict.fromkeys(names[:10]), parked={b"p": None})
        assert await store.apply(lease, [removal]) == (1, 3, 1, 0)
        assert (await store.size_of(KEY))[:2] == (4990, 0)
        assert (await store.apply(lease, [batch(1, blocks={})])).duplicate == 1
        # What precedes the first store of a coalesced call is written all the same.
        mixed = [
            batch(3, blocks={names[10]: None}),
            batch(4, blocks={names[11]: None}),
            batch(5, 64),
            batch(6, blocks={names[12]: None}),
        ]
        with pytest.raises(StoreFull) as e:
            await store.apply(lease, mixed)
        assert e.value.applied == 2
        assert (lease.last_seq, lease.revision) == (4, 5)
        assert (await store.size_of(KEY)).blocks == 4988

        # Owning, heartbeats and admin work too; a new worker does not.
        await store.renew(lease, evidence={"detail": "full"})
        lease = await store.acquire(KEY, "me", 60_000)
        await store.set_draining(KEY, True)
        await store.ask(KEY, "resync")
        await store.register(KEY, b"r2", False, 0.0)
        with pytest.raises(StoreFull):
            await store.register(WorkerKey("", "new", 0), b"r", False, 0.0)
        assert await store.apply(lease, [batch(-1, clear=True, blocks={})]) == (2, 1, 1, 0)
        assert (await store.size_of(KEY)).blocks == 0
        await store.reset(KEY)
        await store.deregister(KEY)
        read = await store.read_feed(tail, 0, 100)
        kinds = [e.kind.value for _, _, e in read.entries]
        assert kinds == [
            *[""] * 4, "beat", "lease", "drain", "ask", "reg", "", "clear", "gone",
        ]  # fmt: skip

        redis_server("CONFIG", "SET", "maxmemory", 0)
        await store.register(KEY, b"r", False, 0.0)
        lease = await store.acquire(KEY, "me", 60_000)
        await store.apply(lease, [batch(0, 64)])


@pytest.mark.parametrize("kind", SERVERS)
async def test_a_wrong_database_content_is_an_error_not_a_wait(kind: str) -> None:
    with servers.server(binary_of(kind), *servers.VOLATILE) as server:
        server("SET", "kvx:meta", "text")
        with pytest.raises(Exception, match="WRONGTYPE"):
            async with Store(server.url, StoreOptions(deadline=5)):
                pass
