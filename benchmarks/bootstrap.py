"""How long a new replica takes to load a full store, and what memory that needs."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np

from benchmarks.ingest import Valkey
from benchmarks.measure import peak_bytes
from benchmarks.sides import MODEL, Ours
from kvindexd.model import BatchDelta, GroupInfo, Plane, Profile, Slot, WorkerKey
from kvindexd.records import Block, field_of, pack
from kvindexd.registration import Registration
from kvindexd.store import Store

PROFILE = Profile(
    groups=(GroupInfo(0, "full_attention", 16, 0, "main", 1),),
    planes=(Plane(0, "full_attention", 16, 0, 16),),
    slots=(Slot(0, 0, 16),),
)
_CHUNK = 4096


async def _fill(url: str, entries: int, ranks: int, shared: bool) -> None:
    """Write the blocks of a fleet into the store, through its own API."""
    rng = np.random.default_rng(5)
    per_rank = entries // ranks
    common = rng.integers(1, 2**63, per_rank, dtype=np.uint64).tolist()
    async with Store(url) as store:
        for i in range(ranks):
            key = WorkerKey("", f"w{i}", 0)
            who = Registration(
                worker_id=key.worker_id,
                model=MODEL,
                address=f"10.0.0.{i + 1}:8000",
                kv_events_endpoint="tcp://127.0.0.1:5557",
            )
            await store.register(key, who.encode(), False, time.time())
            lease = await store.acquire(key, "bench", 600_000)
            names = common if shared else rng.integers(1, 2**63, per_rank, dtype=np.uint64).tolist()
            for n, low in enumerate(range(0, per_rank, _CHUNK)):
                part = names[low : low + _CHUNK]
                blocks: dict[bytes, bytes | None] = {}
                for at, name in enumerate(part, low):
                    length = (at % 1000 + 1) * 16
                    parent = names[at - 1] if at % 1000 else 0
                    blocks[field_of(name)] = pack(Block(name, length, name, parent, None, 1))
                delta = BatchDelta(
                    seq=n,
                    ts=time.time(),
                    digest=n,
                    blocks=blocks,
                    profile=msgspec.msgpack.encode(PROFILE) if n == 0 else None,
                    tier_blocks=(per_rank, 0, 0, 0),
                )
                await store.apply(lease, [delta])


def bootstrap(entries: int, *, ranks: int = 64, shared: bool = False) -> dict[str, Any]:
    """Fill a store, then start a `scorer` on it: seconds to ready, peak and final memory."""
    store = Valkey()
    try:
        asyncio.run(_fill(store.url, entries, ranks, shared))
        small = Ours("scorer", store.url + "/1")  # an empty database: what a process weighs anyway
        base = small.resident()
        small.stop()
        before = store.cpu()
        scorer = Ours("scorer", store.url)
        try:
            stats = scorer.index_stats()
            final = scorer.resident()
            peak = peak_bytes(scorer.process.pid)
            table = int(stats["bytes"])
            return {
                "entries": stats["entries"],
                "blocks": stats["blocks"],
                "seconds": round(scorer.ready_after, 2),
                "entries_per_s": round(entries / scorer.ready_after),
                "cpu_s": round(scorer.cpu(), 2),
                "store_cpu_s": round(store.cpu() - before, 2),
                "peak_mb": round(peak / 1e6),
                "final_mb": round(final / 1e6),
                "empty_process_mb": round(base / 1e6),
                "table_mb": round(table / 1e6),
                "peak_over_final": round(peak / final, 2),
                "store_bytes_per_entry": round(store.resident() / entries, 1),
            }
        finally:
            scorer.stop()
    finally:
        store.stop()


def run(*, quick: bool, say: Callable[[str], None]) -> dict[str, Any]:
    """Growing stores, private blocks and blocks that all ranks share."""
    out: dict[str, Any] = {}
    sizes = (256_000,) if quick else (256_000, 1_000_000, 6_400_000)
    for entries in sizes:
        for shared in (False, True):
            if shared and entries > 1_000_000:
                continue
            name = f"{entries}_{'shared' if shared else 'private'}"
            out[name] = bootstrap(entries, shared=shared)
            say(f"bootstrap {name}: {json.dumps(out[name])}")
    return out
