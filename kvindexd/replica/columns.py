"""Which worker has which bit column, and which columns wait to be cleaned before their next use."""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from typing import NamedTuple

from kvindexd.model import WorkerKey


class BlockInfo(NamedTuple):
    """What the table knows of one block. `length`: tokens from the root to its end.

    `holders`: (column, ids of the table's planes whose bit is set), by column.
    """

    parent: int
    length: int
    holders: list[tuple[int, list[int]]]


class Columns:
    """Column numbers: the lowest free one first, so that rows stay narrow.

    A column given up with bits in it is `retired`; a cleaning pass takes all retired ones
    (`begin_pass`) and makes them free at its end (`end_pass`).
    """

    __slots__ = ("_by_worker", "_free", "_next", "passing", "retired")

    def __init__(self) -> None:
        self._by_worker: dict[WorkerKey, int] = {}
        self._free: list[int] = []
        self._next = 0
        self.retired: list[int] = []
        self.passing: list[int] = []

    def get(self, worker: WorkerKey) -> int | None:
        """The worker's column, if it has one."""
        return self._by_worker.get(worker)

    def take(self, worker: WorkerKey) -> int:
        """Give the worker a column."""
        if self._free:
            column = heapq.heappop(self._free)
        else:
            column = self._next
            self._next += 1
        self._by_worker[worker] = column
        return column

    def give_up(self, worker: WorkerKey, *, clean: bool) -> None:
        """Take the worker's column away; `clean`: it has no bits."""
        column = self._by_worker.pop(worker)
        if clean:
            heapq.heappush(self._free, column)
        else:
            self.retired.append(column)

    def begin_pass(self) -> None:
        """Clean what is retired now."""
        self.passing, self.retired = self.retired, []

    def end_pass(self) -> None:
        """What was being cleaned is free."""
        for column in self.passing:
            heapq.heappush(self._free, column)
        self.passing = []

    @property
    def pending(self) -> bool:
        """Whether there are columns to be cleaned."""
        return bool(self.passing or self.retired)

    @property
    def dirty(self) -> set[int]:
        """Columns whose bits are nobody's."""
        return {*self.retired, *self.passing}

    def words(self) -> int:
        """64-bit words that the columns in use need; columns beyond are not handed out again."""
        words = max([*self._by_worker.values(), *self.dirty], default=0) // 64 + 1
        self._next = min(self._next, 64 * words)
        self._free = sorted(c for c in self._free if c < 64 * words)
        return words


def bits_of(columns: Iterable[int], words: int) -> list[int]:
    """The bits of some columns, per 64-bit word."""
    bits = [0] * words
    for column in columns:
        bits[column // 64] |= 1 << (column % 64)
    return bits
