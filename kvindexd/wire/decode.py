"""Decode a KV-event payload (msgpack) of any known generation; a bad event costs only itself."""

from __future__ import annotations

import sys
from array import array
from functools import lru_cache
from typing import Any, ClassVar

import msgspec

from kvindexd.wire.events import (
    AllBlocksCleared,
    Batch,
    BatchError,
    BlockRemoved,
    BlockStored,
    EngineHash,
    Event,
    Rejected,
)

_MASK64 = (1 << 64) - 1
_MAX_TAG = 64
_MAX_TS = 1e15
_TAGS = ("BlockStored", "BlockRemoved", "AllBlocksCleared")


class _Invalid(Exception):
    """Internal: an event that cannot be used; `reason` becomes the counter's label."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


class _StoredFields(msgspec.Struct):
    """The fields that have a position in the array form."""

    block_hashes: list[Any]
    parent_block_hash: Any = None
    token_ids: list[int | list[int]] | None = None
    block_size: int | None = None
    lora_id: int | str | None = None
    medium: str | None = None
    lora_name: Any = None
    extra_keys: list[Any] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: Any = None
    ownership: Any = None
    session_id: Any = None
    lookahead_token_ids: list[Any] | None = None


class _Stored(_StoredFields, tag="BlockStored"):
    cache_salt: str | None = None
    origin: Any = None


class _StoredArray(_StoredFields, array_like=True, tag="BlockStored"):
    cache_salt: ClassVar[str | None] = None
    origin: ClassVar[str | None] = None


class _RemovedFields(msgspec.Struct):
    block_hashes: list[Any]
    medium: str | None = None
    group_idx: int | None = None


class _Removed(_RemovedFields, tag="BlockRemoved"):
    remaining_copy_counts: list[int] | None = None


class _RemovedArray(_RemovedFields, array_like=True, tag="BlockRemoved"):
    remaining_copy_counts: ClassVar[list[int] | None] = None


class _Cleared(msgspec.Struct, tag="AllBlocksCleared"):
    pass


class _ClearedArray(msgspec.Struct, array_like=True, tag="AllBlocksCleared"):
    pass


STORED_FIELDS = _StoredFields.__struct_fields__
"""Fields of a stored event's array form, behind its tag."""
REMOVED_FIELDS = _RemovedFields.__struct_fields__

_AnyStored = _Stored | _StoredArray
_AnyRemoved = _Removed | _RemovedArray

_list = msgspec.msgpack.Decoder(list[msgspec.Raw])
_map = msgspec.msgpack.Decoder(dict[str, msgspec.Raw])
_events = msgspec.msgpack.Decoder(list[msgspec.Raw])
_any = msgspec.msgpack.Decoder(Any)
_map_event = msgspec.msgpack.Decoder(_Stored | _Removed | _Cleared)
_array_event = msgspec.msgpack.Decoder(_StoredArray | _RemovedArray | _ClearedArray)


class _FastBatch(msgspec.Struct, array_like=True):
    ts: float
    events: list[_Stored | _Removed | _Cleared]
    data_parallel_rank: int | None = None


# A batch in which all is well, in today's form, decodes in one pass over its bytes; anything
# else goes the careful way, event by event.
_fast = msgspec.msgpack.Decoder(_FastBatch)


def decode_batch(payload: bytes) -> Batch:
    """Decode one payload.

    Accepts `[ts, events, rank?, ...]` and `{"ts", "events", "data_parallel_rank"}`; each event as
    a tagged map or a tagged array, mixed freely. Events that cannot be used come back as
    `Rejected` in their place. Raises BatchError when the payload is no batch.
    """
    try:
        fast = _fast.decode(payload)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        pass
    else:
        if -_MAX_TS < fast.ts < _MAX_TS:
            return Batch(
                fast.ts, [_convert(e) for e in fast.events], _number(fast.data_parallel_rank)
            )
    ts_raw, events_raw, rank_raw = _split(payload)
    try:
        raws = _events.decode(events_raw)
    except (msgspec.MsgspecError, RecursionError) as e:
        raise BatchError("bad_batch", f"events: expected an array ({e})") from None
    return Batch(_ts(ts_raw), [decode_event(raw) for raw in raws], _rank(rank_raw))


