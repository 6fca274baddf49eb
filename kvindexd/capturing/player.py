"""Playing a capture back as an engine would: a publisher with a replay socket, in its own time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import NamedTuple

import msgspec

from kvindexd.capturing.lines import CaptureError
from kvindexd.capturing.offline import Exchange, exchanges, frame_of
from kvindexd.capturing.reader import Capture
from kvindexd.capturing.records import FrameRecord, LinkRecord, MessageRecord
from kvindexd.ingest.frame import Frame, batch_ts
from kvindexd.ingest.link import LinkEvent
from kvindexd.testing.publisher import Publisher

BUFFER_STEPS = 10_000
"""Batches kept for replay, as by default in vLLM."""
_DRAIN_SECONDS = 5.0
_RETURN_SECONDS = 10.0
_AGAIN = 1.0
"""Seconds between the last batch of a round and the first of the next, on the engine's clock."""


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """How to play. `speed`: 2 = twice as fast, 0 = as fast as possible. `replay_bind`: "" = none.

    `subscribers`: to wait for before the first frame, up to `patience` seconds.
    """

    bind: str
    replay_bind: str = ""
    speed: float = 1.0
    loop: bool = False
    subscribers: int = 0
    patience: float = 60.0


class Played(NamedTuple):
    """What was sent. `restarts`: engine restarts on the way, rounds of a loop included."""

    frames: int
    messages: int
    restarts: int


def source_of(capture: Capture, wanted: str) -> str:
    """The publisher to play. Raises CaptureError when it must be named, or is not there."""
    names = list(capture.header.sources)
    if wanted and wanted not in names:
        raise CaptureError(f"{capture.name}: no source {wanted!r}; it has {', '.join(names)}")
    if not wanted and len(names) != 1:
        raise CaptureError(
            f"{capture.name} has {len(names)} sources: name one with --source "
            f"({', '.join(names) or 'it holds none'}), and play each in a process of its own"
        )
    return wanted or names[0]


