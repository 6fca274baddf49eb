"""Payload bytes to events: every generation by shape, bad events alone, hostile payloads."""

from __future__ import annotations

import itertools
import math
import struct
from typing import Any

import msgspec
import pytest
from wire_forms import STORED, T16, T32, as_array, as_map

from kvindexd.chain import pack_tokens
from kvindexd.wire import (
    AllBlocksCleared,
    BatchError,
    BlockRemoved,
    BlockStored,
    Rejected,
    decode_batch,
)

encode = msgspec.msgpack.encode


def one(event: Any) -> Any:
    """The only event of a batch."""
    batch = decode_batch(encode([1.5, [event], 0]))
    assert len(batch.events) == 1
    return batch.events[0]


def reason(event: Any) -> str:
    got = one(event)
    assert isinstance(got, Rejected), got
    return got.reason


# -- generations ----------------------------------------------------------------------------------


def expected() -> BlockStored:
    return BlockStored(
        hashes=[11, 12],
        parent=7,
        tokens=pack_tokens(T32),
        block_size=16,
        lora_id=3,
        lora_name="x",
        extra_keys=[["x"], None],
        medium="GPU",
        group_idx=2,
        kind="sliding_window",
        window=128,
    )


def test_map_and_array_events_decode_to_the_same() -> None:
    assert one(as_map()) == expected()
    assert one(as_array()) == expected()


def test_a_batch_may_be_a_map() -> None:
    raw = encode({"ts": 2, "events": [as_map(), as_array()], "data_parallel_rank": 3})
    batch = decode_batch(raw)
    assert (batch.ts, batch.rank, batch.events) == (2.0, 3, [expected(), expected()])


def test_generations_mix_in_one_batch() -> None:
    events = [as_array(), as_map(), ["AllBlocksCleared"], {"type": "AllBlocksCleared"}]
    batch = decode_batch(encode([1.0, events]))
    assert batch.events == [expected(), expected(), AllBlocksCleared(), AllBlocksCleared()]


@pytest.mark.parametrize("width", range(1, len(STORED) + 1))
def test_array_events_may_end_early(width: int) -> None:
    event = one(as_array(STORED[:width]))
    if width < 4:  # tokens without a block size
        assert (width < 3) == isinstance(event, BlockStored)
        return
    assert isinstance(event, BlockStored)
    assert event.lora_id == (3 if width >= 5 else None)
    assert event.medium == ("GPU" if width >= 6 else None)
    assert event.group_idx == (2 if width >= 9 else None)
    assert event.kind == ("sliding_window" if width >= 10 else None)


def test_longer_arrays_and_unknown_keys_are_ignored() -> None:
    assert one([*as_array(), "more", {"and": 1}]) == expected()
    assert one(as_map() | {"event_version": 2, "nested": {"a": [1]}}) == expected()


def test_non_minimal_map_headers_are_read() -> None:
    body = encode(as_map())
    count = body[0] & 0x0F if body[0] < 0xDE else struct.unpack(">H", body[1:3])[0]
    start = 1 if body[0] < 0xDE else 3
    wide = b"\xdf" + struct.pack(">I", count) + body[start:]
    raw = b"\x93" + encode(1.0) + b"\x91" + wide + b"\x00"
    assert decode_batch(raw).events == [expected()]


@pytest.mark.parametrize(
    ("tail", "rank"),
    [([], None), ([None], None), ([3], 3), ([0, "future"], 0), ([-1], None), (["x"], None)],
)
def test_batches_of_two_three_and_more_elements(tail: list[Any], rank: int | None) -> None:
    batch = decode_batch(encode([1.0, [as_map()], *tail]))
    assert batch.rank == rank
    assert batch.events == [expected()]


def test_removals_in_every_form() -> None:
    want = BlockRemoved(hashes=[5], medium=None, group_idx=None)
    assert one(["BlockRemoved", [5]]) == want
    assert one({"type": "BlockRemoved", "block_hashes": [5]}) == want
    assert one(["BlockRemoved", [5], "CPU", 3]) == BlockRemoved(
        hashes=[5], medium="CPU", group_idx=3
    )
    counted = {"type": "BlockRemoved", "block_hashes": [5, 6], "remaining_copy_counts": [1, 0]}
    assert one(counted).remaining == [1, 0]
    assert reason(counted | {"remaining_copy_counts": [1]}) == "bad_field"
    assert reason(counted | {"remaining_copy_counts": [1, -1]}) == "bad_field"


