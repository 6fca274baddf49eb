"""Content keys: a hash chain over units of tokens, one key space for every engine and block size.

The public specification (03-index.md section 1; test vectors in docs/hash-spec.md):

    key[0]     = 0, or XXH3_64(msgpack([lora_name or "", cache_salt or ""])) when either is set
    key[L + u] = XXH3_64(tokens[L : L+u] as little-endian uint32 || extras, seed = key[L])

A block that ends at token L is named by key[L]. Where an engine's hash also covers the tokens
behind the block (EAGLE/MTP), it is named by XXH3_64(those tokens as u32 LE, seed = key[L]).
"""

from __future__ import annotations

import math
import sys
from array import array
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import xxhash

from kvindexd.native import chain as _native

UNIT = 16
"""Tokens per chain unit unless a worker's block sizes force a smaller one."""

_xxh3 = xxhash.xxh3_64_intdigest
_encode = msgspec.msgpack.encode


class Item(NamedTuple):
    """A multimodal item: its identifier and the token position where its placeholder begins."""

    identifier: str
    start: int


def unit_for(current: int, block_sizes: Iterable[int]) -> int:
    """The unit in tokens that divides `current` and every block size."""
    return math.gcd(current, *block_sizes)


def root_key(lora_name: str = "", cache_salt: str = "", lora_id: int | str | None = None) -> int:
    """key[0] of a prompt. A `lora_id` counts only without a name, and no query can reach it."""
    if not lora_name and lora_id is not None:
        lora_name = f"\0lora_id:{lora_id}"
    if not lora_name and not cache_salt:
        return 0
    return _xxh3(_encode([lora_name or "", cache_salt or ""]))


def pack_tokens(tokens: Sequence[int]) -> bytes:
    """Token ids as little-endian uint32. Raises ValueError for an id outside 0..2**32-1."""
    try:
        packed = array("I", tokens)
    except (OverflowError, TypeError) as e:
        raise ValueError(f"token ids must be integers in 0..2**32-1: {e}") from None
    if sys.byteorder != "little":
        packed.byteswap()
    return packed.tobytes()


