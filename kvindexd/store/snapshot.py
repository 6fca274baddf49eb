"""A worker rank's stored blocks, read in bounded chunks over one connection to one server."""

from __future__ import annotations

from collections.abc import AsyncIterator
from functools import partial
from typing import Any

from redis.exceptions import ResponseError

from kvindexd.model import WorkerKey
from kvindexd.store.core import Core
from kvindexd.store.errors import Diverged, NotRegistered, StoreUnavailable
from kvindexd.store.pool import Link, pack
from kvindexd.store.records import Snapshot
from kvindexd.store.replies import raise_reply
from kvindexd.store.topology import NETWORK_ERRORS

CHUNK = 2_000
"""Records per HSCAN: a fraction of a millisecond of the server's time."""


async def take_snapshot(core: Core, key: WorkerKey) -> Snapshot:
    """See Store.load."""
    slot, keys = core.where(key)
    h = await core.client.call(
        "load", slot, "HMGET", keys.worker, "reg", "ep", "rv", "sq", "ts", "dg", "pf", "st"
    )
    if h[0] is None:
        raise NotRegistered(f"worker {key} is not registered")
    epoch = int(h[1])
    return Snapshot(
        key=key,
        epoch=epoch,
        revision=int(h[2]),
        last_seq=int(h[3]),
        last_ts=float(h[4]),
        last_digest=int(h[5]),
        profile=h[6],
        state=h[7],
        blocks=partial(_scan, core, key, keys.blocks, epoch),
        parked=partial(_scan, core, key, keys.parked, epoch),
    )


async def _scan(
    core: Core, key: WorkerKey, name: bytes, epoch: int
) -> AsyncIterator[tuple[bytes, bytes]]:
    """All of one HASH. Pinned to one server process: a cursor means nothing to another one, whose
    buckets are in another order, and fields would be missed."""
    slot, keys = core.where(key)
    timeout = core.client.limits.timeout
    link: Link | None = None
    try:
        link = await core.client.dedicated(slot)
        cursor = b"0"
        while True:
            cursor, flat = await _one(
                core, link, pack("HSCAN", name, cursor, "COUNT", CHUNK), timeout
            )
            it = iter(flat)
            for field, record in zip(it, it, strict=True):
                yield field, record
            if cursor == b"0":
                break
        found = await _one(core, link, pack("HMGET", keys.worker, "ep", "rv"), timeout)
    except NETWORK_ERRORS as e:
        raise StoreUnavailable(f"loading {key} was interrupted: {e or type(e).__name__}") from e
    finally:
        if link is not None:
            await link.drop()
    if found[0] is None:
        raise NotRegistered(f"worker {key} was removed while it was loaded")
    if int(found[0]) != epoch:
        raise Diverged(str(key), (epoch, 0), (int(found[0]), int(found[1])))


async def _one(core: Core, link: Link, packed: bytes, within: float) -> Any:
    (reply,) = await link.call(packed, 1, within)
    if isinstance(reply, ResponseError):
        raise_reply(reply, "load", core.client.url)
    return reply