def _split(payload: bytes) -> tuple[Any, Any, Any]:
    try:
        first = payload[0] if payload else 0xC0
        if 0x80 <= first <= 0x8F or first in (0xDE, 0xDF):
            fields = _map.decode(payload)
            if "events" not in fields:
                raise BatchError("bad_batch", "a map without 'events'")
            return fields.get("ts"), fields["events"], fields.get("data_parallel_rank")
        parts = _list.decode(payload)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as e:
        raise BatchError("bad_payload", f"not a msgpack batch ({e})") from None
    if len(parts) < 2:
        raise BatchError("bad_batch", f"{len(parts)} elements, expected [ts, events, rank?]")
    return parts[0], parts[1], parts[2] if len(parts) > 2 else None


def _ts(raw: Any) -> float:
    value = _scalar(raw)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise BatchError("bad_ts", f"ts: expected seconds, got {type(value).__name__}")
    if not -_MAX_TS < value < _MAX_TS:
        raise BatchError("bad_ts", "ts: expected finite seconds")
    return float(value)


def _rank(raw: Any) -> int | None:
    return _number(_scalar(raw))


def _number(value: Any) -> int | None:
    return value if isinstance(value, int) and 0 <= value < 1 << 31 else None


def _scalar(raw: Any) -> Any:
    if raw is None:
        return None
    try:
        return _any.decode(raw)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        return None


def decode_event(raw: msgspec.Raw) -> Event:
    """Decode one event of a batch; never raises, see `Rejected`."""
    first = memoryview(raw)[0] if len(memoryview(raw)) else 0xC0
    is_map = 0x80 <= first <= 0x8F or first in (0xDE, 0xDF)
    try:
        event = (_map_event if is_map else _array_event).decode(raw)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as e:
        return _explain(raw, e)
    return _convert(event)


def _convert(event: _AnyStored | _AnyRemoved | _Cleared | _ClearedArray) -> Event:
    try:
        if isinstance(event, _StoredFields):
            return _stored(event)
        if isinstance(event, _RemovedFields):
            return _removed(event)
        return AllBlocksCleared()
    except _Invalid as e:
        return _rejected(e.reason, str(e))


@lru_cache(maxsize=64)
def _rejected(reason: str, detail: str, tag: str = "") -> Rejected:
    """One object for all that were rejected alike: a payload may hold a million of them."""
    return Rejected(reason, detail, tag)


def _explain(raw: msgspec.Raw, error: Exception) -> Rejected:
    """The slow path: tell an unknown tag from a known event with wrong fields."""
    try:
        value = _any.decode(raw)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as e:
        return _rejected("malformed", f"event is not decodable: {e}")
    tag: Any = None
    if isinstance(value, dict):
        tag = value.get("type")
    elif isinstance(value, list) and value:
        tag = value[0]
    else:
        return _rejected("malformed", "event is neither a tagged map nor a tagged array")
    if not isinstance(tag, str):
        return _rejected("unknown_tag", "the event's type is not a string", type(tag).__name__)
    if tag not in _TAGS:
        return _rejected("unknown_tag", f"unknown event type {tag[:_MAX_TAG]!r}", tag[:_MAX_TAG])
    return _rejected("bad_field", f"{tag}: {error}", tag)


def _stored(e: _AnyStored) -> Event:
    size = e.block_size
    tokens, second = _tokens(e.token_ids)
    if tokens:
        if size is None or size <= 0:
            raise _Invalid("bad_block_size", f"block_size {size}: expected a positive integer")
        count = len(tokens) >> 2
        if count % size:
            raise _Invalid("misaligned", f"{count} tokens are no multiple of block_size {size}")
        if len(e.block_hashes) * size > count:
            raise _Invalid(
                "too_many_hashes",
                f"{len(e.block_hashes)} hashes for {count} tokens of block_size {size}",
            )
    hashes = _hashes(e.block_hashes)
    if e.extra_keys is not None and len(e.extra_keys) != len(hashes):
        raise _Invalid(
            "bad_extra_keys", f"{len(e.extra_keys)} extra_keys for {len(hashes)} block hashes"
        )
    name, salt = _adapter(e)
    lookahead = _lookahead(e, len(hashes), size or 0, tokens, second)
    return BlockStored(
        hashes=hashes,
        parent=None if e.parent_block_hash is None else _hash(e.parent_block_hash),
        tokens=tokens,
        block_size=size if size is not None and size > 0 else 0,
        lora_id=e.lora_id,
        lora_name=name,
        cache_salt=salt,
        extra_keys=_no_empty(e.extra_keys),
        medium=e.medium,
        group_idx=_group(e.group_idx),
        kind=e.kv_cache_spec_kind,
        window=_window(e.kv_cache_spec_sliding_window),
        lookahead=lookahead,
        pairs=bool(second),
        reused=isinstance(e.origin, str) and e.origin.upper() == "REUSED",
    )


