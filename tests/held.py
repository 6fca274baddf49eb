"""Presence by hand, for tests of the reuse rules: which entries end where, and nothing else."""

from __future__ import annotations

from typing import Any

import numpy as np
from pure import FULL, MLA

from kvindexd import chain
from kvindexd.model import GroupInfo, Plane, Profile, Tier
from kvindexd.scoring.geometry import Geometry, WorkerOptions, geometry
from kvindexd.scoring.match import Bools, Match, match

CHUNKED = "chunked_local_attention"


class Held:
    """Presence by hand: (spec index, tier, entry size) -> the tokens at which entries end."""

    workers = 1

    def __init__(self, geometry: Geometry, tokens: int, held: dict[tuple[int, int, int], Any]):
        specs = {s.idx: s for s in (*geometry.main, *geometry.auxiliary)}
        self._tokens = tokens
        self._held: dict[Plane, set[int]] = {}
        for (idx, tier, entry), ends in held.items():
            if idx in specs:
                self._held[specs[idx].plane(tier, entry)] = set(ends)

    def held(self, plane: Plane, entry: int) -> Bools | None:
        ends = self._held.get(plane)
        if ends is None:
            return None
        rows = range(entry, self._tokens // entry * entry + 1, entry)
        return np.array([e in ends for e in rows], bool).reshape(-1, 1)


def shape(
    groups: list[tuple[str, int, int]],
    held: dict[tuple[int, int, int], Any],
    options: WorkerOptions,
    *,
    pairs: bool = False,
    hybrid: bool = True,
) -> Geometry:
    mains = (FULL, MLA, "")
    infos = tuple(
        GroupInfo(i, kind, size, window, "main" if kind in mains else "auxiliary", 1)
        for i, (kind, size, window) in enumerate(groups)
    )
    planes = {Plane(t, *groups[i], e) for i, t, e in held}
    planes |= {Plane(0, *g, g[1]) for g in groups}
    unit = chain.unit_for(16, [g[1] for g in groups])
    profile = Profile(unit=unit, groups=infos, planes=tuple(sorted(planes)), pairs=pairs)
    return geometry(profile, options, hybrid)


def run(
    groups: list[tuple[str, int, int]],
    tokens: int,
    held: dict[tuple[int, int, int], Any],
    *,
    options: WorkerOptions | None = None,
    device_only: bool = False,
    **more: Any,
) -> Match:
    """Groups are (kind, block size, window); `held` is (group, tier, entry) -> ends in tokens."""
    geo = shape(groups, held, options or WorkerOptions(), **more)
    return match(Held(geo, tokens, held), geo, tokens, device_only=device_only)


def reuse(*args: Any, **more: Any) -> int:
    return int(run(*args, **more).reusable[0])


def upto(end: int, size: int = 16, start: int = 0) -> list[int]:
    """Ends of the blocks of `size` between two boundaries."""
    return list(range(start + size, end + 1, size))


FULL16 = (FULL, 16, 0)
DEV, HOST, DISK = int(Tier.DEVICE), int(Tier.HOST), int(Tier.STORAGE)
