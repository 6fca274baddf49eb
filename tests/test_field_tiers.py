"""Faults that users of KV-cache routers met with tiers and copies, as event sequences.

Each docstring starts with the row of docs/field-cases.md that it covers.
"""

from __future__ import annotations

import math

import pytest
from pure import (
    CLEARED,
    FULL,
    HA,
    HB,
    HD,
    A,
    B,
    C,
    D,
    Rank,
    chunk,
    legacy,
    removed,
    stored,
)

from kvindexd.groups import tier_of
from kvindexd.model import Tier
from kvindexd.residency import Options

# -- tiers ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [16, 0])
def test_field_a_store_without_tokens_says_where_a_block_is(size: int) -> None:
    """T1: an error per event, and the tier was lost."""
    rank = Rank()
    rank.send(stored([HA, HB], A + B))
    rank.send(stored([HA, HB], [], None, medium="CPU", bs=size))
    rank.send(removed([HA, HB]))
    assert rank.matched(A + B) == 2
    assert rank.tiers(A + B + C) == (0, 32, 0)
    assert not [c for c in rank.counters if c.startswith("dropped")]


def test_field_a_store_without_tokens_of_an_unknown_hash_is_no_root() -> None:
    """T1: parked, and no error."""
    rank = Rank()
    rank.send(stored([HA], A), stored([HD], [], None, medium="CPU", bs=0))
    assert rank.held(Tier.HOST) == 0
    assert len(rank.parked) == 1
    assert rank.matched(D) == 0


def test_field_a_removal_takes_one_tier() -> None:
    """T2: a removal from one tier deleted the block, or all tiers scored alike."""
    rank = Rank()
    rank.send(stored([HA], A), stored([HA], A, medium="CPU"))
    assert rank.residency.tier_blocks()[:2] == (1, 1)
    rank.send(removed([HA], medium="CPU"))
    assert (rank.matched(A), rank.tiers(A + B)) == (1, (16, 0, 0))
    rank.send(removed([HA]))
    assert rank.matched(A) == 0


@pytest.mark.parametrize(
    ("medium", "tier"),
    [
        ("GPU", 0),
        (None, 0),
        ("gpu", 0),
        ("CPU", 1),
        ("CPU_PINNED", 1),
        ("CPU_TIER1", 1),
        ("CPU_TIER2", 1),
        ("DISK", 2),
        ("EXTERNAL", 2),
        ("FS", 2),
        ("OBJ", 2),
        ("STORAGE", 2),
        ("", 3),
        ("weird", 3),
    ],
)
def test_field_only_the_devices_own_names_are_the_device(medium: str | None, tier: int) -> None:
    """T4: unknown media were taken for the GPU."""
    rank = Rank()
    rank.send(stored([HB], B), stored([HA], A, medium=medium))
    want = [0, 0, 0]
    if tier < 3:
        want[tier] = 16
    assert rank.tiers([*A, 1]) == tuple(want)
    assert tier_of(medium) == tier
    assert rank.counters["dropped:unknown_medium"] == (1 if tier == 3 else 0)


def test_field_each_physical_copy_has_its_own_removal() -> None:
    """T5: the first removal of a duplicate deleted it: a hit of 7 blocks scored 2."""
    names = [1, 2, 3, 4, 5, 6, 7]
    tokens = [t for n in names for t in chunk(n)]
    rank = Rank()
    rank.send(stored(names[:3], tokens[:48]), stored([3], chunk(3), 2))
    rank.send(stored(names[3:], tokens[48:], 3))
    rank.send(removed([3]))
    assert rank.matched(tokens) == 7
    rank.send(removed([3]))
    assert rank.matched(tokens) == 2


