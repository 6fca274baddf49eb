"""One BlockStored in the forms that engines write it in."""

from __future__ import annotations

from typing import Any

T16 = list(range(100, 116))
T32 = list(range(100, 132))

FIELDS = (
    "block_hashes",
    "parent_block_hash",
    "token_ids",
    "block_size",
    "lora_id",
    "medium",
    "lora_name",
    "extra_keys",
    "group_idx",
    "kv_cache_spec_kind",
    "kv_cache_spec_sliding_window",
    "locality",
    "ownership",
    "session_id",
    "lookahead_token_ids",
)
STORED: tuple[Any, ...] = (
    [11, 12],
    7,
    T32,
    16,
    3,
    "GPU",
    "x",
    [["x"], None],
    2,
    "sliding_window",
    128,
    "LOCAL",
    None,
    "s",
    None,
)


def as_map(values: tuple[Any, ...] = STORED, tag: str = "BlockStored") -> dict[str, Any]:
    return {"type": tag} | {k: v for k, v in zip(FIELDS, values, strict=False) if v is not None}


def as_array(values: tuple[Any, ...] = STORED, tag: str = "BlockStored") -> list[Any]:
    return [tag, *values]
