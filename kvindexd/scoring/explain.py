"""Block by block, what one worker holds of a prompt, and which group stops the match."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from kvindexd.groups import ABSENT, MAIN_KINDS, STATE_KINDS
from kvindexd.model import Tier
from kvindexd.scoring.geometry import Geometry, Spec
from kvindexd.scoring.match import Match, Presence, match

MISSING, DEVICE, HOST, STORAGE, PREDICTED = range(5)
"""Values of `GroupRun.held`, one per block of the prompt."""


class Run(NamedTuple):
    """One group spec's view of a prompt.

    `held`: a byte per block of the spec's size (values above). `stops_at`: the block after which
    this spec alone cannot resume. `why`: in words.
    """

    spec: Spec
    held: bytes
    stops_at: int
    why: str


def runs(presence: Presence, shape: Geometry, tokens: int) -> list[Run]:
    """The runs of one worker (a presence of exactly one), main groups first."""
    found = match(presence, shape, tokens)
    specs = shape.main + shape.auxiliary
    return [
        _run(presence, shape, spec, tokens, int(limit[0]), found)
        for spec, limit in zip(specs, found.limits, strict=True)
    ]


def _run(
    presence: Presence, shape: Geometry, spec: Spec, tokens: int, limit: int, found: Match
) -> Run:
    size = spec.block_size
    held = np.zeros(tokens // size, np.uint8)
    for tier, value in ((Tier.STORAGE, STORAGE), (Tier.HOST, HOST), (Tier.DEVICE, DEVICE)):
        # Of an offloaded chunk every block can be loaded.
        for entry in (e for e in spec.sizes[tier] if e % size == 0):
            bits = presence.held(spec.plane(tier, entry), entry)
            if bits is not None:
                blocks = np.repeat(bits[:, 0], entry // size)
                held[: len(blocks)][blocks] = value
    return Run(
        spec, held.tobytes(), limit // spec.block_size, _why(shape, spec, held, limit, found)
    )


def _why(shape: Geometry, spec: Spec, held: np.ndarray, limit: int, found: Match) -> str:
    reusable = int(found.reusable[0])
    block = limit // spec.block_size
    if limit > reusable:
        return f"allows {limit} tokens; another group stops the match at {reusable}"
    if block >= len(held):
        return "every full block of the prompt is held"
    if spec.kind in MAIN_KINDS or spec.kind == ABSENT:
        if held[block]:
            return f"block {block} is held, but the boundary behind it cannot be resumed from"
        return f"block {block} is not held"
    if spec.kind in STATE_KINDS:
        return f"no state is kept at a boundary behind token {limit}"
    window = f"the {spec.window} tokens" if spec.window else "all tokens"
    return f"behind token {limit}, {window} before a boundary are nowhere held whole"
