"""What it costs to send a prompt to a worker (04-scoring.md section 2); lower is better."""

from __future__ import annotations

from typing import NamedTuple

from kvindexd.scoring.scorer import Scored


class Weights(NamedTuple):
    """Weights of the cost function. `host`, `storage`: what a token there is worth of one on the
    device, 0..1; `overlap`: cost of one block that must be computed."""

    overlap: float = 1.0
    host: float = 0.7
    storage: float = 0.3


class Load(NamedTuple):
    """A worker's load in blocks: distinct prompt blocks in flight, and the decayed sum of blocks
    that recent picks made it compute."""

    active_blocks: float = 0.0
    recent_blocks: float = 0.0


IDLE = Load()


def cost(scored: Scored, tokens: int, weights: Weights, load: Load = IDLE) -> float:
    """overlap x blocks to compute + load, in blocks of the worker's own size.

    A prompt shorter than one block counts as one block, so that short prompts rotate; a worker
    whose block size is not known yet is taken to hold nothing, at 16 tokens a block.
    """
    size = scored.block_size or 16
    credited = scored.device + weights.host * scored.host + weights.storage * scored.storage
    total = max(1.0, tokens / size)
    missing = max(0.0, total - credited / size)
    return weights.overlap * missing + load.active_blocks + load.recent_blocks
