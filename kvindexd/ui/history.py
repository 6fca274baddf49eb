"""What the charts show: bounded rings of samples, and rates over the last few of them. Pure."""

from __future__ import annotations

import math
from array import array
from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

INTERVAL = 2.0
"""Seconds between samples."""
FLEET_SAMPLES = 300
RANK_SAMPLES = 150
_WINDOW = 6
"""Samples that a rate spans: counters come from the store every few seconds, not every sample."""

Number = float | None


class Sample(NamedTuple):
    """The fleet during one interval; None = nothing happened that could be measured."""

    time: float
    events: float
    lag_ms: Number
    hit_ratio: Number
    pick_ratio: Number
    requests: float
    latency_ms: Number


class FleetHistory:
    """The last samples of the fleet, numbered from 0."""

    def __init__(self, size: int = FLEET_SAMPLES) -> None:
        self._samples: deque[Sample] = deque(maxlen=size)
        self._count = 0

    def add(self, sample: Sample) -> None:
        """Keep one more; the oldest goes."""
        self._samples.append(sample)
        self._count += 1

    @property
    def last(self) -> Sample | None:
        """The latest one."""
        return self._samples[-1] if self._samples else None

    def since(self, number: int) -> tuple[int, list[Sample]]:
        """(number of the next sample, what is kept of those from `number` on). A number that is
        yet to come, as after a restart of the daemon, brings all."""
        first = self._count - len(self._samples)
        start = number if first <= number <= self._count else first
        return self._count, list(self._samples)[start - first :]


class Totals:
    """A running (count, sum) pair, such as a histogram's, and its change from look to look."""

    def __init__(self) -> None:
        self._count = 0.0
        self._sum = 0.0

    def change(self, count: float, total: float) -> tuple[float, Number]:
        """(how many more, their mean) since the last call."""
        n, added = count - self._count, total - self._sum
        self._count, self._sum = count, total
        return n, added / n if n > 0 else None


class RankHistory:
    """One rank's last samples: 8 bytes each."""

    __slots__ = ("_events", "_lag", "_next", "_revision", "_seen")

    def __init__(self) -> None:
        self._events = array("f", [math.nan] * RANK_SAMPLES)
        self._lag = array("f", [math.nan] * RANK_SAMPLES)
        self._next = 0
        self._revision: tuple[int, int] | None = None
        self._seen: deque[tuple[float, int]] = deque(maxlen=_WINDOW)

    def add(self, now: float, events: int, position: tuple[int, int], lag_ms: int) -> None:
        """Take a sample. `events`: total so far; `position`: (epoch, revision) of the last batch,
        whose lag is `lag_ms`: kept if that is another one than at the last sample."""
        if self._seen and events < self._seen[-1][1]:
            self._seen.clear()  # registered anew: the counters began again
        self._seen.append((now, events))
        moved = self._revision is not None and position != self._revision
        self._revision = position
        at = self._next % RANK_SAMPLES
        self._events[at] = self.rate
        self._lag[at] = lag_ms if moved and lag_ms >= 0 else math.nan
        self._next += 1

    @property
    def rate(self) -> float:
        """Events per second over the last samples."""
        if len(self._seen) < 2:
            return 0.0
        (t0, first), (t1, last) = self._seen[0], self._seen[-1]
        return (last - first) / (t1 - t0) if t1 > t0 else 0.0

    def samples(self) -> tuple[list[Number], list[Number]]:
        """(events per second, lag in ms), oldest first."""
        return self._in_order(self._events), self._in_order(self._lag)

    def _in_order(self, ring: Sequence[float]) -> list[Number]:
        kept = min(self._next, RANK_SAMPLES)
        places = ((self._next - kept + i) % RANK_SAMPLES for i in range(kept))
        return [_number(ring[p]) for p in places]


def _number(value: float) -> Number:
    return None if math.isnan(value) else round(value, 3)


def columns(samples: Iterable[Sample]) -> dict[str, list[Number]]:
    """Samples as lists by field, rounded for the wire."""
    rows = list(samples)
    return {
        name: [None if v is None else round(v, 4) for v in (row[i] for row in rows)]
        for i, name in enumerate(Sample._fields)
    }
