"""What `doctor` learns of real servers of both kinds, and that it leaves nothing behind."""

from __future__ import annotations

import pytest
import servers
from doctor_facts import healthy
from servers import Server

from kvindexd.config import Config, load
from kvindexd.doctor.catalogue import CHECKS
from kvindexd.doctor.facts import Missing, Redis
from kvindexd.doctor.probe_redis import look
from kvindexd.doctor.report import chosen, judge
from kvindexd.model import WorkerKey
from kvindexd.store import Store
from kvindexd.store.replies import ACL

KEY = WorkerKey("", "w0", 0)


def config(url: str) -> Config:
    return load(env={}, flags={"redis.url": url}).config


def user(server: Server, *rules: str) -> str:
    """URL of a user with what kvindexd needs, and further rules."""
    server("ACL", "SETUSER", "doc", "reset", "on", ">pw", *ACL.split(), *rules)
    return server.url.replace("redis://", "redis://doc:pw@")


async def seen(url: str) -> Redis:
    found = await look(config(url), "", 2.0)
    assert found.reach.problem == ""
    assert isinstance(found.redis, Redis)
    return found.redis


async def test_the_documented_rights_are_enough(redis_server: Server) -> None:
    async with Store(redis_server.url) as store:
        await store.register(KEY, b"r", False, 0.0)
    redis = await seen(user(redis_server))
    (one,) = redis.servers
    assert one.denied == {}
    assert redis.ranks == frozenset({KEY.store_id})
    assert one.schema == "1"
    assert abs(one.skew) < 0.5
    assert 0 < one.latency < 1
    assert one.info["role"] == "master"


@pytest.mark.parametrize("command", ["hset", "unlink", "xadd", "zadd", "xread", "hscan"])
async def test_a_right_that_is_missing_is_named(redis_server: Server, command: str) -> None:
    (one,) = (await seen(user(redis_server, f"-{command}"))).servers
    assert isinstance(one.denied, dict)
    assert set(one.denied) == {command.upper()}


async def test_keys_that_are_not_ours_to_write_are_noticed(redis_server: Server) -> None:
    redis_server("ACL", "SETUSER", "doc", "reset", "on", ">pw", "+@all", "~other:*")
    (one,) = (await seen(redis_server.url.replace("redis://", "redis://doc:pw@"))).servers
    assert isinstance(one.denied, dict)
    assert {"HGETALL", "XREAD"} <= set(one.denied)


async def test_nothing_is_left_behind(redis_server: Server) -> None:
    redis = await seen(redis_server.url)
    assert redis_server("DBSIZE") == 0
    assert redis.servers[0].schema == ""
    assert redis.ranks == frozenset()


async def test_a_server_that_refuses_the_login_or_is_away(redis_server: Server) -> None:
    wrong = redis_server.url.replace("redis://", "redis://nobody:pw@")
    for url in (wrong, f"redis://127.0.0.1:{servers.free_port()}", "redis://"):
        found = await look(config(url), "", 0.3)
        assert found.reach.problem
        assert isinstance(found.redis, Missing)
        assert "pw@" not in found.reach.problem + found.redis.why


async def test_faults_of_a_server_are_found(redis_server: Server) -> None:
    """Those that a running server can be brought to have."""
    async with Store(redis_server.url) as store:
        await store.register(KEY, b"r", False, 0.0)
    redis_server("HSET", "kvx:meta", "schema", 99)
    redis_server("CONFIG", "SET", "maxmemory-policy", "allkeys-lru")
    most = int(redis_server("CONFIG", "GET", "maxclients")[1])
    redis_server("CONFIG", "SET", "maxclients", 10)
    links = [redis_server.raw() for _ in range(7)]
    try:
        facts = healthy()
        facts.redis = await seen(redis_server.url)
        report = judge(chosen(CHECKS, ["redis-*", "clock-skew-redis"]), facts)
    finally:
        for link in links:
            link.close()
        redis_server("CONFIG", "SET", "maxclients", most)
    assert {f.id for f in report.findings} == {
        "redis-schema",
        "redis-evicts",
        "redis-clients",
        "redis-not-durable",
        "redis-other",
    }
    (other,) = [f for f in report.findings if f.id == "redis-other"]
    assert other.evidence == {"absent": ["w1#0"]}


async def test_a_replica_is_noticed() -> None:
    with servers.start_valkey() as master, servers.start_valkey() as replica:
        replica("REPLICAOF", "127.0.0.1", master.port)
        servers.wait_until(lambda: b"role:slave" in replica("INFO", "replication"))
        facts = healthy()
        facts.redis = await seen(replica.url)
    (hit,) = judge(chosen(CHECKS, ["redis-replica"]), facts).findings
    assert hit.evidence == {"role": "slave", "master": "127.0.0.1"}
