"""The sequence rules: batches in order and once, holes filled or reported, restarts recognised."""

from __future__ import annotations

import base64
import random
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvindexd.ingest.actions import (
    Action,
    Apply,
    AskReplay,
    CancelReplay,
    Dropped,
    Gap,
    Lost,
    ReplayOutcome,
    Restarted,
    SequencerConfig,
    SequencerState,
)
from kvindexd.ingest.frame import Frame, FrameError, batch_ts, parse_live, parse_replayed
from kvindexd.ingest.sequencer import Sequencer

COMPLETE, TIMEOUT = ReplayOutcome.COMPLETE, ReplayOutcome.TIMEOUT
END = [b"", b"", b"\xff" * 8, b""]


def frame(seq: int, ts: float | None = None, body: str = "") -> Frame:
    """A batch at engine time `ts` (100 + seq unless told); ts NaN stands for an undated one."""
    ts = 100.0 + seq if ts is None else ts
    payload = b"\xc1garbage" if ts != ts else msgspec.msgpack.encode([ts, [body], 0])
    return Frame.of(b"", seq, payload, 0.0)


UNDATED = float("nan")


def new(replay: bool = True, state: SequencerState | None = None, **config: Any) -> Sequencer:
    return Sequencer(SequencerConfig(replay=replay, **config), state, random.Random(1))


def fed(seqs: Iterable[int], replay: bool = True, **config: Any) -> Sequencer:
    s = new(replay, **config)
    for seq in seqs:
        s.live(frame(seq), 0.0)
    return s


def applied(actions: Iterable[Action]) -> list[int]:
    return [a.frame.seq for a in actions if isinstance(a, Apply)]


def only(actions: Iterable[Action], kind: type) -> list[Any]:
    return [a for a in actions if isinstance(a, kind)]


def asked(actions: Iterable[Action]) -> AskReplay:
    (ask,) = only(actions, AskReplay)
    assert isinstance(ask, AskReplay)
    return ask


# -- frames ------------------------------------------------------------------------------------


def test_time_is_read_from_every_batch_shape() -> None:
    encode = msgspec.msgpack.encode
    assert batch_ts(encode([1.5, [], 0])) == 1.5
    assert batch_ts(encode([7, []])) == 7.0
    assert batch_ts(encode({"events": [], "ts": 2.5, "data_parallel_rank": 0})) == 2.5
    assert batch_ts(encode([1.5])) == 1.5
    for bad in (b"", b"\xc1", encode([float("nan"), []]), encode(["x", []]), encode({"a": 1})):
        assert batch_ts(bad) is None


@pytest.mark.parametrize(
    ("parts", "reason"),
    [
        ([b"t", b"\0" * 8], "bad_parts"),
        ([b"t", b"\0" * 8, b"x", b"more"], "bad_parts"),
        ([b"t", b"\0" * 7, b"x"], "bad_seq"),
        ([b"t", b"\xff" * 8, b"x"], "bad_seq"),
        ([b"t", b"\0" * 8, b"x" * 101], "too_large"),
    ],
)
def test_a_message_that_is_no_frame_is_refused_with_its_reason(
    parts: list[bytes], reason: str
) -> None:
    with pytest.raises(FrameError) as caught:
        parse_live(parts, 100, 0.0)
    assert caught.value.reason == reason


def test_replies_are_read_from_the_tail_and_the_end_marker_is_never_data() -> None:
    seq = (7).to_bytes(8, "big")
    newer = parse_replayed([b"", b"topic", seq, b"p"], 100, 0.0)
    older = parse_replayed([b"", seq, b"p"], 100, 0.0)
    assert newer is not None
    assert older is not None
    assert (newer.seq, newer.topic, older.seq, older.topic) == (7, b"topic", 7, b"")
    assert parse_replayed(END, 100, 0.0) is None
    assert parse_replayed(END[1:], 100, 0.0) is None
    with pytest.raises(FrameError, match="bad_seq"):
        parse_replayed([b"", b"\xff" * 8, b"data"], 100, 0.0)


# -- order -------------------------------------------------------------------------------------


def test_contiguous_frames_are_applied_as_they_come() -> None:
    s = new()
    assert [applied(s.live(frame(i), 0.0)) for i in range(3)] == [[0], [1], [2]]
    assert s.last_seq == 2


