"""One rank's state machine: order, specs, bindings, deltas; each rule with its counter-example."""

from __future__ import annotations

import itertools
from typing import Any

from pure import (
    CLEARED,
    FULL,
    HA,
    HB,
    HC,
    HD,
    MAMBA,
    A,
    B,
    C,
    D,
    Rank,
    chunk,
    dump,
    holdings_by_plane,
    legacy,
    payload,
    planes,
    presence_by_plane,
    removed,
    state,
    stored,
)

from kvindexd.model import Tier
from kvindexd.residency import Options
from kvindexd.wire import decode_batch

# -- order inside a batch -------------------------------------------------------------------------


def test_a_sparse_group_may_speak_before_the_dense_one() -> None:
    rank = Rank()
    rank.send(state([HB], A + B), stored([HA, HB], A + B))
    assert rank.reusable(A + B + C) == 32
    assert "unplaced" not in rank.counters


def test_main_events_keep_their_own_order() -> None:
    rank = Rank()
    rank.send(stored([HA], A))
    rank.send(removed([HA]), state([HA], A), stored([HA], A))
    assert rank.matched(A) == 1
    rank.send(stored([HA], A), removed([HA]), removed([HA]))
    assert rank.matched(A) == 0


def test_auxiliary_events_keep_their_own_order() -> None:
    rank = Rank()
    rank.send(stored([HA], A), state([HA], A))
    rank.send(removed([HA], group=1), state([HA], A))
    assert rank.reusable(A + B) == 16
    rank.send(state([HA], A), removed([HA], group=1), removed([HA], group=1))
    assert rank.reusable(A + B) == 0


def test_the_partition_ends_at_a_clear() -> None:
    rank = Rank()
    rank.send(state([HA], A), stored([HA], A), CLEARED, state([HB], B), stored([HB], B))
    assert rank.matched(A) == 0
    assert rank.reusable(B + C) == 16


def test_the_catalogue_learns_from_the_whole_batch_first() -> None:
    rank = Rank()
    rank.send(removed([HA], group=1), stored([HA], A), state([HA], A))
    assert "unknown_group" not in rank.counters
    assert rank.reusable(A + B) == 16


# -- units, sizes, specs --------------------------------------------------------------------------


def test_a_smaller_page_lowers_the_unit_and_asks_for_a_replay() -> None:
    rank = Rank()
    rank.send(stored([HA], A))
    assert not rank.residency.needs_replay
    delta = rank.send(legacy([HB], [7], None, bs=1))
    assert delta.clear
    assert rank.residency.needs_replay
    assert rank.counters["unit_changes"] == 1
    assert rank.residency.unit == 1
    assert rank.matched(A) == 0
    rank.send(stored([HA], A))
    assert rank.presence.profile.unit == 1


def test_a_first_small_page_asks_for_nothing() -> None:
    rank = Rank()
    rank.send(legacy([1, 2, 3], [7, 8, 9], None, bs=1))
    assert not rank.residency.needs_replay
    assert rank.reusable([7, 8, 9, 10]) == 3


def test_sizes_of_ignored_groups_do_not_lower_the_unit() -> None:
    rank = Rank()
    rank.send(stored([HA], A), stored([1], [5], bs=1, group=1, kind="cross_attention"))
    assert rank.residency.unit == 16
    assert rank.matched(A) == 1


def test_partial_entries_do_not_make_a_full_block_look_held() -> None:
    rank = Rank()
    tokens = list(range(64))
    rank.send(stored([1], tokens, bs=64), removed([1]))
    rank.send(stored([2], tokens[:16], bs=16))
    assert planes(rank) == 1
    assert rank.matched(tokens) == 0
    rank.send(stored([1], tokens, bs=64))
    assert rank.matched(tokens) == 1