def item_extras(items: Iterable[Item], unit: int) -> dict[int, bytes]:
    """Unit index -> extras bytes; an item (absolute start) enters the unit it begins in."""
    per_unit: dict[int, list[tuple[int, str]]] = {}
    for identifier, start in items:
        if start >= 0:
            per_unit.setdefault(start // unit, []).append((start % unit, identifier))
    return {
        u: _encode([[name, offset] for offset, name in sorted(pairs, key=lambda p: p[0])])
        for u, pairs in per_unit.items()
    }


def extend(
    key: int, tokens: bytes, unit: int, extras: Mapping[int, bytes] | None = None
) -> list[int]:
    """Keys at every unit boundary behind `key`, in order.

    `tokens`: packed uint32 LE; a trailing partial unit is dropped. `extras`: unit index within
    `tokens` -> bytes that enter that unit.
    """
    if _native is None or extras or unit > UNIT:
        return extend_plain(key, tokens, unit, extras)
    return memoryview(_native.extend(key, tokens, unit)).cast("Q").tolist()


def extend_packed(
    key: int, tokens: bytes, unit: int, extras: Mapping[int, bytes] | None = None
) -> bytes:
    """The same keys as packed uint64 in this machine's byte order."""
    if _native is None or extras or unit > UNIT:
        return array("Q", extend_plain(key, tokens, unit, extras)).tobytes()
    return _native.extend(key, tokens, unit)


def extend_plain(
    key: int, tokens: bytes, unit: int, extras: Mapping[int, bytes] | None = None
) -> list[int]:
    """`extend` without the C module, which knows no extras: about 140 ns per unit, not 8."""
    step = unit * 4
    keys: list[int] = []
    append = keys.append
    if not extras:
        for i in range(0, len(tokens) - step + 1, step):
            key = _xxh3(tokens[i : i + step], key)
            append(key)
        return keys
    for u, i in enumerate(range(0, len(tokens) - step + 1, step)):
        extra = extras.get(u)
        chunk = tokens[i : i + step]
        key = _xxh3(chunk + extra if extra else chunk, key)
        append(key)
    return keys


def lookahead_key(key: int, tokens: bytes) -> int:
    """The name of a block whose engine hash also covers `tokens` (packed) behind it."""
    return _xxh3(tokens, key)


def prompt_keys(
    tokens: Sequence[int] | bytes,
    *,
    lora_name: str = "",
    cache_salt: str = "",
    items: Iterable[Item] = (),
    unit: int = UNIT,
) -> list[int]:
    """What a client sends instead of tokens: one key per full unit of the prompt.

    `tokens`: ids, or packed little-endian uint32. Raises ValueError for a bad id or a packed
    length that is no multiple of 4.
    """
    packed = tokens if isinstance(tokens, bytes) else pack_tokens(tokens)
    if len(packed) % 4:
        raise ValueError(f"packed tokens: length {len(packed)} is no multiple of 4")
    return extend(root_key(lora_name, cache_salt), packed, unit, item_extras(items, unit))


def prompt_lookahead(
    tokens: Sequence[int] | bytes, keys: Sequence[int], unit: int = UNIT
) -> list[int]:
    """Per unit boundary the lookahead name over the one next token; 0 where there is none."""
    packed = tokens if isinstance(tokens, bytes) else pack_tokens(tokens)
    names = []
    for u, key in enumerate(keys):
        at = (u + 1) * unit * 4
        following = packed[at : at + 4]
        names.append(_xxh3(following, key) if following else 0)
    return names


class BlockExtras(NamedTuple):
    """What a block's `extra_keys` entry said. `salt` only ever in a root block."""

    salt: str
    items: tuple[Item, ...]  # starts relative to the block
    opaque: tuple[Any, ...]  # embeddings and anything unknown: keeps blocks apart
    embedding: bool


NO_EXTRAS = BlockExtras("", (), (), False)


def parse_extra_keys(entry: Any, lora_name: str | None, at_root: bool) -> BlockExtras:
    """Read one block's entry (03-index.md, "Parsing extra_keys").

    `at_root`: the block is the first one of a prompt. The wire does not tag its elements: a
    string is the adapter's name iff it equals `lora_name`, then the salt in a root block, or
    else an item without offset; `[str, int]` is an item; bytes are an embedding's digest.
    """
    if not entry:
        return NO_EXTRAS
    parts = list(entry) if isinstance(entry, list) else [entry]
    adapter = bool(lora_name) and bool(parts) and parts[0] == lora_name
    if adapter:
        parts = parts[1:]
    salt, items, opaque, embedding = "", [], [], False
    for part in parts:
        if isinstance(part, str):
            if at_root and not salt:
                salt = part
            elif not at_root and not adapter and len(parts) == 1:
                items.append(Item(part, 0))
            else:
                opaque.append(part)
        elif _is_item(part):
            items.append(Item(part[0], part[1]))
        else:
            embedding = embedding or isinstance(part, bytes)
            opaque.append(part)
    return BlockExtras(salt, tuple(items), tuple(opaque), embedding)


def _is_item(part: Any) -> bool:
    return (
        isinstance(part, list)
        and len(part) == 2
        and isinstance(part[0], str)
        and isinstance(part[1], int)
    )


def block_extras(blocks: Mapping[int, BlockExtras], block_size: int, unit: int) -> dict[int, bytes]:
    """Unit index -> extras bytes for the blocks of one event, by block index.

    Items enter the unit where they begin; negative starts have entered earlier. Opaque parts
    enter the unit of the block's start.
    """
    items: list[Item] = []
    opaque: dict[int, list[Any]] = {}
    for index, extra in blocks.items():
        start = index * block_size
        items += [Item(i.identifier, start + i.start) for i in extra.items if i.start >= 0]
        if extra.opaque:
            opaque[start // unit] = list(extra.opaque)
    if not opaque:
        return item_extras(items, unit)
    out = item_extras((i for i in items if i.start // unit not in opaque), unit)
    for u, parts in opaque.items():
        inside = sorted((i.start % unit, i.identifier) for i in items if i.start // unit == u)
        out[u] = _encode([*([name, offset] for offset, name in inside), *parts])
    return out
