"""Engine payloads to typed events: every known wire generation, decided by shape, per event."""

from kvindexd.wire.decode import decode_batch
from kvindexd.wire.events import (
    AllBlocksCleared,
    Batch,
    BatchError,
    BlockRemoved,
    BlockStored,
    Event,
    Rejected,
)

__all__ = [
    "AllBlocksCleared",
    "Batch",
    "BatchError",
    "BlockRemoved",
    "BlockStored",
    "Event",
    "Rejected",
    "decode_batch",
]
