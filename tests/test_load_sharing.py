"""Two scorers on one Redis: what one has in flight, the other knows."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import servers
from daemon import Daemon, serving
from picks import complete, fresh, hold, pick

from kvindexd.testing.engine import FakeEngine
from kvindexd.v1 import index_pb2 as pb

NAMES = "ab"


class Pair:
    """A sidecar-like daemon that ingests, and two scorers that answer."""

    def __init__(self, ingest: Daemon, scorers: list[Daemon], engines: dict[str, FakeEngine]):
        self.ingest = ingest
        self.scorers = scorers
        self.engines = engines

    def active(self, tokens: list[int]) -> list[dict[str, int]]:
        """Blocks in flight by worker, as each scorer says."""
        return [
            {name: s.active_blocks for name, s in scorer.score(tokens).items()}
            for scorer in self.scorers
        ]

    def until_all_say(self, expected: dict[str, int], within: float) -> None:
        began = time.monotonic()
        probe = fresh(1)
        self.ingest.until(lambda: self.active(probe) == [expected] * 2, f"both say {expected}")
        assert time.monotonic() - began < within


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    with (
        servers.server(servers.VALKEY) as redis,
        serving(redis__url=redis.url) as ingest,
        serving("scorer", redis__url=redis.url) as one,
        serving("scorer", redis__url=redis.url) as two,
    ):
        engines = {name: FakeEngine() for name in NAMES}
        try:
            for name, engine in engines.items():
                ingest.register(name, engine.endpoint())
                engine.wait_subscribed()
                hold(ingest, engine, name, fresh(1))
            for scorer in (one, two):
                for name in NAMES:
                    scorer.until_seq(name, 0)
            yield Pair(ingest, [one, two], engines)
        finally:
            for engine in engines.values():
                engine.stop()


def test_what_is_in_flight_agrees_within_a_second_and_completes_anywhere(pair: Pair) -> None:
    one, two = pair.scorers
    prefix = fresh(5)
    first = pick(one, prefix + fresh(2), candidates=["a"])
    pair.until_all_say({"a": 7, "b": 0}, 1.0)
    second = pick(two, prefix + fresh(3), candidates=["a"])
    third = pick(two, fresh(4), candidates=["b"])
    pair.until_all_say({"a": 10, "b": 4}, 1.0)
    complete(one, first.request_id)
    pair.until_all_say({"a": 8, "b": 4}, 1.0)
    # Reported to the scorer that did not make the pick: it is passed on.
    complete(one, second.request_id, cached_tokens=0)
    complete(one, third.request_id)
    pair.until_all_say({"a": 0, "b": 0}, 2.0)


def test_two_scorers_do_not_pile_onto_one_worker(pair: Pair) -> None:
    one, two = pair.scorers
    went: Counter[str] = Counter()
    ids: list[tuple[Daemon, str]] = []
    got = pick(one, fresh(30), candidates=["a"])
    ids.append((one, got.request_id))
    pair.until_all_say({"a": 30, "b": 0}, 1.0)
    # The other scorer has picked nothing yet; it fills up the worker that does less.
    for _ in range(3):
        got = pick(two, fresh(10))
        went[got.worker.worker_id] += 1
        ids.append((two, got.request_id))
    assert went == {"b": 3}
    for scorer, request_id in ids:
        complete(scorer, request_id)
    pair.until_all_say({"a": 0, "b": 0}, 1.5)


def test_burst_through_both_scorers_stays_together(pair: Pair) -> None:
    one, two = pair.scorers
    tokens, probe = fresh(20, 2), fresh(7)

    def rested() -> bool:
        return all(w.cost == 7 for s in (one, two) for w in s.score(probe).values())

    one.until(rested, "what earlier picks computed has decayed")
    first = pick(one, tokens)
    name = first.worker.worker_id
    two.until(lambda: two.score(tokens)[name].predicted_tokens == 320, "known to the other")
    ids = [(one, first.request_id)]
    for _ in range(5):
        for scorer in (two, one):
            got = pick(scorer, tokens)
            assert got.worker.worker_id == name
            ids.append((scorer, got.request_id))
    # Once they are over, nothing predicts that the prompt is held for longer than two seconds.
    for scorer, request_id in ids:
        complete(scorer, request_id)
    pair.until_all_say(dict.fromkeys(NAMES, 0), 1.5)
    two.until(lambda: two.score(tokens)[name].predicted_tokens == 0, "no event confirmed it", 5.0)


def test_concurrent_traffic_through_both_balances_and_ends_at_nothing(pair: Pair) -> None:
    blocks: Counter[str] = Counter()
    lock = threading.Lock()
    ids: list[tuple[Daemon, str]] = []

    def drive(scorer: Daemon) -> None:
        for _ in range(40):
            got = pick(scorer, fresh(5))
            with lock:
                blocks[got.worker.worker_id] += 5
                ids.append((scorer, got.request_id))
            time.sleep(0.01)

    threads = [threading.Thread(target=drive, args=(s,)) for s in pair.scorers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert max(blocks.values()) <= 0.6 * sum(blocks.values())
    probe = fresh(1)
    pair.ingest.until(lambda: pair.active(probe)[0] == pair.active(probe)[1] == blocks, "agree")
    for i, (scorer, request_id) in enumerate(ids):
        other = pair.scorers[0] if scorer is pair.scorers[1] else pair.scorers[1]
        complete(other if i % 2 else scorer, request_id)
    pair.until_all_say({"a": 0, "b": 0}, 3.0)


def test_load_of_a_scorer_that_died_is_forgotten(pair: Pair, tmp_path: Any) -> None:
    one, two = pair.scorers
    pick(two, fresh(9), candidates=["a"])
    pair.until_all_say({"a": 9, "b": 0}, 1.0)
    two.kill()
    probe = fresh(1)

    def forgotten() -> bool:
        return one.score(probe)["a"].active_blocks == 0

    one.until(forgotten, "the dead scorer's load is gone")
    two.start()
    for name in NAMES:
        two.until(lambda n=name: two.worker(n).state == pb.LIVE, "live again")
    pair.until_all_say({"a": 0, "b": 0}, 2.0)


def test_picks_go_on_while_redis_is_away(tmp_path: Any) -> None:
    with (
        servers.server(servers.VALKEY) as redis,
        serving(redis__url=redis.url) as daemon,
        FakeEngine() as engine,
    ):
        daemon.register("a", engine.endpoint())
        engine.wait_subscribed()
        hold(daemon, engine, "a", fresh(1))
        redis.pause()
        try:
            began = time.monotonic()
            for _ in range(5):
                assert pick(daemon, fresh(3)).worker.worker_id == "a"
            assert time.monotonic() - began < 2
            daemon.until(lambda: daemon.events("load_sharing_away"), "said so")
        finally:
            redis.resume()
        daemon.until(lambda: daemon.events("load_sharing_back"), "said so")
        assert len(daemon.events("load_sharing_away")) == 1
