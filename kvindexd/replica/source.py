"""What the replica asks of the store: the part of `store.Store` that it reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvindexd.model import Profile, WorkerKey
from kvindexd.store import FeedRead, Snapshot, WorkerRecord


class Reader(Protocol):
    """The tail of the feed; see store.feed.FeedReader."""

    async def read(self, positions: Mapping[int, str], block_ms: int, count: int) -> FeedRead:
        """Entries after `positions`, at most `count` per shard."""
        ...

    async def aclose(self) -> None:
        """Stop reading."""
        ...


class Source(Protocol):
    """The store as the replica sees it. All raise the store's errors (store/errors.py)."""

    @property
    def shards(self) -> int:
        """Number of shards."""
        ...

    async def feed_tail(self) -> dict[int, str]:
        """Position after the last entry of every shard."""
        ...

    def feed_reader(self) -> Reader:
        """A reader of the replica's own."""
        ...

    async def list_workers(self) -> list[WorkerRecord]:
        """All registered worker ranks."""
        ...

    async def get_worker(self, key: WorkerKey) -> WorkerRecord:
        """One worker rank; raises NotRegistered."""
        ...

    async def load(self, key: WorkerKey) -> Snapshot:
        """A worker rank's blocks, iterated in chunks."""
        ...

    async def leases(self) -> dict[WorkerKey, float]:
        """Seconds until each rank's lease lapses."""
        ...


class DecodeRecords(Protocol):
    """records.decode_records: block records of a rank to mutations (model.MUTATION)."""

    def __call__(
        self, fields: Sequence[bytes], records: Sequence[bytes], profile: Profile, /
    ) -> npt.NDArray[np.void]:
        """ADD mutations for all that the records hold."""
        ...
