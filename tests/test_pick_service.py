"""PickWorker, CompleteRequest and PairWorkers of a running daemon, engines being stand-ins."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from daemon import Daemon, serving
from google.protobuf.duration_pb2 import Duration
from picks import complete, fresh, hold, pick, request, stored

from kvindexd.testing.engine import FakeEngine
from kvindexd.v1 import index_pb2 as pb


class Fleet:
    """A daemon and engines a, b (and c) registered with it."""

    def __init__(self, daemon: Daemon, engines: dict[str, FakeEngine]) -> None:
        self.daemon = daemon
        self.engines = engines

    def hold(self, name: str, *prompts: list[int]) -> None:
        hold(self.daemon, self.engines[name], name, *prompts)

    def rest(self) -> None:
        """Wait until what earlier picks computed has decayed."""
        tokens = fresh(7)

        def idle() -> bool:
            return all(s.cost == 7 for s in self.daemon.score(tokens).values())

        self.daemon.until(idle, "load has decayed")


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """One daemon with the usual settings for the whole module."""
    with serving(index__data_dir=str(tmp_path_factory.mktemp("picks"))) as daemon:
        yield daemon


@pytest.fixture
def fleet(shared: Daemon, tmp_path: Any, request: pytest.FixtureRequest) -> Iterator[Fleet]:
    """Fresh workers on the shared daemon, or, with a parameter, on one with those settings."""
    settings = getattr(request, "param", None)
    if settings is None:
        with workers_of(shared) as fleet:
            yield fleet
        return
    with serving(index__data_dir=str(tmp_path), **settings) as daemon, workers_of(daemon) as fleet:
        yield fleet


@contextlib.contextmanager
def workers_of(daemon: Daemon) -> Iterator[Fleet]:
    engines = {name: FakeEngine() for name in "abc"}
    try:
        for name, engine in engines.items():
            daemon.register(
                name,
                engine.endpoint(),
                replay_endpoint=engine.replay_endpoint(),
                address=f"10.0.0.{ord(name) - 96}:8000",
                labels={"zone": "x" if name == "c" else "y"},
                aliases=[f"pod-{name}", "[fd00::5]:8000" if name == "b" else f"[fd00::{name}]:1"],
            )
        for engine in engines.values():
            engine.wait_subscribed()
        for name in engines:
            daemon.until(lambda n=name: daemon.worker(n).state == pb.LIVE, f"{name} live")
        yield Fleet(daemon, engines)
        for name in engines:
            daemon.admin.DeregisterWorker(pb.DeregisterWorkerRequest(worker_id=name), timeout=10)
    finally:
        for engine in engines.values():
            engine.stop()


def code_of(call: Any, *args: Any) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.RpcError) as caught:
        call(*args, timeout=10)
    return caught.value.code(), caught.value.details()


# -- exactness over the wire ------------------------------------------------------------------


def test_holder_gets_twenty_of_twenty_in_any_order_and_with_requests_in_flight(
    fleet: Fleet,
) -> None:
    for blocks, extra, holder in ((8, 0, "c"), (8, 5, "b"), (1, 0, "c")):
        tokens = fresh(blocks, extra)
        fleet.hold(holder, tokens)
        for names in (["a", "b", "c"], ["c", "b", "a"]):
            ids = []
            for _ in range(20):
                got = pick(fleet.daemon, tokens, candidates=names)
                assert got.worker.worker_id == holder
                assert [f.worker_id for f in got.fallbacks] != []
                ids.append(got.request_id)
            for request_id in ids:
                complete(fleet.daemon, request_id)


def test_longer_match_wins_by_a_single_block(fleet: Fleet) -> None:
    for a, b in ((2, 8), (8, 2), (0, 1), (9, 10)):
        tokens = fresh(10)
        fleet.hold("a", tokens[: 16 * a] or fresh(1))
        fleet.hold("b", tokens[: 16 * b])
        fleet.rest()
        for names in (["a", "b"], ["b", "a"]):
            got = pick(fleet.daemon, tokens, candidates=names)
            assert got.worker.worker_id == ("a" if a > b else "b"), (a, b)
            complete(fleet.daemon, got.request_id)


def test_one_cached_block_is_worth_one_in_flight_until_completion(fleet: Fleet) -> None:
    tokens, other = fresh(10), fresh(1)
    fleet.hold("a", tokens[:16], other)
    fleet.hold("b", fresh(1))
    before = fleet.daemon.score(tokens)
    assert before["a"].cost == before["b"].cost - 1
    got = pick(fleet.daemon, other, candidates=["a"])
    during = fleet.daemon.score(tokens)
    assert (during["a"].active_blocks, during["b"].active_blocks) == (1, 0)
    assert during["a"].cost == during["b"].cost == 10
    complete(fleet.daemon, got.request_id)
    after = fleet.daemon.score(tokens)
    assert after["a"].active_blocks == 0
    assert after["a"].cost == before["a"].cost


def test_shared_prefixes_are_counted_once_and_leases_end(fleet: Fleet) -> None:
    tokens = fresh(6)
    ended = fleet.daemon.metric('kvindexd_leases_ended_total{why="lease"}')
    for tail in (fresh(1), fresh(2)):
        pick(fleet.daemon, tokens + tail, candidates=["b"], lease=Duration(nanos=400_000_000))
    assert fleet.daemon.score(tokens)["b"].active_blocks == 9
    fleet.daemon.until(lambda: fleet.daemon.score(tokens)["b"].active_blocks == 0, "lease ends")
    name = 'kvindexd_leases_ended_total{why="lease"}'
    fleet.daemon.until(lambda: fleet.daemon.metric(name) == ended + 2, "both are counted")


# -- predictions ------------------------------------------------------------------------------


def spread_of_burst(fleet: Fleet, tokens: list[int]) -> Counter[str]:
    """64 picks of one prompt at once; what each worker is sent, it announces 200 ms later."""
    futures = [fleet.daemon.index.PickWorker.future(request(tokens), timeout=10) for _ in range(64)]
    went = Counter(f.result().worker.worker_id for f in futures)

    def announce() -> None:
        for name in went:
            fleet.engines[name].publish([stored(tokens)])

    timer = threading.Timer(0.2, announce)
    timer.start()
    timer.join()
    return went


def test_burst_of_equal_prompts_does_not_scatter_before_the_first_event(fleet: Fleet) -> None:
    for name in "abc":
        fleet.hold(name, fresh(1))
    assert list(spread_of_burst(fleet, fresh(40)).values()) == [64]


@pytest.mark.parametrize("fleet", [{"pick__prediction_ttl": 0}], indirect=True)
def test_burst_of_equal_prompts_scatters_without_predictions(fleet: Fleet) -> None:
    for name in "abc":
        fleet.hold(name, fresh(1))
    assert sorted(spread_of_burst(fleet, fresh(40)).values()) == [21, 21, 22]


def test_burst_stays_together_on_workers_that_never_sent_an_event(fleet: Fleet) -> None:
    assert list(spread_of_burst(fleet, fresh(40)).values()) == [64]


def test_prediction_is_kept_apart_and_ended_by_events(fleet: Fleet) -> None:
    tokens = fresh(10, 3)
    fleet.hold("a", fresh(1))
    first = pick(fleet.daemon, tokens, candidates=["a"])
    assert (first.worker.reusable_tokens, first.worker.predicted_tokens) == (0, 0)
    score = fleet.daemon.score(tokens)["a"]
    assert (score.reusable_tokens, score.predicted_tokens, score.device_tokens) == (160, 160, 160)
    explained = fleet.daemon.index.Explain(request(tokens).score, timeout=10)
    held = {w.score.worker_id: w.groups[0].held for w in explained.workers if w.groups}
    assert held["a"] == bytes([4] * 10)
    event = stored(tokens[: 16 * 6])
    seq = fleet.engines["a"].publish([event])
    fleet.daemon.until_seq("a", seq)
    score = fleet.daemon.score(tokens)["a"]
    assert (score.reusable_tokens, score.predicted_tokens) == (160, 64)
    removed = {
        "type": "BlockRemoved",
        "block_hashes": event["block_hashes"][-1:],
        "medium": "GPU",
        "group_idx": 0,
    }
    fleet.daemon.until_seq("a", fleet.engines["a"].publish([removed]))
    score = fleet.daemon.score(tokens)["a"]
    assert (score.reusable_tokens, score.predicted_tokens) == (80, 0)
    pick(fleet.daemon, tokens, candidates=["a"])
    assert fleet.daemon.score(tokens)["a"].predicted_tokens == 80
    seq = fleet.engines["a"].publish([{"type": "AllBlocksCleared"}])
    fleet.daemon.until(lambda: fleet.daemon.worker("a").last_seq == seq, "cleared")
    score = fleet.daemon.score(tokens)["a"]
    assert (score.reusable_tokens, score.predicted_tokens) == (0, 0)


@pytest.mark.parametrize("fleet", [{"pick__prediction_ttl": 0.3}], indirect=True)
def test_prediction_that_no_event_confirms_expires(fleet: Fleet) -> None:
    tokens = fresh(10, 3)
    fleet.hold("a", fresh(1))
    pick(fleet.daemon, tokens, candidates=["a"])
    began = time.monotonic()
    assert fleet.daemon.score(tokens)["a"].predicted_tokens == 160
    fleet.daemon.until(lambda: fleet.daemon.score(tokens)["a"].predicted_tokens == 0, "expiry")
    assert time.monotonic() - began < 2
    fleet.daemon.until(
        lambda: fleet.daemon.metric('kvindexd_predictions_total{outcome="expired"}') >= 10,
        "metric",
    )


# -- who may be picked ------------------------------------------------------------------------


def test_candidates_go_by_any_of_their_names(fleet: Fleet) -> None:
    for names, expected in (
        (["b"], {"b"}),
        (["10.0.0.2"], {"b"}),
        (["10.0.0.2:8000"], {"b"}),
        (["pod-b"], {"b"}),
        (["[fd00::5]:8000"], {"b"}),
        (["fd00::5"], {"b"}),
        (["fd00:0:0::5"], {"b"}),
        ([" a ", "pod-c", "nobody"], {"a", "c"}),
    ):
        got = pick(fleet.daemon, fresh(2), candidates=names)
        assert {got.worker.worker_id, *(f.worker_id for f in got.fallbacks)} == expected, names
    assert code_of(fleet.daemon.index.PickWorker, request(fresh(2), candidates=["10.0.0.2:9"])) == (
        grpc.StatusCode.UNAVAILABLE,
        "none of the 1 candidates is a worker of this model; it has 3 workers",
    )


def test_labels_roles_and_top_k_narrow_the_choice(fleet: Fleet) -> None:
    got = pick(fleet.daemon, fresh(2), labels={"zone": "x"})
    assert (got.worker.worker_id, list(got.fallbacks)) == ("c", [])
    got = pick(fleet.daemon, fresh(2), top_k=2)
    assert len(got.fallbacks) == 1
    code, text = code_of(fleet.daemon.index.PickWorker, request(fresh(2), role=pb.PREFILL))
    assert code is grpc.StatusCode.UNAVAILABLE
    assert "no LIVE or SYNCING worker suits" in text


def test_draining_and_stale_workers_are_scored_but_not_picked(fleet: Fleet) -> None:
    tokens = fresh(5)
    fleet.hold("b", tokens)
    drain = pb.DrainWorkerRequest(worker_id="b")
    fleet.daemon.admin.DrainWorker(drain, timeout=10)
    fleet.daemon.until(lambda: fleet.daemon.worker("b").state == pb.DRAINING, "draining")
    assert fleet.daemon.score(tokens)["b"].reusable_tokens == 64
    for _ in range(4):
        got = pick(fleet.daemon, tokens)
        assert got.worker.worker_id in "ac"
        assert "b" not in [f.worker_id for f in got.fallbacks]
    code, text = code_of(fleet.daemon.index.PickWorker, request(tokens, candidates=["b"]))
    assert (code, "1 DRAINING" in text) == (grpc.StatusCode.UNAVAILABLE, True)


def test_syncing_workers_are_picked_only_where_no_live_one_suits(fleet: Fleet) -> None:
    tokens = fresh(5)
    fleet.hold("c", tokens)
    assert pick(fleet.daemon, tokens).worker.worker_id == "c"
    fleet.engines["c"].stop()
    fleet.daemon.until(lambda: fleet.daemon.score(tokens)["c"].state == pb.SYNCING, "syncing")
    got = pick(fleet.daemon, tokens)
    assert got.worker.worker_id in "ab"
    assert got.fallbacks[-1].worker_id == "c"
    got = pick(fleet.daemon, tokens, candidates=["c"])
    assert (got.worker.worker_id, got.worker.state) == ("c", pb.SYNCING)


def test_bad_requests_name_the_field(fleet: Fleet) -> None:
    ask, end = fleet.daemon.index.PickWorker, fleet.daemon.index.CompleteRequest
    for lease in (Duration(seconds=-1), Duration(), Duration(seconds=90_000)):
        code, text = code_of(ask, request(fresh(1), lease=lease))
        assert (code, text.startswith("lease:")) == (grpc.StatusCode.INVALID_ARGUMENT, True)
    code, text = code_of(ask, request(fresh(1), request_id="x" * 300))
    assert (code, text.startswith("request_id:")) == (grpc.StatusCode.INVALID_ARGUMENT, True)
    code, text = code_of(end, pb.CompleteRequestRequest())
    assert (code, text.startswith("request_id:")) == (grpc.StatusCode.INVALID_ARGUMENT, True)
    wrong = pb.CompleteRequestRequest(request_id="r", cached_tokens=9, prompt_tokens=8)
    code, text = code_of(end, wrong)
    assert (code, text.startswith("cached_tokens:")) == (grpc.StatusCode.INVALID_ARGUMENT, True)
    for weight in (-1.0, float("nan"), float("inf")):
        for call, message in (
            (ask, request(fresh(1), overlap_weight=weight)),
            (fleet.daemon.index.ScoreWorkers, request(fresh(1), overlap_weight=weight).score),
        ):
            code, text = code_of(call, message)
            assert code is grpc.StatusCode.INVALID_ARGUMENT
            assert text.startswith("options.overlap_weight:")
    code, _ = code_of(ask, request(fresh(1), model="nope"))
    assert code is grpc.StatusCode.NOT_FOUND


def test_request_ids_are_kept_or_made_and_a_retry_moves_the_load(fleet: Fleet) -> None:
    tokens = fresh(5)
    assert pick(fleet.daemon, tokens, request_id="mine", candidates=["a"]).request_id == "mine"
    made = {pick(fleet.daemon, fresh(1)).request_id for _ in range(5)}
    assert len(made) == 5
    assert all(made)
    assert pick(fleet.daemon, tokens, request_id="mine", candidates=["b"]).worker.worker_id == "b"
    picked = fleet.daemon.metric('kvindexd_picks_total{worker="a#0"}')
    assert picked >= 1
    for request_id in made:
        complete(fleet.daemon, request_id)
    score = fleet.daemon.score(tokens)
    assert (score["a"].active_blocks, score["b"].active_blocks) == (0, 5)
    complete(fleet.daemon, "mine")
    complete(fleet.daemon, "mine")
    assert fleet.daemon.score(tokens)["b"].active_blocks == 0


# -- outcomes ---------------------------------------------------------------------------------


@pytest.mark.parametrize("fleet", [{"pick__drift_minimum": 5}], indirect=True)
def test_worker_whose_engine_reports_otherwise_is_resynced_and_heals(fleet: Fleet) -> None:
    tokens = fresh(20, 1)
    fleet.hold("a", tokens)
    engine = fleet.engines["a"]
    # The engine dropped it all and its event was lost for good: nothing on the wire tells.
    engine.drop_next(replayable=False)
    assert pick(fleet.daemon, tokens, candidates=["a"]).worker.reusable_tokens == 320
    for _ in range(6):
        got = pick(fleet.daemon, tokens, candidates=["a"])
        complete(fleet.daemon, got.request_id, cached_tokens=0, prompt_tokens=321)
    fleet.daemon.until(lambda: fleet.daemon.events("worker_drifting"), "drift logged")
    fleet.daemon.until(lambda: fleet.daemon.worker("a").counters["resyncs"] == 1, "resync")
    assert fleet.daemon.metric('kvindexd_predicted_vs_actual_tokens_count{worker="a#0"}') == 6
    fleet.daemon.until(
        lambda: fleet.daemon.metric('kvindexd_worker_drifting{worker="a#0"}') == 1, "gauge"
    )
    for _ in range(10):
        got = pick(fleet.daemon, tokens, candidates=["a"])
        complete(fleet.daemon, got.request_id, cached_tokens=got.worker.reusable_tokens)
    fleet.daemon.until(
        lambda: fleet.daemon.metric('kvindexd_worker_drifting{worker="a#0"}') == 0, "healed"
    )


# -- pairs ------------------------------------------------------------------------------------


def test_pairs_are_transferable_first_then_by_cost_and_say_why(tmp_path: Any) -> None:
    kinds = {
        "p1": (pb.PREFILL, "BLHNC", 1),
        "p2": (pb.PREFILL, "BLNHC", 1),
        "d1": (pb.DECODE, "LBHNC", 2),
        "d2": (pb.DECODE, "BLNHC", 1),
    }
    with serving(index__data_dir=str(tmp_path)) as daemon:
        engines = {name: FakeEngine() for name in kinds}
        try:
            for name, (role, layout, tp) in kinds.items():
                daemon.register(
                    name,
                    engines[name].endpoint(),
                    role=role,
                    kv_layout=layout,
                    tp_size=tp,
                    num_kv_heads=8,
                    block_size=16,
                )
            for engine in engines.values():
                engine.wait_subscribed()
            tokens = fresh(10, 1)
            hold(daemon, engines["p2"], "p2", tokens)
            ask = pb.PairWorkersRequest(prefill=request(tokens).score)
            pairs = daemon.index.PairWorkers(ask, timeout=10).pairs
            names = [(p.prefill.worker_id, p.decode.worker_id) for p in pairs]
            assert names[:2] == [("p2", "d2"), ("p1", "d1")]
            assert set(names) == {(p, d) for p in ("p1", "p2") for d in ("d1", "d2")}
            assert [p.transferable for p in pairs] == [True, True, False, False]
            # Prefill misses weigh 20 a block, decode misses 2.
            assert [p.cost for p in pairs[:2]] == [20.0, 220.0]
            assert pairs[0].prefill.reusable_tokens == 160
            refused = {n: p.reason for n, p in zip(names, pairs, strict=True)}[("p2", "d1")]
            assert "TP 1 to TP 2" in refused
            assert "prefill: BLNHC (one row per page), TP 1" in refused
            assert "decode: LBHNC (slices per KV head), TP 2" in refused
            ask = pb.PairWorkersRequest(
                prefill=request(tokens, candidates=["p1"]).score,
                decode_candidates=["d1", "d2"],
                top_k=1,
            )
            (only,) = daemon.index.PairWorkers(ask, timeout=10).pairs
            assert (only.prefill.worker_id, only.decode.worker_id) == ("p1", "d1")
        finally:
            for engine in engines.values():
                engine.stop()