def test_a_first_frame_above_zero_is_a_gap_from_zero() -> None:
    s = new()
    out = s.live(frame(7), 0.0)
    assert only(out, Gap) == [Gap(0, 6)]
    ask = asked(out)
    assert ask.start == 0
    for i in range(7):
        out = s.replayed(ask.request_id, frame(i), 0.0)
        assert applied(out) == [i]
    assert applied(s.replay_ended(ask.request_id, COMPLETE, 0.0)) == [7]


def test_a_hole_is_filled_before_the_frames_behind_it() -> None:
    s = fed(range(5))
    out = s.live(frame(6), 0.0)
    assert out == [Gap(5, 5), AskReplay(1, 0, "gap")]
    assert s.live(frame(7), 0.0) == []
    assert s.held == 2
    assert applied(s.replayed(1, frame(5), 0.0)) == [5]
    assert applied(s.replayed(1, frame(6), 0.0)) == [6]
    assert applied(s.replay_ended(1, COMPLETE, 0.0)) == [7]
    assert s.live(frame(6), 0.0) == [Dropped(6, "duplicate")]


def test_without_replay_the_hole_is_lost_and_the_stream_goes_on() -> None:
    s = fed(range(3), replay=False)
    out = s.live(frame(5), 0.0)
    assert out == [Gap(3, 4), Lost(3, 4, "no_replay"), Apply(frame(5), False)]
    assert s.live(frame(4), 0.0) == [Dropped(4, "late")]


def test_a_silent_replay_server_costs_the_hole_and_then_a_backoff() -> None:
    s = fed(range(3))
    ask = asked(s.live(frame(5), 0.0))
    s.live(frame(6), 1.0)
    out = s.replay_ended(ask.request_id, TIMEOUT, 2.0)
    assert [type(a) for a in out] == [Lost, Apply, Apply]
    assert out[0] == Lost(3, 4, "timeout")
    out = s.live(frame(8), 2.1)
    assert only(out, Lost) == [Lost(7, 7, "backoff")]
    assert not only(out, AskReplay)
    assert only(s.live(frame(10), 2.0 + 60), AskReplay), "the next attempt comes after the backoff"


def test_what_a_silent_server_cost_is_read_back_once_it_answers() -> None:
    s = fed(range(3))
    ask = asked(s.live(frame(5), 0.0))
    s.replay_ended(ask.request_id, TIMEOUT, 2.0)
    assert s.unverified
    wake = s.wake_at
    assert wake is not None
    request = asked(s.tick(wake))
    assert (request.start, request.why) == (0, "repair")
    out = [a for i in range(6) for a in s.replayed(request.request_id, frame(i), wake)]
    assert only(out, Restarted) == [Restarted("repair", 5)]
    assert applied(out) == [*range(6)]
    assert s.replay_ended(request.request_id, COMPLETE, wake) == [], "once"
    assert not s.unverified


def test_a_server_that_answers_in_part_only_is_not_paid_for_with_claims_again_and_again() -> None:
    """It answers what is asked on connecting, and nothing that goes back to what was lost."""
    s = fed(range(10), overlap=4)
    ask = asked(s.live(frame(12), 0.0))
    seen = s.replay_ended(ask.request_id, TIMEOUT, 2.0)
    now, seq, requests = 2.0, 13, 0
    while now < 600.0:
        now = max(now + 1.0, s.wake_at or 0.0)
        todo = only(s.connected(now) if requests % 2 else s.tick(now), AskReplay)
        while todo:
            request, requests = todo.pop(), requests + 1
            seen += s.live(frame(seq), now)
            seq += 1
            for i in range(request.start, seq) if request.start else ():
                seen += s.replayed(request.request_id, frame(i), now)
            outcome = COMPLETE if request.start else TIMEOUT
            out = s.replay_ended(request.request_id, outcome, now)
            todo += only(out, AskReplay)
            seen += out
    assert requests > 10
    assert not only(seen, Restarted)
    assert only(seen, Lost) == [Lost(10, 11, "timeout")]
    assert s.last_seq == seq - 1


def test_a_buffer_that_begins_behind_what_was_lost_is_no_reason_to_forget() -> None:
    s = fed(range(3))
    ask = asked(s.live(frame(5), 0.0))
    s.replay_ended(ask.request_id, TIMEOUT, 2.0)
    for i in range(6, 30):
        s.live(frame(i), 2.0)
    now = s.wake_at or 0.0
    request = asked(s.tick(now))
    seen = [a for i in range(20, 31) for a in s.replayed(request.request_id, frame(i), now)]
    seen += s.replay_ended(request.request_id, COMPLETE, now)
    assert not only(seen, Restarted)
    assert applied(seen) == [30]
    assert not s.unverified


