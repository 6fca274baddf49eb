"""Reported faults of streams, replays, restarts and ranks, over real sockets into a real daemon.

Each docstring starts with the row of docs/field-cases.md that it covers.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import grpc
import pytest
import servers
from daemon import Daemon
from reliability import QUICK, counter, matched, other, removed, running, state, stored

from kvindexd.testing.engine import FakeEngine, free_ports
from kvindexd.v1 import index_pb2 as pb

CLEAR = {"type": "AllBlocksCleared"}


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    """Replays are asked in parts of a second; silence counts as such after one."""
    with servers.start_valkey() as redis:
        one = Daemon(
            **QUICK, redis__url=redis.url, ingest__event_grace=1.5, ingest__peer_timeout=2.0
        )
        with running(one):
            yield one


@pytest.fixture(scope="module")
def tight() -> Iterator[Daemon]:
    """Little of everything: to see bounds at work. Heartbeats are rare."""
    with servers.start_valkey() as redis:
        one = Daemon(
            **QUICK
            | {"ingest.heartbeat": 30.0, "ingest.lease_ttl": 60.0, "ingest.replay_timeout": 3.0},
            redis__url=redis.url,
            ingest__buffer_batches=5,
            limits__blocks_per_rank=1000,
        )
        with running(one):
            yield one


def follow(daemon: Daemon, engine: FakeEngine, name: str, **fields: object) -> None:
    """Register an engine and wait until what it sends is received."""
    fields = {"replay_endpoint": engine.replay_endpoint()} | fields
    daemon.register(name, engine.endpoint(), **fields)
    engine.wait_subscribed()
    daemon.until(lambda: daemon.worker(name).owner, "owned")


def in_sync(daemon: Daemon, name: str) -> None:
    daemon.until(lambda: state(daemon, name) == "LIVE", "in sync")


# -- gaps and replay ------------------------------------------------------------------------------


def test_field_a_lost_removal_is_a_gap_that_is_replayed(daemon: Daemon) -> None:
    """G1: the child that follows the hole is applied behind what was in it."""
    with FakeEngine() as engine:
        follow(daemon, engine, "g1")
        engine.publish([stored(0)])
        engine.publish([stored(1)])
        daemon.until_seq("g1", 1)
        assert matched(daemon, 3, "g1") == 2
        engine.drop_next()
        engine.publish([removed(0)])
        engine.publish([stored(2)])
        daemon.until_seq("g1", 3)
        assert matched(daemon, 3, "g1") == 0
        assert counter(daemon, "gaps", "g1") == 1
        assert counter(daemon, "lost_batches", "g1") == 0


def test_field_until_a_gap_is_repaired_the_answer_says_so(tight: Daemon) -> None:
    """G1: at once, and not with the next heartbeat, which may be seconds away."""
    with FakeEngine() as engine:
        follow(tight, engine, "marked")
        engine.publish([stored(0)])
        tight.until_seq("marked", 0)
        in_sync(tight, "marked")
        engine.replay_mode("silent")
        engine.drop_next()
        engine.publish([removed(0)])
        engine.publish([stored(1)])
        began = time.monotonic()

        def marked() -> bool:
            return tight.score([*range(16), 7])["marked"].state == pb.SYNCING

        tight.until(marked, "marked in the answer", 2.5)
        assert "replay" in tight.worker("marked").detail
        assert time.monotonic() - began < 2.5
        tight.until_seq("marked", 2)
        in_sync(tight, "marked")
        assert counter(tight, "lost_batches", "marked") == 1


def test_field_a_first_frame_above_zero_is_a_gap_from_zero(daemon: Daemon) -> None:
    """G2: a late joiner reads what was published before it came, and the new batch behind it."""
    with FakeEngine() as engine:
        for n in range(7):
            engine.publish([stored(n)])
        daemon.register("g2", engine.endpoint(), replay_endpoint=engine.replay_endpoint())
        engine.wait_subscribed()
        engine.publish([removed(6)])
        daemon.until_seq("g2", 7)
        assert matched(daemon, 7, "g2") == 6
        assert counter(daemon, "restarts", "g2") == 0


@pytest.mark.parametrize("mode", ["normal", "untopical"])
def test_field_replies_with_and_without_topic_end_at_the_marker(daemon: Daemon, mode: str) -> None:
    """G3: of vLLM's older and newer form; the end marker is never applied as a batch."""
    name = f"g3-{mode}"
    with FakeEngine(topic="kv@pod@m") as engine:
        engine.replay_mode(mode)
        for n in range(5):
            engine.publish([stored(n)])
        follow(daemon, engine, name, topic="kv@pod")
        daemon.until_seq(name, 4)
        in_sync(daemon, name)
        engine.publish([stored(5)])
        assert daemon.until_seq(name, 5).counters["replay:complete"] == 1
        assert matched(daemon, 6, name) == 6
        assert counter(daemon, "restarts", name) == 0


