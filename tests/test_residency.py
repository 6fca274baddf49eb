"""One rank's state machine, rule by rule, each with the counter-example that makes it a rule."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from pure import (
    BS,
    CLEARED,
    FULL,
    HA,
    HB,
    HC,
    HD,
    MAMBA,
    WINDOW,
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
    presence_by_plane,
    removed,
    stored,
)

from kvindexd.model import ADD, MUTATION, Tier
from kvindexd.residency import Options
from kvindexd.wire import decode_batch

DIVIDED = [*A, *B, *C, *D]


def state(hashes: list[int], tokens: list[int], parent: Any = None, **more: Any) -> Any:
    """A Mamba group's event."""
    return stored(hashes, tokens, parent, group=1, kind=MAMBA, **more)


def planes(rank: Rank, kind: str = FULL, tier: Tier = Tier.DEVICE) -> int:
    """Names held in all planes of a kind and tier."""
    held = presence_by_plane(rank.presence)
    return sum(len(n) for p, n in held.items() if p.kind == kind and p.tier == tier)


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


# -- dense and sparse stores ----------------------------------------------------------------------


def test_dense_events_bind_in_any_class_of_group() -> None:
    rank = Rank()
    rank.send(stored([HA, HB], A + B, group=1, kind=WINDOW, window=16))
    assert set(rank.residency.holdings.blocks) == {HA, HB}
    assert rank.matched(A + B) == 0
    assert rank.reusable(A + B + C) == 32


def test_a_sparse_main_event_indexes_its_span_and_binds_nothing() -> None:
    rank = Rank()
    rank.send(stored([HB], A + B))
    assert rank.matched(A + B) == 2
    assert HB not in rank.residency.holdings.blocks
    rank.send(stored([HC], C, HB))
    assert rank.matched(A + B + C) == 2
    assert rank.counters["orphans"] == 1
    assert rank.counters["sparse"] == 1


def test_a_sparse_main_event_does_not_touch_earlier_evidence() -> None:
    rank = Rank()
    rank.send(stored([HA], A))
    rank.send(stored([HB], A + B))
    rank.send(removed([HB]))
    assert rank.matched(A + B) == 1
    rank.send(removed([HA]))
    assert rank.matched(A + B) == 0


def test_sparse_blocks_expire() -> None:
    rank = Rank(Options(unbound_ttl=60.0))
    rank.send(stored([HB], A + B), now=100.0)
    rank.send(now=159.0)
    assert rank.matched(A + B) == 2
    rank.send(now=160.0)
    assert rank.matched(A + B) == 0
    assert rank.counters["unbound_expired"] == 2
    assert not rank.fields


def test_sparse_blocks_said_again_live_on() -> None:
    rank = Rank(Options(unbound_ttl=60.0))
    rank.send(stored([HB], A + B), now=100.0)
    rank.send(stored([HB], A + B), now=150.0)
    rank.send(now=170.0)
    assert rank.matched(A + B) == 2
    rank.send(now=211.0)
    assert rank.matched(A + B) == 0


def test_a_sparse_block_said_again_holds_no_other_up() -> None:
    rank = Rank(Options(unbound_ttl=60.0))
    rank.send(stored([HB], A + B), now=100.0)
    rank.send(stored([HD], C + D), now=110.0)
    rank.send(stored([HB], A + B), now=150.0)
    rank.send(now=171.0)
    assert (rank.matched(A + B), rank.matched(C + D)) == (2, 0)


def test_sparse_blocks_go_with_their_removal_clear_and_restart() -> None:
    for goodbye in ([removed([HB])], [CLEARED]):
        rank = Rank()
        rank.send(stored([HB], A + B))
        rank.send(*goodbye)
        assert rank.matched(A + B) == 0
    rank = Rank()
    rank.send(stored([HB], A + B))
    rank.restart_engine()
    rank.send()
    assert rank.matched(A + B) == 0