def test_a_hole_in_the_buffer_itself_is_not_read_again_and_again() -> None:
    s = fed(range(3))
    ask = asked(s.live(frame(5), 0.0))
    s.replay_ended(ask.request_id, TIMEOUT, 2.0)
    todo = only(s.tick(s.wake_at or 0.0), AskReplay)
    seen: list[object] = []
    for _ in range(10):
        if not todo:
            break
        request = todo.pop()
        out: list[object] = []
        for i in (0, 1, 2, 5):  # the lost ones were never in it
            if i >= request.start:
                out += s.replayed(request.request_id, frame(i), 9.0)
        out += s.replay_ended(request.request_id, COMPLETE, 9.0)
        todo += only(out, AskReplay)
        seen += out
    assert not todo, "it comes to an end"
    assert [r.reason for r in only(seen, Restarted)] == ["repair"]
    assert {lost.reason for lost in only(seen, Lost)} == {"not_in_buffer"}
    assert (s.last_seq, s.unverified) == (5, False)


def test_backoff_grows_has_jitter_and_is_bounded() -> None:
    waits = []
    s = fed([0], backoff_base=1.0, backoff_max=8.0)
    now = 0.0
    s.connected(now)
    for request in range(1, 8):
        s.replay_ended(request, TIMEOUT, now)
        wake = s.wake_at
        assert wake is not None
        waits.append(wake - now)
        now = wake
        assert asked(s.tick(now)).why == "connect"
        assert s.replay_failures == request
        assert s.unverified
        assert not s.syncing, "a server that never answers must not keep the rank from serving"
    assert all(low <= w <= 2 * low for w, low in zip(waits, [0.5, 1, 2, 4, 4, 4, 4], strict=True))
    assert len(set(waits)) == len(waits)


def test_a_reply_that_starts_later_than_asked_is_a_loss() -> None:
    s = fed(range(3))
    ask = asked(s.live(frame(20), 0.0))
    out = s.replayed(ask.request_id, frame(10), 0.0)
    assert out == [Lost(3, 9, "not_in_buffer"), Apply(frame(10), True)]


def test_a_hole_inside_a_reply_is_asked_for_again_at_once() -> None:
    s = fed(range(3))
    first = asked(s.live(frame(20), 0.0))
    s.replayed(first.request_id, frame(3), 0.0)
    out = s.replayed(first.request_id, frame(6), 0.0)
    assert only(out, CancelReplay) == [CancelReplay(first.request_id)]
    assert not only(out, Lost)
    second = asked(out)
    got = [a for i in range(4, 20) for a in s.replayed(second.request_id, frame(i), 0.0)]
    got += s.replay_ended(second.request_id, COMPLETE, 0.0)
    assert applied(got) == list(range(4, 21))


def test_a_reply_that_brought_something_is_worth_another_request() -> None:
    s = fed(range(3))
    ask = asked(s.live(frame(9), 0.0))
    for i in (3, 4):
        s.replayed(ask.request_id, frame(i), 0.0)
    again = asked(s.replay_ended(ask.request_id, TIMEOUT, 2.0))
    assert again.why == "gap"
    out = s.replay_ended(again.request_id, TIMEOUT, 4.0)
    assert only(out, Lost) == [Lost(5, 8, "timeout")], "this one brought nothing"


def test_waiting_frames_are_bounded_by_count_and_by_bytes() -> None:
    for bounds in ({"buffer_batches": 3}, {"buffer_bytes": 3 * len(frame(9).payload)}):
        s = fed(range(3), **bounds)
        out = s.live(frame(4), 0.0)
        for i in range(5, 8):
            assert not only(out, Lost)
            out = s.live(frame(i), 0.0)
        assert only(out, Lost) == [Lost(3, 3, "overflow")]
        assert applied(out) == [4, 5, 6, 7]
        assert only(out, CancelReplay) == [CancelReplay(1)]
        assert s.replayed(1, frame(3), 0.0) == [Dropped(3, "stale_replay")]


def test_a_frame_that_was_overtaken_fills_its_hole_when_no_replay_can() -> None:
    s = fed(range(3))
    ask = asked(s.live(frame(4), 0.0))
    s.live(frame(3), 0.0)
    out = s.replay_ended(ask.request_id, TIMEOUT, 2.0)
    assert applied(out) == [3, 4]
    assert not only(out, Lost)


