"""A prompt as the index sees it: chain keys per unit, names per entry size."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvindexd import chain

Names = npt.NDArray[np.uint64]
SLICE = 1 << 16
"""Tokens hashed at a time: about half a millisecond."""


class Query:
    """One prompt. Keys are computed once per chain unit asked for, and only then."""

    def __init__(
        self,
        packed: bytes,
        *,
        lora_name: str = "",
        cache_salt: str = "",
        items: Sequence[chain.Item] = (),
    ) -> None:
        self._packed = packed
        self.lora_name, self.cache_salt = lora_name, cache_salt
        self.root = chain.root_key(lora_name, cache_salt)
        """Chain key at the prompt's start."""
        self.items = tuple(items)
        self._keys: dict[int, Names] = {}
        self._names: dict[tuple[int, int, int], Names] = {}
        self.tokens = len(packed) // 4
        """Prompt length in tokens."""

    @property
    def packed(self) -> bytes:
        """The token ids, uint32 little-endian; empty where they are not known."""
        return self._packed

    def varied(
        self,
        *,
        packed: bytes | None = None,
        root: int | None = None,
        items: Sequence[chain.Item] | None = None,
    ) -> Query:
        """The same prompt with other tokens, another root or other items."""
        made = Query(
            self._packed if packed is None else packed, items=self.items if items is None else items
        )
        made.root = self.root if root is None else root
        return made

    async def hash(self, unit: int) -> None:
        """Compute the keys for a unit ahead of `keys`, letting others run in between."""
        if unit in self._keys or len(self._packed) <= SLICE * 4:
            return
        extras = chain.item_extras(self.items, unit) if self.items else {}
        key, parts = self.root, []
        per_slice = SLICE // unit
        for first in range(0, len(self._packed) // (4 * unit), per_slice):
            part = self._packed[first * unit * 4 : (first + per_slice) * unit * 4]
            inside = {u - first: e for u, e in extras.items() if first <= u < first + per_slice}
            parts.append(np.frombuffer(chain.extend_packed(key, part, unit, inside), np.uint64))
            if len(parts[-1]):
                key = int(parts[-1][-1])
            await asyncio.sleep(0)
        self._keys[unit] = np.concatenate(parts)

    def keys(self, unit: int) -> Names | None:
        """The chain key at every unit boundary; None when it cannot be known for this unit."""
        found = self._keys.get(unit)
        if found is None:
            extras = chain.item_extras(self.items, unit) if self.items else None
            keys = chain.extend_packed(self.root, self._packed, unit, extras)
            found = self._keys[unit] = np.frombuffer(keys, np.uint64)
        return found

    def names(self, unit: int, lookahead: int, entry: int) -> Names | None:
        """What to probe for entries of `entry` tokens: [tokens // entry].

        With `lookahead` tokens in the engine's hash, a boundary with fewer tokens behind it gets
        name 0, which nothing holds. None: not knowable from what the client sent.
        """
        wanted = (unit, lookahead, entry)
        found = self._names.get(wanted)
        if found is None:
            keys = self.keys(unit)
            if keys is None:
                return None
            found = keys[entry // unit - 1 :: entry // unit]
            if lookahead:
                made = self._lookahead_names(found, lookahead, entry)
                if made is None:
                    return None
                found = made
            self._names[wanted] = found
        return found

    def _lookahead_names(self, keys: Names, lookahead: int, entry: int) -> Names | None:
        out = np.zeros(len(keys), np.uint64)
        size = 4 * lookahead
        for i, key in enumerate(keys.tolist()):
            at = (i + 1) * entry * 4
            behind = self._packed[at : at + size]
            if len(behind) < size:
                break
            out[i] = chain.lookahead_key(key, behind)
        return out


class ChainQuery(Query):
    """A prompt of which the client sent only its own keys, at one unit (05-api.md, ChainHashes)."""

    def __init__(self, keys: Names, unit: int, tokens: int, lookahead: Names | None) -> None:
        super().__init__(b"")
        self._unit = unit
        self._keys[unit] = keys
        self._ahead = lookahead
        self.tokens = tokens or len(keys) * unit

    async def hash(self, unit: int) -> None:
        """Nothing to compute."""

    def keys(self, unit: int) -> Names | None:
        """The client's keys, for its own unit alone."""
        return self._keys.get(unit)

    def _lookahead_names(self, keys: Names, lookahead: int, entry: int) -> Names | None:
        if self._ahead is None or lookahead != 1:
            return None
        step = entry // self._unit
        return self._ahead[step - 1 :: step][: len(keys)]


class BlindQuery(Query):
    """A prompt of which nothing but its length is known."""

    def __init__(self, tokens: int) -> None:
        super().__init__(b"")
        self.tokens = tokens

    async def hash(self, unit: int) -> None:
        """Nothing to compute."""

    def keys(self, unit: int) -> Names | None:
        """Not knowable."""
        return None