def test_a_group_whose_first_event_was_partial_grows() -> None:
    rank = Rank()
    tokens = list(range(128))
    rank.send(stored([2], tokens[:16], bs=16))
    assert rank.geometry().block_size == 16
    rank.send(stored([1], tokens[:64], bs=64))
    assert rank.geometry().block_size == 64
    assert holdings_by_plane(rank.residency) == presence_by_plane(rank.presence)
    assert rank.reusable(tokens[:65]) == 64
    rank.send(removed([1]), removed([2]))
    assert presence_by_plane(rank.presence) == {}


def test_groups_of_equal_spec_are_held_only_together() -> None:
    rank = Rank()
    rank.send(stored([HA], A), state([HA], A))
    assert rank.reusable(A + B) == 16
    second = stored([HA], A, group=2, kind=MAMBA)
    rank.send(stored([HB], B, HA), stored([], B, HA, group=2, kind=MAMBA))
    assert rank.reusable(A + B) == 0  # the second state group never showed A
    assert holdings_by_plane(rank.residency) == presence_by_plane(rank.presence)
    rank.send(second)
    assert rank.reusable(A + B) == 16
    rank.send(removed([HA], group=1))
    assert rank.reusable(A + B) == 0
    assert holdings_by_plane(rank.residency) == presence_by_plane(rank.presence)


def test_two_main_groups_of_equal_spec_hold_their_own_copies() -> None:
    rank = Rank()
    rank.send(stored([HA], A, group=0), stored([HA], A, group=1))
    assert rank.matched(A) == 1
    rank.send(removed([HA], group=1))
    assert rank.matched(A) == 0
    rank.send(stored([HA], A, group=1))
    assert rank.matched(A) == 1


def test_a_tier_in_which_one_group_of_a_spec_never_spoke_is_not_held() -> None:
    rank = Rank()
    rank.send(stored([HA], A, group=0), stored([HA], A, group=1))
    rank.send(stored([HA], A, group=0, medium="CPU"))
    assert planes(rank, tier=Tier.HOST) == 0
    rank.send(stored([HA], A, group=1, medium="CPU"))
    assert planes(rank, tier=Tier.HOST) == 1


def test_a_removal_takes_the_full_block_before_a_partial_entry_of_its_hash() -> None:
    rank = Rank()
    tokens = list(range(64))
    rank.send(stored([4], tokens, bs=64), stored([1, 2, 3, 4], tokens, bs=16))
    assert rank.matched(tokens) == 1
    rank.send(removed([4]))
    assert rank.matched(tokens) == 0
    assert planes(rank) == 4
    rank.send(removed([4]))
    assert planes(rank) == 3


# -- bindings -------------------------------------------------------------------------------------


def test_a_binding_outlives_its_block() -> None:
    rank = Rank()
    rank.send(stored([HA], A), removed([HA]))
    rank.send(stored([HB], B, HA))
    assert rank.matched(A + B) == 0
    rank.send(stored([HA], A))
    assert rank.matched(A + B) == 2


def test_idle_bindings_go_oldest_first_and_never_while_held() -> None:
    rank = Rank(Options(bindings=64))
    held = [chunk(100 + i) for i in range(32)]
    rank.send(*(stored([1000 + i], t) for i, t in enumerate(held)))
    for i in range(200):
        rank.send(stored([5000 + i], chunk(500 + i)), removed([5000 + i]))
        assert len(rank.residency.holdings.blocks) <= 64
        assert len(rank.fields) == len(rank.residency.holdings.blocks)
    assert all(rank.matched(t) == 1 for t in held)
    assert 5199 in rank.residency.holdings.blocks
    assert 5000 not in rank.residency.holdings.blocks
    assert rank.counters["bindings_forgotten"] >= 168


def test_the_oldest_claims_go_beyond_the_bound_on_blocks() -> None:
    rank = Rank(Options(blocks=100))
    for i in range(300):
        rank.send(stored([5000 + i], chunk(500 + i)))
        assert rank.held() <= 100
    assert rank.counters["claims_expired"] >= 200
    assert rank.matched(chunk(799)) == 1
    assert rank.matched(chunk(500)) == 0
    assert holdings_by_plane(rank.residency) == presence_by_plane(rank.presence)


