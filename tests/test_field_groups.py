"""Faults that users of KV-cache routers met with KV-cache groups, as event sequences.

Each docstring starts with the row of docs/field-cases.md that it covers.
"""

from __future__ import annotations

import pytest
from pure import (
    BS,
    FULL,
    HA,
    HB,
    HC,
    HD,
    MAMBA,
    MLA,
    WINDOW,
    A,
    B,
    C,
    D,
    Rank,
    chunk,
    removed,
    stored,
)

from kvindexd.groups import Treatment
from kvindexd.residency import Options
from kvindexd.scoring.geometry import WorkerOptions

# -- groups and block sizes -----------------------------------------------------------------------


def test_field_a_sparse_event_of_a_main_group_binds_nothing() -> None:
    """H2: one hash, several chunks of tokens, position unknown; with a kind and without."""
    for more in ({}, {"group": None, "kind": None}):
        rank = Rank()
        rank.send(stored([HC], C, **more))
        rank.send(stored([HB], A + B, **more))
        assert rank.matched(A + B) == 2
        assert rank.matched(C) == 1
        assert rank.counters["sparse"] == 1
        rank.send(stored([HD], D, HB, **more))
        assert rank.counters["orphans"] == 1
        assert rank.matched(A + B + D) == 2


def test_field_a_sparse_event_of_another_group_only_adds_its_own_bit() -> None:
    """H2: presence joined through the hash map; earlier evidence stays as it was."""
    rank = Rank()
    rank.send(stored([HA, HB], A + B))
    before = dict(rank.fields)
    rank.send(stored([HB], A + B, group=1, kind=MAMBA))
    assert rank.matched(A + B) == 2
    assert rank.reusable(A + B + C) == 32
    assert set(rank.fields) == set(before)


def test_field_five_groups_of_four_block_sizes() -> None:
    """H4: window groups list only resident blocks; reuse was 24.7% instead of about 76%."""
    tokens = list(range(256))
    rank = Rank()
    rank.send(
        stored([2], tokens, group=1, kind="sliding_window_mla", bs=64, window=128),
        stored([2], tokens, group=2, kind="sliding_window_mla", bs=64, window=128),
        stored([2], tokens, group=3, kind="sliding_window_mla", bs=4, window=8),
        stored([2], tokens, group=4, kind="sliding_window_mla", bs=8, window=16),
        stored([2], tokens, group=0, kind=MLA, bs=256),
    )
    assert rank.matched(tokens) == 1
    assert rank.held() == 1
    assert rank.residency.catalogue.groups[0].treated_as is Treatment.MAIN
    assert rank.reusable([*tokens, 1], hybrid=False) == 256


def test_field_a_removal_from_a_state_group_leaves_the_attention_block() -> None:
    """H5 (i): removes carry a group and no kind."""
    rank = Rank()
    rank.send(stored([HA], A, group=3, kind=MLA), stored([HA], A, group=0, kind=MAMBA))
    rank.send(removed([HA], group=0))
    assert rank.matched(A) == 1


def test_field_the_groups_survive_a_restart_of_kvindexd() -> None:
    """H5 (ii): the map is saved with the index; a group nobody knows takes nothing away."""
    rank = Rank()
    rank.send(stored([HA], A, group=3, kind=MLA), stored([HB], B, HA, group=3, kind=MLA))
    again = rank.reloaded()
    again.send(removed([HB], group=3))
    assert again.matched(A + B) == 1
    again.send(removed([HA], group=7))
    assert again.matched(A + B) == 1
    assert again.counters["unknown_group"] == 1


def test_field_another_layout_after_an_engine_restart() -> None:
    """H5 (iii): group 0 was Mamba and is now attention."""
    rank = Rank()
    rank.send(stored([HA], A, group=3, kind=MLA), stored([HA], A, group=0, kind=MAMBA))
    rank.restart_engine()
    rank.send(stored([HA], A, group=0))
    assert rank.matched(A) == 1
    rank.send(removed([HA], group=0))
    assert rank.matched(A) == 0


@pytest.mark.parametrize("kind", ["unknown", "some_new_kind"])
def test_field_unknown_kinds_are_left_out_loudly_and_can_be_taken_in(kind: str) -> None:
    """H6: a merged group reported `unknown`, and filters dropped all its events."""
    rank = Rank()
    rank.send(stored([HA], A, kind=kind), stored([HB], B, HA, kind=kind))
    assert rank.matched(A + B) == 0
    assert rank.counters[f"filtered:{kind}"] == 2
    assert rank.counters["admitted"] == 0
    assert [g.stores for g in rank.residency.catalogue.infos()] == [2]
    told = Rank(Options(treat_as={kind: "main"}))
    told.send(stored([HA], A, kind=kind), stored([HB], B, HA, kind=kind))
    assert told.matched(A + B) == 2


