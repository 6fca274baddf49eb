"""SIGTERM: not serving, calls in flight finish, the rank is handed over, status 0, in time."""

from __future__ import annotations

import contextlib
import queue
import signal
import threading
import time
from pathlib import Path

import grpc
import servers
from daemon import Daemon
from grpc_health.v1 import health_pb2, health_pb2_grpc
from reliability import QUICK, counter, matched, owns, running, stored

from kvindexd.testing.engine import FakeEngine
from kvindexd.v1 import index_pb2 as pb

NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


class Stream:
    """A ScoreWorkersStream that stays open."""

    def __init__(self, daemon: Daemon) -> None:
        self._requests: queue.Queue[pb.ScoreWorkersRequest | None] = queue.Queue()
        self._answers = daemon.index.ScoreWorkersStream(iter(self._requests.get, None))

    def ask(self) -> pb.ScoreWorkersResponse:
        prompt = pb.Prompt(model="m", tokens=pb.TokenIds(ids=range(17)))
        self._requests.put(pb.ScoreWorkersRequest(prompt=prompt))
        return next(self._answers)

    def end(self) -> None:
        self._requests.put(None)
        assert list(self._answers) == []


def watch(daemon: Daemon) -> list[int]:
    """What health says, change by change."""
    seen: list[int] = []
    stub = health_pb2_grpc.HealthStub(daemon.channel)
    answers = stub.Watch(health_pb2.HealthCheckRequest(service="readiness"))

    def read() -> None:
        with contextlib.suppress(grpc.RpcError):
            for answer in answers:
                seen.append(answer.status)

    threading.Thread(target=read, daemon=True).start()
    return seen


def test_an_orderly_end() -> None:
    settings = QUICK | {"ingest.lease_ttl": 60.0, "server.grace_seconds": 8.0}
    with servers.start_valkey() as redis, FakeEngine() as engine:
        one, two = (Daemon(**settings, redis__url=redis.url) for _ in range(2))
        with running(one):
            one.register("w", engine.endpoint(), replay_endpoint=engine.replay_endpoint())
            engine.wait_subscribed()
            for n in range(10):
                engine.publish([stored(n)])
            one.until_seq("w", 9)
            health = watch(one)
            stream = Stream(one)
            assert stream.ask().scores[0].matched_tokens == 16
            one.until(lambda: health, "health answers")
            assert one.process is not None
            one.process.send_signal(signal.SIGTERM)
            one.until(lambda: health[-1] == NOT_SERVING, "not serving", 5)
            assert stream.ask().scores[0].matched_tokens == 16, "a call in flight goes on"
            assert one.process.poll() is None
            stream.end()
            asked = time.monotonic()
            assert one.process.wait(10) == 0
            assert time.monotonic() - asked < 5, "it does not sit out its grace time"
            assert one._reader is not None
            one._reader.join(5)
            assert one.records[-1]["event"] == "stopped"
            one.process = None
        engine.publish([stored(10)])
        with running(two):  # the lease would have lived for a minute
            two.until(lambda: owns(two), "released, not left to lapse", 5)
            two.until_seq("w", 10)
            assert matched(two, 11) == 11
            assert counter(two, "event:BlockStored") == 11
            assert counter(two, "restarts") == 0


def test_calls_that_never_end_are_cut_off_at_the_grace_time(tmp_path: Path) -> None:
    settings = QUICK | {"server.grace_seconds": 1.0, "index.data_dir": str(tmp_path)}
    daemon = Daemon(**settings)
    with running(daemon), FakeEngine() as engine:
        daemon.register("w", engine.endpoint())
        stream = Stream(daemon)
        stream.ask()
        assert daemon.process is not None
        began = time.monotonic()
        daemon.process.send_signal(signal.SIGTERM)
        assert daemon.process.wait(10) == 0
        assert 0.8 < time.monotonic() - began < 5
        daemon.process = None


def test_a_redis_that_is_away_does_not_hold_the_end_up() -> None:
    with servers.start_valkey() as redis, FakeEngine() as engine:
        daemon = Daemon(**(QUICK | {"redis.timeout": 4.0}), redis__url=redis.url)
        with running(daemon):
            daemon.register("w", engine.endpoint())
            engine.wait_subscribed()
            engine.publish([stored(0)])
            daemon.until_seq("w", 0)
            redis.pause()
            try:
                engine.publish([stored(1)])
                began = time.monotonic()
                assert daemon.stop() == 0
                assert time.monotonic() - began < 8
            finally:
                redis.resume()
