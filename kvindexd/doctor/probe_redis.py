"""Probes of the store: its own words, its clock, its latency, and what its ACL lets us do.

Nothing is left behind: writes are tried in one script, on a key that it removes again, or in a form
that does nothing on a key that is not there.
"""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import time
from typing import Any, NamedTuple

import msgspec
from redis.exceptions import RedisError, ResponseError

from kvindexd.config import Config, ConfigError
from kvindexd.doctor.facts import Missing, Reach, Redis, RedisServer, Stored
from kvindexd.model import Profile, WorkerKey
from kvindexd.store import Store, StoreError, StoreOptions
from kvindexd.store.checks import parse_info
from kvindexd.store.connect import Client, Limits
from kvindexd.store.errors import StoreDenied
from kvindexd.store.keys import META, META_SLOT, slot_of_shard, worker_keys
from kvindexd.store.pool import Link, pack
from kvindexd.store.replies import has_code
from kvindexd.store.url import parse_url, with_credentials

_PINGS = 15
_TIMES = 5
_PROFILES = msgspec.msgpack.Decoder(Profile)

_REFUSED = (b"NOPERM", b"permission", b"ACL failure", b"The user executing the script")
"""What servers of all versions say inside a script that lacks a right."""
_NOBODY = "/kvindexd-doctor/0"
"""A rank's name that is nobody's."""

Command = tuple[str | bytes | int, ...]


class Look(NamedTuple):
    """What was found of the store. `stored`: by the rank's name in it."""

    reach: Reach
    redis: Redis | Missing
    stored: dict[str, Stored]


def reads(shard: int) -> list[Command]:
    """Every command that kvindexd runs itself, on keys that it could have and has not."""
    k = worker_keys(shard, _NOBODY)
    return [
        ("PING",),
        ("TIME",),
        ("INFO",),
        ("EVAL", "return 0", 0),
        ("EVALSHA", "0" * 40, 0),
        ("HGET", k.worker, "f"),
        ("HMGET", k.worker, "f"),
        ("HGETALL", k.worker),
        ("HLEN", k.blocks),
        ("HSCAN", k.blocks, 0),
        ("ZSCORE", k.workers, _NOBODY),
        ("ZRANGE", k.workers, 0, 0),
        ("XREAD", "COUNT", 1, "STREAMS", k.feed, "$"),
        ("XREVRANGE", k.feed, "+", "-", "COUNT", 1),
        ("MEMORY", "USAGE", k.blocks),
    ]


SCRIPTED: tuple[tuple[str, ...], ...] = (
    ("UNLINK", "KEY"),
    ("EXISTS", "KEY"),
    ("HSET", "KEY", "f", "1"),
    ("HINCRBY", "KEY", "f", "1"),
    ("HEXISTS", "KEY", "f"),
    ("HDEL", "KEY", "f"),
    ("ZADD", "GONE", "XX", "0", "m"),
    ("ZREM", "GONE", "m"),
    ("XADD", "GONE", "NOMKSTREAM", "*", "f", "v"),
)
"""Every command that only kvindexd's scripts run. Without UNLINK none of the rest is tried."""

_TRY = """
local out, n = {}, tonumber(ARGV[1])
local i = 2
for _ = 1, n do
  local size = tonumber(ARGV[i])
  local command = {}
  for j = 1, size do
    local word = ARGV[i + j]
    command[j] = word == 'KEY' and KEYS[1] or word == 'GONE' and KEYS[2] or word
  end
  i = i + size + 1
  local reply = redis.pcall(unpack(command))
  local failed = type(reply) == 'table' and reply.err
  if failed then out[#out + 1] = command[1]; out[#out + 1] = reply.err end
  if failed and command[1] == 'UNLINK' then return out end
end
redis.pcall('UNLINK', KEYS[1])
return out
"""


async def look(config: Config, embedded: str, within: float) -> Look:
    """Everything about the store that `config` names; `embedded`: URL where it names none."""
    r = config.redis
    try:
        text = with_credentials(r.url, r.username, r.password()) if r.url else embedded
        url = parse_url(text)
    except (ValueError, ConfigError) as e:
        return Look(Reach("redis.url", str(e)), Missing(str(e)), {})
    limits = Limits(4, within, within, 2 * within)
    client = Client(url, limits)
    try:
        async with asyncio.timeout(10 * within):
            shards = await _shards(client, config.redis.shards)
            servers = await _servers(client, shards, within)
            ranks, stored = await _ranks(text, shards, within)
    except (StoreError, RedisError, OSError, TimeoutError) as e:
        why = str(e) or f"no answer within {10 * within:g} s"
        return Look(Reach(str(url), why), Missing(f"the store does not answer: {why}"), {})
    finally:
        await client.aclose()
    return Look(Reach(str(url)), Redis(str(url), servers, ranks), stored)