def test_an_undecodable_payload_still_takes_up_its_number() -> None:
    s = fed(range(2))
    assert applied(s.live(frame(2, UNDATED), 0.0)) == [2]
    assert applied(s.live(frame(3), 0.0)) == [3]
    assert s.live(frame(1, UNDATED), 0.0) == [Dropped(1, "undated")]
    assert s.live(frame(2, UNDATED), 0.0) == [Dropped(2, "duplicate")]
    assert s.state().history[2].ts == 101.0


# -- restarts ----------------------------------------------------------------------------------


@pytest.mark.parametrize("replay", [True, False])
def test_a_number_that_goes_back_with_a_newer_time_is_a_new_incarnation(replay: bool) -> None:
    s = fed(range(6), replay)
    z = frame(0, 500.0, "new")
    assert s.live(z, 0.0) == [Restarted("sequence_back", 5), Apply(z, False)]
    assert s.last_seq == 0


@pytest.mark.parametrize("replay", [True, False])
def test_a_number_that_repeats_with_a_newer_time_is_a_new_incarnation(replay: bool) -> None:
    s = fed([0], replay)
    z = frame(0, 500.0, "new")
    assert s.live(z, 0.0) == [Restarted("sequence_back", 0), Apply(z, False)]


def test_a_repeated_frame_is_a_duplicate_and_an_older_one_is_late() -> None:
    s = fed(range(6), replay=False)
    assert s.live(frame(5), 0.0) == [Dropped(5, "duplicate")]
    assert s.live(frame(3, 50.0, "other"), 0.0) == [Dropped(3, "late")]


def test_a_restart_whose_first_batches_were_missed_asks_for_them() -> None:
    s = fed(range(6))
    out = s.live(frame(3, 500.0, "new"), 0.0)
    assert out == [Restarted("sequence_back", 5), Gap(0, 2), AskReplay(1, 0, "gap")]


def test_a_restart_during_a_replay_drops_what_waited_for_the_old_one() -> None:
    s = fed(range(4))
    ask = asked(s.live(frame(10), 0.0))
    s.live(frame(11), 0.0)
    z = frame(5, 500.0, "new")  # lower than what is held, newer than all of it
    out = s.live(z, 0.0)
    assert only(out, Dropped) == [Dropped(10, "superseded"), Dropped(11, "superseded")]
    assert only(out, CancelReplay) == [CancelReplay(ask.request_id)]
    assert only(out, Restarted) == [Restarted("sequence_back", 3)]
    assert asked(out).start == 0
    assert s.replayed(ask.request_id, frame(4), 0.0) == [Dropped(4, "stale_replay")]


def test_a_straggler_of_the_process_before_is_not_taken_for_a_gap() -> None:
    s = fed(range(6), replay=False)
    s.live(frame(0, 500.0), 0.0)
    assert s.live(frame(900, 300.0, "old"), 0.0) == [Dropped(900, "late")]
    assert applied(s.live(frame(1, 501.0), 0.0)) == [1]


def test_a_replay_that_has_overtaken_the_stream_does_not_make_it_late() -> None:
    """Far behind a flood: the buffer begins beyond what waits in our own queue."""
    s = fed(range(10))
    ask = asked(s.live(frame(20), 0.0))
    s.live(frame(21), 0.0)
    out = s.replayed(ask.request_id, frame(500), 0.0)
    assert only(out, Lost) == [Lost(10, 19, "not_in_buffer")], "the hole, and no more"
    assert applied(out) == [20, 21]
    assert only(out, CancelReplay)
    for i in range(22, 500):
        assert applied(s.live(frame(i), 0.5)) == [i]
    again = asked(s.tick(s.wake_at or 0.0))
    for i in range(again.start, 503):
        s.replayed(again.request_id, frame(i), 2.0)
    assert s.replay_ended(again.request_id, COMPLETE, 2.0) == []
    assert (s.last_seq, s.unverified) == (502, False)


def test_a_stream_that_has_dried_up_is_not_waited_for() -> None:
    """The publisher dropped the rest and is idle: what replay has is all there will be."""
    s = fed(range(10))
    ask = asked(s.live(frame(20), 0.0))
    s.replayed(ask.request_id, frame(500), 0.0)
    assert s.last_seq == 20
    again = asked(s.tick(s.wake_at or 0.0))
    out = [a for i in range(500, 503) for a in s.replayed(again.request_id, frame(i), 2.0)]
    assert only(out, Lost) == [Lost(21, 499, "not_in_buffer")]
    s.replay_ended(again.request_id, COMPLETE, 2.0)
    assert s.last_seq == 502


