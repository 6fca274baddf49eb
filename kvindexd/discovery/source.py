"""What a source of workers is, and what all of them share."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from typing import Protocol

from kvindexd.discovery.wanted import Wanted


class Report(Protocol):
    """Where a source says what it found."""

    def publish(self, found: Iterable[Wanted], unusable: Mapping[str, str] = ...) -> None:
        """The whole view of the source, as of now. `unusable`: what it found and cannot use, by
        name, and why."""
        ...

    def failed(self, why: str) -> None:
        """Looking failed; what was found before stays. Logged when it is not what failed last."""
        ...

    def works(self) -> None:
        """Looking worked, and nothing has changed."""
        ...


class Source(Protocol):
    """Looks for workers until cancelled."""

    @property
    def name(self) -> str:
        """Names it as an owner: the same in every process that looks at the same thing."""
        ...

    async def run(self, report: Report) -> None:
        """Look, and report, until cancelled."""
        ...

    def look(self) -> None:
        """Look again soon: an operator asks."""
        ...


class Backoff:
    """Pauses between attempts, in seconds: doubling up to `most`, each of random length between
    half of it and all, so that processes that failed together do not try again together."""

    def __init__(self, least: float = 0.5, most: float = 30.0) -> None:
        self._least, self._most = least, most
        self._failures = 0

    def next(self) -> float:
        """The pause after one more failure."""
        pause = min(self._most, self._least * 2.0 ** min(self._failures, 20))
        self._failures += 1
        return pause * random.uniform(0.5, 1.0)  # noqa: S311 - jitter

    def reset(self) -> None:
        """An attempt worked."""
        self._failures = 0

    @property
    def failures(self) -> int:
        """Failures since the last reset."""
        return self._failures
