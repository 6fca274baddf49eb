"""One rank's copies: counted, removed, in tiers, cleared; each rule with its counter-example."""

from __future__ import annotations

import numpy as np
import pytest
from pure import (
    BS,
    CLEARED,
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
    legacy,
    planes,
    presence_by_plane,
    removed,
    state,
    stored,
)

from kvindexd.model import ADD, MUTATION, Tier
from kvindexd.residency import Options

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