class Player:
    """Plays one source. `play` blocks; `stop` may be called from any thread or signal handler."""

    def __init__(self, capture: Capture, src: str, settings: Settings) -> None:
        """Open the sockets. Raises OSError when an address cannot be bound; CaptureError."""
        self._capture = capture
        self._src = src
        self._settings = settings
        self._stopping = threading.Event()
        self._exchanges = exchanges(capture, src)
        largest = max((len(e.frames) for e in self._exchanges), default=0)
        self.publisher = Publisher(
            capture.header.sources[src].dp_rank,
            settings.bind,
            settings.replay_bind or None,
            b"",
            max(BUFFER_STEPS, largest),
            connect=False,
            # A file is sent whole: nothing is dropped for one who reads slowly.
            send_hwm=0,
        )
        self._shift = 0.0
        self._times: tuple[float, float] | None = None
        self._pending: list[Frame] = []
        self._last = (-1, float("-inf"))
        self._frames = self._messages = self._restarts = 0
        self._open(0)

    def stop(self) -> None:
        """End `play` soon."""
        self._stopping.set()

    def hold(self) -> None:
        """Stay up until told to stop."""
        self._stopping.wait()

    def close(self) -> None:
        """Close the sockets once what was sent is delivered, within a few seconds."""
        self.publisher.stop(_DRAIN_SECONDS)

    def play(self, watch: Callable[[Played], None] | None = None) -> Played:
        """Send everything, in time, until the end or `stop`. `watch` is shown each step.

        Raises TimeoutError when the subscribers to wait for do not come; CaptureError.
        """
        settings = self._settings
        if not self._subscribed(settings.subscribers, settings.patience):
            raise TimeoutError(
                f"{self.publisher.endpoint}: {self.publisher.subscriptions()} subscribers after "
                f"{settings.patience:g} s, waiting for {settings.subscribers}"
            )
        while True:
            self._round(watch)
            if not self._settings.loop or self._stopping.is_set() or self._times is None:
                return self._played
            first, last = self._times
            self._shift += last - first + _AGAIN
            self._reopen(0)

    @property
    def _played(self) -> Played:
        return Played(self._frames, self._messages, self._restarts)

    # -- a round ------------------------------------------------------------------------------

    def _round(self, watch: Callable[[Played], None] | None) -> None:
        pace = _Pace(self._settings.speed, self._stopping)
        connections = 0
        for record in self._capture.records():
            if getattr(record, "src", None) != self._src:
                continue
            if isinstance(record, LinkRecord) and record.event == LinkEvent.CONNECTED.value:
                if connections:
                    self._connected(connections)
                connections += 1
            elif isinstance(record, MessageRecord):
                if not pace.wait(record.at):
                    return
                self.publisher.send_parts(record.parts)
                self._messages += 1
            elif isinstance(record, FrameRecord) and not record.replayed:
                if not pace.wait(record.at):
                    return
                self._send(frame_of(record))
            if watch is not None:
                watch(self._played)

    def _send(self, frame: Frame) -> None:
        seq, ts = self._last
        if frame.seq <= seq and frame.ts is not None and frame.ts > ts:
            behind = [f for f in self._pending if f.ts is not None and f.ts > ts]
            self._pending = [f for f in behind if f.seq > frame.seq]
            self._reopen_with([f for f in behind if f.seq < frame.seq])
        self._buffer_until(frame.seq)
        if self._pending and self._pending[0].seq == frame.seq:
            self._pending.pop(0)
        self.publisher.publish_raw(frame.topic, frame.seq, shifted(frame.payload, self._shift))
        self._frames += 1
        self._note(frame)

    def _note(self, frame: Frame) -> None:
        if frame.ts is None:
            return
        if frame.seq > self._last[0]:
            self._last = (frame.seq, frame.ts)
        first, last = self._times or (frame.ts, frame.ts)
        self._times = (min(first, frame.ts), max(last, frame.ts))

    def _buffer_until(self, seq: int) -> None:
        """What was only ever replayed is only ever replayed here, too."""
        while self._pending and self._pending[0].seq < seq:
            frame = self._pending.pop(0)
            self.publisher.drop_next(1, replayable=True)
            self.publisher.publish_raw(frame.topic, frame.seq, shifted(frame.payload, self._shift))

    # -- the engine's life --------------------------------------------------------------------

    def _connected(self, number: int) -> None:
        """The recording's own connection was made anew: perhaps to a new process."""
        if number >= len(self._exchanges):
            return
        seq, ts = self._last
        frames = _ordered(self._exchanges[number])
        if any(f.seq <= seq and f.ts is not None and f.ts > ts for f in frames):
            self._reopen(number)
        else:
            self._pending = [f for f in frames if f.seq > seq]

    def _reopen(self, number: int) -> None:
        self._pending = []
        self._reopen_with(self._history(number))

    def _reopen_with(self, history: list[Frame]) -> None:
        """A new process in place, which whoever had subscribed finds again."""
        subscribed = self.publisher.subscriptions()
        self.publisher.stop(_DRAIN_SECONDS)
        self._restarts += 1
        self._start(history)
        # Who does not come back in time misses batches, as from an engine.
        self._subscribed(subscribed, _RETURN_SECONDS)

    def _open(self, number: int) -> None:
        self._start(self._history(number))

    def _history(self, number: int) -> list[Frame]:
        """What the engine had sent before it was listened to; the rest of its replay waits."""
        if number >= len(self._exchanges):
            return []
        exchange = self._exchanges[number]
        frames = _ordered(exchange)
        end = exchange.first_live
        self._pending = [f for f in frames if end is not None and f.seq > end]
        return [f for f in frames if end is None or f.seq < end]

    def _start(self, history: list[Frame]) -> None:
        self._last = (-1, float("-inf"))
        for frame in history:
            self._note(frame)
        self.publisher.start([(f.seq, f.topic, shifted(f.payload, self._shift)) for f in history])

    def _subscribed(self, count: int, patience: float) -> bool:
        """Whether so many subscribers come in time; True when told to stop meanwhile."""
        deadline = time.monotonic() + patience
        while self.publisher.subscriptions() < count:
            if time.monotonic() > deadline:
                return False
            if self._stopping.wait(0.01):
                break
        return True


class _Pace:
    """When each record is due, counted from the first one."""

    def __init__(self, speed: float, stopping: threading.Event) -> None:
        self._speed = speed
        self._stopping = stopping
        self._start: tuple[float, float] | None = None

    def wait(self, at: float) -> bool:
        """Wait until a record of this time is due; False when told to stop."""
        left = 0.0
        if self._speed and at:
            now = time.monotonic()
            first, began = self._start = self._start or (at, now)
            left = began + (at - first) / self._speed - now
        return not (self._stopping.wait(left) if left > 0 else self._stopping.is_set())


def _ordered(exchange: Exchange) -> list[Frame]:
    return [exchange.frames[seq] for seq in sorted(exchange.frames)]


def shifted(payload: bytes, seconds: float) -> bytes:
    """A batch as if the engine's clock were ahead; a payload that shows no time as it is."""
    ts = batch_ts(payload) if seconds else None
    if ts is None:
        return payload
    moved = msgspec.Raw(msgspec.msgpack.encode(ts + seconds))
    if 0x80 <= payload[0] <= 0x8F or payload[0] in (0xDE, 0xDF):
        fields = msgspec.msgpack.decode(payload, type=dict[str, msgspec.Raw])
        return msgspec.msgpack.encode(fields | {"ts": moved})
    parts = msgspec.msgpack.decode(payload, type=list[msgspec.Raw])
    return msgspec.msgpack.encode([moved, *parts[1:]])
