"""Replacing token ids, names and hashes in batches, so that only what is equal stays equal.

A token id becomes another one by a permutation of all 32-bit numbers under a random key; a block
hash, an adapter's name, a salt or an item's identifier becomes a keyed digest of the same type and
length. What kvindexd goes by (equality, lengths, parents, order, sizes) stays. What masking does
not hide is in docs/capture-format.md.

Hashes are masked too: where an engine's hash function is public, tokens of a short block can be
found by trying them all against its hash.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from kvindexd.capturing.records import FrameRecord, MessageRecord, PromptRecord, Record
from kvindexd.wire.decode import REMOVED_FIELDS, STORED_FIELDS

_ROUNDS = 10
_HALF = np.uint32(16)
_LOW = np.uint32(0xFFFF)
_MAX_TOKEN = (1 << 32) - 1
_WORD = 64
_OPAQUE = b"\xc1"
"""A byte that msgpack never uses: a payload of these decodes as little as the one it replaces."""

Tokens = npt.NDArray[np.uint32]
_Fields = dict[str, Any]

_raw_list = msgspec.msgpack.Decoder(list[msgspec.Raw])
_raw_map = msgspec.msgpack.Decoder(dict[str, msgspec.Raw])
_any = msgspec.msgpack.Decoder()
_encode = msgspec.msgpack.encode
_FAILURES = (msgspec.MsgspecError, RecursionError, UnicodeDecodeError)

_PLAIN = {
    "block_size", "medium", "group_idx", "kv_cache_spec_kind", "kv_cache_spec_sliding_window",
    "locality", "ownership", "origin",
}  # fmt: skip
"""Fields without anything of a prompt, kept byte for byte. `lora_id` is only a running number, and
kept where it is one."""


class Mask:
    """One key's replacement of everything that tells of prompts. Equal in, equal out."""

    def __init__(self, key: bytes | None = None) -> None:
        """`key`: 32 bytes; by default random, and gone with this object."""
        self._key = secrets.token_bytes(32) if key is None else key
        # Feistel rounds as tables: a permutation whatever the tables hold, at numpy's speed.
        self._tables = [
            np.frombuffer(
                hashlib.shake_256(self._key + bytes([i])).digest(2 << 16), dtype="<u2"
            ).astype(np.uint32)
            for i in range(_ROUNDS)
        ]
        self._fields: Mapping[str, Callable[[Any], Any]] = {
            "block_hashes": self._hashes,
            "parent_block_hash": self._hash,
            "token_ids": self._token_ids,
            "lookahead_token_ids": self._token_ids,
            "lora_id": lambda v: v if isinstance(v, int) else self._blind(v),
            "extra_keys": self._extra_keys,
        }

    # -- records ------------------------------------------------------------------------------

    def record(self, record: Record) -> Record:
        """The record with its payload or its prompt masked; others as they are."""
        if isinstance(record, FrameRecord):
            return msgspec.structs.replace(record, payload=self.payload(record.payload))
        if isinstance(record, MessageRecord):
            # Whatever it is, it can hold a payload; its shape is what matters.
            return msgspec.structs.replace(
                record, parts=[p if len(p) <= 8 else _OPAQUE * len(p) for p in record.parts]
            )
        if isinstance(record, PromptRecord):
            return self.prompt(record)
        return record

    def prompt(self, prompt: PromptRecord) -> PromptRecord:
        """The prompt that finds in a masked stream what `prompt` finds in the original."""
        return msgspec.structs.replace(
            prompt,
            tokens=self.packed(prompt.tokens),
            lora_name=self.text(prompt.lora_name),
            cache_salt=self.text(prompt.cache_salt),
            items=[(self.text(name), at, n) for name, at, n in prompt.items],
        )

    def packed(self, tokens: bytes) -> bytes:
        """Token ids as packed little-endian uint32, and back in that form."""
        return self.tokens(np.frombuffer(tokens, "<u4")).astype("<u4").tobytes()

    def tokens(self, ids: Tokens) -> Tokens:
        """Token ids, each replaced by the one it stands for."""
        left, right = np.right_shift(ids, _HALF), np.bitwise_and(ids, _LOW)
        for table in self._tables:
            left, right = right, np.bitwise_xor(left, table[right])
        return np.bitwise_or(np.left_shift(left, _HALF), right)

    def text(self, value: str) -> str:
        """A name; "" stays empty."""
        return "m-" + self._digest(b"s" + value.encode(), 8).hex() if value else ""

    # -- batches ------------------------------------------------------------------------------

    def payload(self, payload: bytes) -> bytes:
        """A batch with its events masked and all else byte for byte.

        A payload that is no batch is replaced by as many bytes that are none either.
        """
        try:
            if payload and _is_map(payload[0]):
                fields = _raw_map.decode(payload)
                return _encode({name: self._of_batch(name, raw) for name, raw in fields.items()})
            parts = _raw_list.decode(payload)
            names = ("ts", "events", "data_parallel_rank", *[""] * len(parts))
            return _encode([self._of_batch(*one) for one in zip(names, parts, strict=False)])
        except _FAILURES:
            return _OPAQUE * len(payload)

    def _of_batch(self, name: str, raw: msgspec.Raw) -> Any:
        if name == "events":
            return self._events(raw)
        if name in ("ts", "data_parallel_rank") and isinstance(_any.decode(raw), int | float):
            return raw
        return self._blinded(raw)

    def _events(self, raw: msgspec.Raw) -> Any:
        try:
            events = _raw_list.decode(raw)
        except _FAILURES:
            return self._blinded(raw)
        return msgspec.Raw(_encode([self._event(event) for event in events]))

    def _event(self, raw: msgspec.Raw) -> Any:
        first = memoryview(raw)[0]
        try:
            if _is_map(first):
                fields: _Fields = dict(_raw_map.decode(raw))
                tag = _any.decode(fields.get("type", b"\xc0"))
                return msgspec.Raw(_encode(self._masked(tag, fields)))
            parts = _raw_list.decode(raw)
            tag = _any.decode(parts[0]) if parts else None
            names = {"BlockStored": STORED_FIELDS, "BlockRemoved": REMOVED_FIELDS}.get(str(tag), ())
            known = dict(zip(names, parts[1:], strict=False))
            masked = self._masked(tag, known)
            more = [self._blinded(part) for part in parts[1 + len(names) :]]
            head = [self._short(part) for part in parts[:1]]
            return msgspec.Raw(_encode([*head, *(masked[n] for n in known), *more]))
        except _FAILURES:
            return self._blinded(raw)

    def _masked(self, tag: Any, fields: _Fields) -> _Fields:
        known = tag in ("BlockStored", "BlockRemoved")
        return {name: self._field(name, raw, known) for name, raw in fields.items()}

    def _field(self, name: str, raw: Any, known: bool) -> Any:
        if name == "remaining_copy_counts" and known:
            return raw
        if name == "type" or (known and name in _PLAIN):
            return self._short(raw)
        mask = self._fields.get(name) if known else None
        return self._blinded(raw) if mask is None else mask(_any.decode(raw))

    def _short(self, raw: Any) -> Any:
        """As it is, unless it is longer than any word or number that belongs there."""
        return raw if memoryview(raw).nbytes <= _WORD else self._blinded(raw)

    # -- values -------------------------------------------------------------------------------

    def _token_ids(self, value: Any) -> Any:
        """Ids as a list, pairs, lists of lists, or packed bytes."""
        if isinstance(value, bytes) and len(value) % 4 == 0:
            return self.packed(value)
        if not isinstance(value, list):
            return self._blind(value)
        if set(map(type, value)) == {int} and 0 <= min(value) <= max(value) <= _MAX_TOKEN:
            return self.tokens(np.array(value, np.uint32)).tolist()
        return [self._token_ids(v) if isinstance(v, list) else self._blind(v) for v in value]

    def _hashes(self, value: Any) -> Any:
        return [self._hash(v) for v in value] if isinstance(value, list) else self._blind(value)

    def _hash(self, value: Any) -> Any:
        """A hash of the same type and length; a signed one keeps its sign."""
        if isinstance(value, int) and not isinstance(value, bool):
            if not -(1 << 63) <= value < 1 << 64:
                return value
            top = 1 << 63
            folded = value & (2 * top - 1)
            low = int.from_bytes(self._digest(b"h" + folded.to_bytes(8, "big"), 8), "big") % top
            masked = low | (folded & top)
            return masked - 2 * top if value < 0 else masked
        if isinstance(value, bytes):
            return self._digest(b"h" + value, len(value)) if value else value
        if isinstance(value, str):
            raw = value.encode()
            return self._digest(b"h" + raw, len(raw)).hex()[: len(raw)] if raw else value
        return self._blind(value)

    def _extra_keys(self, value: Any) -> Any:
        """As any other value, but for an item's offset, which is a place and no token."""
        if isinstance(value, list):
            if len(value) == 2 and isinstance(value[0], str) and isinstance(value[1], int):
                return [self.text(value[0]), value[1]]
            return [self._extra_keys(v) for v in value]
        return self._blind(value)

    def _blinded(self, raw: Any) -> Any:
        try:
            return msgspec.Raw(_encode(self._blind(_any.decode(raw))))
        except _FAILURES:
            return msgspec.Raw(b"\xc0")

    def _blind(self, value: Any) -> Any:
        """Any value with its texts, bytes and numbers masked, in its own shape."""
        if value is None or isinstance(value, bool):
            return value
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, bytes):
            return self._digest(b"b" + value, len(value)) if value else value
        if isinstance(value, int):
            if 0 <= value <= _MAX_TOKEN:
                return int(self.tokens(np.array([value], np.uint32))[0])
            return -1 if value < 0 else _MAX_TOKEN + 1  # as unusable as it was
        if isinstance(value, list):
            return [self._blind(v) for v in value]
        if isinstance(value, dict):
            # Keys are names of fields, such as lora_name in a metadata map.
            return {k if isinstance(k, str) else "?": self._blind(v) for k, v in value.items()}
        return 0.0 if isinstance(value, float) else None  # None: extension types

    def _digest(self, data: bytes, size: int) -> bytes:
        if size <= hashlib.blake2b.MAX_DIGEST_SIZE:
            return hashlib.blake2b(data, digest_size=size, key=self._key).digest()
        return hashlib.shake_256(self._key + data).digest(size)


def _is_map(first: int) -> bool:
    return 0x80 <= first <= 0x8F or first in (0xDE, 0xDF)