@pytest.mark.parametrize("size", [528, 768, 1056, 2096])
def test_field_block_size_is_learned_from_the_first_admitted_store(size: int) -> None:
    """H8: configured 16, engine 528/768/1056/2096: every event dropped, with only a warning."""
    rank = Rank()
    rank.send(stored([1], [7] * (size * 2), group=1, kind="cross_attention", bs=size * 2))
    rank.send(stored([HA], range(size), bs=size))
    assert rank.matched(range(size)) == 1
    assert rank.geometry().block_size == size
    assert rank.reusable(range(size + 1)) == size


def test_field_a_window_group_that_frees_blocks_leaves_the_prefix_whole() -> None:
    """H9: groups folded together punch holes into the full-attention prefix."""
    names, tokens = list(range(1, 9)), [t for n in range(8) for t in chunk(n)]
    rank = Rank()
    rank.send(stored(names, tokens), stored(names, tokens, group=1, kind=WINDOW, window=32))
    rank.send(removed(names[:4], group=1))
    assert rank.matched(tokens) == 8
    rank.send(removed(names[:4]))
    assert rank.matched(tokens) == 0


def test_field_reuse_is_the_largest_boundary_of_all_groups() -> None:
    """H10: an attention-only index over-credits; nor is it the least of the groups' maxima."""
    names, tokens = list(range(1, 11)), [t for n in range(10) for t in chunk(n)]
    rank = Rank()
    rank.send(stored(names, tokens))
    rank.send(stored([5, 8], tokens, group=1, kind=MAMBA))
    rank.send(stored(names, tokens, group=2, kind=WINDOW, window=17))
    rank.send(removed([8], group=2))
    assert rank.matched([*tokens, 1]) == 10
    assert rank.reusable([*tokens, 1]) == 5 * BS
    limits = [int(n[0]) for n in rank.ask([*tokens, 1]).limits]
    assert limits == [160, 128, 160]


@pytest.mark.parametrize("length", [0, 10, 2095])
def test_field_a_prompt_shorter_than_a_block_scores_zero(length: int) -> None:
    """H11: no event, no error."""
    rank = Rank()
    rank.send(stored([HA], range(2096), bs=2096))
    found = rank.ask(range(length))
    assert (int(found.matched[0]), int(found.reusable[0])) == (0, 0)


def test_field_matched_is_resident_and_only_an_option_subtracts() -> None:
    """H13: EAGLE drops the last matched block. `matched` says what is held; `reusable` drops a
    block only where the operator says `eagle`."""
    tokens = list(range(3 * 2096))
    for eagle, reusable in ((False, 2 * 2096), (True, 2096)):
        rank = Rank(worker=WorkerOptions(eagle=eagle))
        rank.send(stored([1, 2, 3], tokens, bs=2096))
        assert rank.matched(tokens) == 3
        assert rank.reusable(tokens) == reusable


def test_field_engines_without_group_fields_are_indexed() -> None:
    """H14: no metadata at all is one legacy group; group 0 without a kind is provisional; a
    further group without a kind could be anything."""
    rank = Rank()
    rank.send(stored([HA], A, group=None, kind=None))
    assert rank.matched(A) == 1
    rank = Rank()
    rank.send(stored([HB], B, group=0, kind=None), stored([HC], C, group=1, kind=None))
    assert (rank.matched(B), rank.matched(C)) == (1, 0)
    rank.send(stored([HC], C, HB, group=0, kind=FULL))
    assert rank.matched(B + C) == 2
    assert rank.counters["filtered:unknown"] == 1


def test_field_kindless_events_mix_with_events_that_have_one() -> None:
    """H14: a connector that leaves the group out speaks of the main group's blocks."""
    rank = Rank()
    rank.send(stored([HA], A), stored([HB], B, HA))
    rank.send(stored([HB], [], None, group=None, kind=None, medium="CPU"))
    rank.send(removed([HB]))
    assert rank.tiers(A + B + C) == (16, 16, 0)
    rank.send(removed([HB], group=None, medium="CPU"))
    assert rank.tiers(A + B + C) == (16, 0, 0)
