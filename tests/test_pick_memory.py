"""What picking remembers: blocks in flight, predicted entries, outcomes. Time is an argument."""

from __future__ import annotations

import random

import numpy as np
import pytest

from kvindexd.model import WorkerKey
from kvindexd.scoring.load import Flight, LoadLedger, PeerLoad
from kvindexd.scoring.outcomes import DriftOptions, DriftWatch, Outcome
from kvindexd.scoring.predict import Predictions

A, B = WorkerKey("", "a", 0), WorkerKey("", "b", 0)


def flight(
    name: str, worker: WorkerKey, *keys: int, at: float = 0.0, lease: float = 10.0
) -> Flight:
    number = int.from_bytes(name.encode(), "little")
    return Flight(name, worker, np.array(keys, np.uint64), at + lease, at, number)


# -- in flight --------------------------------------------------------------------------------


def test_shared_blocks_count_once_until_the_last_request_ends() -> None:
    ledger = LoadLedger(half_life=1.0)
    ledger.add(flight("r1", A, 1, 2, 3), 0, 0.0)
    ledger.add(flight("r2", A, 1, 2, 4, 5), 0, 0.0)
    ledger.add(flight("r3", B, 1), 0, 0.0)
    assert ledger.load(A, 0.0).active_blocks == 5
    assert ledger.shared(A, [1, 2, 9, 4]) == 2
    ledger.release("r1", 1.0)
    assert ledger.load(A, 1.0).active_blocks == 4
    assert ledger.release("r1", 1.0) is None
    ledger.release("r2", 1.0)
    assert (ledger.load(A, 1.0).active_blocks, ledger.load(B, 1.0).active_blocks) == (0, 1)


def test_lease_ends_what_nobody_completes_and_the_same_id_again_replaces() -> None:
    ledger = LoadLedger(half_life=1.0)
    ledger.add(flight("r1", A, 1, 2, lease=5.0), 0, 0.0)
    ledger.add(flight("r2", A, 3, lease=20.0), 0, 0.0)
    assert ledger.expire(4.9) == []
    assert [f.request_id for f in ledger.expire(5.0)] == ["r1"]
    assert ledger.load(A, 5.0).active_blocks == 1
    ledger.add(flight("r2", B, 3, at=6.0, lease=5.0), 0, 6.0)
    assert ledger.load(A, 6.0).active_blocks == 0
    assert ledger.load(B, 6.0).active_blocks == 1
    assert ledger.expire(10.9) == []
    ledger.expire(20.0)
    assert (len(ledger), ledger.expired) == (0, 2)


def test_computed_blocks_are_load_once_and_decay_after_the_request() -> None:
    ledger = LoadLedger(half_life=2.0)
    ledger.add(flight("r1", A, 1, 2, 3, 4), 3, 0.0)
    ledger.add(flight("r2", A, 1, 2, 3, 4), 0, 0.0)
    assert ledger.load(A, 0.0).total == 4
    ledger.release("r1", 0.0)
    assert ledger.load(A, 0.0).total == 4
    ledger.release("r2", 0.0)
    assert ledger.load(A, 0.0)[:2] == (0, 3.0)
    assert ledger.load(A, 2.0).recent_blocks == pytest.approx(1.5)
    ledger.add(flight("r3", A, 9, at=2.0), 1, 2.0)
    ledger.release("r3", 4.0)  # it was computed two seconds ago
    assert ledger.load(A, 4.0).recent_blocks == pytest.approx(0.75 + 0.5)
    assert ledger.load(A, 400.0).recent_blocks == 0.0


