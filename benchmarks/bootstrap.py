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
from benchmarks.measure import peak_bytes, until
from benchmarks.sides import MODEL, Ours
from kvindexd.model import BatchDelta, GroupInfo, Plane, Profile, Slot, WorkerKey
from kvindexd.records import Block, field_of, pack
from kvindexd.registration import Registration
from kvindexd.store import Store
from kvindexd.store.records import Lease

PROFILE = Profile(
    groups=(GroupInfo(0, "full_attention", 16, 0, "main", 1),),
    planes=(Plane(0, "full_attention", 16, 0, 16),),
    slots=(Slot(0, 0, 16),),
)
_CHUNK = 4096


async def _fill(store_side: Valkey, entries: int, ranks: int, distinct: int) -> None:
    """Write the blocks of a fleet into the store: of `distinct` ranks through its own API, and
    copies of those for the others, whose content is then the same."""
    rng = np.random.default_rng(5)
    per_rank = entries // ranks
    async with Store(store_side.url) as store:
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
            if i < distinct:
                names = rng.integers(1, 2**63, per_rank, dtype=np.uint64).tolist()
                await _write(store, lease, names)
            else:
                _copy(store_side, WorkerKey("", f"w{i % distinct}", 0).store_id, key.store_id)


async def _write(store: Store, lease: Lease, names: list[int]) -> None:
    for n, low in enumerate(range(0, len(names), _CHUNK)):
        blocks: dict[bytes, bytes | None] = {}
        for at, name in enumerate(names[low : low + _CHUNK], low):
            length = (at % 1000 + 1) * 16
            parent = names[at - 1] if at % 1000 else 0
            blocks[field_of(name)] = pack(Block(name, length, name, parent, None, 1))
        delta = BatchDelta(
            seq=n,
            ts=time.time(),
            digest=n,
            blocks=blocks,
            profile=msgspec.msgpack.encode(PROFILE) if n == 0 else None,
            tier_blocks=(len(names), 0, 0, 0),
        )
        await store.apply(lease, [delta])


def _copy(store: Valkey, source: str, target: str) -> None:
    prefix = "kvx:{0}:"
    store.ask("COPY", f"{prefix}b:{source}", f"{prefix}b:{target}")
    fields = ("rv", "sq", "ts", "dg", "tb", "pf", "nb", "np")
    values = store.ask("HMGET", f"{prefix}w:{source}", *fields)
    pairs = [part for pair in zip(fields, values, strict=True) for part in pair]
    store.ask("HSET", f"{prefix}w:{target}", *pairs)


def bootstrap(entries: int, *, ranks: int = 64, distinct: int = 64) -> dict[str, Any]:
    """Fill a store, then start a `scorer` on it: seconds until its replica holds all of it, peak
    and final memory. Of `ranks` ranks `distinct` hold blocks of their own, the others the same."""
    store = Valkey()
    try:
        asyncio.run(_fill(store, entries, ranks, distinct))
        small = Ours("scorer", store.url + "/1")  # an empty database: what a process weighs anyway
        base = small.resident()
        small.stop()
        before, whole = store.cpu(), entries // ranks * ranks
        scorer = Ours("scorer", store.url)
        try:
            until(lambda: scorer.index_stats()["entries"] == whole, "everything is loaded", 600)
            seconds = time.monotonic() - scorer.started
            stats = scorer.index_stats()
            final = scorer.resident()
            peak = peak_bytes(scorer.process.pid)
            return {
                "entries": stats["entries"],
                "blocks": stats["blocks"],
                "seconds": round(seconds, 2),
                "entries_per_s": round(whole / seconds),
                "cpu_s": round(scorer.cpu(), 2),
                "store_cpu_s": round(store.cpu() - before, 2),
                "peak_mb": round(peak / 1e6),
                "final_mb": round(final / 1e6),
                "empty_process_mb": round(base / 1e6),
                "table_mb": round(stats["bytes"] / 1e6),
                "peak_over_final": round(peak / final, 2),
                "store_bytes_per_entry": round(store.resident() / entries, 1),
            }
        finally:
            scorer.stop()
    finally:
        store.stop()


def run(*, quick: bool, say: Callable[[str], None]) -> dict[str, Any]:
    """Growing stores: ranks with blocks of their own, and fleets where eight ranks share theirs."""
    out: dict[str, Any] = {}
    cases = [(256_000, 64)]
    if not quick:
        cases += [(1_000_000, 64), (6_400_000, 8), (10_000_000, 8)]
    for entries, distinct in cases:
        name = str(entries) if distinct == 64 else f"{entries}_shared_by_{64 // distinct}"
        out[name] = bootstrap(entries, distinct=distinct)
        say(f"bootstrap {name}: {json.dumps(out[name])}")
    return out
