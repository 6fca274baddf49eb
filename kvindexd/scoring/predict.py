"""Predicted entries: what a pick will make a worker hold, kept apart from what events have said."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence

from kvindexd.model import WorkerKey


class _Rank:
    """`blocks`, `ends`: name -> when it expires. `order`: (expiry, names) in order of addition."""

    __slots__ = ("blocks", "ends", "epoch", "order")

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch
        self.blocks: dict[int, float] = {}
        self.ends: dict[int, float] = {}
        self.order: deque[tuple[float, list[int]]] = deque()


class Predictions:
    """Names that picks are expected to make worker ranks hold within `ttl` seconds.

    Pure: the time is an argument (seconds, monotonic). Nothing here ever reaches the table of
    facts. A name goes when an event speaks of it (stored: now a fact; removed: no more), when the
    rank's epoch changes, or when its time is up. At most `limit` names in all; beyond that, new
    ones are not taken.

    Two kinds of names are kept: `blocks`, any of which may be the end of a match, and `ends`,
    boundaries at which even a rank with window or state groups will be able to resume.
    """

    def __init__(self, ttl: float, limit: int = 1_000_000) -> None:
        self._ttl = ttl
        self._limit = limit
        self._ranks: dict[WorkerKey, _Rank] = {}
        self._size = 0
        self.confirmed = 0
        """Names that an event stored."""
        self.dropped = 0
        """Names that an event removed, or that went with their rank's epoch."""
        self.expired = 0
        """Names that no event spoke of in time."""
        self.refused = 0
        """Names not taken because there were too many."""

    def __len__(self) -> int:
        return self._size

    def add(
        self, worker: WorkerKey, epoch: int, blocks: Sequence[int], end: int, now: float
    ) -> None:
        """Predict blocks, and the boundary `end` (0 = none), on a worker rank of an epoch."""
        if self._ttl <= 0:
            return
        if self._size + len(blocks) + 1 > self._limit:
            self.refused += len(blocks)
            return
        rank = self._ranks.get(worker)
        if rank is None or rank.epoch != epoch:
            self.forget(worker)
            rank = self._ranks[worker] = _Rank(epoch)
        before = len(rank.blocks) + len(rank.ends)
        expires = now + self._ttl
        names = [name for name in blocks if name]
        rank.blocks.update(dict.fromkeys(names, expires))
        if end:
            rank.ends[end] = expires
            names.append(end)
        rank.order.append((expires, names))
        self._size += len(rank.blocks) + len(rank.ends) - before

    def has(self, worker: WorkerKey, now: float) -> bool:
        """Whether anything is predicted on a worker rank."""
        rank = self._ranks.get(worker)
        if rank is None:
            return False
        self._expire(worker, rank, now)
        return bool(rank.blocks or rank.ends)

    def expire(self, now: float) -> None:
        """Let go of all whose time is up, on ranks too that nobody asks about."""
        for worker, rank in list(self._ranks.items()):
            self._expire(worker, rank, now)

    def run(self, worker: WorkerKey, names: Sequence[int], start: int, now: float) -> int:
        """The index behind the predicted names that follow each other from `start` on."""
        rank = self._ranks.get(worker)
        if rank is None:
            return start
        self._expire(worker, rank, now)
        blocks = rank.blocks
        for i in range(start, len(names)):
            if names[i] not in blocks:
                return i
        return max(start, len(names))

    def holds(self, worker: WorkerKey, name: int, now: float) -> bool:
        """Whether one name is predicted, of either kind."""
        if not self.has(worker, now):
            return False
        rank = self._ranks[worker]
        return name in rank.blocks or name in rank.ends

    def farthest_end(self, worker: WorkerKey, places: Mapping[int, int], now: float) -> int:
        """The largest place among predicted boundaries; `places`: name -> place. -1 = none."""
        rank = self._ranks.get(worker)
        if rank is None:
            return -1
        self._expire(worker, rank, now)
        return max((places.get(name, -1) for name in rank.ends), default=-1)

    # -- events -------------------------------------------------------------------------------

    def seen(self, worker: WorkerKey, stored: Iterable[int], removed: Iterable[int]) -> None:
        """Events have spoken of these names: whatever they said, it is no prediction any more."""
        rank = self._ranks.get(worker)
        if rank is None:
            return
        self.confirmed += self._take_out(rank, stored)
        self.dropped += self._take_out(rank, removed)

    def at_epoch(self, worker: WorkerKey, epoch: int) -> None:
        """The rank is at this epoch: what was predicted in another one is void."""
        rank = self._ranks.get(worker)
        if rank is not None and rank.epoch != epoch:
            self.forget(worker)

    def forget(self, worker: WorkerKey) -> None:
        """A worker rank is gone, or holds nothing any more."""
        rank = self._ranks.pop(worker, None)
        if rank is not None:
            size = len(rank.blocks) + len(rank.ends)
            self.dropped += size
            self._size -= size

    def active(self, worker: WorkerKey) -> bool:
        """Whether `seen` would look at a worker rank's names at all."""
        return worker in self._ranks

    def _take_out(self, rank: _Rank, names: Iterable[int]) -> int:
        blocks, ends, n = rank.blocks, rank.ends, 0
        for name in names:
            for held in (blocks, ends):
                if held.pop(name, None) is not None:
                    n += 1
        self._size -= n
        return n

    def _expire(self, worker: WorkerKey, rank: _Rank, now: float) -> None:
        order = rank.order
        while order and order[0][0] <= now:
            _, names = order.popleft()
            for name in names:
                for held in (rank.blocks, rank.ends):
                    expires = held.get(name)
                    if expires is not None and expires <= now:
                        del held[name]
                        self.expired += 1
                        self._size -= 1
        if not order:
            self._size -= len(rank.blocks) + len(rank.ends)
            del self._ranks[worker]
