"""Promises against outcomes: a worker whose predictions are wrong for a while is marked. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from kvindexd.model import WorkerKey


class Outcome(NamedTuple):
    """What was promised for a request, and what the engine reported. All in tokens.

    `resting`: part of `predicted` that rested on predictions instead of events. `prompt_tokens`:
    as the engine counted, `asked_tokens`: as we did. `exact`: False = `predicted` was an upper
    bound.
    """

    worker: WorkerKey
    predicted: int
    resting: int
    actual: int
    prompt_tokens: int
    asked_tokens: int
    block_size: int
    exact: bool = True

    @property
    def error(self) -> int:
        """Tokens by which the promise was off; less than a block is no error, nor is an engine
        that falls short of an upper bound."""
        off = self.predicted - self.actual
        if abs(off) < max(1, self.block_size) or (off > 0 and not self.exact):
            return 0
        return abs(off)


class DriftOptions(NamedTuple):
    """A worker drifts when, over its last `window` outcomes, and `minimum` of them at least, the
    wrong tokens are more than `threshold` of the prompts'. `cooldown`: seconds before the same
    worker is resynced again; 0 <= threshold <= 1."""

    threshold: float = 0.2
    window: int = 50
    minimum: int = 10
    cooldown: float = 60.0


class Audit(NamedTuple):
    """A worker's record: totals since the start, and the window that decides on drift. While it
    drifts, `window_error` is not below what it was marked for."""

    worker: WorkerKey
    outcomes: int
    predicted_tokens: int
    actual_tokens: int
    prompt_tokens: int
    over: int
    under: int
    resting_tokens: int
    miscounted: int
    window: int
    window_error: float
    drifting: bool
    resyncs: int


class _Record:
    """Mutable totals of one worker; see Audit."""

    def __init__(self, window: int) -> None:
        self.outcomes = self.predicted = self.actual = self.prompts = 0
        self.over = self.under = self.resting = self.miscounted = self.resyncs = 0
        self.recent: deque[tuple[int, int]] = deque(maxlen=window)
        self.drifting = False
        self.marked = 0.0
        self.resynced_at = float("-inf")

    def add(self, o: Outcome) -> None:
        self.outcomes += 1
        self.predicted += o.predicted
        self.actual += o.actual
        self.prompts += o.prompt_tokens
        self.resting += o.resting
        self.miscounted += o.prompt_tokens != o.asked_tokens
        if o.error:
            self.over += o.predicted > o.actual
            self.under += o.predicted < o.actual
        self.recent.append((min(o.error, o.prompt_tokens), max(1, o.prompt_tokens)))

    @property
    def error(self) -> float:
        """Wrong tokens of the window, as a part of its prompts'."""
        total = sum(prompt for _, prompt in self.recent)
        return sum(wrong for wrong, _ in self.recent) / total if total else 0.0

    def audit(self, worker: WorkerKey) -> Audit:
        return Audit(
            worker,
            self.outcomes,
            self.predicted,
            self.actual,
            self.prompts,
            self.over,
            self.under,
            self.resting,
            self.miscounted,
            len(self.recent),
            max(self.error, self.marked),
            self.drifting,
            self.resyncs,
        )


class DriftWatch:
    """Keeps a record per worker, marks those that drift, and lists which to resync."""

    def __init__(self, options: DriftOptions | None = None) -> None:
        self._options = options or DriftOptions()
        self._records: dict[WorkerKey, _Record] = {}
        self._due: list[tuple[WorkerKey, float]] = []

    def record(self, outcome: Outcome, now: float) -> None:
        """Take one outcome in. `now`: seconds, monotonic."""
        o = self._options
        record = self._records.get(outcome.worker)
        if record is None:
            record = self._records[outcome.worker] = _Record(o.window)
        record.add(outcome)
        error = record.error
        if len(record.recent) < min(o.minimum, o.window):
            return
        record.drifting = error > o.threshold
        record.marked = error if record.drifting else 0.0
        if record.drifting and now - record.resynced_at >= o.cooldown:
            record.resynced_at = now
            record.resyncs += 1
            # What comes next must be judged by what the worker holds after the resync.
            record.recent.clear()
            self._due.append((outcome.worker, error))

    def due(self) -> list[tuple[WorkerKey, float]]:
        """(worker, wrong part of its window) to resync now; each is listed once."""
        due, self._due = self._due, []
        return due

    def drifting(self, worker: WorkerKey) -> bool:
        """Whether a worker is marked. The mark goes when a window is right again."""
        record = self._records.get(worker)
        return record is not None and record.drifting

    def forget(self, worker: WorkerKey) -> None:
        """A worker has been removed."""
        self._records.pop(worker, None)

    def of(self, worker: WorkerKey) -> Audit | None:
        """One worker's record, None before its first outcome."""
        record = self._records.get(worker)
        return record.audit(worker) if record is not None else None

    def audit(self) -> Sequence[Audit]:
        """The records, by worker."""
        return [record.audit(worker) for worker, record in sorted(self._records.items())]