@pytest.mark.parametrize("replay", [True, False])
def test_what_a_lost_connection_had_left_in_its_queue_is_no_restart(replay: bool) -> None:
    """Its frames come among those of the new connection, or all of them after."""
    s = fed(range(200), replay=replay)
    s.connected(10.0)
    s.replay_ended(1, COMPLETE, 10.0)
    s.live(frame(900), 10.0)
    for request in range(2, 4):
        s.replay_ended(request, COMPLETE, 10.0)
    assert s.last_seq == 900
    outs = [s.live(frame(i), 11.0) for i in range(200, 400)]
    assert all(out == [Dropped(200 + n, "late")] for n, out in enumerate(outs))
    assert applied(s.live(frame(901), 12.0)) == [901]
    later = [s.live(frame(i, 10.0 + i, "new"), 100.0) for i in range(20)]
    assert [r for out in later for r in only(out, Restarted)], "after a while it is one"


def test_a_restart_under_a_clock_that_was_set_back_is_recognised_in_the_end() -> None:
    s = fed(range(200), replay=False, late_limit=16)
    outs = [s.live(frame(i, 10.0 + i, "new"), 0.0) for i in range(20)]
    kinds = [only(out, Restarted) for out in outs]
    assert kinds.index([Restarted("clock_back", 199)]) == 15
    assert applied(outs[19]) == [19]


def test_a_clock_set_back_in_the_middle_of_a_stream_changes_nothing() -> None:
    s = fed(range(6), replay=False)
    for i in range(6, 40):
        assert applied(s.live(frame(i, 1.0 + i), 0.0)) == [i]


def resumed(upto: int, replay: bool = True) -> Sequencer:
    """A sequencer whose process was restarted after batch `upto`."""
    return new(replay, fed(range(upto + 1), replay).state())


def test_kvindexd_alone_restarts_and_nothing_is_dropped() -> None:
    for replay in (True, False):
        s = resumed(100, replay)
        if replay:
            ask = asked(s.connected(0.0))
            assert 90 < ask.start <= 100, "the overlap allows a comparison"
            got = []
            for i in range(ask.start, 103):
                got += s.replayed(ask.request_id, frame(i), 0.0)
            got += s.replay_ended(ask.request_id, COMPLETE, 0.0)
            assert applied(got) == [101, 102]
            assert not only(got, Restarted)
            assert not s.syncing
        out = s.live(frame(s.last_seq + 1), 0.0)
        assert [type(a) for a in out] == [Apply]


def test_resuming_from_the_last_batch_alone_is_enough_to_compare() -> None:
    last = frame(100)
    assert last.ts is not None
    s = new(state=SequencerState.resume(100, last.ts, last.digest))
    ask = asked(s.connected(0.0))
    assert ask.start == 100
    assert s.replayed(ask.request_id, last, 0.0) == [Dropped(100, "replay_overlap")]
    other = new(state=SequencerState.resume(100, last.ts, last.digest))
    other.connected(0.0)
    out = other.replayed(1, frame(100, 900.0, "new"), 0.0)
    assert out == [Restarted("replay_mismatch", 100), CancelReplay(1), AskReplay(2, 0, "restart")]


def test_saved_history_that_disagrees_with_the_store_is_not_used() -> None:
    saved = fed(range(6)).state()
    assert SequencerState.resume(-1, 0.0, 0, saved) == SequencerState()
    behind = SequencerState.resume(3, 103.0, frame(3).digest, saved)
    assert [one.seq for one in behind.history] == [0, 1, 2, 3]
    other = SequencerState.resume(3, 900.0, 1, saved)
    assert [one.seq for one in other.history] == [3]


def test_state_survives_msgpack() -> None:
    state = fed(range(3)).state()
    encoded = msgspec.msgpack.encode(state)
    assert msgspec.msgpack.decode(encoded, type=SequencerState) == state


def test_both_restarted_and_the_new_sequence_passed_the_old_one() -> None:
    s = resumed(10)
    first = asked(s.connected(0.0))
    live = frame(50, 900.0, "new")
    s.live(live, 0.0)
    out = s.replayed(first.request_id, frame(first.start, 800.0, "new"), 0.0)
    assert only(out, Restarted) == [Restarted("replay_mismatch", 10)]
    second = asked(out)
    assert second.start == 0
    got = []
    for i in range(50):
        got += s.replayed(second.request_id, frame(i, 800.0 + i, "new"), 0.0)
    got += s.replay_ended(second.request_id, COMPLETE, 0.0)
    assert applied(got) == list(range(51))
    assert got[-1] == Apply(live, False)


