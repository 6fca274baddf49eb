"""Block records: what is packed comes back, and the bulk decoder agrees with the slow way."""

from __future__ import annotations

import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvindexd.model import ADD, MUTATION, GroupInfo, Plane, Profile, Slot
from kvindexd.planes import COUNT_BITS, COUNT_MASK, memberships
from kvindexd.records import (
    UNBOUND,
    Block,
    counts,
    decode_records,
    field_of,
    hash_of,
    pack,
    pack_mutation,
    unpack,
)

u64 = st.integers(0, 2**64 - 1)
hashes = u64 | st.binary(min_size=1, max_size=40) | st.just(UNBOUND + b"12345678")


@st.composite
def blocks(draw: st.DrawFn, slots: int = 6) -> Block:
    key = draw(u64)
    block = Block(
        key,
        draw(st.integers(1, 2**32 - 1)),
        draw(st.just(key) | u64),
        draw(u64),
        draw(st.none() | st.binary(min_size=1, max_size=32)),
    )
    for slot in draw(st.sets(st.integers(0, slots - 1), max_size=3)):
        block.copies |= draw(st.integers(1, COUNT_MASK)) << slot * COUNT_BITS
    return block


def same(a: Block, b: Block) -> bool:
    fields = ("key", "length", "name", "parent", "digest", "copies")
    return all(getattr(a, f) == getattr(b, f) for f in fields)


@given(blocks())
def test_a_block_survives_packing(block: Block) -> None:
    assert same(unpack(pack(block)), block)


@given(hashes)
def test_a_hash_survives_its_field(engine_hash: int | bytes) -> None:
    assert hash_of(field_of(engine_hash)) == engine_hash


@given(hashes, hashes)
def test_different_hashes_have_different_fields(a: int | bytes, b: int | bytes) -> None:
    assert (field_of(a) == field_of(b)) == (a == b)


def test_the_common_record_is_small() -> None:
    assert len(pack(Block(1, 16, 1, 0, None, 1))) == 24
    assert len(pack(Block(1, 16, 1, 0))) == 21


def test_a_truncated_record_is_an_error() -> None:
    record = pack(Block(1, 16, 2, 0, b"digest", 1))
    for end in (0, 10, 20, 24):
        with pytest.raises((struct.error, IndexError)):
            unpack(record[:end])


def test_mutations_have_the_models_layout() -> None:
    raw = pack_mutation(2**64 - 1, 5, 2**32 - 1, 254, ADD)
    row = np.frombuffer(raw, MUTATION)[0]
    assert len(raw) == MUTATION.itemsize == 24
    assert [int(row[f]) for f in ("name", "parent", "length", "plane", "op")] == [
        2**64 - 1,
        5,
        2**32 - 1,
        254,
        ADD,
    ]


@given(st.dictionaries(st.integers(0, 9), st.integers(1, COUNT_MASK), max_size=5))
def test_counts_list_the_slots_that_hold(wanted: dict[int, int]) -> None:
    packed = sum(n << slot * COUNT_BITS for slot, n in wanted.items())
    assert dict(counts(packed)) == wanted


# -- the bulk decoder -----------------------------------------------------------------------------

GROUPS = (
    GroupInfo(0, "full_attention", 64, 0, "main", 0),
    GroupInfo(1, "mamba", 64, 0, "auxiliary", 0),
    GroupInfo(2, "mamba", 64, 0, "auxiliary", 0),
    GroupInfo(3, "cross_attention", 16, 0, "ignored", 0),
)
SLOTS = (
    Slot(0, 0, 64),
    Slot(0, 1, 64),
    Slot(0, 2, 64),
    Slot(0, 0, 16),
    Slot(1, 0, 64),
    Slot(0, 3, 16),
)
PLANES = (
    Plane(0, "full_attention", 64, 0, 64),
    Plane(0, "mamba", 64, 0, 64),
    Plane(0, "full_attention", 64, 0, 16),
    Plane(1, "full_attention", 64, 0, 64),
)
PROFILE = Profile(groups=GROUPS, planes=PLANES, slots=SLOTS)


def naive(held: list[Block], profile: Profile) -> set[tuple[int, ...]]:
    """One row per (block, plane), worked out slot by slot."""
    members = memberships(profile.groups, profile.slots)
    rows = set()
    for block in held:
        for member in members:
            if member is not None and member.holds(block.copies):
                plane = profile.planes.index(member.plane)
                rows.add((block.name, block.parent, block.length, plane))
    return rows


def decoded(held: list[Block], profile: Profile) -> list[tuple[int, ...]]:
    records = [pack(b) for b in held]
    rows = decode_records([b""] * len(records), records, profile)
    assert rows.dtype == MUTATION
    assert all(rows["op"] == ADD)
    return [tuple(int(r[f]) for f in ("name", "parent", "length", "plane")) for r in rows]


@settings(max_examples=300, deadline=None)
@given(st.lists(blocks(), max_size=20))
def test_the_bulk_decoder_agrees_with_the_slow_way(held: list[Block]) -> None:
    rows = decoded(held, PROFILE)
    assert set(rows) == naive(held, PROFILE)


@settings(max_examples=100, deadline=None)
@given(st.lists(blocks(slots=1), max_size=20))
def test_a_rank_of_one_group(held: list[Block]) -> None:
    profile = Profile(groups=GROUPS[:1], planes=PLANES[:1], slots=SLOTS[:1])
    assert set(decoded(held, profile)) == naive(held, profile)


def test_groups_of_equal_spec_are_held_only_together() -> None:
    half, whole = Block(1, 64, 1, 0), Block(2, 128, 2, 1)
    half.copies = 1 << COUNT_BITS
    whole.copies = 1 << COUNT_BITS | 1 << 2 * COUNT_BITS
    assert decoded([half, whole], PROFILE) == [(2, 1, 128, 1)]


def test_nothing_decodes_to_nothing() -> None:
    assert decoded([], PROFILE) == []
    assert decoded([Block(1, 16, 1, 0)], Profile()) == []
    assert len(decode_records([], [], Profile())) == 0