def test_field_a_replay_server_that_says_nothing_blocks_nothing(daemon: Daemon) -> None:
    """G4: it costs a timeout or two; the live stream goes on, and its buffer can be read later."""
    with FakeEngine() as engine:
        engine.replay_mode("silent")
        for n in range(5):
            engine.publish([stored(n)])
        follow(daemon, engine, "g4")
        began = time.monotonic()
        engine.publish([stored(0)])
        daemon.until_seq("g4", 5)
        assert time.monotonic() - began < QUICK["ingest.replay_timeout"] + 1.5
        assert matched(daemon, 5, "g4") == 1
        assert set(engine.replay_requests()) == {0}, "in the only framing that is answered at all"
        engine.replay_mode("normal")
        daemon.admin.ResyncWorker(pb.ResyncWorkerRequest(worker_id="g4"), timeout=10)
        daemon.until(lambda: matched(daemon, 5, "g4") == 5, "read back")


def test_field_a_replay_that_comes_late_brings_nothing_removed_back(daemon: Daemon) -> None:
    """G5: the removal waits for the hole in front of it."""
    with FakeEngine() as engine:
        follow(daemon, engine, "g5")
        engine.publish([stored(0)])
        daemon.until_seq("g5", 0)
        engine.drop_next()
        engine.publish([stored(1)])
        engine.publish([removed(1)])
        daemon.until_seq("g5", 2)
        assert matched(daemon, 2, "g5") == 1


def test_field_more_live_batches_than_may_wait_drop_the_claims(tight: Daemon) -> None:
    """G5: when the waiting batches overflow, the worker's claims go; nothing is applied out of
    order."""
    with FakeEngine() as engine:
        follow(tight, engine, "overflow")
        engine.publish([stored(0)])
        tight.until_seq("overflow", 0)
        engine.replay_mode("silent")
        engine.drop_next()
        engine.publish([removed(0)])
        began = time.monotonic()
        for n in range(1, 10):
            engine.publish([other(10_000 * n, 1000 + n)])
        tight.until_seq("overflow", 10)
        assert time.monotonic() - began < 2.5, "it did not wait for the replay's timeout"
        assert matched(tight, 1, "overflow") == 0
        assert matched(tight, 1, "overflow", 90_000) == 1
        reasons = [e["reason"] for e in tight.events("events_lost") if e["worker"] == "overflow#0"]
        assert reasons == ["overflow"]


def test_field_a_recovery_is_not_followed_by_another(daemon: Daemon) -> None:
    """G7: live batches that follow what was recovered ask for no further replay."""
    with FakeEngine() as engine:
        for n in range(101):
            engine.publish([stored(n)])
        follow(daemon, engine, "g7")
        daemon.until_seq("g7", 100)
        for n in range(101, 140):
            engine.publish([stored(n)])
        daemon.until_seq("g7", 139)
        assert matched(daemon, 140, "g7") == 140
        assert engine.replay_requests() == [0]
        assert counter(daemon, "gaps", "g7") == 0


# -- restarts and clears --------------------------------------------------------------------------


@pytest.mark.parametrize("replay", [True, False], ids=["replay", "no_replay"])
def test_field_an_engine_that_restarts_in_place_is_a_new_incarnation(
    daemon: Daemon, replay: bool
) -> None:
    """G9: its numbers go back to 0; also where no replay is configured, as by default."""
    name = f"g9-{replay}"
    with FakeEngine(replay_port=0 if replay else None) as engine:
        follow(daemon, engine, name)
        for n in range(6):
            engine.publish([stored(n)])
        daemon.until_seq(name, 5)
        epoch = daemon.worker(name).epoch
        engine.restart()
        engine.wait_subscribed()
        engine.publish([other(9000, 99)])
        daemon.until_seq(name, 0)
        assert matched(daemon, 6, name) == 0
        assert matched(daemon, 1, name, 9000) == 1
        assert daemon.worker(name).epoch > epoch
        assert counter(daemon, "restarts", name) == 1


