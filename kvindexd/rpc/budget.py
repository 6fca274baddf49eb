"""Shedding: how much may be under way at once, and nothing whose deadline has passed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from kvindexd.rpc.errors import Overloaded, TimeUp


class Admission:
    """Counts calls under way; refuses one more at once instead of queueing it, and one that nobody
    waits for any more: under overload those are most of what is waiting."""

    def __init__(
        self,
        limit: int,
        setting: str = "limits.max_concurrent_calls",
        reason: str = "concurrent_calls",
    ) -> None:
        """`setting`: that gives the limit; `reason`: that refusals are counted under."""
        self._limit = limit
        self._setting = setting
        self._reason = reason
        self.under_way = 0

    @contextmanager
    def enter(self, time_left: float | None = None) -> Iterator[None]:
        """Hold a place for one call with so many seconds left, None = any.

        Raises Overloaded (RESOURCE_EXHAUSTED) when all places are taken, TimeUp
        (DEADLINE_EXCEEDED) when the deadline has passed.
        """
        in_time(time_left)
        if self.under_way >= self._limit:
            raise Overloaded(
                f"{self.under_way} calls are under way, as many as {self._setting} allows; retry "
                "in a few milliseconds",
                self._reason,
            )
        self.under_way += 1
        try:
            yield
        finally:
            self.under_way -= 1


def in_time(time_left: float | None) -> None:
    """Raise TimeUp for a call whose deadline has passed; None = it has none."""
    if time_left is not None and time_left <= 0:
        raise TimeUp("the deadline passed before the call could be started", "deadline")


class Shares:
    """Counts what each client has under way, so that one cannot take all."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._held: Counter[str] = Counter()

    @contextmanager
    def enter(self, client: str) -> Iterator[None]:
        """Hold a place of a client's share. Raises Overloaded when it has none left."""
        if self._held[client] >= self._limit:
            raise Overloaded(
                f"{self._held[client]} streams of this client are open, as many as "
                "limits.streams_per_client allows; close some",
                "streams",
            )
        self._held[client] += 1
        try:
            yield
        finally:
            self._held[client] -= 1
            if not self._held[client]:
                del self._held[client]
