"""The order of one rank's stream: what was handed out, what waits, which holes were reported."""

from __future__ import annotations

from kvindexd.ingest.actions import Action, Apply, Dropped, Gap, Lost, SequencerState
from kvindexd.ingest.backlog import Applied, Held
from kvindexd.ingest.frame import Frame

_NEVER = float("-inf")
_UNANSWERED = frozenset({"backoff", "timeout", "replay_failed"})
"""Losses that say nothing of what the engine's buffer holds."""


class Order:
    """Hands frames out by sequence, each at most once, and names every hole at most once."""

    def __init__(self, history: int, state: SequencerState) -> None:
        self._history = history
        self.applied = Applied(history, state.history)
        self.held = Held()
        self.began = state.began  # engine clock of this incarnation's first batch
        self.missed = -1  # the last batch given up that a replay may yet bring
        self._gaps_to = -1  # holes up to here have been reported

    @property
    def last_seq(self) -> int:
        return self.applied.last_seq

    def top(self) -> tuple[int, float]:
        """Sequence and engine clock of the newest frame known, applied or held."""
        last, top = self.applied.last, self.held.top
        if top is not None:
            ts = top.ts if top.ts is not None else last.ts if last else _NEVER
            return top.seq, ts
        return (last.seq, last.ts) if last else (-1, _NEVER)

    def is_straggler(self, frame: Frame) -> bool:
        """Of the process before: beyond our sequence, but older than this one's first batch."""
        return frame.ts is not None and self.began is not None and frame.ts < self.began

    def clear(self) -> int:
        """A new incarnation: forget what was handed out, not what waits. Returns the last seq."""
        last = self.last_seq
        self.applied = Applied(self._history)
        self.began = None
        self.missed = -1
        self._gaps_to = -1
        return last

    def hand_out(self, frame: Frame, replayed: bool, out: list[Action]) -> None:
        if self.began is None:
            self.began = frame.ts
        self.applied.add(frame)
        out.append(Apply(frame, replayed))

    def release(self, out: list[Action], below: int | None = None) -> None:
        """Hand out the held frames that follow without a hole, up to but not including `below`."""
        while self.held and self.last_seq + 1 != below:
            frame = self.held.pop(self.last_seq + 1)
            if frame is None:
                return
            if self.is_straggler(frame):
                out.append(Dropped(frame.seq, "late"))
                return
            self.hand_out(frame, False, out)

    def give_up(self, reason: str, out: list[Action]) -> None:
        """Stop waiting: hand out all that is held, and report each hole before, in order."""
        for frame in self.held.drain():
            self._let_go(frame, reason, out)

    def close_holes(self, upto: int, reason: str, out: list[Action]) -> None:
        """Make `upto` the next sequence: hand out what is held below it, report what is not."""
        for frame in self.held.drain():
            if frame.seq >= upto:
                self.held.add(frame)
            else:
                self._let_go(frame, reason, out)
        self._lose(upto, reason, out)

    def report_gap(self, upto: int, out: list[Action]) -> None:
        """Name the hole that ends before `upto`, each number once."""
        first = max(self.last_seq, self._gaps_to) + 1
        if first < upto:
            out.append(Gap(first, upto - 1))
        self._gaps_to = max(self._gaps_to, upto - 1)

    def _let_go(self, frame: Frame, reason: str, out: list[Action]) -> None:
        if frame.seq <= self.last_seq:
            out.append(Dropped(frame.seq, "duplicate"))
        elif self.is_straggler(frame):
            out.append(Dropped(frame.seq, "late"))
        else:
            self._lose(frame.seq, reason, out)
            self.hand_out(frame, False, out)

    def _lose(self, upto: int, reason: str, out: list[Action]) -> None:
        first, last = self.last_seq + 1, upto - 1
        if first <= last:
            self.report_gap(upto, out)
            out.append(Lost(first, last, reason))
            if reason in _UNANSWERED:
                self.missed = last