def test_field_an_idle_engine_under_the_same_name_is_not_warm(daemon: Daemon) -> None:
    """G10: the pod restarts with the same name and says nothing: its empty buffer convicts it."""
    with FakeEngine() as engine:
        follow(daemon, engine, "pod-0")
        engine.publish([stored(0, 4)])
        daemon.until_seq("pod-0", 0)
        assert matched(daemon, 4, "pod-0") == 4
        engine.restart()
        daemon.until(lambda: matched(daemon, 4, "pod-0") == 0, "cold without a single event", 15)


def test_field_a_new_address_under_the_same_name_is_a_new_incarnation(daemon: Daemon) -> None:
    """G10, R3: what was held under a name does not outlive the engine that held it."""
    with FakeEngine() as old, FakeEngine() as new:
        follow(daemon, old, "renamed")
        old.publish([stored(0, 4)])
        daemon.until_seq("renamed", 0)
        daemon.register("renamed", new.endpoint(), address="elsewhere.test:8000")
        assert matched(daemon, 4, "renamed") == 0


def test_field_a_worker_that_moves_again_and_again_is_followed(daemon: Daemon) -> None:
    """G10, O7: its task is fenced and cancelled at once; that must end it, or it would hold up all
    that come after."""
    with FakeEngine() as old, FakeEngine() as new:
        old.publish([stored(0)])
        new.publish([stored(0), stored(1)])
        for n in range(40):
            engine = (old, new)[n % 2]
            daemon.register("moves", engine.endpoint(), replay_endpoint=engine.replay_endpoint())
        daemon.until(lambda: matched(daemon, 2, "moves") == 2, "followed to where it is now")
        daemon.register("after", old.endpoint(), replay_endpoint=old.replay_endpoint())
        daemon.until(lambda: matched(daemon, 1, "after") == 1, "and the next one too")
        assert not daemon.events("rank_did_not_stop")


def test_field_a_clear_empties_one_worker_and_keeps_its_groups(daemon: Daemon) -> None:
    """G13: the other worker's copy stays; what is stored afterwards counts."""
    with FakeEngine() as engine, FakeEngine() as neighbour:
        follow(daemon, engine, "g13")
        follow(daemon, neighbour, "g13-other")
        neighbour.publish([stored(0)])
        daemon.until_seq("g13-other", 0)
        engine.publish([stored(0, 2)])
        engine.publish([CLEAR])
        daemon.until_seq("g13", 1)
        assert matched(daemon, 2, "g13") == 0
        engine.publish([stored(0)])
        daemon.until_seq("g13", 2)
        assert matched(daemon, 2, "g13") == 1
        assert matched(daemon, 2, "g13-other") == 1
        assert [g.kind for g in daemon.worker("g13").groups] == ["full_attention"]


def test_field_an_operator_can_clear_what_no_event_clears(daemon: Daemon) -> None:
    """G13, G16: an idle engine may never send its clear, and a batch that was lost before it was
    numbered leaves no gap."""
    with FakeEngine() as engine:
        follow(daemon, engine, "g16")
        engine.publish([stored(0, 2)])
        engine.publish([stored(2)])  # the removal before it was lost inside the engine
        daemon.until_seq("g16", 1)
        assert matched(daemon, 3, "g16") == 3
        assert counter(daemon, "gaps", "g16") == 0
        daemon.admin.PurgeWorker(pb.PurgeWorkerRequest(worker_id="g16"), timeout=10)
        daemon.until(lambda: matched(daemon, 3, "g16") == 0, "forgotten")
        in_sync(daemon, "g16")
        engine.publish([stored(0)])
        daemon.until(lambda: matched(daemon, 3, "g16") == 1, "and followed further")


def test_field_a_flood_of_clears_costs_next_to_nothing(daemon: Daemon) -> None:
    """G14: the second clear finds nothing; answers about others stay quick."""
    with FakeEngine() as engine:
        follow(daemon, engine, "g14")
        for n in range(0, 20_000, 1000):
            engine.publish([stored(n, 1000)])
        daemon.until_seq("g14", 19)
        began = time.monotonic()
        slowest = 0.0
        for _ in range(1000):
            engine.publish([CLEAR])
        while daemon.worker("g14").last_seq < 1019:
            asked = time.monotonic()
            matched(daemon, 4, "g13-other")
            slowest = max(slowest, time.monotonic() - asked)
            assert time.monotonic() - began < 15
        assert matched(daemon, 4, "g14") == 0
        assert slowest < 1.0