def test_a_live_frame_that_follows_exactly_waits_for_the_comparison() -> None:
    s = resumed(10)
    ask = asked(s.connected(0.0))
    assert applied(s.live(frame(11, 900.0, "new"), 0.0)) == []
    out = s.replayed(ask.request_id, frame(ask.start, 890.0, "new"), 0.0)
    assert only(out, Restarted)


def test_what_waited_for_the_old_incarnation_goes_when_a_replay_shows_the_new_one() -> None:
    s = resumed(10)
    ask = asked(s.connected(0.0))
    for f in (frame(12), frame(50, 950.0, "new")):
        s.live(f, 0.0)
    out = s.replayed(ask.request_id, frame(ask.start, 900.0, "new"), 0.0)
    assert only(out, Dropped) == [Dropped(12, "superseded")]
    assert s.held == 1


def test_a_reply_that_begins_where_we_left_off_cannot_be_compared_and_clears() -> None:
    s = resumed(10)
    ask = asked(s.connected(0.0))
    out = s.replayed(ask.request_id, frame(11), 0.0)
    assert out[0] == Restarted("unverified", 10)
    assert applied(out) == [11]
    gap = fed(range(4))  # connected all the time: the hole is all that happened
    ask = asked(gap.live(frame(5), 0.0))
    assert gap.replayed(ask.request_id, frame(4), 0.0) == [Apply(frame(4), True)]


def test_an_empty_buffer_where_ours_should_be_convicts_a_server_that_worked_before() -> None:
    s = fed(range(4))
    ask = asked(s.live(frame(5), 0.0))
    s.replayed(ask.request_id, frame(4), 0.0)
    s.replay_ended(ask.request_id, COMPLETE, 0.0)
    reconnect = asked(s.connected(10.0))
    out = s.replay_ended(reconnect.request_id, COMPLETE, 10.0)
    probe = asked(out) if reconnect.start else reconnect
    if probe is not reconnect:
        out = s.replay_ended(probe.request_id, COMPLETE, 10.0)
    assert out == [Restarted("replay_empty", 5)]
    assert not s.syncing


def test_an_empty_buffer_of_an_unknown_server_is_believed_after_a_grace_period() -> None:
    s = resumed(10)
    first = asked(s.connected(0.0))
    probe = asked(s.replay_ended(first.request_id, COMPLETE, 0.1))
    assert (probe.start, probe.why) == (0, "probe")
    assert s.replay_ended(probe.request_id, COMPLETE, 0.2) == []
    assert s.syncing
    assert s.wake_at == pytest.approx(2.2)
    assert s.tick(1.0) == []
    again = asked(s.tick(2.3))
    assert s.replay_ended(again.request_id, COMPLETE, 2.4) == [Restarted("replay_empty", 10)]


def test_a_live_frame_disproves_the_suspicion() -> None:
    s = resumed(10)
    first = asked(s.connected(0.0))
    probe = asked(s.replay_ended(first.request_id, COMPLETE, 0.1))
    s.replay_ended(probe.request_id, COMPLETE, 0.2)
    again = asked(s.live(frame(11), 0.5))
    out = s.replay_ended(again.request_id, COMPLETE, 0.6)  # it keeps no buffer at all
    assert out == [Apply(frame(11), False)]
    assert not s.syncing


def test_an_empty_reply_although_the_engine_was_heard_is_only_a_loss() -> None:
    s = fed(range(4))
    ask = asked(s.live(frame(6), 0.0))
    out = s.replay_ended(ask.request_id, COMPLETE, 0.1)
    assert out == [Lost(4, 5, "not_in_buffer"), Apply(frame(6), False)]


def test_nothing_published_and_nothing_known_is_in_sync() -> None:
    s = new()
    ask = asked(s.connected(0.0))
    assert s.syncing
    assert s.replay_ended(ask.request_id, COMPLETE, 0.1) == []
    assert not s.syncing
    assert not s.unverified
    assert s.wake_at is None


def test_a_reconnect_during_a_replay_is_checked_after_it() -> None:
    s = fed(range(4))
    gap = asked(s.live(frame(5), 0.0))
    assert s.connected(0.1) == []
    s.replayed(gap.request_id, frame(4), 0.2)
    out = s.replay_ended(gap.request_id, COMPLETE, 0.2)
    assert applied(out) == [5]
    assert asked(out).why == "connect"


