"""Every Redis key that kvindexd uses, and nothing else that names one.

All keys of one worker rank carry one hash tag, `{S}`, S being its shard's number: they share
a slot, so that one Lua call may touch all of them, in a cluster too.
"""

from __future__ import annotations

from typing import NamedTuple
from zlib import crc32

from redis.crc import key_slot

from kvindexd.model import WorkerKey

SCHEMA = 1
"""Version of the layout of keys and records; raised with every change that old code misreads."""

META = b"kvx:meta"
"""HASH: schema, shards, birth (a random name of this data set: another one = data was lost)."""


class WorkerKeys(NamedTuple):
    """The keys of one worker rank, in the order in which every worker script takes them."""

    worker: bytes  # HASH: registration, epoch, revision, lease, profile, counters, ...
    blocks: bytes  # HASH: engine hash -> record
    parked: bytes  # HASH: the waiting room
    workers: bytes  # ZSET of the shard: store id -> lease expiry in ms of server time, 0 = none
    feed: bytes  # STREAM of the shard
    shard: bytes  # HASH of the shard: n, ms (last feed id), floor (highest epoch ever dropped)


def shard_of(key: WorkerKey, shards: int) -> int:
    """The shard that holds a worker rank; the same in every process and language."""
    return crc32(key.store_id.encode()) % shards


def feed_key(shard: int) -> bytes:
    """The feed stream of one shard."""
    return b"kvx:{%d}:feed" % shard


def workers_key(shard: int) -> bytes:
    """The ZSET of one shard's worker ranks."""
    return b"kvx:{%d}:workers" % shard


def shard_key(shard: int) -> bytes:
    """The HASH of one shard's own counters."""
    return b"kvx:{%d}:shard" % shard


def worker_key(shard: int, store_id: str) -> bytes:
    """The HASH of one worker rank."""
    return b"kvx:{%d}:w:%s" % (shard, store_id.encode())


def worker_keys(shard: int, store_id: str) -> WorkerKeys:
    """All keys that the scripts of one worker rank may touch."""
    name = store_id.encode()
    return WorkerKeys(
        worker_key(shard, store_id),
        b"kvx:{%d}:b:%s" % (shard, name),
        b"kvx:{%d}:p:%s" % (shard, name),
        workers_key(shard),
        feed_key(shard),
        shard_key(shard),
    )


def slot_of_shard(shard: int) -> int:
    """The cluster slot in which all keys of a shard live."""
    return key_slot(b"{%d}" % shard)


META_SLOT = key_slot(META)
