"""What it costs to send a prompt to a worker (04-scoring.md section 2); lower is better."""

from __future__ import annotations

from typing import NamedTuple

from kvindexd.scoring.geometry import Geometry
from kvindexd.scoring.scorer import Scored

UNKNOWN_SIZE = 16
"""Tokens per block of a worker that has neither shown nor registered a block size."""


class Weights(NamedTuple):
    """Weights of the cost function. `overlap`: cost of one block that must be computed, times the
    factor of the worker's role; `host`, `storage`: what a block there is worth of one on the
    device, 0..1."""

    overlap: float = 1.0
    host: float = 0.7
    storage: float = 0.3
    prefill: float = 20.0
    decode: float = 2.0
    mixed: float = 1.0

    def of(self, role: str) -> float:
        """The overlap weight of a worker by its role (MIXED, PREFILL, DECODE)."""
        factor = {"PREFILL": self.prefill, "DECODE": self.decode}.get(role, self.mixed)
        return self.overlap * factor


class Load(NamedTuple):
    """A worker's load in blocks: distinct prompt blocks in flight, the decayed sum of blocks that
    recent picks made it compute, and what its engine says is queued, where that counts."""

    active_blocks: int = 0
    recent_blocks: float = 0.0
    queued_blocks: float = 0.0

    @property
    def total(self) -> float:
        """The load term of the cost."""
        return self.active_blocks + self.recent_blocks + self.queued_blocks


IDLE = Load()


class Miss(NamedTuple):
    """What a worker lacks of a prompt, in blocks of its own size. `weighted`: what the cost
    charges, blocks on farther tiers in part; `computed`: those that it must compute."""

    weighted: float
    computed: float


def blocks_of(tokens: int, size: int) -> int:
    """Full blocks of a prompt; a prompt shorter than one block counts as one, so that short
    prompts rotate."""
    return max(1, tokens // size)


def ceiling(geometry: Geometry, tokens: int) -> int:
    """The most tokens that any worker of a geometry could reuse: one is always computed, and EAGLE
    drops a block."""
    align = geometry.alignment
    most = max(0, tokens - (2 if geometry.pairs else 1))
    if geometry.options.eagle:
        step = min(align, geometry.block_size)
        most = max(0, most // step * step - step)
    return most // align * align


def miss_blocks(
    scored: Scored, geometry: Geometry, tokens: int, size: int, weights: Weights
) -> Miss:
    """Blocks that a worker lacks. `size`: its block size, or what it is taken to be.

    A worker that holds every full block of the prompt lacks nothing, although the engine computes
    the end of it again: no worker could do better, and one block less must always cost more.
    """
    total = blocks_of(tokens, size)
    if tokens < size:
        return Miss(total, total)
    credit = scored.device + weights.host * scored.host + weights.storage * scored.storage
    if _holds_all(scored, geometry, tokens, total * size):
        rest = total * size - scored.reusable
        deepest = weights.storage if scored.storage else weights.host if scored.host else 1.0
        return Miss(max(0.0, total - (credit + deepest * rest) / size), 0.0)
    return Miss(max(0.0, total - credit / size), max(0.0, total - scored.reusable / size))


def _holds_all(scored: Scored, geometry: Geometry, tokens: int, full: int) -> bool:
    if not geometry.block_size:  # nothing but predictions to go by
        return scored.matched >= full
    if geometry.main and scored.matched < full:
        return False
    return scored.reusable >= ceiling(geometry, tokens)
