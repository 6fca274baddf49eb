"""What a worker rank's groups ask of a boundary, read off its profile and its options."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from typing import NamedTuple

from kvindexd.groups import (
    ABSENT,
    CHUNK_KINDS,
    MAIN_KINDS,
    NO_REUSE_KINDS,
    STATE_KINDS,
    WINDOW_KINDS,
    Treatment,
)
from kvindexd.model import GroupInfo, Plane, Profile, Tier


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
        """The size of partial entries on the device that hits may end at; at most one."""
        return tuple(s for s in self.sizes[Tier.DEVICE] if s < self.block_size)


class WorkerOptions(NamedTuple):
    """Facts that no wire carries (02-wire-and-groups.md section 4).

    `hidden_groups`: groups that publish nothing, or whose rules are not known here, have a say:
    answers are upper bounds.
    """

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
    fine = _fine_hits(specs.values())
    treated = {(g.kind, g.block_size, g.window): g.treated_as for g in profile.groups}
    main = tuple(_fitted(s, fine) for k, s in specs.items() if treated[k] == Treatment.MAIN)
    auxiliary = tuple(_fitted(s, fine) for k, s in specs.items() if treated[k] != Treatment.MAIN)
    used = main + (auxiliary if hybrid else ())
    alignment = fine or (math.lcm(*(s.block_size for s in used)) if used else 1)
    lowest = main or auxiliary
    if (auxiliary and not hybrid) or any(map(_unknowable, profile.groups)):
        options = options._replace(hidden_groups=True)
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


def _unknowable(group: GroupInfo) -> bool:
    """Whether the engine asks this group too before it reuses, by rules that nobody here knows."""
    return group.treated_as == Treatment.IGNORED and group.kind not in NO_REUSE_KINDS


def _fine_hits(specs: Iterable[Spec]) -> int:
    """The hash block size in tokens where hits may end inside a block, else 0.

    An engine registers partial entries of its main groups whenever hashes are finer than blocks,
    and looks them up only where a state group has finer hashes too and no group that knows whole
    blocks alone (windows, chunks) has another block size (04-scoring.md section 1).
    """
    shown = list(specs)
    states = [p for s in shown if s.kind in STATE_KINDS for p in s.partial]
    if not states:
        return 0
    fine = math.gcd(*states)
    whole = (s.block_size for s in shown if s.kind in WINDOW_KINDS | CHUNK_KINDS)
    return fine if all(size == fine for size in whole) else 0


def _fitted(spec: Spec, fine: int) -> Spec:
    """A spec without the sizes of partial entries that no hit can end at."""
    device, host, storage = spec.sizes
    kept = tuple(s for s in device if s >= spec.block_size or s == fine)
    return spec if kept == device else spec._replace(sizes=(kept, host, storage))


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
    return max(1, -(-(spec.window - 1) // spec.block_size)) if spec.window else None
