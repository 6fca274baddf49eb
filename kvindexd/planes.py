"""Which copies make which presence bit: groups of equal spec are ANDed into one plane."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kvindexd.groups import Treatment
from kvindexd.model import GroupInfo, Plane, Slot

COUNT_BITS = 16
"""Bits per slot in a packed count: `(packed >> (16 * slot)) & 0xFFFF` copies."""
COUNT_MASK = (1 << COUNT_BITS) - 1


class Membership(NamedTuple):
    """A plane and the shifts of the packed counts that must all be non-zero for its bit.

    `complete` is False while a group of the spec has never shown such an entry: no block can be
    held by all of them then.
    """

    plane: Plane
    shifts: tuple[int, ...]
    complete: bool

    def holds(self, packed: int) -> bool:
        """Whether a name with these packed counts is held in the plane."""
        return self.complete and all((packed >> shift) & COUNT_MASK for shift in self.shifts)


def memberships(groups: Sequence[GroupInfo], slots: Sequence[Slot]) -> list[Membership | None]:
    """Per slot, the plane it counts towards; None for a group that is not indexed."""
    by_idx = {g.idx: g for g in groups if g.treated_as != Treatment.IGNORED}
    specs: dict[tuple[str, int, int], list[int]] = {}
    for g in by_idx.values():
        specs.setdefault((g.kind, g.block_size, g.window), []).append(g.idx)
    number = {slot: i for i, slot in enumerate(slots)}
    found: list[Membership | None] = []
    for slot in slots:
        group = by_idx.get(slot.group)
        if group is None:
            found.append(None)
            continue
        mates = specs[(group.kind, group.block_size, group.window)]
        ids = [number.get(Slot(slot.tier, idx, slot.size)) for idx in mates]
        plane = Plane(slot.tier, group.kind, group.block_size, group.window, slot.size)
        shifts = tuple(i * COUNT_BITS for i in ids if i is not None)
        found.append(Membership(plane, shifts, None not in ids))
    return found