def test_sparse_blocks_of_an_earlier_process_go_at_its_end() -> None:
    rank = Rank()
    rank.send(stored([HA], A), stored([HC], B + C, HA), now=5.0)
    again = rank.reloaded()
    again.send(now=5.0)
    assert again.matched(A + B + C) == 1


@pytest.mark.parametrize(
    "tainted",
    [
        {"extra_keys": [["salt"]]},
        {"cache_salt": "salt"},
    ],
)
def test_sparse_main_events_with_invisible_extras_are_dropped(tainted: Any) -> None:
    rank = Rank()
    rank.send(stored([HB], A + B, **tainted))
    assert rank.counters["dropped:sparse_extras"] == 1
    assert rank.held() == 0
    rank.send(stored([HD], C + D))
    assert rank.counters["dropped:sparse_extras"] == 2


def test_a_sparse_main_event_without_hashes_says_nothing() -> None:
    rank = Rank()
    rank.send(stored([], A + B))
    assert rank.held() == 0
    assert rank.counters["dropped:sparse_unplaced"] == 1


def test_a_sparse_auxiliary_hash_is_placed_by_the_main_groups_binding() -> None:
    rank = Rank()
    rank.send(stored([HA, HB, HC], A + B + C))
    rank.send(state([HB], A + B + C))
    assert rank.reusable(A + B + C + D) == 32


def test_a_sparse_auxiliary_hash_that_nobody_explains_waits() -> None:
    rank = Rank()
    rank.send(stored([HA], A), state([HB], A + B))
    assert rank.counters["unplaced"] == 1
    assert rank.presence.profile.unlocated == 1
    assert rank.reusable(A + B + C) == 0
    rank.send(stored([HB], B, HA))
    assert rank.presence.profile.unlocated == 0
    assert rank.reusable(A + B + C) == 32


def test_a_sparse_auxiliary_hash_never_binds() -> None:
    rank = Rank()
    rank.send(stored([HA], A), state([HB], A + B))
    assert HB not in rank.residency.holdings.blocks
    rank.send(stored([HC], C, HB))
    assert rank.counters["orphans"] == 1


# -- parents --------------------------------------------------------------------------------------


def test_an_unknown_parent_is_not_the_root() -> None:
    rank = Rank()
    rank.send(stored([HC], C, HB))
    assert rank.matched(C) == 0
    assert rank.held() == 0
    assert rank.counters["orphans"] == 1


def test_orphans_are_adopted_when_the_parent_turns_up() -> None:
    rank = Rank()
    rank.send(stored([HC], C, HB))
    rank.send(stored([HD], D, HC))
    assert rank.matched(DIVIDED) == 0
    rank.send(stored([HA, HB], A + B))
    assert rank.matched(DIVIDED) == 4
    assert rank.counters["orphans_adopted"] == 2
    assert not rank.parked


def test_an_orphan_removed_while_it_waits_does_not_come_back() -> None:
    rank = Rank()
    rank.send(stored([HC], C, HB))
    rank.send(removed([HC]))
    rank.send(stored([HA, HB], A + B))
    assert rank.matched(A + B + C) == 2
    rank.send(stored([HD], D, HC))
    rank.send(stored([HC], C, HB))
    assert rank.matched(DIVIDED) == 4


def test_copies_of_an_orphan_are_counted_while_it_waits() -> None:
    rank = Rank()
    rank.send(stored([HB], B, HA), stored([HB], B, HA))
    rank.send(removed([HB]))
    rank.send(stored([HA], A))
    assert rank.matched(A + B) == 2
    rank.send(removed([HB]))
    assert rank.matched(A + B) == 1


def test_a_bound_hash_counts_though_this_events_parent_is_unknown() -> None:
    rank = Rank()
    rank.send(stored([HA, HB], A + B))
    rank.send(removed([HB]))
    rank.send(stored([HB], B, 0xDEAD))
    assert rank.matched(A + B) == 2


