"""Holes in the sequence: filled in order and once, or admitted; never waited for long."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import servers
from daemon import Daemon
from reliability import QUICK, counter, matched, removed, running, state, stored, twice

from kvindexd.testing.engine import FakeEngine
from kvindexd.v1 import index_pb2 as pb


@pytest.fixture(scope="module")
def daemons() -> Iterator[dict[str, Daemon]]:
    """A daemon per policy, each on its own server."""
    with servers.start_valkey() as a, servers.start_valkey() as b:
        reset = Daemon(**QUICK, redis__url=a.url)
        keep = Daemon(**QUICK, redis__url=b.url, ingest__on_lost_events="keep")
        with running(reset, keep):
            yield {"reset": reset, "keep": keep}


@pytest.fixture
def daemon(daemons: dict[str, Daemon]) -> Iterator[Daemon]:
    daemons["reset"].records.clear()
    yield daemons["reset"]
    _forget(daemons["reset"])


def _forget(daemon: Daemon) -> None:
    daemon.admin.DeregisterWorker(pb.DeregisterWorkerRequest(worker_id="w"), timeout=10)

    def gone() -> bool:
        return not daemon.admin.ListWorkers(pb.ListWorkersRequest(), timeout=10).workers

    daemon.until(gone, "deregistered")


def follow(daemon: Daemon, engine: FakeEngine) -> None:
    daemon.register("w", engine.endpoint(), replay_endpoint=engine.replay_endpoint())
    engine.wait_subscribed()
    daemon.until(lambda: daemon.worker("w").owner, "owned")


def test_a_gap_is_replayed_from_where_it_begins(daemon: Daemon) -> None:
    with FakeEngine() as engine:
        follow(daemon, engine)
        for n in range(20):
            engine.publish(twice(n))
        daemon.until_seq("w", 19)
        engine.drop_next(3)
        for n in range(20, 24):
            engine.publish(twice(n))
        daemon.until_seq("w", 23)
        assert counter(daemon, "gaps") == 1
        assert [(e["first"], e["last"]) for e in daemon.events("gap")] == [(20, 22)]
        assert counter(daemon, "lost_batches") == 0
        # A few batches before the hole are asked for too, to compare; not the whole buffer.
        assert 10 < engine.replay_requests()[-1] <= 20
        assert counter(daemon, "event:BlockStored") == 47, "each batch once"
        assert matched(daemon, 24) == 24
        engine.publish([removed(*range(1, 24))])
        engine.publish([removed(*range(24))])
        daemon.until_seq("w", 25)
        assert matched(daemon, 24) == 0


def test_a_late_joiner_replays_from_the_beginning(daemon: Daemon) -> None:
    with FakeEngine() as engine:
        for n in range(7):
            engine.publish([stored(n)])
        follow(daemon, engine)
        daemon.until_seq("w", 6)  # with no live traffic at all
        assert matched(daemon, 7) == 7
        engine.publish([stored(7)])
        daemon.until_seq("w", 7)
        assert engine.replay_requests() == [0]


def test_live_batches_wait_for_the_hole_and_are_applied_after_it(daemon: Daemon) -> None:
    """Applied as they come, the removal would be lost and the block stay for ever."""
    with FakeEngine() as engine:
        follow(daemon, engine)
        engine.publish([stored(0)])
        daemon.until_seq("w", 0)
        for n in range(1, 20):
            engine.drop_next()
            engine.publish([stored(n)])
            engine.publish([removed(n)])
        daemon.until_seq("w", 38)
        assert daemon.worker("w").blocks["device"] == 1
        assert matched(daemon, 20) == 1
        assert counter(daemon, "event:BlockStored") == 20
        assert counter(daemon, "event:BlockRemoved") == 19
        assert counter(daemon, "lost_batches") == 0


def test_reordered_and_repeated_frames_are_put_in_order_and_counted_once(daemon: Daemon) -> None:
    with FakeEngine() as engine:
        follow(daemon, engine)
        for n in range(0, 20, 2):
            engine.swap_next()
            engine.publish([stored(n)])
            engine.duplicate_next(2)
            engine.publish([stored(n + 1)])
        daemon.until_seq("w", 19)
        assert matched(daemon, 20) == 20
        assert counter(daemon, "event:BlockStored") == 20
        engine.publish([removed(*range(10, 20))])
        daemon.until_seq("w", 20)
        assert matched(daemon, 20) == 10


def test_a_silent_replay_server_holds_live_ingest_up_no_longer_than_configured(
    daemon: Daemon,
) -> None:
    with FakeEngine() as engine:
        follow(daemon, engine)
        engine.publish([stored(0)])
        daemon.until_seq("w", 0)
        engine.replay_mode("silent")
        before = len(engine.replay_requests())
        engine.drop_next()
        engine.publish([stored(1)])
        engine.publish([stored(0)])
        started = time.monotonic()
        daemon.until_seq("w", 2)
        took = time.monotonic() - started
        # Far more than it takes, and far less than for ever: the machine may be busy.
        assert took < QUICK["ingest.replay_timeout"] + 5, f"{took:.2f} s"
        (lost,) = daemon.events("events_lost")
        assert (lost["first"], lost["last"], lost["reason"]) == (1, 1, "timeout")
        assert lost["policy"] == "reset"
        assert counter(daemon, "lost_batches") == 1
        assert counter(daemon, "replay:timeout") == 1
        # It is left alone for a while: the next holes cost no waiting.
        for n in range(5):
            engine.drop_next()
            engine.publish([stored(1)])
            engine.publish([stored(0)])
            daemon.until_seq("w", 4 + 2 * n)
        assert len(engine.replay_requests()) - before <= 4
        # Nobody announces again what is resident: the buffer is read back as soon as it can be.
        assert matched(daemon, 2) < 2
        engine.replay_mode("normal")
        daemon.until(lambda: matched(daemon, 2) == 2, "what was lost is back", 15)
        daemon.until(lambda: state(daemon) == "LIVE", "live again")
        assert daemon.events("engine_restarted")[-1]["reason"] == "repair"


@pytest.mark.parametrize("policy", ["reset", "keep"])
def test_a_gap_older_than_the_engines_buffer(daemons: dict[str, Daemon], policy: str) -> None:
    daemon = daemons[policy]
    daemon.records.clear()
    with FakeEngine(buffer_steps=5) as engine:
        follow(daemon, engine)
        engine.publish([stored(0, 3)])
        daemon.until_seq("w", 0)
        assert matched(daemon, 3) == 3
        engine.drop_next(10)
        for n in range(3, 14):
            engine.publish([stored(n)])
        daemon.until_seq("w", 11)
        (lost,) = daemon.events("events_lost")
        assert (lost["first"], lost["last"], lost["reason"]) == (1, 6, "not_in_buffer")
        assert lost["policy"] == policy
        assert counter(daemon, "lost_batches") == 6
        assert counter(daemon, "gaps") == 1
        if policy == "reset":
            assert matched(daemon, 3) == 0
        else:
            assert matched(daemon, 3) == 3
            daemon.until(lambda: "6 batches were lost" in daemon.worker("w").detail, "marked")
        daemon.until(lambda: state(daemon) == "LIVE", "live again")
    _forget(daemon)


def test_without_replay_a_gap_is_admitted_at_once(daemon: Daemon) -> None:
    with FakeEngine(replay_port=None) as engine:
        daemon.register("w", engine.endpoint())
        engine.wait_subscribed()
        engine.publish([stored(0)])
        daemon.until_seq("w", 0)
        engine.drop_next()
        engine.publish([removed(0)])
        engine.publish([stored(5)])
        daemon.until_seq("w", 2)
        assert matched(daemon, 1) == 0
        assert daemon.events("events_lost")[0]["reason"] == "no_replay"