def test_clears_in_every_form() -> None:
    for event in (["AllBlocksCleared"], ["AllBlocksCleared", 1], {"type": "AllBlocksCleared"}):
        assert one(event) == AllBlocksCleared()


# -- hashes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sent", "want"),
    [
        (-5, 2**64 - 5),
        (2**64 - 5, 2**64 - 5),
        (-(2**63), 2**63),
        (0, 0),
        (b"\x01" * 32, b"\x01" * 32),
        (b"\x02" * 16, b"\x02" * 16),
        ("abc", b"abc"),
    ],
)
def test_hashes_have_one_form_per_value(sent: Any, want: Any) -> None:
    event = one(as_map(([sent], sent, T16, 16)))
    assert (event.hashes, event.parent) == ([want], want)
    assert one({"type": "BlockRemoved", "block_hashes": [sent]}).hashes == [want]


def test_mixed_hash_forms_in_one_event() -> None:
    assert one(as_map(([-1, b"\0" * 32], None, T32, 16))).hashes == [2**64 - 1, b"\0" * 32]


@pytest.mark.parametrize("bad", [1.5, None, [1], {}, b"", b"x" * 129])
def test_hashes_of_other_types_are_rejected(bad: Any) -> None:
    assert reason(as_map(([bad], None, T16, 16))) == "bad_hash"
    if bad is not None:
        assert reason(as_map(([1], bad, T16, 16))) == "bad_hash"


# -- tokens, sizes, extras ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"block_size": 0}, "bad_block_size"),
        ({"block_size": -16}, "bad_block_size"),
        ({"block_size": None}, "bad_block_size"),
        ({"token_ids": T32[:-1]}, "misaligned"),
        ({"token_ids": T16}, "too_many_hashes"),
        ({"token_ids": [2**32, *T32[1:]]}, "bad_token_ids"),
        ({"token_ids": [-1, *T32[1:]]}, "bad_token_ids"),
        ({"token_ids": [[1, 2], *T32[1:]]}, "bad_token_ids"),
        ({"token_ids": [[1, 2, 3]] * 32}, "bad_token_ids"),
        ({"token_ids": "text"}, "bad_field"),
        ({"extra_keys": [None]}, "bad_extra_keys"),
        ({"extra_keys": [None, None, None]}, "bad_extra_keys"),
        ({"group_idx": -1}, "bad_group_idx"),
        ({"group_idx": 1 << 20}, "bad_group_idx"),
        ({"group_idx": "0"}, "bad_field"),
        ({"block_hashes": None}, "bad_field"),
        ({"block_hashes": 5}, "bad_field"),
        ({"medium": 3}, "bad_field"),
        ({"lora_name": 3}, "bad_field"),
        ({"cache_salt": 3}, "bad_field"),
        ({"lookahead_token_ids": [[1]]}, "bad_lookahead"),
        ({"lookahead_token_ids": [[1], ["a"]]}, "bad_token_ids"),
    ],
)
def test_a_bad_event_is_rejected_with_its_reason(changes: dict[str, Any], why: str) -> None:
    assert reason(as_map() | changes) == why


def test_block_size_zero_is_fine_without_tokens() -> None:
    event = one(as_map(([1], None, [], 0, None, "CPU")))
    assert isinstance(event, BlockStored)
    assert (event.tokens, event.block_size, event.hashes) == (b"", 0, [1])


def test_four_hashes_for_three_tokens() -> None:
    assert reason(as_map(([1, 2, 3, 4], None, [1, 2, 3], 256))) in ("misaligned", "too_many_hashes")


def test_fewer_hashes_than_blocks_are_kept() -> None:
    event = one(as_map(([9], None, T32, 16)))
    assert (event.hashes, event.num_tokens) == ([9], 32)
    assert one(as_map(([], None, T32, 16))).hashes == []


def test_pairs_become_flat_tokens_and_a_lookahead() -> None:
    tokens = list(range(1, 34))
    pairs = [[a, b] for a, b in itertools.pairwise(tokens)]
    event = one(as_map(([1, 2], None, pairs, 16)))
    assert event.pairs
    assert event.tokens == pack_tokens(tokens[:-1])
    assert event.lookahead == [pack_tokens([17]), pack_tokens([33])]