def test_a_held_frame_newer_than_its_replayed_copy_means_a_restart_in_between() -> None:
    s = fed(range(4))
    ask = asked(s.live(frame(6), 0.0))
    out = s.replayed(ask.request_id, frame(4), 0.0)
    rival = frame(7, 900.0, "new")
    s.live(rival, 0.0)
    for i in (5, 6):
        out = s.replayed(ask.request_id, frame(i), 0.0)
    out = s.replayed(ask.request_id, frame(7), 0.0)
    assert only(out, Restarted) == [Restarted("replay_conflict", 6)]
    assert asked(out).start == 0


def test_resync_forgets_and_reads_from_the_beginning() -> None:
    s = fed(range(4))
    out = s.resync(0.0)
    assert out == [Restarted("resync", 3), AskReplay(1, 0, "resync")]
    assert s.last_seq == -1
    without = fed(range(4), replay=False)
    assert without.resync(0.0) == [Restarted("resync", 3)]
    assert only(without.live(frame(9), 0.0), Lost) == [Lost(0, 8, "no_replay")]


# -- whole streams -----------------------------------------------------------------------------


class World:
    """An engine, a lossy wire to a sequencer, and a replay server that may be flawed."""

    def __init__(self, *, replay: bool, buffer: int = 10_000, **config: Any) -> None:
        self.clock = 1000.0
        self.replay = replay
        self.buffer = buffer
        self.s = new(replay, **config)
        self.log: list[Frame] = []
        self.reply: deque[Frame] | None = None
        self.request = 0
        self.flaw: Callable[[deque[Frame]], None] = lambda reply: None
        self.outcome = COMPLETE
        self.applied: list[Frame] = []
        self.lost: list[Lost] = []
        self.gaps: list[Gap] = []
        self.restarts: list[Restarted] = []

    def publish(self) -> Frame:
        self.clock += 1.0
        made = frame(len(self.log), self.clock, f"run {len(self.restarts)}")
        self.log.append(made)
        return made

    def restart(self) -> None:
        self.log = []

    def do(self, actions: list[Action]) -> None:
        for a in actions:
            match a:
                case Apply(f, _):
                    self.applied.append(f)
                case Restarted():
                    self.restarts.append(a)
                    self.applied, self.lost, self.gaps = [], [], []
                case Lost():
                    self.lost.append(a)
                case Gap():
                    self.gaps.append(a)
                case AskReplay(request, start, _):
                    assert self.replay
                    assert self.reply is None, "one request at a time"
                    self.request = request
                    kept = self.log[-self.buffer :]
                    self.reply = deque(f for f in kept if f.seq >= start)
                    self.flaw(self.reply)
                case CancelReplay(request):
                    assert request == self.request
                    self.reply = None

    def serve(self, n: int = 1) -> None:
        """Let up to n messages of the reply arrive, the end included."""
        while n and self.reply is not None:
            n -= 1
            if self.reply:
                self.do(self.s.replayed(self.request, self.reply.popleft(), self.clock))
            else:
                self.reply = None
                self.do(self.s.replay_ended(self.request, self.outcome, self.clock))

    def deliver(self, f: Frame) -> None:
        self.do(self.s.live(f, self.clock))

    def connect(self) -> None:
        self.do(self.s.connected(self.clock))

    def finish(self, ticks: bool = True) -> None:
        for _ in range(6):
            self.serve(-1)
            wake = self.s.wake_at
            if wake is not None and ticks:
                self.clock = max(self.clock, wake)
                self.do(self.s.tick(self.clock))
        assert self.reply is None

    def check_books(self) -> None:
        """Applied and lost together cover each number once, in order; gaps name what is lost."""
        seqs = [f.seq for f in self.applied]
        assert seqs == sorted(set(seqs))
        missing = [i for lost in self.lost for i in range(lost.first, lost.last + 1)]
        assert sorted(seqs + missing) == list(range(self.s.last_seq + 1))
        named = [i for gap in self.gaps for i in range(gap.first, gap.last + 1)]
        assert len(named) == len(set(named))
        assert set(missing) <= set(named)


wire_ops = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(["ok", "drop", "dup", "delay", "serve"]), st.integers(1, 4)),
        st.tuples(st.just("connect"), st.just(1)),
    ),
    max_size=60,
)


