"""Redis away, slow, full, unfit, or answering into a cut connection: the whole daemon's part."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Iterator

import grpc
import pytest
import servers
from daemon import Daemon
from proxies import Proxy
from reliability import QUICK, counter, matched, removed, running, state, stored, twice

from kvindexd.testing.engine import FakeEngine
from kvindexd.v1 import index_pb2 as pb


@pytest.fixture(scope="module")
def redis() -> Iterator[servers.Server]:
    with servers.start_valkey() as server:
        yield server


@pytest.fixture
def url(redis: servers.Server) -> str:
    redis("FLUSHALL")
    redis("CONFIG", "SET", "maxmemory", "0")
    redis("CONFIG", "SET", "maxmemory-policy", "noeviction")
    return redis.url


@contextlib.contextmanager
def proxy(port: int) -> Iterator[Proxy]:
    """A proxy in front of a server, in a thread of its own."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    one = Proxy(port)
    asyncio.run_coroutine_threadsafe(one.__aenter__(), loop).result(10)
    try:
        yield one
    finally:
        asyncio.run_coroutine_threadsafe(one.__aexit__(None, None, None), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.close()


def test_a_silent_redis_stops_nothing_but_writes(url: str, redis: servers.Server) -> None:
    """No FIN, no RST, no answer: only timeouts help."""
    daemon = Daemon(**QUICK, redis__url=url)
    with FakeEngine() as engine, running(daemon):
        daemon.register("w", engine.endpoint(), replay_endpoint=engine.replay_endpoint())
        engine.wait_subscribed()
        engine.publish([stored(0, 3)])
        daemon.until_seq("w", 0)
        redis.pause()
        try:
            silent = time.monotonic()
            slowest = 0.0
            for n in range(3, 30):
                engine.publish([stored(n)])
                before = time.monotonic()
                kept = daemon.score([*range(48), 1], include_stale=True)["w"]
                slowest = max(slowest, time.monotonic() - before)
                assert kept.matched_tokens == 48
            assert slowest < 0.5, "answers come from memory"
            with pytest.raises(grpc.RpcError) as caught:
                daemon.register("new", "tcp://127.0.0.1:1")
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
            assert time.monotonic() - silent < 10
            daemon.until(lambda: matched(daemon, 3) == -1, "stale by age", 10)
            assert state(daemon) == "STALE"
            assert daemon.events("store_unavailable")
        finally:
            redis.resume()
        daemon.until_seq("w", 27)
        daemon.until(lambda: matched(daemon, 30) == 30, "nothing was lost")
        assert counter(daemon, "event:BlockStored") == 28
        assert counter(daemon, "gaps") == 0, "it waited in memory"
        daemon.until(lambda: daemon.events("store_back"), "told once it was back")
        assert len(daemon.events("store_unavailable")) <= 2, "a change of state, not a flood"


def test_lost_replies_write_nothing_twice(url: str, redis: servers.Server) -> None:
    """The server did it, the client cannot know: repeated, it must not count again."""
    with proxy(redis.port) as between, FakeEngine() as engine:
        daemon = Daemon(**QUICK, redis__url=between.url)
        with running(daemon):
            daemon.register("w", engine.endpoint(), replay_endpoint=engine.replay_endpoint())
            engine.wait_subscribed()
            for n in range(40):
                if n % 4 == 1:
                    between.lose_replies += 1
                if n % 4 == 3:
                    between.lose_requests += 1
                engine.publish(twice(n))
                time.sleep(0.01)  # spread over calls, so that many of them are cut
            daemon.until_seq("w", 39)
            assert between.lost >= 5
            daemon.until(lambda: matched(daemon, 40) == 40, "whole")
            assert counter(daemon, "event:BlockStored") == 79
            assert counter(daemon, "rewrites") == 0, "its own writes are recognised"
            engine.publish([removed(*range(1, 40))])
            daemon.until_seq("w", 40)
            assert matched(daemon, 40) == 40
            engine.publish([removed(*range(40))])
            daemon.until_seq("w", 41)
            assert daemon.worker("w").blocks["device"] == 0


def test_cancelled_calls_never_get_or_leave_a_wrong_reply(url: str, redis: servers.Server) -> None:
    """Two connections, fifty callers with a deadline shorter than the server's delay."""
    with proxy(redis.port) as between:
        daemon = Daemon(**QUICK, redis__url=between.url, redis__pool_size=2)
        with running(daemon):
            between.delay = 0.02

            def request(i: int) -> pb.RegisterWorkerRequest:
                worker = pb.Worker(
                    worker_id=f"w{i}",
                    model="m",
                    address=f"h{i}:1",
                    kv_events_endpoint="tcp://127.0.0.1:1",
                )
                return pb.RegisterWorkerRequest(worker=worker)

            def calls(deadline: float) -> list[grpc.Future]:
                return [
                    daemon.admin.RegisterWorker.future(request(i), timeout=deadline)
                    for i in range(50)
                ]

            cut = 0
            for call in calls(0.1):
                if call.exception() is not None:
                    assert call.code() is grpc.StatusCode.DEADLINE_EXCEEDED
                    cut += 1
            assert cut > 10
            for i, call in enumerate(calls(20)):
                worker = call.result().worker
                assert (worker.worker_id, worker.address) == (f"w{i}", f"h{i}:1")
            between.delay = 0.0

            def listed() -> bool:
                found = daemon.admin.ListWorkers(
                    pb.ListWorkersRequest(include_stale=True), timeout=10
                ).workers
                return sorted(w.address for w in found) == sorted(f"h{i}:1" for i in range(50))

            daemon.until(listed, "all fifty, each with its own address")


def test_a_full_redis_is_told_and_still_takes_removals(url: str, redis: servers.Server) -> None:
    daemon = Daemon(**QUICK, redis__url=url)
    with FakeEngine() as engine, running(daemon):
        daemon.register("w", engine.endpoint(), replay_endpoint=engine.replay_endpoint())
        engine.wait_subscribed()
        engine.publish([stored(0, 4)])
        daemon.until_seq("w", 0)
        used = int(redis("INFO", "memory").split(b"used_memory:")[1].split(b"\r")[0])
        redis("CONFIG", "SET", "maxmemory", max(1, used - 100_000))
        engine.publish([stored(4, 4)])
        daemon.until(lambda: daemon.events("store_full"), "told")
        assert "not indexed" in daemon.events("store_full")[0]["cost"]
        daemon.until_seq("w", 1)
        assert matched(daemon, 8) == 4, "what is in stays, what is new does not get in"
        engine.publish([removed(2, 3)])
        daemon.until_seq("w", 2)
        assert matched(daemon, 8) == 2, "removals work"
        redis("CONFIG", "SET", "maxmemory", "0")
        engine.publish([{"type": "AllBlocksCleared"}])
        engine.publish([stored(0, 4)])
        daemon.until_seq("w", 4)
        daemon.until(lambda: matched(daemon, 4) == 4, "room again")
        assert daemon.events("store_has_room")
        assert counter(daemon, "dropped:store_full") >= 4
        daemon.kill()
        daemon.start()
        daemon.until(lambda: matched(daemon, 4) == 4, "and what was written is whole")


@pytest.mark.parametrize("policy", ["allkeys-lru", "volatile-ttl"])
def test_an_evicting_redis_is_refused_with_the_reason(
    url: str, redis: servers.Server, policy: str
) -> None:
    redis("CONFIG", "SET", "maxmemory", "100mb")
    redis("CONFIG", "SET", "maxmemory-policy", policy)
    daemon = Daemon(**QUICK, redis__url=url)
    daemon.start(wait=False)
    assert daemon.process is not None
    assert daemon.process.wait(20) == 1
    assert daemon._reader is not None
    daemon._reader.join(5)
    text = daemon.log()
    assert policy in text
    assert "noeviction" in text
    assert "Traceback" not in text
    daemon.process = None
