"""Reported faults of load and of Redis, seen through the whole daemon.

Each docstring starts with the row of docs/field-cases.md that it covers.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest
import servers
from daemon import Daemon
from reliability import QUICK, counter, matched, other, prompt, removed, running, stored
from test_field_rpc import rss
from test_reliability_redis import proxy
from test_store_ha import move_slot

from kvindexd import chain
from kvindexd.rpc.budget import Admission
from kvindexd.rpc.errors import TimeUp, TooLarge
from kvindexd.store.keys import slot_of_shard
from kvindexd.testing.engine import FakeEngine
from kvindexd.v1 import index_pb2 as pb

CLEAR = {"type": "AllBlocksCleared"}


@contextlib.contextmanager
def started(url: str, **settings: Any) -> Iterator[Daemon]:
    """A daemon of its own for one test."""
    one = Daemon(**QUICK, redis__url=url, **settings)
    with running(one):
        yield one


@pytest.fixture(scope="module")
def redis() -> Iterator[servers.Server]:
    with servers.start_valkey() as server:
        yield server


@pytest.fixture(scope="module")
def daemon(redis: servers.Server) -> Iterator[Daemon]:
    with running(one := Daemon(**QUICK, redis__url=redis.url)):
        yield one


def follow(daemon: Daemon, engine: FakeEngine, name: str, **fields: Any) -> None:
    daemon.register(name, engine.endpoint(), replay_endpoint=engine.replay_endpoint(), **fields)
    engine.wait_subscribed()


def commands(redis: servers.Server) -> dict[str, int]:
    """How often each command was executed so far, those of scripts included."""
    found = {}
    for line in redis("INFO", "commandstats").decode().splitlines():
        if line.startswith("cmdstat_"):
            name, _, rest = line[8:].partition(":")
            found[name] = int(rest.partition("calls=")[2].partition(",")[0])
    return found


def large(first: int, count: int) -> dict[str, Any]:
    """A root store of many blocks that have nothing in common with other stores."""
    tokens = [(first * 31 + i) % 2**32 for i in range(16 * count)]
    return stored(0, count) | {
        "token_ids": tokens,
        "block_hashes": [first + n for n in range(count)],
    }


# -- load -----------------------------------------------------------------------------------------


def test_field_long_prompts_at_once_cost_milliseconds(
    daemon: Daemon, redis: servers.Server
) -> None:
    """M1: 150 callers with prompts of 55,000 tokens and 16 candidates; nothing asks Redis."""
    with FakeEngine(replay_port=None) as engine:
        for n in range(16):
            daemon.register(f"m1-{n}", engine.endpoint(), model="m1")
        engine.wait_subscribed(16)
        engine.publish([large(10**6, 2000)])
        for n in range(16):
            daemon.until_seq(f"m1-{n}", 0)
        tokens = [(10**6 * 31 + i) % 2**32 for i in range(55_000)]
        packed = pb.Prompt(model="m1", token_ids=chain.pack_tokens(tokens))
        request = pb.ScoreWorkersRequest(prompt=packed)
        before = commands(redis)
        ends: list[float] = []
        stub, began = daemon.index, time.monotonic()
        calls = [stub.ScoreWorkers.future(request, timeout=30) for _ in range(150)]
        for call in calls:
            call.add_done_callback(lambda _: ends.append(time.monotonic() - began))
        for call in calls:
            assert [s.matched_tokens for s in call.result().scores] == [32_000] * 16
        daemon.until(lambda: len(ends) == 150, "all ended")
        asked = {k: n - before.get(k, 0) for k, n in commands(redis).items()}
        assert max(ends) / 150 < 0.02, f"{max(ends) * 1000 / 150:.1f} ms each"
        assert asked.get("hget", 0) + asked.get("hmget", 0) < 150, asked
        for n in range(16):
            request_ = pb.DeregisterWorkerRequest(worker_id=f"m1-{n}")
            daemon.admin.DeregisterWorker(request_, timeout=10)


def test_field_callers_whose_time_is_up_cost_nothing(daemon: Daemon) -> None:
    """M2: work that nobody waits for any more is not started."""
    with FakeEngine(replay_port=None) as engine:
        daemon.register("m2", engine.endpoint(), model="m2")
        request = pb.ScoreWorkersRequest(
            prompt=pb.Prompt(model="m2", token_ids=bytes(4 * 16 * 1024))
        )
        daemon.index.ScoreWorkers(request, timeout=10)
        name = 'kvindexd_score_requests_total{code="OK"}'
        before = daemon.metric(name)
        daemon.pause()
        try:
            stub = daemon.index
            calls = [stub.ScoreWorkers.future(request, timeout=0.2) for _ in range(300)]
            codes = {call.exception().code() for call in calls}
        finally:
            daemon.resume()
        assert codes == {grpc.StatusCode.DEADLINE_EXCEEDED}
        began = time.monotonic()
        daemon.index.ScoreWorkers(request, timeout=10)
        assert time.monotonic() - began < 5
        # Some are handed to the service together with their cancellation.
        assert daemon.metric(name) - before <= 150


def test_field_a_crowd_with_deadlines_of_a_millisecond_is_shed(daemon: Daemon) -> None:
    """M2: 1,500 callers with 1,024-block prompts; the next patient one is served at once."""
    with FakeEngine(replay_port=None) as engine:
        daemon.register("crowd", engine.endpoint(), model="crowd")
        engine.wait_subscribed()
        engine.publish([stored(0, 3)])
        daemon.until_seq("crowd", 0)
        prompt_ = pb.Prompt(model="crowd", token_ids=chain.pack_tokens([*range(16 * 1024)]))
        request = pb.ScoreWorkersRequest(prompt=prompt_)
        stub = daemon.index
        calls = [stub.ScoreWorkers.future(request, timeout=0.001) for _ in range(1500)]
        ends = Counter(_end(call) for call in calls)
        shed = (grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.RESOURCE_EXHAUSTED)
        assert set(ends) <= {48, *shed}, ends
        began = time.monotonic()
        answer = stub.ScoreWorkers(request, timeout=10)
        assert answer.scores[0].matched_tokens == 48
        assert time.monotonic() - began < 3


def _end(call: Any) -> Any:
    """The matched tokens of a call, or the status that it failed with."""
    error = call.exception()
    return call.result().scores[0].matched_tokens if error is None else error.code()


def test_field_calls_that_waited_too_long_are_not_started() -> None:
    """M2: neither are they counted among those under way."""
    admission = Admission(2)
    with pytest.raises(TimeUp) as caught, admission.enter(0.0):
        raise AssertionError("it was let in")
    assert caught.value.code is grpc.StatusCode.DEADLINE_EXCEEDED
    assert admission.under_way == 0
    with admission.enter(None), admission.enter(0.1), pytest.raises(TooLarge), admission.enter(1.0):
        pass
    assert admission.under_way == 0


def test_field_stores_and_removals_of_two_workers_do_not_undo_each_other(daemon: Daemon) -> None:
    """M4: the same block removed by one and stored by the other at the same instant, many times."""
    with FakeEngine() as one, FakeEngine() as two:
        follow(daemon, one, "m4-1")
        follow(daemon, two, "m4-2")
        for n in range(100):
            one.publish([stored(0)])
            two.publish([removed(0)] if n else [])
            one.publish([removed(0)])
            two.publish([stored(0)])
            if n % 10 == 9:
                daemon.until_seq("m4-1", 2 * n + 1)
                daemon.until_seq("m4-2", 2 * n + 1)
                found = [matched(daemon, 1, name) for name in ("m4-1", "m4-2")]
                assert found == [0, 1], f"round {n}"


def test_field_ten_thousand_single_block_events_in_one_batch(daemon: Daemon) -> None:
    """M2, M5: answers about others go on while it is applied, and it is applied whole."""
    with FakeEngine(replay_port=None) as engine, FakeEngine(replay_port=None) as calm:
        daemon.register("big", engine.endpoint())
        daemon.register("calm", calm.endpoint())
        engine.wait_subscribed()
        calm.wait_subscribed()
        calm.publish([stored(0)])
        daemon.until_seq("calm", 0)
        took = [_timed(daemon) for _ in range(20)]
        engine.publish([stored(n) for n in range(10_000)])
        while daemon.worker("big").last_seq < 0:
            took.append(_timed(daemon))
            assert len(took) < 5000
        assert daemon.worker("big").blocks["device"] == 10_000
        assert matched(daemon, 10_000, "big") == 10_000
        assert max(took) < 0.5


def _timed(daemon: Daemon) -> float:
    began = time.monotonic()
    assert matched(daemon, 1, "calm") == 1
    return time.monotonic() - began


def test_field_a_flood_while_redis_is_away_is_bounded_and_repaired() -> None:
    """M5: what does not fit is dropped, seen as a gap, and replayed once Redis is back."""
    with servers.start_valkey() as redis, FakeEngine() as engine:
        one = Daemon(
            **QUICK,
            redis__url=redis.url,
            ingest__rcvhwm=200,
            ingest__buffer_batches=20_000,
        )
        with running(one):
            follow(one, engine, "w")
            engine.publish([stored(0)])
            one.until_seq("w", 0)
            assert one.process is not None
            before = rss(one.process.pid)
            redis.pause()
            try:
                for n in range(1, 5000):
                    engine.publish([stored(n, 4)])
                grown = rss(one.process.pid) - before
                assert grown < 64 << 20, f"{grown >> 20} MiB"
                assert one.score(prompt(1), include_stale=True)["w"].matched_tokens == 16
            finally:
                redis.resume()
            engine.publish([stored(0)])
            one.until_seq("w", 5000)
            one.until(lambda: matched(one, 5003) == 5003, "whole again")
            assert counter(one, "lost_batches") == 0


# -- Redis ----------------------------------------------------------------------------------------


def test_field_a_clear_lists_no_keys_and_delays_nobody(
    daemon: Daemon, redis: servers.Server
) -> None:
    """R2: of a worker with 40,000 blocks; another's writes and queries go on meanwhile."""
    with FakeEngine() as engine, FakeEngine() as calm:
        follow(daemon, engine, "r2")
        follow(daemon, calm, "r2-calm")
        for n in range(20):
            engine.publish([large(10**7 + 10**4 * n, 2000)])
        calm.publish([stored(0)])
        daemon.until_seq("r2", 19)
        daemon.until_seq("r2-calm", 0)
        engine.publish([CLEAR])
        began = time.monotonic()
        calm.publish([stored(1)])
        daemon.until_seq("r2-calm", 1)
        daemon.until_seq("r2", 20)
        assert time.monotonic() - began < 3
        assert daemon.worker("r2").blocks["device"] == 0
        assert matched(daemon, 2, "r2-calm") == 2
        executed = commands(redis)
        assert not {"keys", "scan", "flushdb", "del"} & executed.keys(), executed


