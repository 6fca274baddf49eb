"""Checks of Redis or Valkey: fit for the index, near its limits, allowed what is needed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from kvindexd.doctor.facts import Facts, Missing, Redis, RedisServer
from kvindexd.doctor.report import Book, Hit, Outcome, Severity, Skip
from kvindexd.model import WorkerKey
from kvindexd.store.checks import MINIMUM, identity_of
from kvindexd.store.keys import SCHEMA
from kvindexd.store.replies import ACL

book = Book()
ERROR, WARNING, INFO = Severity

_LATENCY = 0.02
_SKEW = 1.0
_NEARLY_FULL, _FULL = 0.8, 0.95


def _servers(f: Facts) -> Iterator[RedisServer]:
    assert isinstance(f.redis, Redis)  # noqa: S101 - needed
    yield from f.redis.servers


def _number(info: Mapping[str, str], name: str) -> int:
    text = info.get(name, "")
    return int(text) if text.isdigit() else 0


@book.check(
    "redis-unreachable",
    ERROR,
    "redis_reach",
    provoked="the store does not answer, or refuses the login",
    cost="the index no longer follows the engines; after ingest.buffer_batches events are lost",
    fix="start the server, open its port, or correct redis.url (KVINDEXD_REDIS__URL) and password",
)
def redis_unreachable(f: Facts) -> Outcome:
    assert not isinstance(f.redis_reach, Missing)  # noqa: S101 - needed
    if f.redis_reach.problem:
        yield Hit(f.redis_reach.target, "no usable store", {"error": f.redis_reach.problem})


@book.check(
    "redis-old",
    ERROR,
    "redis",
    provoked=f"Redis is older than {'.'.join(map(str, MINIMUM))}",
    cost="kvindexd refuses to start on it",
    fix="install Redis 6.2 or newer, or any Valkey",
)
def redis_old(f: Facts) -> Outcome:
    for s in _servers(f):
        identity = identity_of(dict(s.info))
        version = tuple(int(p) for p in identity.version.split(".")[:2] if p.isdigit())
        if identity.server == "redis" and version < MINIMUM:
            yield Hit(s.where, f"Redis {identity.version}", {"version": identity.version})


@book.check(
    "redis-evicts",
    ERROR,
    "redis",
    provoked="maxmemory-policy is not noeviction",
    cost="the server deletes keys by itself: the index would silently be wrong, and kvindexd"
    " refuses to start",
    fix="redis-cli CONFIG SET maxmemory-policy noeviction, and in redis.conf",
)
def redis_evicts(f: Facts) -> Outcome:
    for s in _servers(f):
        policy = s.info.get("maxmemory_policy", "")
        if not policy:
            yield Skip(s.where, "INFO does not say maxmemory_policy")
        elif policy != "noeviction":
            yield Hit(s.where, f"maxmemory-policy is {policy}", {"maxmemory_policy": policy})


@book.check(
    "redis-full",
    WARNING,
    "redis",
    provoked=f"{_NEARLY_FULL:.0%} and more of maxmemory is used (error from {_FULL:.0%})",
    cost="when it is full new blocks are refused, and the index shrinks",
    fix="raise maxmemory, lower limits.blocks_per_rank or limits.feed_maxlen, or give kvindexd a"
    " server of its own",
)
def redis_full(f: Facts) -> Outcome:
    for s in _servers(f):
        used, limit = _number(s.info, "used_memory"), _number(s.info, "maxmemory")
        if limit and used >= _NEARLY_FULL * limit:
            severity = ERROR if used >= _FULL * limit else WARNING
            what = f"{used / limit:.0%} of maxmemory is used"
            evidence = {"used_memory": used, "maxmemory": limit}
            yield Hit(s.where, what, evidence, severity=severity)


@book.check(
    "redis-not-durable",
    WARNING,
    "redis",
    provoked="neither an append-only file nor snapshots are on",
    cost="after a restart of Redis the index is only what running ingesters still hold in memory",
    fix="redis-cli CONFIG SET appendonly yes, and in redis.conf",
)
def redis_not_durable(f: Facts) -> Outcome:
    for s in _servers(f):
        if "aof_enabled" not in s.info:
            yield Skip(s.where, "INFO has no section persistence")
        elif s.info["aof_enabled"] == "0" and "save" not in s.info:
            yield Skip(s.where, "CONFIG GET save is not allowed")
        elif s.info["aof_enabled"] == "0" and not s.info["save"]:
            evidence = {"aof_enabled": "0", "save": ""}
            yield Hit(s.where, "nothing is written to disk", evidence)


@book.check(
    "redis-write-error",
    ERROR,
    "redis",
    provoked="the last snapshot or append to the file failed",
    cost="the server may refuse all writes (MISCONF), and a restart loses the index",
    fix="free disk space in the server's `dir` and see its log; then redis-cli BGSAVE",
)
def redis_write_error(f: Facts) -> Outcome:
    for s in _servers(f):
        fields = ("rdb_last_bgsave_status", "aof_last_write_status")
        bad = {n: s.info[n] for n in fields if s.info.get(n, "ok") != "ok"}
        if bad:
            yield Hit(s.where, "the last write to disk failed", bad)


@book.check(
    "redis-slow",
    WARNING,
    "redis",
    provoked=f"the median PING takes {_LATENCY * 1000:g} ms and more",
    cost="each batch waits that long at least, and a burst longer",
    fix="move Redis close to the ingesters (one zone), and look at SLOWLOG GET and LATENCY DOCTOR",
)
def redis_slow(f: Facts) -> Outcome:
    for s in _servers(f):
        if s.latency >= _LATENCY:
            what = f"a PING takes {s.latency * 1000:.0f} ms"
            yield Hit(s.where, what, {"median_ms": round(s.latency * 1000, 2)})


@book.check(
    "redis-acl",
    ERROR,
    "redis",
    provoked="the user may not run a command that kvindexd uses",
    cost="what needs the command fails, perhaps only later",
    fix="give the user the rules that the finding names, by redis-cli ACL SETUSER",
)
def redis_acl(f: Facts) -> Outcome:
    for s in _servers(f):
        if isinstance(s.denied, Missing):
            yield Skip(s.where, s.denied.why)
        elif s.denied:
            names = ", ".join(s.denied)
            fix = f"redis-cli ACL SETUSER USER {ACL}"
            yield Hit(s.where, f"not allowed: {names}", {"denied": dict(s.denied)}, fix)


@book.check(
    "redis-replica",
    ERROR,
    "redis",
    provoked="redis.url names a read-only replica",
    cost="kvindexd refuses to start on it",
    fix="name the master, or use redis+sentinel://HOST:26379/SERVICE",
)
def redis_replica(f: Facts) -> Outcome:
    for s in _servers(f):
        if s.info.get("role", "master") != "master":
            evidence = {"role": s.info["role"], "master": s.info.get("master_host", "")}
            yield Hit(s.where, "a replica, which refuses writes", evidence)


@book.check(
    "redis-schema",
    ERROR,
    "redis",
    provoked="kvx:meta names a schema that this version does not know",
    cost="kvindexd refuses to start on it; an older one would misread the index",
    fix="run one version of kvindexd, or give each its own Redis",
)
def redis_schema(f: Facts) -> Outcome:
    for s in _servers(f):
        if s.schema and s.schema != str(SCHEMA):
            evidence = {"found": s.schema, "known": str(SCHEMA)}
            yield Hit(s.where, f"schema {s.schema}, known is {SCHEMA}", evidence)


@book.check(
    "redis-other",
    ERROR,
    "redis",
    "ranks",
    provoked="ranks that the server lists are not registered in the store of this configuration",
    cost="sidecars and scorers with these settings work on an index of their own",
    fix="give every kvindexd the same redis.url (KVINDEXD_REDIS__URL)",
)
def redis_other(f: Facts) -> Outcome:
    assert isinstance(f.redis, Redis)  # noqa: S101 - needed
    assert not isinstance(f.ranks, Missing)  # noqa: S101 - needed
    if isinstance(f.redis.ranks, Missing):
        yield Skip(f.redis.url, f.redis.ranks.why)
        return
    keys = [WorkerKey(r.after.namespace, r.after.worker_id, r.after.dp_rank) for r in f.ranks]
    absent = [str(k) for k in keys if k.store_id not in f.redis.ranks]
    if absent:
        what = f"{len(absent)} of {len(keys)} ranks are not in this store"
        yield Hit(f.redis.url, what, {"absent": absent[:20]})


@book.check(
    "clock-skew-redis",
    WARNING,
    "redis",
    provoked=f"the store's clock and this host's differ by {_SKEW:g} s and more",
    cost="ages in `workers show` are wrong by as much (leases go by the store's clock alone)",
    fix="run chrony or systemd-timesyncd on both hosts: timedatectl set-ntp true",
)
def clock_skew_redis(f: Facts) -> Outcome:
    for s in _servers(f):
        if abs(s.skew) - s.skew_error >= _SKEW:
            way = "ahead of" if s.skew > 0 else "behind"
            what = f"its clock is {abs(s.skew):.1f} s {way} this host's"
            yield Hit(s.where, what, {"skew_seconds": round(s.skew, 3)})


@book.check(
    "redis-clients",
    WARNING,
    "redis",
    provoked="80% and more of maxclients are connected",
    cost="further kvindexd processes are refused",
    fix="raise maxclients, or lower redis.pool_size",
)
def redis_clients(f: Facts) -> Outcome:
    for s in _servers(f):
        have, limit = _number(s.info, "connected_clients"), _number(s.info, "maxclients")
        if limit and have >= _NEARLY_FULL * limit:
            evidence = {"connected_clients": have, "maxclients": limit}
            yield Hit(s.where, f"{have} of {limit} clients", evidence)
