"""Restarts of kvindexd, of engines in place, and of Redis, alone and together."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import servers
from daemon import Daemon
from reliability import QUICK, counter, matched, other, owns, removed, running, stored, twice

from kvindexd.testing.engine import FakeEngine
from kvindexd.testing.process import EngineProcess
from kvindexd.v1 import index_pb2 as pb


@pytest.fixture(scope="module")
def redis() -> Iterator[servers.Server]:
    with servers.start_valkey(*servers.DURABLE) as server:
        yield server


@pytest.fixture
def daemon(redis: servers.Server) -> Iterator[Daemon]:
    redis("FLUSHALL")
    one = Daemon(**QUICK, redis__url=redis.url)
    with running(one):
        yield one


def follow(daemon: Daemon, engine: FakeEngine, worker: str = "w", replay: bool = True) -> None:
    endpoint = engine.replay_endpoint() if replay else ""
    daemon.register(worker, engine.endpoint(), replay_endpoint=endpoint)
    engine.wait_subscribed()


# -- kvindexd -----------------------------------------------------------------------------------


def test_kvindexd_alone_restarts_and_resumes_where_it_was(daemon: Daemon) -> None:
    with FakeEngine() as engine:
        follow(daemon, engine)
        for n in range(30):
            engine.publish(twice(n))
        daemon.until(lambda: daemon.worker("w").last_seq >= 10, "some are written")
        daemon.kill()
        for n in range(30, 60):
            engine.publish(twice(n))
        daemon.start()
        daemon.until_seq("w", 59)
        assert matched(daemon, 60) == 60
        assert counter(daemon, "event:BlockStored") == 119, "each batch once"
        assert counter(daemon, "restarts") == 0
        assert counter(daemon, "lost_batches") == 0
        assert min(engine.replay_requests()[1:]) > 0, "it resumes, and does not read all again"
        engine.publish([removed(*range(1, 60))])
        daemon.until_seq("w", 60)
        assert matched(daemon, 60) == 60, "the second copy of each is still there"
        engine.publish([removed(*range(60))])
        daemon.until_seq("w", 61)
        assert matched(daemon, 60) == 0


def test_what_waits_for_its_parent_survives_a_restart_of_kvindexd(daemon: Daemon) -> None:
    with FakeEngine() as engine:
        follow(daemon, engine)
        engine.publish([stored(0)])
        engine.publish([stored(2)])  # its parent, block 1, comes later
        daemon.until_seq("w", 1)
        assert matched(daemon, 3) == 1
        daemon.kill()
        daemon.start()
        engine.publish([stored(1)])
        daemon.until_seq("w", 2)
        assert matched(daemon, 3) == 3


# -- an engine in place -------------------------------------------------------------------------


@pytest.mark.parametrize("replay", [True, False])
def test_an_engine_killed_and_started_in_place_is_cold_before_its_first_new_block(
    daemon: Daemon, replay: bool
) -> None:
    with EngineProcess(*([] if replay else ["--replay-port", "-1"])) as engine:
        daemon.register("w", engine.endpoints[0], replay_endpoint=engine.replay_endpoints[0])
        engine.call("wait_subscribed")
        for n in range(5):
            engine.call("publish", events=[stored(n)])
        daemon.until_seq("w", 4)
        engine.kill()
        engine.start()
        engine.call("wait_subscribed")
        engine.call("publish", events=[other(10_000, 900)])
        seen = daemon.until(lambda: matched(daemon, 1, first_token=10_000) == 1, "the new block")
        assert seen
        assert matched(daemon, 5) == 0, "no old block beside a new one"
        assert counter(daemon, "restarts") == 1
        assert daemon.worker("w").blocks["device"] == 1


def test_an_idle_engine_that_was_restarted_is_cold_without_a_single_event(daemon: Daemon) -> None:
    """Only replay can tell: the empty buffer of a server that has answered before."""
    with FakeEngine() as engine:
        follow(daemon, engine)
        engine.publish([stored(0, 5)])
        daemon.until_seq("w", 0)
        daemon.kill()
        daemon.start()  # compares what replay returns, and so learns that there is a replay
        daemon.until(lambda: matched(daemon, 5) == 5, "kept")
        daemon.until(lambda: daemon.events("replay_ended"), "compared")
        engine.restart()
        daemon.until(lambda: matched(daemon, 5) == 0, "cold", 15)
        assert counter(daemon, "restarts") == 1


def test_both_restart_and_the_new_sequence_has_passed_the_old_one(daemon: Daemon) -> None:
    """The number goes on as if nothing had happened: what replay returns differs."""
    with FakeEngine() as engine:
        follow(daemon, engine)
        for n in range(5):
            engine.publish([stored(n)])
        daemon.until_seq("w", 4)
        daemon.kill()
        engine.restart()
        for n in range(8):
            engine.publish([other(10_000 + 16 * n, 900 + n)])
        daemon.start()
        daemon.until_seq("w", 7)
        assert counter(daemon, "restarts") == 1
        assert matched(daemon, 5) == 0
        assert daemon.worker("w").blocks["device"] == 8
        assert matched(daemon, 1, first_token=10_000) == 1, "from its beginning, by replay"


def test_both_restart_and_the_numbers_join_without_a_gap(daemon: Daemon) -> None:
    """The same, where the next live number is exactly the one that is waited for."""
    with FakeEngine() as engine:
        follow(daemon, engine)
        for n in range(5):
            engine.publish([stored(n)])
        daemon.until_seq("w", 4)
        daemon.kill()
        engine.restart()
        for n in range(5):
            engine.publish([other(10_000 + 16 * n, 900 + n)])
        daemon.start()
        engine.publish([other(20_000, 990)])
        daemon.until_seq("w", 5)
        daemon.until(lambda: daemon.worker("w").blocks["device"] == 6, "only what it holds")
        assert matched(daemon, 5) == 0


# -- Redis --------------------------------------------------------------------------------------


def test_redis_restarts_with_its_data(daemon: Daemon, redis: servers.Server) -> None:
    with FakeEngine() as engine:
        follow(daemon, engine)
        engine.publish([stored(0, 5)])
        daemon.until_seq("w", 0)
        redis.kill()
        engine.publish([stored(5, 5)])
        assert matched(daemon, 5) == 5, "answers go on without Redis"
        redis.start()
        daemon.until_seq("w", 1)
        assert matched(daemon, 10) == 10
        assert counter(daemon, "rewrites") == 0
        assert counter(daemon, "event:BlockStored") == 2


def test_redis_restarts_without_its_data_and_is_rebuilt_from_memory(
    daemon: Daemon, redis: servers.Server
) -> None:
    """The engine is idle and cannot be asked again: the ingester's own state is all there is."""
    with FakeEngine(replay_port=None) as engine:
        follow(daemon, engine, replay=False)
        engine.publish([stored(0, 5), stored(1, 4)])
        daemon.until_seq("w", 0)
        epoch = daemon.worker("w").epoch
        _wipe(redis)
        daemon.until(lambda: daemon.events("registered_again"), "noticed")
        daemon.until(lambda: counter(daemon, "rewrites") == 1, "written anew")
        daemon.until(lambda: daemon.worker("w").epoch > 0 and matched(daemon, 5) == 5, "whole")
        assert epoch == 1
        engine.publish([removed(*range(1, 5))])
        daemon.until_seq("w", 1)
        assert matched(daemon, 5) == 5, "copies are counted as before"
        engine.publish([removed(4)])
        daemon.until_seq("w", 2)
        assert matched(daemon, 5) == 4


