"""Any bytes at all: decoded, or refused with a reason; and what was encoded comes back."""

from __future__ import annotations

import math
from typing import Any

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st
from wire_forms import FIELDS, as_array, as_map

from kvindexd.chain import pack_tokens
from kvindexd.wire import (
    BatchError,
    BlockStored,
    Rejected,
    decode_batch,
)

encode = msgspec.msgpack.encode


# -- any bytes ------------------------------------------------------------------------------------

scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=8)
    | st.binary(max_size=40)
)
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(max_size=6) | st.integers(0, 9), inner, max_size=4)
    ),
    max_leaves=12,
)
near_events = st.builds(
    lambda tag, fields, array: [tag, *fields.values()] if array else {"type": tag, **fields},
    st.sampled_from(["BlockStored", "BlockRemoved", "AllBlocksCleared", "Other"]),
    st.fixed_dictionaries({}, optional=dict.fromkeys((*FIELDS, "origin", "cache_salt"), values)),
    st.booleans(),
)


@settings(max_examples=400, deadline=None)
@given(st.binary(max_size=200))
def test_random_bytes_raise_nothing_but_batch_error(raw: bytes) -> None:
    decodes_or_says_why(raw)


@settings(max_examples=400, deadline=None)
@given(values | st.tuples(st.floats(), st.lists(near_events, max_size=4), values))
def test_random_values_raise_nothing_but_batch_error(value: Any) -> None:
    decodes_or_says_why(encode(value))


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 400), st.integers(0, 255), st.booleans())
def test_a_flipped_byte_of_a_good_payload(position: int, byte: int, cut: bool) -> None:
    raw = bytearray(encode([1.0, [as_map(), as_array(), ["BlockRemoved", [1]]], 0]))
    at = position % len(raw)
    if cut:
        del raw[at:]
    else:
        raw[at] = byte
    decodes_or_says_why(bytes(raw))


def decodes_or_says_why(raw: bytes) -> None:
    try:
        batch = decode_batch(raw)
    except BatchError:
        return
    assert math.isfinite(batch.ts)
    for event in batch.events:
        if isinstance(event, Rejected):
            assert event.reason
            assert len(event.tag) <= 64
        if isinstance(event, BlockStored):
            assert not event.tokens or event.block_size > 0
            assert len(event.hashes) * event.block_size <= event.num_tokens or not event.tokens
            assert len(event.tokens) % 4 == 0
            assert event.extra_keys is None or len(event.extra_keys) == len(event.hashes)
            assert event.lookahead is None or len(event.lookahead) >= len(event.hashes)


# -- round trip -----------------------------------------------------------------------------------

hashes = st.integers(0, 2**64 - 1) | st.binary(min_size=1, max_size=32)
names = st.none() | st.text(min_size=1, max_size=5)


@st.composite
def stores(draw: st.DrawFn) -> dict[str, Any]:
    size = draw(st.sampled_from([1, 2, 16]))
    blocks = draw(st.integers(1, 3))
    listed = draw(st.integers(0, blocks))
    token = st.integers(0, 2**32 - 1)
    return {
        "block_hashes": draw(st.lists(hashes, min_size=listed, max_size=listed)),
        "parent_block_hash": draw(st.none() | hashes),
        "token_ids": draw(st.lists(token, min_size=blocks * size, max_size=blocks * size)),
        "block_size": size,
        "lora_id": draw(st.none() | st.integers(0, 9)),
        "medium": draw(st.none() | st.sampled_from(["GPU", "CPU"])),
        "lora_name": draw(names),
        "extra_keys": draw(
            st.none() | st.lists(st.just([["i", 1]]), min_size=listed, max_size=listed)
        ),
        "group_idx": draw(st.none() | st.integers(0, 9)),
        "kv_cache_spec_kind": draw(st.none() | st.sampled_from(["mamba", "full_attention"])),
        "kv_cache_spec_sliding_window": draw(st.none() | st.integers(1, 500)),
    }


@settings(max_examples=200, deadline=None)
@given(stores(), st.booleans(), st.booleans(), st.none() | st.integers(0, 7), st.floats(0, 1e12))
def test_what_was_encoded_comes_back(
    event: dict[str, Any], array: bool, map_batch: bool, rank: int | None, ts: float
) -> None:
    body = as_array(tuple(event.values())) if array else {"type": "BlockStored", **event}
    raw = (
        encode({"ts": ts, "events": [body], "data_parallel_rank": rank})
        if map_batch
        else encode([ts, [body], rank])
    )
    batch = decode_batch(raw)
    assert (batch.ts, batch.rank) == (ts, rank)
    got = batch.events[0]
    assert isinstance(got, BlockStored)
    assert got.hashes == event["block_hashes"]
    assert got.parent == event["parent_block_hash"]
    assert got.tokens == pack_tokens(event["token_ids"])
    assert got.block_size == event["block_size"]
    assert got.lora_id == event["lora_id"]
    assert got.medium == event["medium"]
    assert got.lora_name == event["lora_name"]
    assert got.extra_keys == (event["extra_keys"] or None)
    assert got.group_idx == event["group_idx"]
    assert got.kind == event["kv_cache_spec_kind"]
    assert got.window == event["kv_cache_spec_sliding_window"]