def test_field_a_store_of_two_thousand_blocks_is_one_round_trip() -> None:
    """R4: behind a Redis that takes 20 ms to answer; a round trip per block would take 40 s."""
    with (
        servers.start_valkey() as redis,
        proxy(redis.port) as between,
        FakeEngine() as engine,
        started(between.url) as one,
    ):
        follow(one, engine, "w")
        engine.publish([stored(0)])
        one.until_seq("w", 0)
        between.delay = 0.02
        began = time.monotonic()
        engine.publish([stored(1, 2000)])
        one.until_seq("w", 1)
        assert matched(one, 2001) == 2001
        assert time.monotonic() - began < 2
        engine.publish([removed(*range(2001))])
        one.until_seq("w", 2)
        assert time.monotonic() - began < 4


def test_field_more_callers_than_connections_wait_their_turn(redis: servers.Server) -> None:
    """R8: 200 writes at once over two connections; none is refused."""
    with running(one := Daemon("scorer", **QUICK, redis__url=redis.url, redis__pool_size=2)):

        def add(n: int) -> str:
            return str(one.register(f"r8-{n}", "tcp://127.0.0.1:9", model="r8").worker_id)

        with ThreadPoolExecutor(50) as pool:
            assert sorted(pool.map(add, range(200))) == sorted(f"r8-{n}" for n in range(200))