def test_ledger_is_bounded_by_requests_and_by_blocks() -> None:
    ledger = LoadLedger(half_life=1.0, max_requests=10, max_blocks=50)
    for i in range(100):
        ledger.add(flight(f"r{i}", A, i, lease=10.0 + i), 0, 0.0)
    assert (len(ledger), ledger.evicted) == (10, 90)
    assert ledger.release("r99", 0.0) is not None
    ledger.add(flight("big", A, *range(1000, 1060), lease=500.0), 0, 0.0)
    assert ledger.load(A, 0.0).active_blocks == 60
    for i in range(5000):
        ledger.add(flight(f"s{i}", B, 1, lease=1000.0), 0, 0.0)
        ledger.release(f"s{i}", 0.0)
    assert len(ledger._leases) < 1100


def test_counts_agree_with_a_naive_ledger_under_random_traffic() -> None:
    source = random.Random(5)
    ledger = LoadLedger(half_life=1.0)
    held: dict[str, tuple[WorkerKey, set[int]]] = {}
    peer: dict[WorkerKey, set[int]] = {A: set(), B: set()}
    for i in range(3000):
        worker = source.choice([A, B])
        step = source.random()
        if step < 0.5:
            keys = list(range(source.randrange(5) * 100, source.randrange(5) * 100 + 20))
            keys = keys[: source.randrange(1, 20)] or [source.randrange(1000)]
            ledger.add(flight(f"r{i}", worker, *keys, lease=1e9), 0, 0.0)
            held[f"r{i}"] = (worker, set(keys))
        elif step < 0.9 and held:
            name = source.choice(list(held))
            ledger.release(name, 0.0)
            del held[name]
        else:
            peer[worker] = set(source.sample(range(500), 30))
            ledger.set_peers(worker, [PeerLoad(frozenset(peer[worker]), 2, 0.0, 0.0)])
        for w in (A, B):
            mine = set().union(*(keys for at, keys in held.values() if at == w))
            expected = len(mine | peer[w]) + (2 if peer[w] else 0)
            assert ledger.load(w, 0.0).active_blocks == expected


def test_peers_count_with_shared_blocks_once_and_decay() -> None:
    ledger = LoadLedger(half_life=1.0)
    ledger.add(flight("r1", A, 1, 2, 3), 0, 0.0)
    ledger.set_peers(A, [PeerLoad(frozenset({2, 3, 4}), 0, 8.0, 0.0)])
    assert ledger.load(A, 1.0)[:2] == (4, 4.0)
    ledger.release("r1", 1.0)
    assert ledger.load(A, 1.0).active_blocks == 3
    ledger.set_peers(A, [])
    assert ledger.load(A, 1.0).total == 0
    ledger.add(flight("r2", A, 1), 0, 0.0)
    ledger.forget(A)
    assert (len(ledger), ledger.load(A, 1.0).total) == (0, 0)


def test_what_an_engine_has_queued_is_load_until_it_is_old() -> None:
    ledger = LoadLedger(half_life=1.0)
    ledger.set_queued(A, 0.0, 10.0)
    assert ledger.workers() == ()
    ledger.set_queued(A, 7.5, 10.0)
    assert ledger.load(A, 9.0) == (0, 0.0, 7.5)
    assert ledger.load(A, 9.0).total == 7.5
    assert ledger.load(A, 10.0).total == 0
    ledger.set_queued(A, 0.0, 20.0)
    assert ledger.load(A, 11.0).total == 0


# -- predictions ------------------------------------------------------------------------------


def test_predictions_end_by_event_by_epoch_and_by_time() -> None:
    p = Predictions(ttl=2.0)
    p.add(A, 1, [1, 2, 3, 4], 4, 0.0)
    assert p.run(A, [1, 2, 3, 9], 0, 1.0) == 3
    p.seen(A, stored=[1, 2], removed=[])
    assert p.run(A, [1, 2, 3, 4], 0, 1.0) == 0
    assert p.run(A, [1, 2, 3, 4], 2, 1.0) == 4
    p.seen(A, stored=[], removed=[4])
    assert p.run(A, [1, 2, 3, 4], 2, 1.0) == 3
    assert p.farthest_end(A, {4: 7}, 1.0) == -1
    assert (p.confirmed, p.dropped) == (2, 2)
    p.at_epoch(A, 2)
    assert (len(p), p.has(A, 1.0)) == (0, False)
    p.add(B, 1, [1, 2], 2, 0.0)
    p.add(B, 1, [1, 2, 3], 3, 1.0)
    assert p.run(B, [1, 2, 3], 0, 2.5) == 3
    assert p.farthest_end(B, {2: 1, 3: 2}, 2.5) == 2
    assert not p.has(B, 3.0)
    assert len(p) == 0