async def _shards(client: Client, configured: int) -> int:
    try:
        found = await client.call("doctor", META_SLOT, "HGET", META, "shards")
    except StoreDenied:
        return configured  # what exactly is refused is found out below
    return int(found) if found else configured


async def _servers(client: Client, shards: int, within: float) -> list[RedisServer]:
    """Each server once, with one of the shards that it holds."""
    found: dict[str, int] = {}
    for shard in range(shards):
        found.setdefault(str(await client.endpoint(slot_of_shard(shard))), shard)
    out = [await _server(client, where, shard, within) for where, shard in found.items()]
    with contextlib.suppress(StoreDenied):  # told as what the ACL lacks
        schema = await client.call("doctor", META_SLOT, "HGET", META, "schema")
        out[0].schema = schema.decode() if schema else ""
    return out


async def _server(client: Client, where: str, shard: int, within: float) -> RedisServer:
    link = await client.dedicated(slot_of_shard(shard))
    try:
        latency = []
        for _ in range(_PINGS):
            began = time.perf_counter()
            await link.call(pack("PING"), 1, within)
            latency.append(time.perf_counter() - began)
        skew, error = await _skew(link, within)
        info = await _info(link, within)
        denied = await _denied(link, shard, within)
    finally:
        await link.drop()
    return RedisServer(
        where=where,
        info=info,
        latency=statistics.median(latency),
        skew=skew,
        skew_error=error,
        denied=denied,
    )


async def _one(link: Link, command: Command, within: float) -> Any:
    return (await link.call(pack(*command), 1, within))[0]


async def _skew(link: Link, within: float) -> tuple[float, float]:
    """(their clock minus ours, half of the round trip), of the quickest of a few."""
    best = (float("inf"), 0.0)
    for _ in range(_TIMES):
        before = time.time()
        reply = await _one(link, ("TIME",), within)
        after = time.time()
        if isinstance(reply, ResponseError):
            return 0.0, 0.0
        theirs = int(reply[0]) + int(reply[1]) / 1e6
        best = min(best, ((after - before) / 2, theirs - (before + after) / 2))
    return best[1], best[0]


async def _info(link: Link, within: float) -> dict[str, str]:
    reply, save = await link.call(pack("INFO") + pack("CONFIG", "GET", "save"), 2, within)
    info = {} if isinstance(reply, ResponseError) else parse_info(reply.decode(errors="replace"))
    if isinstance(save, list) and len(save) == 2:
        info["save"] = save[1].decode()
    return info


async def _denied(link: Link, shard: int, within: float) -> dict[str, str] | Missing:
    """Commands that the server would not run for us, with what it says."""
    asked = reads(shard)
    replies = await link.call(b"".join(pack(*c) for c in asked), len(asked), within)
    denied = {
        str(command[0]): str(reply)
        for command, reply in zip(asked, replies, strict=True)
        if isinstance(reply, ResponseError) and has_code(reply, ("NOPERM",))
    }
    if "EVAL" in denied:
        return denied
    k = worker_keys(shard, _NOBODY)
    words = [str(w) for c in SCRIPTED for w in (len(c), *c)]
    script = pack("EVAL", _TRY, 2, k.worker, k.parked, len(SCRIPTED), *words)
    reply = (await link.call(script, 1, within))[0]
    if isinstance(reply, ResponseError):
        return denied or Missing(f"the script that tries writes failed: {reply}")
    pairs = zip(reply[::2], reply[1::2], strict=True)
    return denied | {
        name.decode(): error.decode()
        for name, error in pairs
        if any(words in error for words in _REFUSED)
    }


async def _ranks(
    url: str, shards: int, within: float
) -> tuple[frozenset[str] | Missing, dict[str, Stored]]:
    # Not opened: that would write kvx:meta where it is absent, and refuse servers whose faults
    # are findings here.
    store = Store(url, StoreOptions(shards=shards, timeout=within, deadline=2 * within))
    stored = {}
    try:
        for r in await store.list_workers():
            profile = _PROFILES.decode(r.profile) if r.profile else Profile()
            parked = (await store.size_of(r.key)).parked
            stored[r.key.store_id] = Stored(r.last_seq, r.last_digest, parked, profile)
    except (StoreError, msgspec.MsgspecError) as e:
        return Missing(str(e)), {}
    finally:
        await store.close()
    return frozenset(stored), stored


def key_name(namespace: str, worker_id: str, rank: int) -> str:
    """A rank's name in the store."""
    return WorkerKey(namespace, worker_id, rank).store_id