def test_an_engine_and_an_emptied_redis_restart_together(
    daemon: Daemon, redis: servers.Server
) -> None:
    """The clear of the engine's restart is not written yet when the store is written anew: its
    first numbers must not be taken for repeats of the old ones."""
    with FakeEngine() as engine:
        for n in range(5):
            engine.publish([stored(n)])
        follow(daemon, engine)
        daemon.until_seq("w", 4)
        daemon.until(lambda: daemon.events("replay_ended"), "it knows that there is a replay")
        redis.kill()
        engine.restart()
        daemon.until(lambda: daemon.events("engine_restarted"), "noticed")
        _wipe(redis, running=False)
        engine.wait_subscribed()
        daemon.until(lambda: daemon.events("store_rewritten"), "written anew")
        for n in range(2):
            engine.publish([other(10_000 + 16 * n, 900 + n)])
        daemon.until_seq("w", 1)
        daemon.until(lambda: daemon.worker("w").blocks["device"] == 2, "the new ones")
        assert matched(daemon, 5) == 0


def test_redis_comes_back_with_an_older_state_while_the_engine_is_idle(
    daemon: Daemon, redis: servers.Server, tmp_path: Path
) -> None:
    """As after a failover that lost the last writes: no batch follows that would show it."""
    with FakeEngine(replay_port=None) as engine:
        follow(daemon, engine, replay=False)
        engine.publish([stored(0, 5)])
        daemon.until_seq("w", 0)
        shutil.copytree(redis.folder / "appendonlydir", tmp_path / "older")
        engine.publish([removed(3, 4)])
        engine.publish([stored(5, 2, parent=3)])
        daemon.until_seq("w", 2)
        assert matched(daemon, 5) == 3
        redis.kill()
        shutil.rmtree(redis.folder / "appendonlydir")
        shutil.copytree(tmp_path / "older", redis.folder / "appendonlydir")
        redis.start()
        daemon.until(lambda: counter(daemon, "rewrites") == 1, "noticed by a heartbeat")
        daemon.until_seq("w", 2)
        daemon.until(lambda: matched(daemon, 5) == 3, "as it was")
        assert daemon.worker("w").blocks["device"] == 5