def test_the_waiting_room_is_bounded_and_oldest_go_first() -> None:
    rank = Rank(Options(parked=10))
    for i in range(25):
        rank.send(stored([1000 + i], chunk(50 + i), 5000 + i))
    assert len(rank.residency.waiting) == 10
    assert rank.counters["dropped:parked_overflow"] == 15
    assert len(rank.residency.waiting.unplaced) <= 11
    assert len(rank.parked) <= 21
    rank.send(stored([5000], A), stored([5024], B))
    assert rank.matched(A + chunk(50)) == 1
    assert rank.matched(B + chunk(74)) == 2


def test_the_waiting_room_is_bounded_in_tokens_too() -> None:
    rank = Rank(Options(parked_tokens=100))
    for i in range(9):
        rank.send(stored([1000 + i], chunk(50 + i), 0xDEAD))
    assert len(rank.residency.waiting) == 6
    assert rank.counters["dropped:parked_overflow"] == 3
    again = rank.reloaded()
    again.send(stored([2000], chunk(60), 0xDEAD))
    assert len(again.residency.waiting) == 6
    again.send(stored([0xDEAD], A))
    assert again.matched(A + chunk(60)) == 2
    assert again.matched(A + chunk(50)) == 1


def test_what_is_shed_is_forgotten_wherever_it_was() -> None:
    rank = Rank()
    rank.send(stored([HA], A), state([], A))
    delta = rank.send(stored([HC], C, HB), state([HB], A + B), stored([HD], D, HA))
    assert rank.residency.shed([delta]) >= 1
    rank.send()
    assert list(rank.residency.holdings.blocks) == [HA]
    assert len(rank.residency.waiting) == 0
    assert not rank.residency.waiting.unplaced
    assert rank.residency.profile().unlocated == 0
    assert not rank.parked
    assert len(rank.fields) == 1
    rank.send(stored([HB], B, HA))
    assert rank.matched(A + B + C) == 2


def test_what_waits_too_long_goes() -> None:
    rank = Rank(Options(parked_age=300.0))
    rank.send(stored([HB], B, HA), now=10.0)
    rank.send(now=311.0)
    assert rank.counters["dropped:parked_expired"] == 1
    assert rank.counters["dropped:unplaced_expired"] == 1
    assert not rank.parked
    rank.send(stored([HA], A), now=312.0)
    assert rank.matched(A + B) == 1


def test_a_block_that_is_its_own_parent_is_rejected_alone() -> None:
    rank = Rank()
    rank.send(stored([HC], C))
    rank.send(stored([HA], A, HA), stored([HB, HB], A + B), stored([HD], D))
    assert rank.counters["dropped:cycle"] == 2
    assert (rank.matched(C), rank.matched(D), rank.matched(A)) == (1, 1, 0)


def test_a_longer_cycle_is_rejected() -> None:
    rank = Rank()
    rank.send(stored([HA], A), stored([HB], B, HA))
    rank.send(stored([HA], A, HB))
    assert rank.counters["dropped:conflict"] == 1
    assert rank.matched(A + B) == 2


def test_a_cycle_among_orphans_ends() -> None:
    rank = Rank()
    rank.send(stored([HA], A, HB), stored([HB], B, HA))
    rank.send(stored([HC], C), stored([HA], C + A, None))
    assert len(rank.residency.waiting) <= 2
    assert rank.matched(C) == 1


def test_a_hash_that_is_held_cannot_change_its_content() -> None:
    rank = Rank()
    rank.send(stored([HA], A))
    rank.send(stored([HA], B))
    assert rank.counters["dropped:conflict"] == 1
    assert (rank.matched(A), rank.matched(B)) == (1, 0)
    rank.send(removed([HA]))
    rank.send(stored([HA], B))
    assert (rank.matched(A), rank.matched(B)) == (0, 1)


# -- copies ---------------------------------------------------------------------------------------


