"""What a batch, or an event of it, says by itself, before any state is looked at."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from kvindexd.groups import tier_of
from kvindexd.model import EngineHash, Tier
from kvindexd.wire.events import AllBlocksCleared, BlockStored


def is_chunk(event: BlockStored, tier: Tier) -> bool:
    """Whether an event tells of one offloaded chunk of several blocks: the connector lists them
    all, and finds, loads and evicts the chunk by the last one's hash alone."""
    return (
        tier is not Tier.DEVICE
        and event.group_idx is not None
        and len(event.hashes) > 1
        and len(event.hashes) * event.block_size == event.num_tokens
    )


def credited(event: BlockStored) -> list[EngineHash]:
    """The hashes that an event gives a copy to: all, or the one that stands for a chunk."""
    return event.hashes[-1:] if is_chunk(event, tier_of(event.medium)) else event.hashes


def segments(events: Iterable[object]) -> Iterator[tuple[list[object], bool]]:
    """Events between clears; True with each run that a clear follows."""
    run: list[object] = []
    for event in events:
        if isinstance(event, AllBlocksCleared):
            yield run, True
            run = []
        else:
            run.append(event)
    yield run, False