def test_redis_and_kvindexd_lose_everything_and_replay_brings_it_back(
    daemon: Daemon, redis: servers.Server
) -> None:
    with FakeEngine() as engine:
        worker = {
            "worker_id": "w",
            "model": "m",
            "address": "w.test:8000",
            "kv_events_endpoint": engine.endpoint(),
            "replay_endpoint": engine.replay_endpoint(),
        }
        daemon.settings["workers"] = [worker]
        for n in range(20):
            engine.publish([stored(n)])
        daemon.kill()
        _wipe(redis)
        daemon.start()
        daemon.until_seq("w", 19)
        assert matched(daemon, 20) == 20


@pytest.mark.parametrize("loss", ["b:", "feed", "w:"])
def test_keys_that_vanish_are_noticed_and_put_back(
    daemon: Daemon, redis: servers.Server, loss: str
) -> None:
    with FakeEngine() as engine:
        follow(daemon, engine)
        engine.publish([stored(0, 5)])
        daemon.until_seq("w", 0)
        for n in (1, 2):  # an epoch that a new record would not have
            daemon.admin.ResyncWorker(pb.ResyncWorkerRequest(worker_id="w"), timeout=10)
            daemon.until(lambda n=n: counter(daemon, "resyncs") == n, "read anew")
            daemon.until_seq("w", 0)
        gone = [k for k in redis("KEYS", "kvx:*") if loss.encode() in k]
        assert gone, redis("KEYS", "kvx:*")
        redis("DEL", *gone)
        engine.publish([stored(5)])
        daemon.until_seq("w", 1)
        daemon.until(lambda: matched(daemon, 6) == 6, "whole")
        assert len(redis("HKEYS", next(k for k in redis("KEYS", "kvx:*") if b":b:" in k))) == 6
        assert owns(daemon)


def test_a_rank_deregistered_and_registered_at_once_is_followed(daemon: Daemon) -> None:
    with FakeEngine() as engine:
        follow(daemon, engine)
        engine.publish([stored(0, 5)])
        daemon.until_seq("w", 0)
        for _ in range(5):
            daemon.admin.DeregisterWorker(pb.DeregisterWorkerRequest(worker_id="w"), timeout=10)
            follow(daemon, engine)
        engine.publish([stored(5)])
        daemon.until_seq("w", 1)
        daemon.until(lambda: matched(daemon, 6) == 6, "whole, by replay")


def _wipe(redis: servers.Server, running: bool = True) -> None:
    if running:
        redis.kill()
    shutil.rmtree(Path(redis.folder) / "appendonlydir", ignore_errors=True)
    redis.start()
