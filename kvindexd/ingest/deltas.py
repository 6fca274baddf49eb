"""Deltas on their way to the store: what they cost, and what of them a full server takes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from kvindexd.model import MUTATION, REMOVE, BatchDelta


def records(deltas: Iterable[BatchDelta]) -> int:
    """What deltas cost the store, in records."""
    return sum(len(d.blocks) + len(d.parked) + 1 for d in deltas)


def removals(deltas: Sequence[BatchDelta], last: BatchDelta) -> BatchDelta:
    """What all of `deltas` and then `last` remove, as one delta that stands where `last` does."""
    every = (*deltas, last)
    return BatchDelta(
        seq=last.seq,
        ts=last.ts,
        digest=last.digest,
        clear=any(d.clear for d in every),
        blocks={f: None for d in every for f, r in d.blocks.items() if r is None},
        parked={f: None for d in every for f, r in d.parked.items() if r is None},
        mutations=b"".join(_removals(d.mutations) for d in every),
        tier_blocks=last.tier_blocks,
    )


def _removals(mutations: bytes) -> bytes:
    rows = np.frombuffer(mutations, MUTATION)
    return bytes(rows[rows["op"] == REMOVE].tobytes())
