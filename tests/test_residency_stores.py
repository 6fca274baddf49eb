"""One rank's stores: dense, sparse, orphans; each rule with its counter-example."""

from __future__ import annotations

from typing import Any

import pytest
from pure import (
    CLEARED,
    HA,
    HB,
    HC,
    HD,
    WINDOW,
    A,
    B,
    C,
    D,
    Rank,
    chunk,
    removed,
    state,
    stored,
)

from kvindexd.residency import Options

DIVIDED = [*A, *B, *C, *D]


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