def test_lookahead_tokens_are_packed_per_hash() -> None:
    event = one(as_map() | {"lookahead_token_ids": [[5], [6]], "kv_cache_spec_kind": "mamba"})
    assert event.lookahead == [pack_tokens([5]), pack_tokens([6])]
    assert not event.pairs
    assert one(as_map() | {"lookahead_token_ids": [[], []]}).lookahead is None


@pytest.mark.parametrize(
    ("field", "name", "salt"),
    [
        ({"cache_salt": "s", "lora_name": "n"}, "n", "s"),
        ([{"lora_name": "n"}, "junk"], "n", None),
        ({}, None, None),
        ([], None, None),
        ("", None, None),
    ],
)
def test_a_metadata_map_or_list_in_the_adapters_place(
    field: Any, name: str | None, salt: str | None
) -> None:
    event = one(as_array(([1], None, T16, 16, None, "GPU", field)))
    assert (event.lora_name, event.cache_salt) == (name, salt)


def test_extra_keys_of_nothing_are_none() -> None:
    assert one(as_map() | {"extra_keys": [None, []]}).extra_keys is None


def test_reused_origin_is_recognised() -> None:
    assert one(as_map() | {"origin": "REUSED"}).reused
    assert not one(as_map() | {"origin": "COMPUTED"}).reused


# -- a bad event costs itself ---------------------------------------------------------------------


def test_unknown_tags_cost_only_themselves() -> None:
    events = [
        as_map(),
        {"type": "TierBlocksCleared", "medium": "GPU"},
        {"type": "BlockTransferred", "x": [1]},
        {"type": 5},
        ["Snapshot", [1, 2]],
        [5, 6],
        {},
        [],
        7,
        None,
        "BlockStored",
        as_array(),
    ]
    got = decode_batch(encode([1.0, events, 0])).events
    assert got[0] == got[-1] == expected()
    rejected = [e for e in got[1:-1] if isinstance(e, Rejected)]
    assert len(rejected) == 10
    assert [e.tag for e in rejected if e.reason == "unknown_tag"][:2] == [
        "TierBlocksCleared",
        "BlockTransferred",
    ]
    assert rejected[3].tag == "Snapshot"


def test_tags_are_cut_to_a_bound() -> None:
    assert len(one({"type": "x" * 5000}).tag) <= 64


def test_a_bad_event_does_not_hide_its_neighbours() -> None:
    events = [as_map() | {"block_size": 0}, as_map(), as_map() | {"token_ids": [1.5] * 32}]
    got = decode_batch(encode([1.0, events, 0])).events
    assert isinstance(got[0], Rejected)
    assert got[1] == expected()
    assert isinstance(got[2], Rejected)


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"\xc1",
        encode(None),
        encode(5),
        encode("x"),
        encode([]),
        encode([1.0]),
        encode([1.0, 5]),
        encode([1.0, None]),
        encode(["x", []]),
        encode([None, []]),
        encode([True, []]),
        encode([math.inf, []]),
        encode([math.nan, []]),
        encode([2**63, []]),
        encode({"events": []}),
        encode({"ts": 1.0}),
        encode({1: 2}),
        encode([1.0, [], 0]) + b"x",
        encode([1.0, [as_map()], 0])[:-5],
        b"\x91" * 5000,
        b"\xdd\xff\xff\xff\xff",
        b"\xdf\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff",
    ],
)
def test_what_is_no_batch_raises_batch_error(raw: bytes) -> None:
    with pytest.raises(BatchError) as error:
        decode_batch(raw)
    assert error.value.reason
    assert ":" in str(error.value)


def test_hostile_nesting_is_refused() -> None:
    deep = b"\x91" * 100_000 + b"\x00"
    with pytest.raises(BatchError, match="bad_payload"):
        decode_batch(b"\x92" + encode(1.0) + b"\x92" + deep + encode(as_map()))


def test_map_with_binary_keys_and_extension_types() -> None:
    weird = [{b"type": "BlockStored"}, msgspec.msgpack.Ext(5, b"x"), {"type": "BlockStored"}]
    got = decode_batch(encode([1.0, [*weird, as_map()], 0])).events
    assert all(isinstance(e, Rejected) for e in got[:3])
    assert got[3] == expected()
