"""Shedding: how many calls may be under way at once, and none whose deadline has passed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from kvindexd.rpc.errors import TooLarge


class Admission:
    """Counts calls under way; refuses one more at once instead of queueing it."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.under_way = 0

    @contextmanager
    def enter(self) -> Iterator[None]:
        """Hold a place for one call. Raises TooLarge (RESOURCE_EXHAUSTED) when all are taken."""
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