def test_field_a_clear_that_redis_missed_comes_before_what_follows_it() -> None:
    """R13: the engine restarts while Redis is away: nothing of its former life is left."""
    with servers.start_valkey() as redis, FakeEngine() as engine, started(redis.url) as one:
        follow(one, engine, "w")
        engine.publish([stored(0, 4)])
        one.until_seq("w", 0)
        assert matched(one, 4) == 4
        redis.pause()
        try:
            engine.restart()
            engine.wait_subscribed()
            engine.publish([other(9000, 77)])
            engine.publish([CLEAR])
            engine.publish([other(8000, 78)])
        finally:
            redis.resume()
        one.until_seq("w", 2)
        found = [matched(one, 1, "w", first) for first in (0, 9000, 8000)]
        assert found == [0, 0, 1]
        one.kill()
        one.start()
        one.until_seq("w", 2)
        assert [matched(one, 1, "w", first) for first in (0, 9000, 8000)] == [0, 0, 1]


def test_field_a_cluster_that_moves_its_slots_is_ridden_out() -> None:
    """R9: three masters; stores, a clear, and a migration while queries go on."""
    with (
        servers.start_cluster(servers.VALKEY) as cluster,
        FakeEngine() as engine,
        started(cluster.url) as one,
    ):
        follow(one, engine, "w")
        engine.publish([stored(0, 10)])
        one.until_seq("w", 0)
        slot = slot_of_shard(0)
        source = cluster.owner(slot)
        target = next(n for n in cluster.nodes if n is not source)
        moving = threading.Thread(target=move_slot, args=(cluster, slot, source, target))
        moving.start()
        for n in range(10, 60):
            engine.publish([stored(n)])
            assert matched(one, 10) >= 10
        moving.join(30)
        one.until_seq("w", 50)
        assert cluster.owner(slot) is target
        assert matched(one, 60) == 60
        engine.publish([CLEAR, stored(0)])
        one.until_seq("w", 51)
        assert matched(one, 60) == 1
        assert counter(one, "lost_batches") == 0
