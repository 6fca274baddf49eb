"""The store's invariants (03-index.md section 3), each against real servers."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from servers import Server

from kvindexd.model import BatchDelta, WorkerKey
from kvindexd.store import Store, StoreOptions

KEY = WorkerKey("", "w0", 0)


@pytest.fixture
async def store(redis_server: Server) -> AsyncIterator[Store]:
    async with Store(redis_server.url, StoreOptions(shards=2)) as s:
        await s.register(KEY, b"reg", False, 1.0)
        yield s


def batch(seq: int, **kw: object) -> BatchDelta:
    kw.setdefault("blocks", {b"h%d" % seq: b"record%d" % seq})
    return BatchDelta(seq=seq, ts=seq + 0.5, digest=seq, **kw)


async def test_a_batch_is_written_with_its_feed_entry(store: Store) -> None:
    lease = await store.acquire(KEY, "me", 5000)
    tail = await store.feed_tail()
    result = await store.apply(lease, [batch(0), batch(1, mutations=b"m" * 24)])
    assert result == (1, 2, 2, 0)
    read = await store.read_feed(tail, 1000, 10)
    assert [(e.revision, e.seq, e.mutations) for _, _, e in read.entries] == [
        (1, 0, b""),
        (2, 1, b"m" * 24),
    ]
    snapshot = await store.load(KEY)
    assert {f: r async for f, r in snapshot.blocks()} == {b"h0": b"record0", b"h1": b"record1"}
