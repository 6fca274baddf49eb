"""Faults that users of KV-cache routers met on the wire, as event sequences.

Each docstring starts with the row of docs/field-cases.md that it covers.
"""

from __future__ import annotations

import time
from typing import Any

import msgspec
import pytest
from pure import (
    FULL,
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
    legacy,
    removed,
    stored,
)

from kvindexd.wire import BlockStored, Rejected, decode_batch

encode = msgspec.msgpack.encode
ARRAY = ["BlockStored", [HA], None, A, 16, None, "GPU", None, None, 0, FULL, None]


def sent(*raw: bytes, rank: Rank | None = None) -> Rank:
    rank = rank or Rank()
    for one in raw:
        rank.send_raw(one)
    return rank


# -- decoding -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "raw",
    [
        encode([1.0, [ARRAY], 0]),
        encode([1.0, [stored([HA], A)], 0]),
        encode({"ts": 1.0, "events": [stored([HA], A)], "data_parallel_rank": 0}),
        encode({"ts": 1.0, "events": [ARRAY], "data_parallel_rank": 0}),
    ],
    ids=["arrays", "maps", "map batch of maps", "map batch of arrays"],
)
def test_field_every_generation_decodes_to_the_same_state(raw: bytes) -> None:
    """W1: events became maps and array decoders dropped everything."""
    rank, plain = sent(raw), sent(encode([1.0, [stored([HA], A)], 0]))
    assert rank.matched(A) == 1
    assert rank.fields == plain.fields


def test_field_generations_mix_inside_one_batch() -> None:
    """W1: decided per event, with no switch."""
    child = stored([HB], B, HA)
    assert sent(encode([1.0, [ARRAY, child], 0])).matched(A + B) == 2


def test_field_shape_decides_and_no_engine_name_is_asked() -> None:
    """W2: a third engine with vLLM's shape fell to the array decoder. Nothing here takes a name."""
    rank = sent(encode([1.0, [stored([HA], A, group=None, kind=None)], 0]))
    assert rank.matched(A) == 1
    rank.send({"type": "BlockStored"}, ["BlockStored"])
    assert rank.counters["dropped:bad_field"] == 2


@pytest.mark.parametrize("tail", [[], [None], [3], [0, "future"]])
def test_field_batches_have_two_or_more_elements(tail: list[Any]) -> None:
    """W3: two or three elements, or more to come."""
    raw = encode([1.0, [ARRAY], *tail])
    assert sent(raw).matched(A) == 1
    assert decode_batch(raw).rank == (tail[0] if tail else None)


def test_field_identity_fields_reach_the_key_or_the_filter() -> None:
    """W4: only the first four fields were read; group, medium and adapter were lost."""
    rank = Rank()
    rank.send(stored([HA], A, group=1, kind=WINDOW), stored([HD], D))
    rank.send(stored([HB], B, medium="CPU"), stored([HC], C, lora_name="x"))
    assert rank.matched(A) == 0
    assert rank.tiers([*B, 1], hybrid=False) == (0, 16, 0)
    assert (rank.matched(C), rank.matched(C, lora="x")) == (0, 1)


@pytest.mark.parametrize(
    ("stored_as", "removed_as"),
    [
        (b"\x01" * 32, b"\x01" * 32),
        (-5, -5),
        (-5, 2**64 - 5),
        (2**64 - 5, -5),
        ("a-text-hash", "a-text-hash"),
        ("a-text-hash", b"a-text-hash"),
    ],
)
def test_field_a_removal_finds_its_store_in_every_form_of_hash(
    stored_as: Any, removed_as: Any
) -> None:
    """W5: int64, uint64, bytes and text, and a parent in the other form."""
    rank = Rank()
    rank.send(stored([stored_as], A), stored([HB], B, removed_as))
    assert rank.matched(A + B) == 2
    rank.send(removed([removed_as]))
    assert rank.matched(A + B) == 0
    assert rank.held() == 1


def test_field_hash_bytes_are_never_cut() -> None:
    """W5: two digests that share their last (or first) eight bytes are two hashes."""
    one, two = b"\x01" * 24 + b"\x07" * 8, b"\x02" * 24 + b"\x07" * 8
    three = b"\x01" * 31 + b"\x00"
    rank = Rank()
    rank.send(stored([one], A), stored([two], B), stored([three], C))
    rank.send(removed([one]))
    assert [rank.matched(t) for t in (A, B, C)] == [0, 1, 1]