def test_each_physical_copy_is_removed_once() -> None:
    rank = Rank()
    rank.send(stored([HA], A), stored([HB], B, HA), stored([HB], B, HA))
    rank.send(removed([HB]))
    assert rank.matched(A + B) == 2
    rank.send(removed([HB]))
    assert rank.matched(A + B) == 1
    rank.send(removed([HB]))
    assert rank.counters["unknown_removes"] == 1
    rank.send(stored([HB], B, HA))
    assert rank.matched(A + B) == 2


def test_two_hashes_of_one_content_hold_it_together() -> None:
    rank = Rank()
    rank.send(stored([HA], A), stored([HB], A))
    rank.send(removed([HA]))
    assert rank.matched(A) == 1
    rank.send(removed([HB]))
    assert rank.matched(A) == 0


def test_a_name_that_another_hash_still_holds_is_said_again() -> None:
    """Of two records under one name a replica may have read one before this batch and the other
    behind it; what holds now makes it right."""
    rank = Rank()
    rank.send(stored([HA], A), stored([HB], A))
    rows = np.frombuffer(rank.send(removed([HA])).mutations, MUTATION)
    assert [int(r["op"]) for r in rows] == [ADD]


def test_the_engines_own_count_of_copies_wins() -> None:
    rank = Rank()
    rank.send(*[stored([HA], A)] * 3)
    rank.send(removed([HA], remaining_copy_counts=[0]))
    assert rank.matched(A) == 0
    rank.send(stored([HA], A))
    rank.send(removed([HA], remaining_copy_counts=[2]))
    assert rank.matched(A) == 1
    rank.send(removed([HA]))
    assert rank.matched(A) == 1
    rank.send(removed([HA]))
    assert rank.matched(A) == 0


def test_the_engines_own_count_wins_in_the_waiting_room_too() -> None:
    rank = Rank()
    rank.send(*[stored([HB], B, HA)] * 3)
    rank.send(removed([HB], remaining_copy_counts=[1]))
    rank.send(stored([HA], A))
    assert rank.matched(A + B) == 2
    rank.send(removed([HB]))
    assert rank.matched(A + B) == 1


def test_reused_blocks_said_again_are_not_counted() -> None:
    rank = Rank()
    rank.send(stored([HA], A))
    rank.send(stored([HA], A, origin="REUSED"))
    assert rank.counters["reannounced"] == 1
    rank.send(removed([HA]))
    assert rank.matched(A) == 0


def test_a_reused_block_that_we_lost_is_found_again() -> None:
    rank = Rank()
    rank.send(stored([HA], A, origin="REUSED"))
    assert rank.matched(A) == 1


def test_a_worker_that_reports_reuse_is_never_counted_twice() -> None:
    for reports, left in ((True, 1), (False, 2)):
        rank = Rank(Options(reports_reuse=reports))
        rank.send(stored([HA], A), stored([HB], B, HA), stored([HB], B, HA))
        rank.send(removed([HB]))
        assert rank.matched(A + B) == left


def test_reuse_reported_in_the_waiting_room_is_not_counted_twice() -> None:
    rank = Rank(Options(reports_reuse=True))
    rank.send(stored([HB], B, HA), stored([HB], B, HA))
    rank.send(removed([HB]))
    rank.send(stored([HA], A))
    assert rank.matched(A + B) == 1


def test_many_copies_saturate() -> None:
    rank = Rank()
    rank.send(*[stored([HA], A)] * 3)
    block = rank.residency.holdings.blocks[HA]
    rank.residency.holdings.add(HA, block, 0, 1 << 20)
    assert rank.residency.holdings.count(block, 0) == 0xFFFF
    rank.residency.holdings.drop(HA, block, 0, 1 << 30)
    assert rank.residency.holdings.count(block, 0) == 0


def test_a_removal_decrements_its_own_tier_and_group_only() -> None:
    rank = Rank()
    rank.send(stored([HA], A), state([HA], A), stored([HA], A, medium="CPU"))
    rank.send(removed([HA], group=1))
    assert (planes(rank, MAMBA), planes(rank), planes(rank, tier=Tier.HOST)) == (0, 1, 1)
    rank.send(removed([HA]))
    assert (planes(rank), planes(rank, tier=Tier.HOST)) == (0, 1)
    rank.send(removed([HA], medium="CPU"))
    assert presence_by_plane(rank.presence) == {}


