"""Batches to script arguments; on the hot path, so flat, and without a copy per block."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain

from kvindexd.model import BatchDelta

Args = list[str | bytes | int | float]


def removes_only(delta: BatchDelta) -> bool:
    """Whether a delta adds no record, so that it must work on a full server too."""
    return all(v is None for v in delta.blocks.values()) and all(
        v is None for v in delta.parked.values()
    )


def apply_args(deltas: Sequence[BatchDelta]) -> tuple[bool, Args]:
    """(whether any delta adds records, arguments in the order that apply.lua reads)."""
    args: Args = [len(deltas)]
    stores = False
    for delta in deltas:
        sets, dels = _split(delta.blocks)
        parked_sets, parked_dels = _split(delta.parked)
        stores = stores or bool(sets) or bool(parked_sets)
        args += (
            delta.seq,
            repr(float(delta.ts)),
            delta.digest,
            int(delta.clear),
            len(sets),
            len(dels),
            len(parked_sets),
            len(parked_dels),
            2 * len(delta.counters),
            b"%d,%d,%d,%d" % tuple(delta.tier_blocks),
            delta.mutations,
            delta.profile or b"",
            delta.state or b"",
        )
        args += sets
        args += dels
        args += parked_sets
        args += parked_dels
        args += chain.from_iterable(delta.counters.items())
    return stores, args


def _split(fields: Mapping[bytes, bytes | None]) -> tuple[list[bytes], list[bytes]]:
    """(field, record, field, record, ...), and the fields to delete."""
    if not fields:
        return [], []
    if None not in fields.values():
        return list(chain.from_iterable(fields.items())), []  # type: ignore[arg-type]  # no None
    sets: list[bytes] = []
    dels: list[bytes] = []
    for name, record in fields.items():
        if record is None:
            dels.append(name)
        else:
            sets += (name, record)
    return sets, dels