def _removed(e: _AnyRemoved) -> Event:
    hashes = _hashes(e.block_hashes)
    remaining = e.remaining_copy_counts
    if remaining is not None and (len(remaining) != len(hashes) or min(remaining, default=0) < 0):
        raise _Invalid("bad_field", "remaining_copy_counts: expected one count >= 0 per hash")
    return BlockRemoved(
        hashes=hashes, medium=e.medium, group_idx=_group(e.group_idx), remaining=remaining
    )


def _hashes(values: list[Any]) -> list[EngineHash]:
    try:
        array("Q", values)  # the common case, checked in C: all are unsigned 64-bit already
        return values
    except (OverflowError, TypeError):
        return [_hash(v) for v in values]


def _hash(value: Any) -> EngineHash:
    if isinstance(value, int):
        if not -(1 << 63) <= value <= _MASK64:
            raise _Invalid("bad_hash", "block hash outside 64 bits")
        return value & _MASK64
    raw = value.encode() if isinstance(value, str) else value
    if not isinstance(raw, bytes):
        raise _Invalid("bad_hash", f"block hash: expected int or bytes, got {type(raw).__name__}")
    if not 0 < len(raw) <= 128:
        raise _Invalid("bad_hash", f"block hash of {len(raw)} bytes, expected 1 to 128")
    return raw


def _tokens(ids: list[int | list[int]] | None) -> tuple[bytes, bytes]:
    """Flat tokens, and the second elements where the engine sent pairs (else empty)."""
    if not ids:
        return b"", b""
    if isinstance(ids[0], list):
        if not all(isinstance(p, list) and len(p) == 2 for p in ids):
            raise _Invalid("bad_token_ids", "token pairs mixed with something else")
        return _pack([p[0] for p in ids]), _pack([p[1] for p in ids])  # type: ignore[index]  # checked above
    return _pack(ids), b""


def _pack(ids: list[Any]) -> bytes:
    try:
        packed = array("I", ids)
    except (OverflowError, TypeError) as e:
        raise _Invalid("bad_token_ids", f"token id outside 0..2**32-1 ({e})") from None
    if sys.byteorder != "little":
        packed.byteswap()
    return packed.tobytes()


def _adapter(e: _AnyStored) -> tuple[str | None, str | None]:
    """Adapter name and salt; some engines put a metadata map or a list in lora_name's place."""
    value, salt = e.lora_name, e.cache_salt
    if isinstance(value, list):
        value = next((v for v in value if isinstance(v, dict)), None)
    if isinstance(value, dict):
        salt = value.get("cache_salt") or salt
        value = value.get("lora_name")
    if value is not None and not isinstance(value, str):
        raise _Invalid("bad_field", f"lora_name: expected text, got {type(value).__name__}")
    if salt is not None and not isinstance(salt, str):
        raise _Invalid("bad_field", f"cache_salt: expected text, got {type(salt).__name__}")
    return value or None, salt or None


def _lookahead(
    e: _AnyStored, hashes: int, size: int, tokens: bytes, second: bytes
) -> list[bytes] | None:
    if second:
        # Pairs overlap by one token: a block's hash also covers its last pair's second token.
        return [second[4 * end - 4 : 4 * end] for end in range(size, len(tokens) // 4 + 1, size)]
    ahead = e.lookahead_token_ids
    if not ahead:
        return None
    if len(ahead) != hashes:
        raise _Invalid("bad_lookahead", f"{len(ahead)} lookahead lists for {hashes} hashes")
    packed = [_pack(t if isinstance(t, list) else [t]) for t in ahead]
    return packed if any(packed) else None


def _no_empty(extra: list[Any] | None) -> list[Any] | None:
    return extra if extra is not None and any(extra) else None


def _group(value: int | None) -> int | None:
    if value is not None and not 0 <= value < 1 << 15:
        raise _Invalid("bad_group_idx", f"group_idx {value}: expected 0..32767")
    return value


def _window(value: int | None) -> int | None:
    return value if value is not None and 0 < value < 1 << 31 else None