def test_field_the_engines_own_count_of_copies_wins() -> None:
    """T5: `remaining_copy_counts`, where an engine sends it."""
    rank = Rank()
    rank.send(stored([HA], A), stored([HA], A))
    rank.send(removed([HA], remaining_copy_counts=[1]))
    assert rank.matched(A) == 1
    rank.send(removed([HA], remaining_copy_counts=[1]))
    assert rank.matched(A) == 1
    rank.send(removed([HA], remaining_copy_counts=[0]))
    assert rank.matched(A) == 0


def test_field_blocks_announced_again_are_counted_as_the_operator_says() -> None:
    """T6: full report mode announces reused blocks again, from the root. `reports_reuse` counts no
    store of a held block, which under-credits at worst, and a later store heals. Without it, a
    store behind a parent is a further copy (T5)."""
    told = Rank(Options(reports_reuse=True))
    told.send(stored([HA, HB], A + B), stored([HA, HB], A + B), stored([HB], B, HA))
    told.send(removed([HB]))
    assert told.matched(A + B) == 1
    assert told.counters["reannounced"] == 3
    told.send(stored([HB], B, HA))
    assert told.matched(A + B) == 2
    counted = Rank()
    counted.send(stored([HA, HB], A + B), stored([HB], B, HA))
    counted.send(removed([HB]))
    assert counted.matched(A + B) == 2


def test_field_a_store_marked_reused_is_no_further_copy() -> None:
    """T6: `origin = REUSED`."""
    rank = Rank()
    rank.send(stored([HA], A), stored([HA], A, origin="REUSED"))
    rank.send(removed([HA]))
    assert rank.matched(A) == 0


def test_field_a_clear_without_a_tier_drops_all_tiers() -> None:
    """T9: the safe side; a tag for one tier would be counted by name until it exists."""
    rank = Rank()
    rank.send(stored([HA], A), stored([HA], A, medium="CPU"))
    rank.send(CLEARED)
    assert rank.residency.tier_blocks() == (0, 0, 0, 0)
    rank.send(stored([HA], A), {"type": "TierBlocksCleared", "medium": "CPU"})
    assert rank.matched(A) == 1
    assert rank.counters["tag:TierBlocksCleared"] == 1


def test_field_a_connector_does_not_rewrite_the_devices_geometry() -> None:
    """T10: connector events carried a global block size and another group's index."""
    tokens = list(range(256))
    rank = Rank()
    rank.send(stored([1], tokens, bs=256))
    rank.send(stored([2], tokens[:16], bs=16, medium="EXTERNAL"))
    rank.send(stored([3], tokens[:16], bs=16, medium="EXTERNAL", kind="mamba"))
    assert rank.geometry().block_size == 256
    assert rank.geometry().alignment == 256
    assert rank.reusable([*tokens, 1]) == 256
    assert rank.counters["dropped:kind_conflict"] == 1


def test_field_storage_is_a_tier_of_its_own_and_its_claims_are_bounded() -> None:
    """T11: files are deleted without any event. A claim is its publisher's, apart from the device
    and the host, and the bound on claims lets it expire."""
    rank = Rank(Options(blocks=100))
    rank.send(stored([HA], A, medium="STORAGE", locality="REMOTE"), stored([HB], B))
    assert rank.tiers([*A, 1]) == (0, 0, 16)
    assert rank.ask([*A, 1], device_only=True).reusable[0] == 0
    for n in range(200):
        rank.send(stored([1000 + n], chunk(1000 + n), medium="STORAGE", locality="REMOTE"))
    assert rank.tiers([*A, 1]) == (0, 0, 0)
    assert rank.counters["claims_expired"] >= 100


def test_field_host_children_of_device_parents_are_found() -> None:
    """T1, T2: write-back caching stores host children whose parent is only on the device."""
    rank = Rank()
    rank.send(legacy([HA], A))
    rank.send(["BlockStored", [HB], HA, B, 16, None, "CPU_PINNED"])
    assert rank.tiers(A + B + C) == (16, 16, 0)
    assert math.isclose(rank.residency.tier_blocks()[1], 1)
    assert FULL not in {g.kind for g in rank.residency.catalogue.infos()}