def test_predictions_of_an_older_epoch_do_not_come_back() -> None:
    p = Predictions(ttl=2.0)
    p.add(A, 1, [1], 0, 0.0)
    p.add(A, 2, [5], 0, 0.0)
    assert p.run(A, [1], 0, 0.0) == 0
    assert p.run(A, [5], 0, 0.0) == 1


def test_predictions_are_bounded_and_can_be_off() -> None:
    p = Predictions(ttl=2.0, limit=10)
    p.add(A, 1, list(range(1, 9)), 0, 0.0)
    p.add(B, 1, list(range(1, 9)), 0, 0.0)
    assert (len(p), p.refused) == (8, 8)
    p.add(B, 1, [1], 0, 5.0)
    assert len(p) == 9
    assert not p.has(A, 5.0)
    off = Predictions(ttl=0.0)
    off.add(A, 1, [1], 1, 0.0)
    assert not off.has(A, 0.0)


def test_size_is_right_after_random_traffic() -> None:
    source, p, now = random.Random(3), Predictions(ttl=1.0), 0.0
    for _ in range(2000):
        now += source.random() / 10
        worker = source.choice([A, B])
        names = source.sample(range(1, 60), 5)
        if source.random() < 0.6:
            p.add(worker, 1, names, names[-1], now)
        else:
            p.seen(worker, names[:2], names[2:])
        p.has(A, now), p.has(B, now)
        held = sum(len(r.blocks) + len(r.ends) for r in p._ranks.values())
        assert len(p) == held
    p.has(A, now + 2), p.has(B, now + 2)
    assert len(p) == 0


# -- outcomes ---------------------------------------------------------------------------------


def outcome(predicted: int, actual: int, *, exact: bool = True, prompt: int = 1000) -> Outcome:
    return Outcome(A, predicted, 0, actual, prompt, 1000, 16, exact)


def test_worker_that_is_wrong_for_a_while_is_marked_once_and_resynced() -> None:
    watch = DriftWatch(DriftOptions(threshold=0.2, window=20, minimum=5, cooldown=60.0))
    for i in range(4):
        watch.record(outcome(800, 0), float(i))
    assert watch.due() == []
    watch.record(outcome(800, 0), 4.0)
    assert watch.drifting(A)
    assert watch.due() == [(A, 0.8)]
    for i in range(30):
        watch.record(outcome(800, 0), 5.0 + i)
    assert watch.due() == []
    assert watch.drifting(A)
    watch.record(outcome(800, 0), 64.0)
    assert [w for w, _ in watch.due()] == [A]
    for i in range(20):
        watch.record(outcome(800, 800), 65.0 + i)
    assert not watch.drifting(A)
    row = watch.audit()[0]
    assert (row.outcomes, row.over, row.under, row.resyncs) == (56, 36, 0, 2)
    watch.forget(A)
    assert watch.audit() == []


def test_small_errors_and_upper_bounds_that_are_not_reached_are_no_drift() -> None:
    watch = DriftWatch(DriftOptions(threshold=0.2, window=10, minimum=2))
    for i in range(10):
        watch.record(outcome(815, 800), float(i))
        watch.record(outcome(800, 0, exact=False), float(i))
    assert not watch.drifting(A)
    for i in range(10):
        watch.record(outcome(0, 800, exact=False, prompt=1001), float(i))
    assert watch.drifting(A)
    assert watch.audit()[0].miscounted == 10
    assert watch.audit()[0].under == 10
