"""What a worker rank's groups ask of a boundary, read off its profile and its options."""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

from kvindexd.groups import (
    ABSENT,
    CHUNK_KINDS,
    MAIN_KINDS,
    STATE_KINDS,
    Treatment,
)
from kvindexd.model import Plane, Profile, Tier


class Spec(NamedTuple):
    """Groups of equal kind, block size and window (tokens), which are one plane per tier.

    `sizes[tier]` are the entry sizes (tokens) seen there: the block size itself, smaller ones
    (partial entries) and larger ones (offloaded chunks, loadable only whole).
    """

    kind: str
    block_size: int
    window: int
    idx: int
    sizes: tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]

    def plane(self, tier: int, entry: int) -> Plane:
        """The plane of entries of `entry` tokens in a tier."""
        return Plane(tier, self.kind, self.block_size, self.window, entry)

    @property
    def partial(self) -> tuple[int, ...]:
        """Sizes of partial entries on the device, smallest first."""
        return tuple(s for s in self.sizes[Tier.DEVICE] if s < self.block_size)


class WorkerOptions(NamedTuple):
    """Facts that no wire carries (02-wire-and-groups.md section 4)."""

    eagle: bool = False
    chunk_size: int = 0
    hidden_groups: bool = False


class Geometry(NamedTuple):
    """All that matching needs of a worker; equal geometries are matched together.

    `alignment`: hits are multiples of it, in tokens. `block_size`: of the lowest main group, or
    of the lowest auxiliary group where there is none.
    """

    unit: int
    lookahead: int
    pairs: bool
    main: tuple[Spec, ...]
    auxiliary: tuple[Spec, ...]
    alignment: int
    block_size: int
    options: WorkerOptions

    @property
    def tiers(self) -> tuple[int, ...]:
        """Tiers in which any group holds anything, nearest first."""
        specs = self.main + self.auxiliary
        return tuple(t for t in (0, 1, 2) if any(s.sizes[t] for s in specs))


@functools.lru_cache(maxsize=4096)
def geometry(profile: Profile, options: WorkerOptions, hybrid: bool = True) -> Geometry:
    """The geometry of a rank. `hybrid` False leaves auxiliary groups out ("attention-only")."""
    specs: dict[tuple[str, int, int], Spec] = {}
    for g in profile.groups:
        key = (g.kind, g.block_size, g.window)
        if g.treated_as == Treatment.IGNORED or not g.block_size or key in specs:
            continue
        sizes = tuple(
            tuple(sorted({p.entry for p in profile.planes if p.tier == t and p[1:4] == key}))
            for t in (Tier.DEVICE, Tier.HOST, Tier.STORAGE)
        )
        specs[key] = Spec(g.kind, g.block_size, g.window, g.idx, sizes)  # type: ignore[arg-type]  # three tiers
    treated = {(g.kind, g.block_size, g.window): g.treated_as for g in profile.groups}
    main = tuple(s for k, s in specs.items() if treated[k] == Treatment.MAIN)
    auxiliary = tuple(s for k, s in specs.items() if treated[k] != Treatment.MAIN)
    used = main + (auxiliary if hybrid else ())
    partial = [p for s in used for p in s.partial]
    if partial:
        alignment = math.gcd(*partial)
    else:
        alignment = math.lcm(*(s.block_size for s in used)) if used else 1
    lowest = main or auxiliary
    return Geometry(
        profile.unit,
        profile.lookahead,
        profile.pairs,
        main,
        auxiliary if hybrid else (),
        alignment,
        lowest[0].block_size if lowest else 0,
        options,
    )


def blocks_back(spec: Spec, chunk_size: int) -> int | None:
    """How many blocks must be held behind a boundary at most; None = all from the root.

    A window of w tokens needs the ceil((w-1)/bs) blocks that end there; a state group the one
    block. Where the window, or the chunk's size, is not known, only a fully held prefix is sure.
    """
    if spec.kind in STATE_KINDS:
        return 1
    if spec.kind in MAIN_KINDS or spec.kind == ABSENT:
        return None
    if spec.kind in CHUNK_KINDS:
        return chunk_size // spec.block_size if chunk_size else None
    return -(-(spec.window - 1) // spec.block_size) if spec.window else None
