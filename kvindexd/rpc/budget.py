"""Shedding: how many calls may be under way at once, and none whose deadline has passed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from kvindexd.rpc.errors import TimeUp, TooLarge


class Admission:
    """Counts calls under way; refuses one more at once instead of queueing it, and one that nobody
    waits for any more: under overload those are most of what is waiting."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.under_way = 0

    @contextmanager
    def enter(self, time_left: float | None = None) -> Iterator[None]:
        """Hold a place for one call with so many seconds left, None = any.

        Raises TooLarge (RESOURCE_EXHAUSTED) when all places are taken, TimeUp (DEADLINE_EXCEEDED)
        when the deadline has passed.
        """
        if time_left is not None and time_left <= 0:
            raise TimeUp("the deadline passed before the call could be started")
        if self.under_way >= self._limit:
            raise TooLarge(
                f"{self.under_way} calls are under way, as many as limits.max_concurrent_calls "
                "allows; retry in a few milliseconds"
            )
        self.under_way += 1
        try:
            yield
        finally:
            self.under_way -= 1