def test_a_removal_of_many_goes_on_behind_an_unknown_one() -> None:
    rank = Rank()
    rank.send(stored([HA, HB, HC], A + B + C))
    rank.send(removed([HA, 0xDEAD, HB]))
    assert rank.counters["unknown_removes"] == 1
    assert list(rank.residency.holdings.idle) == [HA, HB]
    assert rank.held() == 1


def test_a_middle_block_comes_back_with_all_behind_it() -> None:
    rank = Rank()
    rank.send(stored([HA, HB, HC], A + B + C))
    for _ in range(1000):
        rank.send(removed([HB]))
        assert rank.matched(A + B + C) == 1
        rank.send(stored([HB], B, HA))
        assert rank.matched(A + B + C) == 3
        assert rank.held() == 3


# -- tiers ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [0, 16, 999])
def test_a_tokenless_store_is_a_tier_change(size: int) -> None:
    rank = Rank()
    rank.send(stored([HA, HB], A + B))
    rank.send(stored([HA, HB], [], None, kind=None, medium="CPU", bs=size))
    rank.send(removed([HA, HB]))
    assert rank.matched(A + B) == 2
    assert rank.tiers(A + B + C) == (0, 32, 0)
    assert rank.geometry().block_size == BS


def test_a_tokenless_store_of_an_unknown_hash_waits_and_is_no_root() -> None:
    rank = Rank()
    rank.send(stored([HA], A))
    rank.send(stored([HB], [], None, kind=None, medium="CPU"))
    assert rank.held(Tier.HOST) == 0
    rank.send(stored([HB], B, HA), removed([HB]))
    assert rank.tiers(A + B + C) == (16, 16, 0)


def test_a_tokenless_store_removed_while_it_waits_is_gone() -> None:
    rank = Rank()
    rank.send(stored([HA], A))
    rank.send(stored([HB], [], None, kind=None, medium="CPU"), removed([HB], medium="CPU"))
    rank.send(stored([HB], B, HA), removed([HB]))
    assert rank.tiers(A + B + C) == (16, 0, 0)


def test_a_tokenless_store_of_an_unknown_group_is_left_out() -> None:
    rank = Rank()
    rank.send(stored([HA], A))
    rank.send(stored([HA], [], None, group=7, kind=None, medium="CPU"))
    assert rank.held(Tier.HOST) == 0
    assert rank.counters["filtered:unknown"] == 1


def test_a_tokenless_store_as_the_very_first_event_harms_nothing() -> None:
    for group in (None, 0):
        rank = Rank()
        rank.send(stored([HA], [], None, group=group, kind=None, bs=0))
        rank.send(stored([HA], [], None, group=group, kind=None, bs=0, medium="CPU"))
        rank.send(stored([HA, HB], A + B, group=group, kind=None))
        assert rank.matched(A + B) == 2
        assert rank.reusable(A + B + C) == 32
        assert rank.geometry().alignment == 16


def test_a_host_store_with_tokens_does_not_change_the_groups_geometry() -> None:
    rank = Rank()
    rank.send(stored([1], list(range(64)), bs=64))
    rank.send(stored([2], list(range(16)), bs=16, medium="EXTERNAL"))
    rank.send(stored([3], list(range(128)), bs=128, medium="CPU"))
    assert rank.geometry().block_size == 64
    assert rank.reusable(list(range(65))) == 64


def test_parents_are_found_across_tiers() -> None:
    rank = Rank()
    rank.send(stored([HA], A))
    rank.send(stored([HB], B, HA, medium="CPU"))
    assert rank.tiers(A + B + C) == (16, 16, 0)


def test_unknown_media_are_never_credited() -> None:
    rank = Rank()
    rank.send(stored([HA], A, medium="HOLOGRAM"), stored([HA], [], medium="HOLOGRAM"))
    assert rank.counters["dropped:unknown_medium"] == 2
    assert rank.matched(A) == 0