def test_field_claims_that_are_never_removed_are_bounded(tight: Daemon) -> None:
    """G15: 10,000 blocks of a producer that never removes, of which 1,000 are kept: the newest."""
    with FakeEngine() as engine:
        follow(tight, engine, "g15")
        for n in range(100):
            hashes = range(n * 100, n * 100 + 100)
            event = stored(0, 100) | {
                "block_hashes": [5_000_000 + h for h in hashes],
                "token_ids": [n * 1600 + i for i in range(1600)],
            }
            engine.publish([event])
        tight.until_seq("g15", 99)
        assert tight.worker("g15").blocks["device"] <= 1000
        assert counter(tight, "claims_expired", "g15") >= 9000
        assert matched(tight, 1, "g15", 99 * 1600) == 1
        assert matched(tight, 1, "g15", 0) == 0


# -- the socket -----------------------------------------------------------------------------------


def test_field_shifted_frames_are_never_parsed_and_what_they_cost_is_replayed(
    daemon: Daemon,
) -> None:
    """G18: after a run of them the socket is replaced."""
    with FakeEngine() as engine:
        follow(daemon, engine, "g18")
        engine.publish([stored(0)])
        engine.drop_next()
        engine.publish([stored(1)])
        for _ in range(5):
            engine.garbage("shifted")
        engine.publish([stored(2)])
        daemon.until_seq("g18", 2)
        assert matched(daemon, 3, "g18") == 3
        assert counter(daemon, "link:recreated", "g18") == 1
        refused = [counter(daemon, f"dropped:{r}", "g18") for r in ("bad_seq", "bad_parts")]
        assert 4 <= sum(refused) <= 5
        assert counter(daemon, "restarts", "g18") == 0


def test_field_a_burst_before_a_silence_is_consumed_whole(daemon: Daemon) -> None:
    """G20, G17: nothing waits for the next message, and no receive that is cancelled loses one."""
    with FakeEngine(replay_port=None) as engine:
        follow(daemon, engine, "g20")
        for n in range(6000):
            engine.publish([stored(n % 40)])
        daemon.until_seq("g20", 5999)
        assert counter(daemon, "gaps", "g20") == 0
        assert counter(daemon, "event:BlockStored", "g20") == 6000
        # On a busy machine the burst may outlast the lease; the next heartbeat brings it back.
        daemon.until(lambda: matched(daemon, 40, "g20") == 40, "the burst to be answered")


# -- ranks ----------------------------------------------------------------------------------------


def test_field_ranks_count_for_themselves(daemon: Daemon) -> None:
    """I1: interleaved sequences of two ranks are neither gaps nor restarts."""
    with FakeEngine(dp_size=2) as engine:
        for rank in range(2):
            daemon.register(
                "i1",
                engine.endpoint(rank),
                replay_endpoint=engine.replay_endpoint(rank),
                dp_rank=rank,
                dp_size=2,
            )
        engine.wait_subscribed()
        engine.publish([stored(0)], rank=0)
        engine.publish([stored(0)], rank=1)
        engine.publish([stored(1)], rank=0)
        engine.publish([stored(1)], rank=1)
        engine.publish([stored(2)], rank=0)
        daemon.until_seq("i1", 2, 0)
        daemon.until_seq("i1", 1, 1)
        assert (matched(daemon, 3, "i1"), matched(daemon, 3, "i1#1")) == (3, 2)
        for rank in range(2):
            counters = daemon.worker("i1", rank).counters
            assert (counters["gaps"], counters["restarts"]) == (0, 0)


def test_field_what_a_stream_wrote_goes_with_the_stream(daemon: Daemon) -> None:
    """I2: whatever rank its batches claim."""
    with FakeEngine(replay_port=None, dp_size=4) as engine:
        daemon.register("i2", engine.endpoint(3), dp_rank=0)
        engine.wait_subscribed(rank=3)
        engine.publish([stored(0)], rank=3)
        daemon.until_seq("i2", 0)
        assert matched(daemon, 1, "i2") == 1
        assert matched(daemon, 1, "i2#3") == -1
        request = pb.DeregisterWorkerRequest(worker_id="i2", dp_rank=0)
        daemon.admin.DeregisterWorker(request, timeout=10)
        assert matched(daemon, 1, "i2") == matched(daemon, 1, "i2#3") == -1