def drive(world: World, ops: list[tuple[str, int]]) -> None:
    delayed: list[tuple[int, Frame]] = []
    for step, (op, n) in enumerate(ops):
        for late in [f for due, f in delayed if due <= step]:
            world.deliver(late)
        delayed = [(due, f) for due, f in delayed if due > step]
        if op == "serve":
            world.serve(n)
            continue
        if op == "connect":
            world.connect()
            continue
        f = world.publish()
        if op == "delay":
            delayed.append((step + n, f))
        elif op != "drop":
            for _ in range(2 if op == "dup" else 1):
                world.deliver(f)
    for _, f in delayed:
        world.deliver(f)


@settings(max_examples=400, deadline=None)
@given(wire_ops)
def test_any_disorder_with_a_perfect_replay_server_gives_the_exact_stream(
    ops: list[tuple[str, int]],
) -> None:
    world = World(replay=True)
    drive(world, ops)
    world.connect()
    world.finish()
    assert world.applied == world.log
    assert world.lost == []
    assert world.restarts == []


@settings(max_examples=300, deadline=None)
@given(wire_ops)
def test_without_a_replay_server_each_hole_is_reported_once(ops: list[tuple[str, int]]) -> None:
    world = World(replay=False)
    drive(world, [op for op in ops if op[0] != "serve"])
    world.check_books()
    named = {i for gap in world.gaps for i in range(gap.first, gap.last + 1)}
    missing = {i for lost in world.lost for i in range(lost.first, lost.last + 1)}
    assert named == missing
    assert world.restarts == []


@settings(max_examples=400, deadline=None)
@given(
    wire_ops,
    st.sampled_from(["short", "cut", "silent", "holes", "failed"]),
    st.integers(1, 6),
    st.randoms(use_true_random=False),
)
def test_a_flawed_replay_server_never_breaks_order_or_the_books(
    ops: list[tuple[str, int]], flaw: str, bound: int, rng: random.Random
) -> None:
    world = World(replay=True, buffer=bound if flaw == "short" else 10_000, buffer_batches=8)

    def spoil(reply: deque[Frame]) -> None:
        if flaw in ("silent", "failed"):
            reply.clear()
        elif flaw == "cut":
            while len(reply) > bound:
                reply.pop()
        elif flaw == "holes" and len(reply) > 2:
            del reply[rng.randrange(1, len(reply))]

    world.flaw = spoil
    world.outcome = {
        "silent": TIMEOUT,
        "cut": TIMEOUT,
        "failed": ReplayOutcome.FAILED,
    }.get(flaw, COMPLETE)
    drive(world, ops)
    world.finish(ticks=False)
    world.check_books()


@settings(max_examples=400, deadline=None)
@given(st.lists(wire_ops, min_size=1, max_size=4))
def test_after_any_restarts_the_claims_are_those_of_the_engine_that_runs(
    lives: list[list[tuple[str, int]]],
) -> None:
    world = World(replay=True)
    for ops in lives:
        world.restart()
        world.reply = None if world.reply is None else deque()
        world.connect()
        drive(world, ops)
    world.connect()
    world.finish()
    assert world.applied == world.log
    world.check_books()


# -- recorded exchanges ------------------------------------------------------------------------


def test_resuming_at_the_old_number_of_a_restarted_engine_is_not_up_to_date() -> None:
    """As recorded: the engine was at 4, was restarted, and has published 0 and 1 since."""
    s = resumed(4)
    ask = asked(s.connected(0.0))
    fresh = [frame(0, 900.0, "new"), frame(1, 901.0, "new")]
    out: list[Action] = []
    for f in fresh[ask.start :]:
        out += s.replayed(ask.request_id, f, 0.0)
    out += s.replay_ended(ask.request_id, COMPLETE, 0.0)
    if ask.start:
        probe = asked(out)
        for f in fresh:
            out += s.replayed(probe.request_id, f, 0.0)
        out += s.replay_ended(probe.request_id, COMPLETE, 0.0)
    assert only(out, Restarted) == [Restarted("replay_mismatch", 4)]
    assert applied(out) == [0, 1]


def test_digest_is_of_the_payload() -> None:
    payload = base64.b64decode("k8tB2sNMzi6AXZGBpHR5cGWwQWxsQmxvY2tzQ2xlYXJlZAA=")
    one = Frame.of(b"kv", 0, payload, 1.0)
    assert one.digest == Frame.of(b"", 9, payload, 2.0).digest
    assert one.ts == pytest.approx(1796027192.5, abs=1e4)