def test_a_claim_said_again_is_young() -> None:
    rank = Rank(Options(blocks=100))
    for i in range(300):
        rank.send(stored([5000 + i], chunk(500 + i)), stored([HA], A))
    assert rank.matched(A) == 1


# -- what a batch says ----------------------------------------------------------------------------


def test_a_batch_that_changes_nothing_writes_nothing() -> None:
    rank = Rank()
    rank.send(stored([HA], A))
    delta = rank.send(removed([HB]))
    assert not delta.blocks
    assert not delta.parked
    assert not delta.mutations
    assert delta.profile is None
    assert delta.state is None


def test_counters_are_increments() -> None:
    rank = Rank()
    assert rank.send(stored([HC], C, HB)).counters["orphans"] == 1
    assert "orphans" not in rank.send(stored([HA], A)).counters
    assert rank.send(stored([HD], D, HB)).counters["orphans"] == 1


def test_rejected_events_are_counted_by_reason_and_tag() -> None:
    rank = Rank()
    rank.send({"type": "TierBlocksCleared"}, stored([HA], A, bs=0), stored([HB], B))
    assert rank.counters["dropped:unknown_tag"] == 1
    assert rank.counters["tag:TierBlocksCleared"] == 1
    assert rank.counters["dropped:bad_block_size"] == 1
    assert rank.matched(B) == 1


def test_the_steps_of_a_batch_make_the_same_delta() -> None:
    whole, steps = Rank(), Rank()
    events = [stored([HA], A), state([HA], A), removed([HA]), stored([HB], B)]
    delta = whole.send(*events)
    taken = 0
    for _ in steps.residency.apply_steps(decode_batch(payload(*events, ts=0.0)), now=0.0):
        taken += 1
    assert taken == len(events)
    again = steps.residency.take_delta(seq=0, ts=0.0, digest=delta.digest)
    assert again == delta


def test_tier_blocks_count_a_block_once() -> None:
    rank = Rank()
    for idx, kind in enumerate((FULL, FULL, MAMBA)):
        rank.send(stored([HA, HB], A + B, group=idx, kind=kind))
    assert rank.residency.tier_blocks() == (2, 0, 0, 0)
    rank.send(stored([HA], A, medium="CPU"), stored([HA], A, group=1, medium="CPU"))
    assert rank.residency.tier_blocks() == (2, 1, 0, 0)


# -- adapters and salts ---------------------------------------------------------------------------


def test_a_child_inherits_its_parents_adapter_and_salt() -> None:
    rank = Rank()
    rank.send(stored([HA], A, lora_name="x", extra_keys=[["x", "salt"]]))
    rank.send(stored([HB], B, HA))
    assert rank.matched(A + B, lora="x", salt="salt") == 2
    assert rank.matched(A + B, lora="x") == 0
    assert rank.matched(A + B) == 0


def test_restored_state_equals_the_live_state_after_each_kind_of_event() -> None:
    events: list[Any] = [
        stored([HA, HB], A + B),
        state([HB], A + B),
        stored([HC], C, 0xDEAD),
        stored([HA], [], None, kind=None, medium="CPU"),
        removed([HA]),
        stored([HD], D, lora_name="x", extra_keys=[["x"]]),
        stored([5], chunk(9), lookahead_token_ids=[[7]]),
        CLEARED,
        stored([HA], A),
    ]
    rank = Rank()
    for event in events:
        rank.send(event)
        again = rank.reloaded()
        assert dump(again.residency) == dump(rank.residency)


def test_permutations_of_independent_stores_agree() -> None:
    events = [stored([HB], B, HA), stored([HA], A), state([HB], A + B), stored([HC], C, HB)]
    answers = set()
    for order in itertools.permutations(events):
        rank = Rank()
        for event in order:
            rank.send(event)
        answers.add((rank.matched(A + B + C + D), rank.reusable(A + B + C + D), rank.held()))
    assert answers == {(3, 32, 3)}