def test_an_unknown_medium_teaches_nothing() -> None:
    rank = Rank()
    rank.send(stored([HA], A))
    rank.send(stored([HB], [1, 2, 3], medium="HOLOGRAM", bs=3))
    assert rank.residency.unit == 16
    assert rank.matched(A) == 1


# -- clears ---------------------------------------------------------------------------------------


def test_a_clear_takes_everything_stored_before_it() -> None:
    rank = Rank()
    rank.send(stored([HA], A), stored([HA], A, medium="CPU"))
    rank.send(stored([HB], B), CLEARED, stored([HC], C))
    assert [rank.matched(t) for t in (A, B, C)] == [0, 0, 1]
    assert rank.counters["clears"] == 1


def test_the_second_clear_of_a_batch_leaves_fresh_device_blocks() -> None:
    rank = Rank()
    rank.send(stored([HA], A), stored([HA], A, medium="CPU"))
    rank.send(CLEARED, stored([HB], B), stored([HB], B, medium="CPU"), CLEARED)
    assert rank.matched(A) == 0
    assert rank.tiers(B + C) == (16, 0, 0)
    assert planes(rank, tier=Tier.HOST) == 0


def test_the_second_clear_empties_waiting_host_copies_too() -> None:
    rank = Rank()
    rank.send(stored([HA], A))
    rank.send(
        CLEARED,
        stored([HB], [], None, kind=None, medium="CPU"),
        stored([HC], C, HB),
        CLEARED,
    )
    rank.send(stored([HB], B))
    assert rank.tiers(B + C + D) == (32, 0, 0)
    assert planes(rank, tier=Tier.HOST) == 0


def test_a_clear_empties_the_waiting_room_and_the_bindings() -> None:
    rank = Rank()
    rank.send(stored([HB], B, HA), stored([HC], C))
    rank.send(CLEARED)
    assert not rank.fields
    assert not rank.parked
    rank.send(stored([HA], A))
    assert rank.matched(A + B) == 1
    rank.send(stored([HD], D, HC))
    assert rank.counters["orphans"] == 2


def test_a_clear_keeps_what_the_groups_have_shown() -> None:
    rank = Rank()
    rank.send(stored([HA], A, group=3), state([HA], A))
    rank.send(CLEARED)
    rank.send(stored([HA], A, group=3), removed([HA], group=1))
    assert rank.matched(A) == 1
    assert "unknown_group" not in rank.counters


def test_a_clear_of_nothing_costs_nothing() -> None:
    rank = Rank()
    rank.send(stored([HA], A))
    rank.send(CLEARED)
    delta = rank.send(*[CLEARED] * 100)
    assert delta.clear
    assert not delta.mutations
    assert not delta.blocks


def test_an_engine_restart_forgets_what_its_groups_have_shown() -> None:
    rank = Rank()
    rank.send(stored([HA], A, group=0, kind=MAMBA), stored([HA], A, group=3))
    rank.restart_engine()
    rank.send(stored([HA], A, group=0))
    assert rank.matched(A) == 1
    rank.send(removed([HA], group=0))
    assert rank.matched(A) == 0
    assert [g.idx for g in rank.residency.catalogue.infos()] == [0]


def test_an_engine_restart_forgets_page_size_pairs_and_extras() -> None:
    rank = Rank()
    rank.send(legacy([HA], [[1, 2]], None, bs=1), stored([HB], B, extra_keys=[["salt"]]))
    assert (rank.residency.unit, rank.residency.lookahead, rank.residency.pairs) == (1, 1, True)
    rank.restart_engine()
    rank.send(stored([HA], A), stored([HD], C + D))
    assert (rank.residency.unit, rank.residency.lookahead, rank.residency.pairs) == (16, 0, False)
    assert rank.reusable(A + B) == 16
    assert rank.matched(C + D) == 2  # a sparse event: its extras are all visible again


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