def test_field_streams_that_claim_one_rank_are_not_merged(daemon: Daemon) -> None:
    """I3: two endpoints of a pod whose children both believe to be rank 0; it is reported."""
    with FakeEngine(replay_port=None) as first, FakeEngine(replay_port=None) as second:
        daemon.register("i3", first.endpoint(), dp_rank=0, dp_size=2)
        daemon.register("i3", second.endpoint(), dp_rank=1, dp_size=2)
        first.wait_subscribed()
        second.wait_subscribed()
        first.publish([stored(0, 2)])
        second.publish([other(7000, 1)])
        daemon.until_seq("i3", 0, 0)
        daemon.until_seq("i3", 0, 1)
        assert (matched(daemon, 2, "i3"), matched(daemon, 2, "i3#1")) == (2, 0)
        assert matched(daemon, 1, "i3#1", 7000) == 1
        second.publish([removed(0)])  # an equal number, and another's
        daemon.until_seq("i3", 1, 1)
        assert matched(daemon, 2, "i3") == 2
        assert daemon.worker("i3", 1).counters["rank_mismatch"] == 2
        daemon.until(lambda: "say rank 0" in daemon.worker("i3", 1).detail, "reported")
        assert "say rank" not in daemon.worker("i3", 0).detail
        (line,) = [e for e in daemon.events("rank_mismatch") if e["worker"] == "i3#1"]
        assert (line["registered"], line["claimed"]) == (1, 0)


def test_field_ranks_that_never_connected_are_told_apart(daemon: Daemon) -> None:
    """I4: one of four ranks carries data; each says how it stands, and answers use what exists."""
    with FakeEngine(replay_port=None) as engine:
        dead = free_ports(3)
        for rank in range(4):
            endpoint = engine.endpoint() if rank == 0 else f"tcp://127.0.0.1:{dead + rank - 1}"
            daemon.register("i4", endpoint, dp_rank=rank, dp_size=4)
        engine.wait_subscribed()
        engine.publish([stored(0)])
        daemon.until_seq("i4", 0)

        def told() -> bool:
            details = [daemon.worker("i4", rank).detail for rank in range(4)]
            return ["never connected" in d for d in details] == [False, True, True, True]

        daemon.until(told, "3 of 4 never connected")
        assert matched(daemon, 1, "i4") == 1
        request = pb.ListWorkersRequest(model="m", include_stale=True)
        listed = daemon.admin.ListWorkers(request, timeout=10).workers
        silent = [w for w in listed if w.worker_id == "i4" and "never connected" in w.detail]
        assert [w.dp_rank for w in silent] == [1, 2, 3]


def test_field_only_registered_ranks_are_answered(daemon: Daemon) -> None:
    """I8: after a scale-down from eight ranks to four."""
    with FakeEngine(replay_port=None, dp_size=8) as engine:
        for rank in range(8):
            daemon.register("i8", engine.endpoint(rank), dp_rank=rank, dp_size=8)
        engine.wait_subscribed()
        for rank in range(8):
            engine.publish([stored(0)], rank=rank)
            daemon.until_seq("i8", 0, rank)
        for rank in range(4, 8):
            request = pb.DeregisterWorkerRequest(worker_id="i8", dp_rank=rank)
            daemon.admin.DeregisterWorker(request, timeout=10)
        answered = {s.dp_rank for k, s in daemon.score([*range(17)]).items() if k[:2] == "i8"}
        assert answered == {0, 1, 2, 3}
        with pytest.raises(grpc.RpcError) as caught:
            daemon.worker("i8", 7)
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND


def test_field_equal_tokens_of_other_models_do_not_meet(daemon: Daemon) -> None:
    """I14: removals name no model; names may hold any character."""
    m1, m2 = "org/m@1", "org/m@1#0:{x}"
    with FakeEngine(replay_port=None) as one, FakeEngine(replay_port=None) as two:
        daemon.register("i14/a@b", one.endpoint(), model=m1)
        daemon.register("i14", two.endpoint(), model=m2)
        one.wait_subscribed()
        two.wait_subscribed()
        one.publish([stored(0)])
        two.publish([stored(0)])
        daemon.until_seq("i14/a@b", 0)
        daemon.until_seq("i14", 0)
        one.publish([removed(0)])
        daemon.until_seq("i14/a@b", 1)
        tokens = [*range(17)]
        found = [
            {k: s.matched_tokens for k, s in daemon.score(tokens, model=m).items()}
            for m in (m1, m2)
        ]
        assert found == [{"i14/a@b": 0}, {"i14": 16}]
