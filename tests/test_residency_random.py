"""Random streams: what a rank says, holds, saves and restores always agree."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from pure import (
    CLEARED,
    FULL,
    MAMBA,
    WINDOW,
    Rank,
    chunk,
    dump,
    holdings_by_plane,
    presence_by_plane,
    removed,
    stored,
)

from kvindexd.records import field_of, pack
from kvindexd.residency import Options

# Prompts that share prefixes: a tree of 16-token chunks.
PATHS = [(1, 2, 3, 4, 5, 6), (1, 2, 3, 7, 8), (1, 9, 10, 11), (12, 13)]
GROUPS: list[tuple[str, int, int | None]] = [
    (FULL, 16, None),
    (MAMBA, 16, None),
    (MAMBA, 16, None),
    (WINDOW, 32, 48),
    (FULL, 16, None),
]
MEDIA = ["GPU", "GPU", "GPU", "CPU", None]


def tokens(path: tuple[int, ...]) -> list[int]:
    return [t for n in path for t in chunk(n)]


def name(path: tuple[int, ...]) -> int:
    """The engine's hash of a prefix."""
    return hash(("prefix", path)) & (2**64 - 1)


@st.composite
def spans(draw: st.DrawFn) -> tuple[int, tuple[int, ...], int, int]:
    """(group, path, first block, blocks) of some group's blocks inside a prompt."""
    group = draw(st.integers(0, len(GROUPS) - 1))
    path = draw(st.sampled_from(PATHS))
    step = GROUPS[group][1] // 16
    total = len(path) // step
    first = draw(st.integers(0, total - 1))
    return group, path, first, draw(st.integers(1, total - first))


@st.composite
def events(draw: st.DrawFn) -> Any:
    kind = draw(st.sampled_from(["store", "store", "store", "sparse", "tier", "remove", "odd"]))
    group, path, first, n = draw(spans())
    step = GROUPS[group][1] // 16
    ends = [(first + i + 1) * step for i in range(n)]
    hashes = [name(path[:end]) for end in ends]
    medium = draw(st.sampled_from(MEDIA))
    if kind == "remove":
        left = draw(st.none() | st.integers(0, 2))
        more = {} if left is None else {"remaining_copy_counts": [left] * len(hashes)}
        return removed(hashes, group=group, medium=medium, **more)
    if kind == "tier":
        return stored(hashes, [], None, group=group, kind=None, medium=medium, bs=0)
    if kind == "odd":
        return draw(
            st.sampled_from(
                [
                    CLEARED,
                    stored([name((99,))], chunk(98), name((99,))),
                    stored([name(path[:1])], chunk(97)),
                    stored([name(path[:1])], tokens(path)[:8], bs=8),
                    {"type": "Unheard"},
                ]
            )
        )
    start = first * step
    if kind == "sparse" and GROUPS[group][0] != FULL:
        hashes = hashes[-draw(st.integers(0, 1)) :] if hashes else hashes
    return stored(
        hashes,
        tokens(path[start : ends[-1]]),
        name(path[:start]) if start else None,
        group=group,
        kind=GROUPS[group][0],
        bs=GROUPS[group][1],
        window=GROUPS[group][2],
        medium=medium,
    )


batches = st.lists(st.lists(events(), max_size=5), max_size=12)


def check(rank: Rank) -> None:
    residency = rank.residency
    holdings = residency.holdings
    held = holdings_by_plane(residency)
    assert held == presence_by_plane(rank.presence)
    counted = dict(zip(holdings.planes, holdings.plane_counts, strict=True))
    assert {p: n for p, n in counted.items() if n} == {p: len(n) for p, n in held.items()}
    assert set(holdings.idle) == {h for h, b in holdings.blocks.items() if not b.copies}
    assert rank.fields == {field_of(h): pack(b) for h, b in holdings.blocks.items()}
    waiting = residency.waiting
    assert len(rank.parked) == len(waiting) + len(waiting.unplaced)
    assert not set(waiting.unplaced) & set(holdings.blocks)
    slots = [slot.group for entry in waiting.unplaced.values() for slot in entry.copies]
    assert {g: n for g, n in waiting.per_group.items() if n} == {
        g: slots.count(g) for g in set(slots)
    }
    assert all(n > 0 for entry in waiting.unplaced.values() for n in entry.copies.values())
    assert dump(rank.reloaded().residency) == dump(residency)


