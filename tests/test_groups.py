"""Which groups are indexed, kind by kind, and what a rank learns of its groups from its events."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from pure import BS, FULL, HA, HB, MAMBA, MLA, WINDOW, A, B, Rank, removed, stored

from kvindexd.groups import Catalogue, Treatment, tier_of, treatment
from kvindexd.model import Tier
from kvindexd.residency import Options

KINDS = Path(__file__).parent / "data" / "captures" / "l_kinds" / "kinds.json"

TABLE = {
    "full_attention": Treatment.MAIN,
    "mla_attention": Treatment.MAIN,
    "sink_full_attention": Treatment.MAIN,
    "sliding_window": Treatment.AUXILIARY,
    "sliding_window_mla": Treatment.AUXILIARY,
    "mamba": Treatment.AUXILIARY,
    "chunked_local_attention": Treatment.AUXILIARY,
    "encoder_only_attention": Treatment.IGNORED,
    "cross_attention": Treatment.IGNORED,
    "unknown": Treatment.IGNORED,
    "invented_next_year": Treatment.IGNORED,
}


@pytest.mark.parametrize(("kind", "want"), TABLE.items())
def test_each_kind_has_one_treatment(kind: str, want: Treatment) -> None:
    assert treatment(kind) is want


def test_every_kind_that_the_engine_knows_is_in_the_table() -> None:
    known = json.loads(KINDS.read_text())
    kinds = set(known["enum"].values())
    kinds |= {spec["kv_cache_spec_kind"] for spec in known["specs"].values()}
    assert len(kinds) == 10
    assert kinds <= set(TABLE)


@pytest.mark.parametrize("kind", TABLE)
def test_only_main_kinds_make_blocks(kind: str) -> None:
    rank = Rank()
    rank.send(stored([HA, HB], A + B, kind=kind))
    main = TABLE[kind] is Treatment.MAIN
    assert rank.matched(A + B) == (2 if main else 0)
    assert rank.held() == (2 if main else 0)
    filtered = rank.counters[f"filtered:{kind}"]
    assert filtered == (1 if TABLE[kind] is Treatment.IGNORED else 0)


def test_a_model_of_mla_attention_alone_is_indexed_whole() -> None:
    rank = Rank()
    rank.send(stored([HA, HB], A + B, kind=MLA))
    assert rank.matched(A + B + [1]) == 2
    assert rank.reusable(A + B + [1]) == 32


def test_an_absent_kind_fails_open() -> None:
    rank = Rank()
    rank.send(stored([HA, HB], A + B, group=None, kind=None))
    assert rank.matched(A + B) == 2
    rank.send(removed([HB], group=None))
    assert rank.matched(A + B) == 1


def test_a_further_group_without_a_kind_is_left_out_until_one_is_learned() -> None:
    rank = Rank()
    rank.send(stored([HA], A, group=0, kind=None))
    rank.send(stored([HA], A, group=1, kind=None))
    assert rank.counters["filtered:unknown"] == 1
    assert rank.matched(A) == 1
    rank.send(stored([HA], A, group=1, kind=WINDOW, window=32))
    rank.send(stored([HB], B, HA, group=1, kind=None, window=32))
    assert rank.counters["filtered:unknown"] == 1
    assert [g.kind for g in rank.residency.catalogue.infos()] == ["", WINDOW]


def test_a_provisional_group_takes_the_kind_that_it_shows_later() -> None:
    rank = Rank()
    rank.send(stored([HA], A, group=0, kind=None))
    rank.send(stored([HB], B, HA, group=0, kind=FULL))
    assert rank.matched(A + B) == 2
    assert [g.kind for g in rank.residency.catalogue.infos()] == [FULL]
    rank.send(removed([HA]), removed([HB]))
    assert rank.matched(A + B) == 0


def test_a_provisional_group_that_turns_out_to_be_state_is_no_longer_main() -> None:
    rank = Rank()
    rank.send(stored([HA], A, group=0, kind=None))
    assert rank.matched(A) == 1
    rank.send(stored([HB], A + B, None, group=0, kind=MAMBA))
    assert rank.matched(A) == 0


def test_a_window_that_shows_later_is_part_of_the_spec() -> None:
    rank = Rank()
    rank.send(stored([HA], A), stored([HA], A, group=1, kind=WINDOW))
    rank.send(stored([HB], B, HA), stored([HB], B, HA, group=1, kind=WINDOW, window=17))
    assert {p.window for p, n in rank.presence.names.items() if p.kind == WINDOW and n} == {17}
    assert rank.reusable(A + B + [1]) == 32


def test_an_event_of_another_kind_than_its_group_is_left_out_and_teaches_nothing() -> None:
    rank = Rank()
    rank.send(stored([HA], A))
    wide = list(range(5000, 5064))
    rank.send(stored([HB], wide, kind=MAMBA, bs=64), stored([HB], B, HA))
    assert rank.counters["dropped:kind_conflict"] == 1
    assert rank.matched(A + B) == 2
    assert rank.geometry().block_size == BS


def test_an_override_changes_a_kinds_treatment() -> None:
    assert treatment("unknown", {"unknown": "main"}) is Treatment.MAIN
    assert treatment("mamba", {"mamba": "ignored"}) is Treatment.IGNORED
    rank = Rank(Options(treat_as={"unknown": "main"}))
    rank.send(stored([HA], A, kind="unknown"))
    assert rank.matched(A) == 1


def test_an_override_that_is_no_treatment_is_an_error() -> None:
    with pytest.raises(ValueError, match="indexed"):
        treatment("unknown", {"unknown": "indexed"})


def test_filtered_groups_are_learned_too() -> None:
    rank = Rank()
    rank.send(stored([HA], A, group=3, kind="cross_attention"))
    group = rank.residency.catalogue.groups[3]
    assert (group.kind, group.treated_as, group.stores) == (
        "cross_attention",
        Treatment.IGNORED,
        1,
    )


def test_a_removal_is_told_apart_by_the_catalogue() -> None:
    rank = Rank()
    rank.send(stored([HA], A, group=3), stored([HA], A, group=0, kind=MAMBA))
    rank.send(removed([HA], group=0))
    assert rank.matched(A) == 1
    rank.send(removed([HA], group=3))
    assert rank.matched(A) == 0


def test_a_removal_of_an_unknown_group_takes_nothing_away() -> None:
    rank = Rank()
    rank.send(stored([HA], A))
    rank.send(removed([HA, HB], group=5))
    assert rank.matched(A) == 1
    assert rank.counters["unknown_group"] == 2


def test_block_size_is_the_largest_device_store() -> None:
    rank = Rank()
    rank.send(stored([1], list(range(16)), bs=16))
    assert rank.geometry().block_size == 16
    rank.send(stored([2], list(range(1000, 1064)), bs=64))
    assert rank.geometry().block_size == 64
    rank.send(stored([3], list(range(2000, 2256)), bs=256, medium="CPU"))
    assert rank.geometry().block_size == 64
    assert rank.residency.catalogue.groups[0].sizes == {16, 64}


def test_catalogue_survives_a_restart() -> None:
    rank = Rank()
    rank.send(stored([HA], A, group=3), stored([], A, group=0, kind=MAMBA, bs=BS))
    again = rank.reloaded()
    again.send(removed([HA], group=0))
    assert again.matched(A) == 1
    again.send(removed([HA], group=3))
    assert again.matched(A) == 0
    assert "unknown_group" not in again.counters


def test_groups_are_listed_by_index() -> None:
    catalogue = Catalogue()
    for idx in (2, 0, 1):
        catalogue.learn(idx, FULL, None)
    assert [g.idx for g in catalogue.infos()] == [0, 1, 2]
    assert [g.idx for g in catalogue.by_treatment(Treatment.MAIN)] == [0, 1, 2]


@pytest.mark.parametrize(
    ("medium", "tier"),
    [
        (None, Tier.DEVICE),
        ("GPU", Tier.DEVICE),
        ("gpu", Tier.DEVICE),
        ("CPU", Tier.HOST),
        ("cpu_pinned", Tier.HOST),
        ("CPU_TIER1", Tier.HOST),
        ("CPU_TIER2", Tier.HOST),
        ("DISK", Tier.STORAGE),
        ("EXTERNAL", Tier.STORAGE),
        ("FS", Tier.STORAGE),
        ("OBJ", Tier.STORAGE),
        ("STORAGE", Tier.STORAGE),
        ("weird", Tier.OTHER),
    ],
)
def test_media_go_through_one_table(medium: str | None, tier: Tier) -> None:
    assert tier_of(medium) is tier
