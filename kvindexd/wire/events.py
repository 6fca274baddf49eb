"""The events that an engine's payload can hold, after decoding and validation."""

from __future__ import annotations

from typing import Any

import msgspec

EngineHash = int | bytes
"""Unsigned 64-bit int (signed ones are folded: -5 is 2**64-5), or the raw bytes, never cut."""


class BatchError(ValueError):
    """A payload that is no batch at all. `reason` is a short label for counters."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason


class BlockStored(msgspec.Struct, kw_only=True):
    """Blocks that became resident.

    `tokens`: token ids packed as little-endian uint32, flat (the first elements where the engine
    sent pairs). `lookahead`: per listed hash, the tokens behind the block that the engine's hash
    also covers, packed likewise; None when the hash covers the block alone. `extra_keys`: one
    list (or None) per hash. `medium` is the engine's word; None means the device.
    """

    hashes: list[EngineHash]
    parent: EngineHash | None = None
    tokens: bytes = b""
    block_size: int = 0
    lora_id: int | str | None = None
    lora_name: str | None = None
    cache_salt: str | None = None
    extra_keys: list[Any] | None = None
    medium: str | None = None
    group_idx: int | None = None
    kind: str | None = None
    window: int | None = None
    lookahead: list[bytes] | None = None
    pairs: bool = False
    reused: bool = False

    @property
    def num_tokens(self) -> int:
        """Tokens that the event spans."""
        return len(self.tokens) >> 2


class BlockRemoved(msgspec.Struct, kw_only=True):
    """Blocks of one tier and group that are gone, one physical copy per listed hash.

    `remaining`: copies left per hash where the engine says so; it wins over our own count.
    """

    hashes: list[EngineHash]
    medium: str | None = None
    group_idx: int | None = None
    remaining: list[int] | None = None


class AllBlocksCleared(msgspec.Struct):
    """The engine dropped its whole prefix cache."""


class Rejected(msgspec.Struct, frozen=True):
    """An event that was left out. `reason` is a counter label, `detail` says what was wrong.

    `tag` is the event's own name where it had one (for unknown tags).
    """

    reason: str
    detail: str
    tag: str = ""


Event = BlockStored | BlockRemoved | AllBlocksCleared | Rejected


class Batch(msgspec.Struct):
    """One decoded payload: engine clock in seconds, events in order, the rank it names."""

    ts: float
    events: list[Event]
    rank: int | None = None
