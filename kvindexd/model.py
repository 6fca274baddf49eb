"""What ingest, store, replica and scoring all speak of: workers, tiers, planes, mutations."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from typing import NamedTuple
from urllib.parse import quote, unquote

import msgspec
import numpy as np

EngineHash = int | bytes
"""An engine's block hash as we key it: unsigned 64-bit int, or the raw bytes it sent."""


class Tier(enum.IntEnum):
    """Where a block's KV lives, nearest first. OTHER is counted and never credited."""

    DEVICE = 0
    HOST = 1
    STORAGE = 2
    OTHER = 3


class WorkerKey(NamedTuple):
    """One data-parallel rank of one worker: the unit that owns an event stream and its state."""

    namespace: str
    worker_id: str
    dp_rank: int

    @property
    def store_id(self) -> str:
        """A name that is safe inside a Redis key: no braces, colons or slashes survive quoting."""
        parts = (self.namespace, self.worker_id, str(self.dp_rank))
        return "/".join(quote(p, safe="") for p in parts)

    @classmethod
    def parse(cls, store_id: str) -> WorkerKey:
        """The inverse of `store_id`. Raises ValueError on any other text."""
        parts = store_id.split("/")
        if len(parts) != 3:
            raise ValueError(f"worker key {store_id!r}: expected namespace/worker/rank")
        return cls(unquote(parts[0]), unquote(parts[1]), int(parts[2]))

    def __str__(self) -> str:
        name = f"{self.namespace}/{self.worker_id}" if self.namespace else self.worker_id
        return f"{name}#{self.dp_rank}"


class Plane(NamedTuple):
    """A kind of presence bit: blocks of one tier in all groups of one spec.

    `block_size` is the group's own size in tokens; `entry` the size of the entries that the bit
    speaks of, which is smaller for partial entries (03-index.md section 2, rule 1).
    """

    tier: int
    kind: str
    block_size: int
    window: int
    entry: int


class Slot(NamedTuple):
    """Where copies are counted: a tier, a group, and the entry size in tokens."""

    tier: int
    group: int
    size: int


class GroupInfo(msgspec.Struct, frozen=True, array_like=True):
    """What one KV-cache group of a worker rank has shown of itself."""

    idx: int
    kind: str
    block_size: int
    window: int
    treated_as: str
    stores: int


class Profile(msgspec.Struct, frozen=True, kw_only=True):
    """All that scoring must know of a worker rank besides its bits; learned from its events.

    `planes[i]` names plane id i of this rank's mutations; the list only grows within an epoch.
    `slots[i]` names slot id i of this rank's block records, likewise.
    `unit`: tokens per chain unit. `lookahead`: tokens beyond a block that its hash covers.
    `pairs`: token_ids came as pairs (EAGLE under SGLang). `unlocated`: blocks of auxiliary groups
    that are held but could not be placed, so that an answer may be too low.
    """

    unit: int = 16
    lookahead: int = 0
    pairs: bool = False
    groups: tuple[GroupInfo, ...] = ()
    planes: tuple[Plane, ...] = ()
    slots: tuple[Slot, ...] = ()
    unlocated: int = 0


ADD, REMOVE = 1, 0

MUTATION = np.dtype(
    [
        ("name", "<u8"),  # key of the boundary, or its lookahead key: what a query probes
        ("parent", "<u8"),  # chain key of the block's start, 0 at an unsalted root
        ("length", "<u4"),  # tokens from the prompt's start to the block's end
        ("plane", "u1"),  # index into Profile.planes
        ("op", "u1"),  # ADD or REMOVE; absolute, so that applying twice is harmless
        ("pad", "<u2"),
    ]
)
"""One 24-byte mutation; a feed entry carries an array of them, to be applied in order."""


class BatchDelta(msgspec.Struct, kw_only=True):
    """What one applied batch changes in the store, in full: written in one atomic call.

    `clear`: forget blocks, parked stores and every replica bit of this rank first, and start
    epoch `epoch` at revision 1. `blocks`/`parked`: field -> record, None = delete the field.
    `profile` and `state`: msgpack, None when unchanged. `counters`: increments by name.
    """

    seq: int
    ts: float
    digest: int
    clear: bool = False
    blocks: Mapping[bytes, bytes | None] = msgspec.field(default_factory=dict)
    parked: Mapping[bytes, bytes | None] = msgspec.field(default_factory=dict)
    mutations: bytes = b""
    profile: bytes | None = None
    state: bytes | None = None
    counters: Mapping[str, int] = msgspec.field(default_factory=dict)
    tier_blocks: Sequence[int] = (0, 0, 0, 0)
