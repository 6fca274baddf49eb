"""Batches byte for byte as engines send them, and recorded frames read back."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from kvindexd.capturing.lines import CapturedFrame, load_capture

__all__ = ["END_SEQ", "CapturedFrame", "Event", "encode_batch", "load_capture"]

Event = Mapping[str, Any]
"""One event as a map: `type` first, then the engine's own field names; hashes as int or bytes."""

END_SEQ = b"\xff" * 8


class BlockStored(msgspec.Struct, tag=True, omit_defaults=True):
    """vLLM's own fields in vLLM's order: what is always sent first, the rest left out when None."""

    block_hashes: list[int | bytes]
    parent_block_hash: int | bytes | None
    token_ids: list[Any]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[Any] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None
    ownership: str | None = None
    session_id: str | None = None
    lookahead_token_ids: list[Any] | None = None


class BlockRemoved(msgspec.Struct, tag=True, omit_defaults=True):
    """vLLM's removal."""

    block_hashes: list[int | bytes]
    medium: str | None
    group_idx: int | None = None
    locality: str | None = None
    ownership: str | None = None


class AllBlocksCleared(msgspec.Struct, tag=True, omit_defaults=True):
    """vLLM's reset: the tag alone."""


_STRUCTS: dict[str, type[msgspec.Struct]] = {
    "BlockStored": BlockStored,
    "BlockRemoved": BlockRemoved,
    "AllBlocksCleared": AllBlocksCleared,
}


def encode_batch(ts: float, events: Iterable[Event], rank: int | None = 0) -> bytes:
    """The payload of one batch, `[ts, events, rank]`.

    Events with vLLM's fields come out in vLLM's bytes; any other map is encoded as it stands, so
    that a test can send what no engine has sent yet.
    """
    return msgspec.msgpack.encode([ts, [_as_sent(event) for event in events], rank])


def _as_sent(event: Event) -> Any:
    struct = _STRUCTS.get(str(event.get("type")))
    if struct is None:
        return event
    known = struct.__struct_fields__
    fields = [name for name in event if name != "type"]
    if any(name not in known for name in fields):
        return event
    if "lora_name" in known and "lora_name" not in event:  # not vLLM's shape
        return event
    return struct(**{name: event[name] for name in fields})
