"""Masked captures: nothing of a prompt is left, and every answer is the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from captures import convert
from daemon import capture_folder
from hypothesis import given, settings
from hypothesis import strategies as st

from kvindexd.capturing.checking import check
from kvindexd.capturing.masking import Mask
from kvindexd.capturing.reader import open_capture
from kvindexd.capturing.records import (
    MessageRecord,
    encode,
)
from kvindexd.chain import pack_tokens
from kvindexd.testing import encode_batch
from kvindexd.wire import (
    Batch,
    BatchError,
    BlockRemoved,
    BlockStored,
    Rejected,
    decode_batch,
)

MASK = Mask(b"k" * 32)


MASK = Mask(b"k" * 32)


def test_masked_tokens_are_a_permutation_of_their_own_per_key() -> None:
    ids = np.concatenate([np.arange(200_000, dtype=np.uint32), np.array([2**32 - 1], np.uint32)])
    one, other = Mask().tokens(ids), Mask().tokens(ids)
    assert len(np.unique(one)) == len(ids)
    assert (one == MASK.tokens(ids)).mean() < 0.001
    assert (one == other).mean() < 0.001
    # Spread over all 32-bit numbers: neighbours tell nothing of each other.
    assert abs(float(one.astype(float).mean()) / 2**32 - 0.5) < 0.01


def masked_batch(payload: bytes) -> Batch:
    return decode_batch(MASK.payload(payload))


STORE = {
    "type": "BlockStored",
    "block_hashes": [5, -7],
    "parent_block_hash": b"\x01" * 32,
    "token_ids": list(range(32)),
    "block_size": 16,
    "lora_id": 3,
    "medium": "GPU",
    "lora_name": "secret-adapter",
    "extra_keys": [["secret-adapter", "secret-salt"], [["secret-image", -4]]],
    "group_idx": 2,
    "kv_cache_spec_kind": "full_attention",
    "kv_cache_spec_sliding_window": 128,
    "session_id": "secret-session",
    "lookahead_token_ids": [[7], [8]],
    "cache_salt": "secret-salt",
}
FIELDS = [
    "block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium",
    "lora_name", "extra_keys", "group_idx", "kv_cache_spec_kind", "kv_cache_spec_sliding_window",
    "locality", "ownership", "session_id", "lookahead_token_ids",
]  # fmt: skip


def as_array(event: dict[str, Any]) -> list[Any]:
    return [event["type"], *(event.get(name) for name in FIELDS)]


@pytest.mark.parametrize("form", ["map", "array", "outer map"])
def test_all_that_tells_of_a_prompt_is_masked_and_the_rest_is_kept(form: str) -> None:
    event: Any = STORE if form != "array" else as_array(STORE)
    payload = msgspec.msgpack.encode([1.5, [event], 0, {"later": "secret-field"}])
    if form == "outer map":
        payload = msgspec.msgpack.encode({"ts": 1.5, "events": [event], "more": "secret-field"})
    masked = MASK.payload(payload)
    assert b"secret" not in masked
    before, after = decode_batch(payload).events[0], decode_batch(masked).events[0]
    assert isinstance(before, BlockStored)
    assert isinstance(after, BlockStored)
    for name in ("block_size", "lora_id", "medium", "group_idx", "kind", "window"):
        assert getattr(after, name) == getattr(before, name)
    mask = MASK
    assert after.tokens == mask.packed(before.tokens) != before.tokens
    assert after.lookahead == [mask.packed(t) for t in before.lookahead or ()]
    assert after.lora_name == mask.text("secret-adapter")
    salt = mask.text("secret-salt")
    assert after.extra_keys == [[after.lora_name, salt], [[mask.text("secret-image"), -4]]]
    if form != "array":
        assert after.cache_salt == salt
    assert set(after.hashes).isdisjoint(before.hashes)
    assert isinstance(after.parent, bytes)
    assert len(after.parent) == 32
    assert after.parent != before.parent


def test_a_hash_is_the_same_wherever_it_stands_and_signed_ones_stay_signed() -> None:
    events = [
        STORE,
        STORE | {"parent_block_hash": -7, "block_hashes": [9, 10]},
        {"type": "BlockRemoved", "block_hashes": [2**64 - 7, 5], "medium": None},
    ]
    payload = MASK.payload(encode_batch(1.0, events))
    raw = msgspec.msgpack.decode(payload)[1]
    assert raw[0]["block_hashes"][1] == raw[1]["parent_block_hash"] < 0
    first, second, removed = decode_batch(payload).events
    assert isinstance(first, BlockStored)
    assert isinstance(second, BlockStored)
    assert first.hashes[1] == second.parent
    assert removed.hashes == first.hashes[::-1]  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "tokens",
    [
        [[1, 2], [2, 3]] * 8,
        [-1] * 16,
        [2**33] * 16,
        ["a"] * 16,
        pack_tokens(list(range(16))),
    ],
    ids=["pairs", "negative", "too large", "text", "packed"],
)
def test_every_form_of_tokens_is_masked_and_as_usable_as_before(tokens: Any) -> None:
    event = STORE | {"token_ids": tokens, "block_hashes": [1], "extra_keys": [None]}
    event["lookahead_token_ids"] = None
    payload = encode_batch(1.0, [event])
    before, after = decode_batch(payload).events[0], masked_batch(payload).events[0]
    assert type(before) is type(after)
    if isinstance(before, Rejected):
        assert isinstance(after, Rejected)
        assert before.reason == after.reason
    if isinstance(before, BlockStored) and isinstance(after, BlockStored):
        assert after.tokens == MASK.packed(before.tokens)
        assert after.lookahead == [MASK.packed(t) for t in before.lookahead or ()]
    masked = msgspec.msgpack.decode(MASK.payload(payload))[1][0]["token_ids"]
    if isinstance(tokens, bytes):
        assert masked == MASK.packed(tokens)


def test_what_is_not_understood_is_masked_whole() -> None:
    events = [{"type": "NewStored", "ids": [1, 2, "secret"], "at": 5.5, "raw": b"secret"}, 7]
    payload = msgspec.msgpack.encode([1.0, events, 0])
    before, after = decode_batch(payload).events, masked_batch(payload).events
    assert after == before  # an unknown tag, and no event at all
    masked = msgspec.msgpack.decode(MASK.payload(payload))[1]
    assert b"secret" not in MASK.payload(payload)
    assert masked[0]["ids"][:2] == MASK.tokens(np.array([1, 2], np.uint32)).tolist()
    misplaced: list[Any] = [
        ["secret ts", [], "secret rank", "secret"],
        {"ts": ["secret"], "events": "secret", "data_parallel_rank": {"x": "secret"}},
        [1.0, [STORE | {"medium": "secret " * 20}, ["secret " * 20, 1]], 0],
    ]
    for batch in misplaced:
        assert b"secret" not in MASK.payload(msgspec.msgpack.encode(batch))
    garbage = b"\x93secret prompt"
    assert MASK.payload(garbage) == b"\xc1" * len(garbage)
    message = MASK.record(MessageRecord(src="w0", parts=[b"t", b"secret payload"]))
    assert b"secret" not in encode(message)


@given(st.binary(max_size=60))
@settings(max_examples=100, deadline=None)
def test_masking_takes_any_bytes(payload: bytes) -> None:
    try:
        decode_batch(payload)
    except BatchError:
        with pytest.raises(BatchError):
            decode_batch(MASK.payload(payload))
    else:
        decode_batch(MASK.payload(payload))


ODD = [
    None, True, 0, -1, 2**32, 2**64 - 1, -(2**63), 1.5, "", "x", "é" * 30, b"", b"ab", b"x" * 200,
    [], [1], [[1, 2]], [[1], 2], ["x", 4], {"lora_name": "a", "cache_salt": "s"}, {1: 2},
]  # fmt: skip


@given(st.dictionaries(st.sampled_from([*FIELDS, "cache_salt", "origin", "more"]),
                       st.sampled_from(ODD), max_size=3), st.booleans(), st.booleans())  # fmt: skip
@settings(max_examples=150, deadline=None)
def test_a_masked_event_is_judged_as_the_original(
    odd: dict[str, Any], array: bool, removed: bool
) -> None:
    event = STORE | odd | ({"type": "BlockRemoved"} if removed else {})
    if array and removed:
        sent: Any = ["BlockRemoved", event["block_hashes"], event["medium"], event["group_idx"]]
    else:
        sent = as_array(event) if array else event
    payload = msgspec.msgpack.encode([1.0, [sent, sent], 0])
    before, after = decode_batch(payload), decode_batch(MASK.payload(payload))
    assert [seen(e) for e in after.events] == [seen(e) for e in before.events]


def seen(event: Any) -> Any:
    """What masking must leave as it is."""
    if isinstance(event, Rejected):
        return event.reason, event.tag
    if isinstance(event, BlockRemoved):
        return len(event.hashes), event.medium, event.group_idx, event.remaining
    assert isinstance(event, BlockStored)
    return (
        [len(h) if isinstance(h, bytes) else 0 for h in event.hashes],
        event.parent is None, event.num_tokens, event.block_size, event.medium, event.group_idx,
        event.kind, event.window, event.pairs, event.reused, event.lora_name is None,
        event.cache_salt is None, event.extra_keys is None,
        [len(t) for t in event.lookahead or ()],
    )  # fmt: skip


@pytest.mark.parametrize(
    "name",
    ["a_full_attention", "c_kimi_mini_default", "f_lora_salt_mm", "o_eagle_lookahead",
     "s_eagle_ps16", "j_native_offload_selfdesc", "s_ns_default", "g_sha256_bytes"],
)  # fmt: skip
def test_a_masked_capture_answers_masked_prompts_alike(name: str, tmp_path: Path) -> None:
    plain = check(open_capture(capture_folder(name)))
    masked = check(open_capture(convert(name, tmp_path / "x.gz", MASK)))
    assert masked.masked
    assert masked.exact == plain.exact
    assert masked.attention_only == plain.attention_only
    assert [(r.events, r.counters, r.blocks, r.groups) for r in masked.ranks] == [
        (r.events, r.counters, r.blocks, r.groups) for r in plain.ranks
    ]


def test_what_only_an_engines_hash_names_is_missing_from_a_masked_capture(tmp_path: Path) -> None:
    masked = check(open_capture(convert("i_kimi_partial_hash", tmp_path / "x.gz", MASK)))
    assert masked.exact.over == 0
    assert masked.exact.under > 61
