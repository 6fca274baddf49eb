"""The C module does what the Python beside it does: same streams, same deltas, same state."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvindexd import holdings, records
from kvindexd.records import Block, pack_all, pack_all_plain
from kvindexd.residency import Residency
from kvindexd.wire.events import AllBlocksCleared, Batch, BlockRemoved, BlockStored

native = pytest.mark.skipif(
    records._native is None, reason="kvindexd._dense is not built: no C compiler was found"
)
SIZE = 16
# Few, so that prompts share prefixes, and hashes come again for the same and for other content.
TEXTS = [bytes([n % 7, 0, 0, 0]) * SIZE for n in range(4)]
step = st.tuples(
    st.sampled_from(["root", "child", "child", "remove", "clear", "other group", "bytes"]),
    st.lists(st.integers(0, 3), min_size=1, max_size=6),
    st.integers(0, 1 << 30),
)


def stored(hashes: list[Any], parent: Any, texts: list[int], **fields: Any) -> BlockStored:
    tokens = b"".join(TEXTS[t] for t in texts)
    fields = {"kind": "full_attention", "group_idx": 0} | fields
    return BlockStored(hashes=hashes, parent=parent, tokens=tokens, block_size=SIZE, **fields)


def events(steps: list[tuple[str, list[int], int]]) -> list[Batch]:
    """A stream in which an engine's hashes are mostly, not always, a function of the content."""
    seen: list[Any] = [1]
    batches = []
    for what, texts, seed in steps:
        rng = random.Random(seed)
        hashes: list[Any] = [rng.choice([rng.getrandbits(64), rng.choice(seen)]) for _ in texts]
        parent = None if what == "root" else rng.choice(seen)
        if what == "clear":
            batches.append(Batch(1.0, [AllBlocksCleared()]))
        elif what == "remove":
            batches.append(Batch(1.0, [BlockRemoved(hashes=rng.choices(seen, k=3), group_idx=0)]))
        elif what == "bytes":
            hashes = [bytes(rng.choices(range(256), k=32)) for _ in texts]
            batches.append(Batch(1.0, [stored(hashes, None, texts)]))
        elif what == "other group":
            other = {"kind": "sliding_window", "group_idx": 1, "window": 32}
            batches.append(Batch(1.0, [stored(hashes, parent, texts, **other)]))
        else:
            batches.append(Batch(1.0, [stored(hashes, parent, texts)]))
        seen += hashes
    return batches


def play(batches: list[Batch]) -> tuple[list[object], Residency]:
    residency = Residency()
    deltas = [residency.apply(b, seq=i, digest=0, now=1.0) for i, b in enumerate(batches)]
    return deltas, residency


@native
@settings(max_examples=150, deadline=None)
@given(st.lists(step, min_size=1, max_size=12))
def test_streams_end_up_the_same(steps: list[tuple[str, list[int], int]]) -> None:
    module = records._native
    deltas, ours = play(events(steps))
    try:
        holdings._native = records._native = None  # type: ignore[assignment]
        expected, plain = play(events(steps))
    finally:
        holdings._native = records._native = module
    assert deltas == expected
    mine, theirs = ours.holdings, plain.holdings
    assert {h: records.pack(b) for h, b in mine.blocks.items()} == {
        h: records.pack(b) for h, b in theirs.blocks.items()
    }
    assert list(mine.blocks) == list(theirs.blocks), "oldest first, for the limits"
    assert (mine._held, mine.plane_counts) == (theirs._held, theirs.plane_counts)


@native
def test_fresh_blocks_are_taken_in_one_pass() -> None:
    residency = Residency()
    batch = Batch(1.0, [stored([5, 6], None, [0, 1])])
    residency.apply(batch, seq=0, digest=0, now=1.0)
    taken: list[object] = []
    one = holdings._native
    try:

        class Watched:
            @staticmethod
            def store(*args: Any) -> bytes | None:
                taken.append(one.store(*args))
                return taken[-1]  # type: ignore[return-value]

        holdings._native = Watched  # type: ignore[assignment]
        residency.apply(Batch(1.0, [stored([7], 6, [2])]), seq=1, digest=0, now=1.0)
        residency.apply(Batch(1.0, [stored([5, 9], None, [0, 3])]), seq=2, digest=0, now=1.0)
    finally:
        holdings._native = one
    assert [t is not None for t in taken] == [True, False]


@native
def test_every_kind_of_block_is_packed_alike() -> None:
    big = (1 << 64) - 1
    blocks: dict[Any, Block] = {
        0: Block(1, 16, 1, 0, None, 1),
        big: Block(big, 2**32 - 1, big, big, None, 0xFFFF),
        2: Block(1, 16, 9, 0, None, 1),
        3: Block(1, 16, 1, 0, b"d" * 32, 1),
        4: Block(1, 16, 1, 0),
        5: Block(1, 16, 1, 0, None, 1 << 16),
        6: Block(1, 16, 1, 0, None, (3 << 40) + 1),
        b"x" * 32: Block(1, 16, 1, 0, None, 1),
        7: Block(2**40, 16, int(str(2**40)), 0, None, 2),
    }
    hashes = {*blocks, 99}
    assert pack_all(hashes, blocks) == pack_all_plain(hashes, blocks)


@native
@pytest.mark.parametrize("bad", [(), (1,) * 11, ({}, {}, set(), [1], b"", 1, (0, 0), 16, (1, 0))])
def test_wrong_arguments_are_refused(bad: tuple[Any, ...]) -> None:
    with pytest.raises(TypeError):
        records._native.store(*bad)


@native
def test_keys_that_do_not_cover_the_hashes_are_refused() -> None:
    arguments: Any = ({}, {}, set(), [1, 2], b"\0" * 8, 1, (0, 0), 16, (1, 0), 1, Block)
    with pytest.raises(ValueError, match="do not fit"):
        records._native.store(*arguments)


@native
@pytest.mark.parametrize("size", [2**62, 2**30])
def test_lengths_that_no_record_has_room_for_are_refused(size: int) -> None:
    arguments: Any = ({}, {}, set(), [1, 2, 3, 4], b"\0" * 32, 1, (0, 0), size, (1, 0), 1, Block)
    with pytest.raises(ValueError, match="do not fit"):
        records._native.store(*arguments)
