"""Reading what scorers published of the load on worker ranks (`Store.report_load`)."""

from __future__ import annotations

from kvindexd.model import WorkerKey
from kvindexd.store.connect import Client
from kvindexd.store.keys import slot_of_shard, worker_key, workers_key
from kvindexd.store.records import LoadReport, loads_of

_CHUNK = 64


async def read_loads(client: Client, shards: int) -> dict[WorkerKey, dict[str, LoadReport]]:
    """Source -> report, per rank that has any: one small command per rank, in batches."""
    out: dict[WorkerKey, dict[str, LoadReport]] = {}
    for shard in range(shards):
        slot = slot_of_shard(shard)
        ranks = await client.call("loads", slot, "ZRANGE", workers_key(shard), 0, -1)
        for start in range(0, len(ranks), _CHUNK):
            names = [rank.decode() for rank in ranks[start : start + _CHUNK]]
            # A rank's record is a small hash: one step of the scan sees all of it.
            scans = [
                ("HSCAN", worker_key(shard, n), 0, "MATCH", "l:*", "COUNT", 10_000) for n in names
            ]
            now, *found = await client.call_many("loads", slot, [("TIME",), *scans])
            now_ms = int(now[0]) * 1000 + int(now[1]) // 1000
            for name, (_, flat) in zip(names, found, strict=True):
                if flat:
                    out[WorkerKey.parse(name)] = loads_of(flat, now_ms)
    return out
