"""What is known of each worker, told apart; engines that vanish in any way."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import servers
from daemon import Daemon
from reliability import QUICK, matched, running, state, stored

from kvindexd.testing.engine import FakeEngine, free_ports
from kvindexd.testing.process import EngineProcess
from kvindexd.v1 import index_pb2 as pb


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with servers.start_valkey() as redis:
        one = Daemon(
            **QUICK, redis__url=redis.url, ingest__event_grace=1.5, ingest__peer_timeout=1.0
        )
        with running(one):
            yield one


def detail(daemon: Daemon, worker: str, words: str) -> str:
    """The worker's state in words, once it has these words in it."""

    def found() -> str:
        text = str(daemon.worker(worker).detail)
        return text if words in text else ""

    return str(daemon.until(found, f"{worker}: {words}"))


def test_four_kinds_of_silence_are_told_apart(daemon: Daemon) -> None:
    with FakeEngine() as silent, FakeEngine() as useless, FakeEngine() as idle:
        daemon.register("never", f"tcp://127.0.0.1:{free_ports(1)}")
        daemon.register("silent", silent.endpoint())
        daemon.register("useless", useless.endpoint())
        daemon.register("idle", idle.endpoint())
        for engine in (silent, useless, idle):
            engine.wait_subscribed()
        kind = {"kv_cache_spec_kind": "encoder_only_attention"}
        useless.publish([stored(0) | kind, stored(1) | kind])
        idle.publish([stored(0)])
        daemon.until_seq("useless", 0)
        daemon.until_seq("idle", 0)

        text = detail(daemon, "never", "never connected")
        assert "is the engine up" in detail(daemon, "never", "is the engine up")
        assert "bind_events" in detail(daemon, "never", "bind_events"), text
        assert state(daemon, "never") != "LIVE"

        assert "no events yet" in detail(daemon, "silent", "no message since")
        assert state(daemon, "silent") == "LIVE"
        assert daemon.worker("silent").last_event_ms_ago == 0

        text = detail(daemon, "useless", "0 of 2 stores admitted")
        assert "encoder_only_attention" in text
        assert "treat_as" in text
        (line,) = daemon.events("none_admitted")
        assert "scores 0" in line["cost"]
        assert daemon.metric('kvindexd_worker_nothing_indexed{worker="useless#0"}') == 1

        detail(daemon, "idle", "last message")
        assert state(daemon, "idle") == "LIVE"
        assert daemon.worker("idle").last_event_ms_ago > 0
        assert matched(daemon, 1, "idle") == 1
        states = {state(daemon, w) for w in ("silent", "useless", "idle")}
        assert states == {"LIVE"}
        assert daemon.metric('kvindexd_worker_nothing_indexed{worker="idle#0"}') == 0


def test_an_engine_that_is_gone_is_left_out_after_the_grace_and_returns(daemon: Daemon) -> None:
    with EngineProcess() as engine:
        daemon.register("dies", engine.endpoints[0], replay_endpoint=engine.replay_endpoints[0])
        engine.call("wait_subscribed")
        engine.call("publish", events=[stored(0)])
        daemon.until_seq("dies", 0)
        assert matched(daemon, 1, "dies") == 1
        engine.kill()
        killed = time.monotonic()
        daemon.until(lambda: state(daemon, "dies") == "SYNCING", "seen at once", 2)
        daemon.until(lambda: matched(daemon, 1, "dies") == -1, "left out", 10)
        assert time.monotonic() - killed < 5
        assert state(daemon, "dies") == "STALE"
        assert "lost" in daemon.worker("dies").detail
        engine.start()
        daemon.until(lambda: state(daemon, "dies") == "LIVE", "back")
        daemon.until(lambda: matched(daemon, 1, "dies") == 0, "cold")


def test_a_half_open_connection_is_noticed(daemon: Daemon) -> None:
    """Its TCP connection stays up and says nothing: only heartbeats tell."""
    with EngineProcess() as engine:
        daemon.register("frozen", engine.endpoints[0], replay_endpoint=engine.replay_endpoints[0])
        engine.call("wait_subscribed")
        engine.call("publish", events=[stored(0)])
        daemon.until_seq("frozen", 0)
        engine.pause()
        froze = time.monotonic()
        try:
            daemon.until(lambda: state(daemon, "frozen") == "STALE", "noticed", 15)
            assert time.monotonic() - froze < 10
            assert matched(daemon, 1, "frozen") == -1
        finally:
            engine.resume()
        daemon.until(lambda: state(daemon, "frozen") == "LIVE", "back")
        engine.call("publish", events=[stored(1)])
        daemon.until_seq("frozen", 1)
        daemon.until(lambda: matched(daemon, 2, "frozen") == 2, "nothing was lost")


def test_an_engine_that_ends_while_it_is_deregistered_freezes_nothing(daemon: Daemon) -> None:
    """Its connection ends in the very moment in which its socket is closed."""
    for n in range(40):
        with FakeEngine() as engine:
            daemon.register("ends", engine.endpoint(), replay_endpoint=engine.replay_endpoint())
            engine.wait_subscribed()
            engine.publish([stored(n)])
            request = pb.DeregisterWorkerRequest(worker_id="ends")
            daemon.admin.DeregisterWorker(request, timeout=10)
    daemon.register("after", "tcp://127.0.0.1:1")
    daemon.until(lambda: daemon.worker("after").owner, "it goes on as before")