@settings(max_examples=150, deadline=None)
@given(batches)
def test_what_is_said_is_what_is_held_and_what_is_saved(stream: list[list[Any]]) -> None:
    rank = Rank(Options(parked=6, bindings=12, blocks=10))
    for batch in stream:
        rank.send(*batch)
        check(rank)


@settings(max_examples=100, deadline=None)
@given(batches, batches)
def test_a_restored_rank_goes_on_like_the_live_one(
    before: list[list[Any]], after: list[list[Any]]
) -> None:
    live = Rank()
    for batch in before:
        live.send(*batch)
    again = live.reloaded()
    for batch in after:
        one, two = live.send(*batch), again.send(*batch)
        assert dict(one.blocks) == dict(two.blocks)
        # Orphans are numbered anew once the room was empty; what they say is the same.
        assert sorted(map(repr, one.parked.values())) == sorted(map(repr, two.parked.values()))
        assert one.clear == two.clear
        assert one.counters == two.counters
        assert presence_by_plane(live.presence) == presence_by_plane(again.presence)
        assert dump(live.residency) == dump(again.residency)


@settings(max_examples=100, deadline=None)
@given(batches)
def test_mutations_may_be_applied_twice(stream: list[list[Any]]) -> None:
    rank = Rank()
    twice = rank.reloaded().presence
    for batch in stream:
        delta = rank.send(*batch)
        twice.apply(delta)
        twice.apply(delta)
        assert presence_by_plane(twice) == presence_by_plane(rank.presence)


scalars = st.none() | st.integers(-(2**63), 2**64 - 1) | st.text(max_size=3) | st.binary(max_size=3)
wild = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=6,
)
some_hash = st.integers(0, 5) | st.sampled_from([b"\0" * 8, b"a" * 32, "text", -1])


@st.composite
def hostile(draw: st.DrawFn) -> Any:
    """Well-formed events with wild contents."""
    size = draw(st.sampled_from([1, 3, 16]))
    blocks = draw(st.integers(0, 3))
    listed = draw(st.integers(0, blocks)) if blocks else draw(st.integers(0, 3))
    event = {
        "type": "BlockStored",
        "block_hashes": draw(st.lists(some_hash, min_size=listed, max_size=listed)),
        "parent_block_hash": draw(st.none() | some_hash),
        "token_ids": draw(
            st.lists(st.integers(0, 3), min_size=blocks * size, max_size=blocks * size)
        ),
        "block_size": size,
        "lora_id": draw(st.none() | st.integers(0, 2) | st.text(max_size=2)),
        "medium": draw(st.sampled_from([None, "GPU", "CPU", "what"])),
        "lora_name": draw(st.none() | st.just("x") | st.just({"cache_salt": "s"})),
        "extra_keys": draw(
            st.none()
            | st.lists(
                st.none() | st.lists(wild | st.just(["i", 2**64 - 1]), max_size=3),
                min_size=listed,
                max_size=listed,
            )
        ),
        "group_idx": draw(st.none() | st.integers(0, 3)),
        "kv_cache_spec_kind": draw(st.sampled_from([None, "", FULL, MAMBA, WINDOW, "odd"])),
        "kv_cache_spec_sliding_window": draw(st.sampled_from([None, 0, 1, 40])),
        "lookahead_token_ids": draw(
            st.none()
            | st.lists(st.lists(st.integers(0, 9), max_size=2), min_size=listed, max_size=listed)
        ),
    }
    if draw(st.booleans()):
        return event
    gone = draw(st.lists(some_hash, max_size=3))
    return removed(gone, group=draw(st.none() | st.integers(0, 3)), medium=event["medium"])


@settings(max_examples=300, deadline=None)
@given(st.lists(st.lists(hostile() | st.just(CLEARED), max_size=5), max_size=6))
def test_hostile_events_raise_nothing_and_leave_all_in_order(stream: list[list[Any]]) -> None:
    rank = Rank(Options(parked=5, bindings=9, blocks=8, unbound_ttl=2.0))
    for number, batch in enumerate(stream):
        rank.send(*batch, now=float(number))
        assert holdings_by_plane(rank.residency) == presence_by_plane(rank.presence)
        for tokens_ in ([0] * 48, [1, 2, 3] * 20, []):
            found = rank.ask(tokens_)
            total = sum(int(t[0]) for t in found.tiers)
            assert 0 <= total == int(found.reusable[0]) <= max(0, len(tokens_) - 1)
            assert 0 <= int(found.matched[0]) <= len(tokens_)
        rank.reloaded()