def test_field_short_tuples_of_older_engines_are_whole_events() -> None:
    """W7: SGLang omits what it has no value for; a missing medium is the device."""
    rank = Rank()
    rank.send(legacy([HA], A), legacy([HB], B, HA))
    assert rank.matched(A + B) == 2
    rank.send(["BlockRemoved", [HB]])
    assert rank.matched(A + B) == 1
    rank.send(["AllBlocksCleared"])
    assert rank.matched(A) == 0


def pairs(first: int, last: int) -> list[list[int]]:
    """[[t, t + 1], ...] for t in first..last."""
    return [[t, t + 1] for t in range(first, last + 1)]


def test_field_a_pair_block_covers_one_token_more() -> None:
    """W8: speculative decoding sends pairs; every event was rejected, or the overlap always 0."""
    rank = Rank()
    rank.send(legacy([HA], pairs(1, 16)))
    assert rank.matched(range(1, 18)) == 1
    assert rank.matched(range(1, 17)) == 0
    assert rank.matched([*range(1, 17), 99]) == 0
    assert rank.presence.profile.pairs
    rank.send(legacy([HB], pairs(17, 32), HA))
    assert rank.matched(range(1, 34)) == 2
    assert rank.reusable(range(1, 35)) == 32
    assert rank.reusable(range(1, 34)) == 16


def test_field_pair_blocks_and_flat_blocks_of_the_same_tokens_do_not_mix() -> None:
    """W8: a worker that publishes pairs is not matched by the flat name of the same tokens."""
    paired, flat = Rank(), Rank()
    paired.send(legacy([HA], pairs(1, 16)))
    flat.send(legacy([HA], range(1, 17)))
    names = [{n for held in r.presence.names.values() for n in held} for r in (paired, flat)]
    assert not names[0] & names[1]


def test_field_more_hashes_than_blocks_reject_the_event() -> None:
    """W10: four hashes, three tokens, block size 256: an error with a trace per event."""
    rank = Rank()
    rank.send(stored([1, 2, 3, 4], [1, 2, 3], bs=256), stored([HA], A))
    assert rank.counters["dropped:misaligned"] + rank.counters["dropped:too_many_hashes"] == 1
    assert rank.held() == 1


def test_field_a_bad_event_costs_itself_and_block_size_has_no_default() -> None:
    """W11: an exception, a reconnect, the same event again, for ever; a missing size became 1."""
    sparse = stored([1], range(3840), bs=768)
    rank = Rank()
    rank.send(sparse, stored([2], A, bs=0), stored([3], A, bs=None), stored([HA], A))
    assert rank.counters["dropped:bad_block_size"] == 2
    assert rank.counters["sparse"] == 1
    assert rank.residency.unit == 16
    assert {slot.size for slot in rank.residency.holdings.slots} == {16, 768}
    assert rank.matched(A, hybrid=False) >= 0
    rank.send(stored([HB], B, HA))
    assert HB in rank.residency.holdings.blocks


def test_field_unknown_tags_cost_themselves_and_are_counted_by_name() -> None:
    """W13: new tags and fields are being proposed; one must not cost its batch."""
    rank = Rank()
    rank.send(
        stored([HA], A, event_version=2),
        {"type": "TierBlocksCleared", "medium": "GPU"},
        {"type": "BlockTransferred", "to": "CPU"},
        {"type": 5},
        stored([HB], B, HA),
    )
    assert rank.matched(A + B) == 2
    assert rank.counters["dropped:unknown_tag"] == 3
    assert rank.counters["tag:TierBlocksCleared"] == 1
    assert rank.counters["tag:BlockTransferred"] == 1


# -- hostile load ---------------------------------------------------------------------------------


def test_field_rejected_events_carry_no_tokens_and_no_trace() -> None:
    """W10, W11: what is kept of a bad event is its reason and one line."""
    raw = encode([1.0, [stored([HA], [2**33] * 16), stored([HB], B)], 0])
    bad, good = decode_batch(raw).events
    assert isinstance(bad, Rejected)
    assert isinstance(good, BlockStored)
    assert str(2**33) not in bad.detail
    assert len(bad.detail) < 200


def test_field_a_thousand_clears_cost_next_to_nothing() -> None:
    """G14: a clear is paid for by what is held; the second one is free."""
    rank = Rank()
    names = list(range(1, 10_001))
    rank.send(stored(names, [t % 50_000 for t in range(160_000)]))
    rank.send({"type": "AllBlocksCleared"})
    start = time.perf_counter()
    for _ in range(10):
        delta = rank.send(*[{"type": "AllBlocksCleared"}] * 100)
        assert not delta.blocks
        assert not delta.mutations
    assert time.perf_counter() - start < 1.0
