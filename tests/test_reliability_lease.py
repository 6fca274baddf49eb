"""One writer per worker rank: paused owners, rolling restarts, two ingesters at once."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import servers
from daemon import Daemon
from reliability import QUICK, counter, matched, owns, removed, running, state, stored, twice

from kvindexd.testing.engine import FakeEngine

SETTINGS = QUICK | {"log.level": "debug"}


@pytest.fixture(scope="module")
def redis() -> Iterator[servers.Server]:
    with servers.start_valkey() as server:
        yield server


@pytest.fixture
def url(redis: servers.Server) -> str:
    redis("FLUSHALL")
    return redis.url


def test_a_paused_owner_is_deposed_steps_down_and_takes_over_again(url: str) -> None:
    one, two = (Daemon(**SETTINGS, redis__url=url) for _ in range(2))
    with FakeEngine() as engine, running(one, two):
        one.register("w", engine.endpoint(), replay_endpoint=engine.replay_endpoint())
        one.until(lambda: one.worker("w").owner, "somebody owns it")
        two.until(lambda: two.worker("w").owner, "two knows it")
        owner, standby = (one, two) if owns(one) else (two, one)
        engine.wait_subscribed()
        for n in range(4):
            engine.publish([stored(n)])
        standby.until_seq("w", 3)

        owner.pause()
        for n in range(4, 10):
            engine.publish([stored(n), stored(n)])  # two copies: counted twice, it takes four
        standby.until(lambda: owns(standby), "taken over", 10)
        standby.until_seq("w", 9)
        engine.publish([stored(10)])
        standby.until_seq("w", 10)

        owner.resume()
        owner.until(lambda: owner.events("rank_stepped_down"), "stepped down")
        assert [e["why"] for e in owner.events("rank_stepped_down")] == ["deposed"]
        # Refused by its token, before anything was compared or repaired.
        assert not owner.events("store_rewritten")
        owner.until(lambda: owner.events("rank_standby"), "waits again")
        engine.publish([stored(11)])
        engine.publish([removed(*range(4, 10))])
        for daemon in (one, two):
            daemon.until_seq("w", 12)
            assert matched(daemon, 12) == 12
            assert counter(daemon, "event:BlockStored") == 4 + 12 + 2
            assert counter(daemon, "restarts") == 0
        engine.publish([removed(*range(4, 10))])
        for daemon in (one, two):
            daemon.until_seq("w", 13)
            assert matched(daemon, 12) == 4
            assert daemon.worker("w").blocks["device"] == 6

        assert standby.stop() == 0
        owner.until(lambda: owns(owner), "takes over again", 10)
        engine.publish([stored(4)])
        owner.until_seq("w", 14)
        assert matched(owner, 12) == 5


def test_a_rolling_restart_of_sidecars_loses_and_repeats_nothing(url: str) -> None:
    scorer = Daemon("scorer", **SETTINGS, redis__url=url)
    with FakeEngine() as engine:
        worker = {
            "worker_id": "w",
            "model": "m",
            "address": "w.test:8000",
            "kv_events_endpoint": engine.endpoint(),
            "replay_endpoint": engine.replay_endpoint(),
        }
        old, new = (Daemon("sidecar", **SETTINGS, redis__url=url, workers=[worker]) for _ in "ab")
        with running(scorer, old):
            engine.wait_subscribed()
            published = 0

            def publish(batches: int) -> None:
                nonlocal published
                for _ in range(batches):
                    engine.publish(twice(published))
                    published += 1

            publish(20)
            scorer.until_seq("w", 19)
            with running(new):
                scorer.until(lambda: new.events("rank_standby"), "the new one waits")
                publish(20)
                stopped = time.monotonic()
                assert old.stop() == 0
                publish(20)
                scorer.until(lambda: owns(new, scorer), "handed over", 10)
                # Released, not lapsed: the new one need not wait for the lease to end.
                assert time.monotonic() - stopped < SETTINGS["ingest.lease_ttl"] + 1.0
                publish(20)
                scorer.until_seq("w", published - 1)
                assert matched(scorer, 80) == 80
                assert counter(scorer, "event:BlockStored") == 2 * published - 1
                engine.publish([removed(*range(1, published))])
                scorer.until_seq("w", published)
                assert matched(scorer, 80) == 80
                engine.publish([removed(*range(published))])
                scorer.until_seq("w", published + 1)
                assert matched(scorer, 80) == 0


def test_a_rank_without_lease_turns_stale_in_seconds_and_is_left_out(url: str) -> None:
    scorer = Daemon("scorer", **SETTINGS, redis__url=url)
    serve = Daemon(**SETTINGS, redis__url=url)
    with FakeEngine() as engine, running(scorer, serve):
        serve.register("w", engine.endpoint())
        engine.wait_subscribed()
        engine.publish([stored(0, 3)])
        scorer.until_seq("w", 0)
        idle_until = time.monotonic() + SETTINGS["ingest.lease_ttl"] + 0.7
        while time.monotonic() < idle_until:  # heartbeats renew it, without any event
            assert matched(scorer, 3) == 3
            time.sleep(0.05)
        serve.kill()
        died = time.monotonic()
        scorer.until(lambda: matched(scorer, 3) == -1, "left out", 10)
        assert time.monotonic() - died < 5
        assert state(scorer) == "STALE"
        assert "lapsed" in scorer.worker("w").detail
        kept = scorer.score([*range(48), 1], include_stale=True)["w"]
        assert kept.matched_tokens == 48


def test_an_emptied_store_is_left_to_the_owner_who_has_the_only_copy(
    url: str, redis: servers.Server
) -> None:
    """The engine is idle and has no replay: a standby that took the rank would find nothing."""
    settings = SETTINGS | {"ingest.lease_ttl": 5.0}
    one, two = (Daemon(**settings, redis__url=url) for _ in range(2))
    with FakeEngine(replay_port=None) as engine, running(one, two):
        one.register("w", engine.endpoint())
        one.until(lambda: one.worker("w").owner, "somebody owns it")
        two.until(lambda: two.worker("w").owner, "two knows it")
        owner = one if owns(one) else two
        engine.wait_subscribed()
        engine.publish([stored(0, 5)])
        for daemon in (one, two):
            daemon.until_seq("w", 0)
        for n in (1, 2):
            redis("FLUSHALL")
            owner.until(lambda n=n: len(owner.events("store_rewritten")) == n, "written anew")
            for daemon in (one, two):
                daemon.until(lambda d=daemon: matched(d, 5) == 5, "whole")
        assert owns(owner)
        assert not owner.events("rank_stepped_down")
