"""What a rank's sequencer remembers: the last batches applied, the live ones that must wait, and
the replay that they wait for."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator

import msgspec

from kvindexd.ingest.frame import Frame


class Seen(msgspec.Struct, frozen=True, array_like=True):
    """One applied batch, as far as it is needed to recognise it: engine clock, payload digest."""

    seq: int
    ts: float
    digest: int


class Flight(msgspec.Struct):
    """The replay request that is under way."""

    id: int
    start: int
    why: str
    last: int  # last batch handed out when it was sent
    top: int  # newest batch known when it was sent
    verified: bool = False  # a batch came back unchanged, or there was none to compare
    returned: int = 0
    applied: int = 0


class Applied:
    """The last batches applied, oldest first; bounded to `limit`."""

    def __init__(self, limit: int, seen: Iterable[Seen] = ()) -> None:
        self._limit = max(1, limit)
        self._seen: OrderedDict[int, Seen] = OrderedDict()
        for one in seen:
            self._append(one)

    def __iter__(self) -> Iterator[Seen]:
        return iter(self._seen.values())

    @property
    def last(self) -> Seen | None:
        return next(reversed(self._seen.values())) if self._seen else None

    @property
    def last_seq(self) -> int:
        """Sequence of the last applied batch, -1 = none."""
        return next(reversed(self._seen)) if self._seen else -1

    def get(self, seq: int) -> Seen | None:
        return self._seen.get(seq)

    def add(self, frame: Frame) -> None:
        """Record a batch. One without a time of its own inherits that of the batch before it."""
        last = self.last
        ts = frame.ts if frame.ts is not None else last.ts if last else float("-inf")
        self._append(Seen(frame.seq, ts, frame.digest))

    def overlap_start(self, overlap: int) -> int:
        """The lowest of the last `overlap` sequences that are all recorded; 0 when none is."""
        last = self.last_seq
        start = last
        while start - 1 in self._seen and last - start + 1 < overlap:
            start -= 1
        return max(0, start)

    def _append(self, one: Seen) -> None:
        self._seen[one.seq] = one
        while len(self._seen) > self._limit:
            self._seen.popitem(last=False)


class Held:
    """Live frames that arrived while a replay was running, by sequence; bounded by the caller."""

    def __init__(self) -> None:
        self._frames: dict[int, Frame] = {}
        self._top = -1
        self.bytes = 0

    def __len__(self) -> int:
        return len(self._frames)

    @property
    def lowest(self) -> int:
        """Lowest sequence held. Raises ValueError when nothing is."""
        return min(self._frames)

    @property
    def top(self) -> Frame | None:
        """The frame with the highest sequence."""
        return self._frames.get(self._top)

    def get(self, seq: int) -> Frame | None:
        return self._frames.get(seq)

    def add(self, frame: Frame) -> None:
        self.pop(frame.seq)
        self._frames[frame.seq] = frame
        self.bytes += len(frame.payload)
        self._top = max(self._top, frame.seq)

    def pop(self, seq: int) -> Frame | None:
        frame = self._frames.pop(seq, None)
        if frame is not None:
            self.bytes -= len(frame.payload)
            if seq == self._top:
                self._top = max(self._frames, default=-1)
        return frame

    def drain(self) -> list[Frame]:
        """Take everything out, in order of sequence."""
        frames = [self._frames[seq] for seq in sorted(self._frames)]
        self._frames.clear()
        self._top, self.bytes = -1, 0
        return frames
