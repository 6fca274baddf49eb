"""Recording one engine's stream: a subscription of our own, straight to the engine."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec
import structlog
import zmq

from kvindexd.capturing.masking import Mask
from kvindexd.capturing.records import (
    FrameRecord,
    LinkRecord,
    MessageRecord,
    Record,
    ReplayRecord,
)
from kvindexd.capturing.writer import CaptureWriter
from kvindexd.ingest.frame import Frame
from kvindexd.ingest.link import LinkEvent
from kvindexd.ingest.replay import ReplayClient, ReplaySettings
from kvindexd.ingest.transport import Subscriber, SubscriberSettings, new_context

log = structlog.get_logger(__name__)

_LOOK = 0.2
"""Seconds between looks at the clock, the disk and the progress while nothing comes."""
_REPLAY_PATIENCE = 10.0
_MAX_MESSAGE = 256 << 20
_RECEIVE_HWM = 200_000


class Bounds(msgspec.Struct, frozen=True, kw_only=True):
    """Where to stop; 0 = no bound. `count`: frames from the live stream. `max_bytes`: of file."""

    seconds: float = 0.0
    count: int = 0
    max_bytes: int = 0


class Target(NamedTuple):
    """What to record. `replay_endpoint`: "" = the live stream alone."""

    src: str
    endpoint: str
    topic: str
    replay_endpoint: str


class Status(NamedTuple):
    """How far a recording is. `seconds` since it began; `link`: the connection in words."""

    live: int
    replayed: int
    messages: int
    size: int
    seconds: float
    link: str


class Recorder:
    """Writes what one engine sends, until a bound is reached or it is told to stop.

    One task owns it. A message is written once `run` has taken it off the socket; those that the
    socket still holds when it ends are not.
    """

    def __init__(
        self,
        target: Target,
        writer: CaptureWriter,
        bounds: Bounds,
        *,
        mask: Mask | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._target = target
        self._writer = writer
        self._bounds = bounds
        self._mask = mask
        self._clock = clock
        self._began = clock()
        self._stopping = ""
        self._hurry = False
        self._replaying: asyncio.Task[None] | None = None
        self._replay_due = False
        self._odd: list[tuple[int, MessageRecord]] = []
        self.live = 0
        self.replayed = 0
        self.connections = 0
        self._link = ""

    def stop(self, reason: str) -> None:
        """End `run` soon, with this reason in the end marker; the first one counts.

        A replay that is under way is waited for, unless this is called a second time.
        """
        self._hurry = bool(self._stopping)
        self._stopping = self._stopping or reason

    @property
    def status(self) -> Status:
        """How far it is."""
        seconds, writer = self._clock() - self._began, self._writer
        return Status(self.live, self.replayed, writer.messages, writer.size, seconds, self._link)

    async def run(self, watch: Callable[[Status], None] | None = None) -> str:
        """Record; returns why it ended. `watch` is shown the status a few times a second.

        Raises TransportError for an endpoint that cannot be used, OSError when the file cannot be
        written.
        """
        context = new_context()
        try:
            subscriber = Subscriber(
                SubscriberSettings(
                    endpoint=self._target.endpoint,
                    topic=self._target.topic,
                    max_event_bytes=_MAX_MESSAGE,
                    receive_hwm=_RECEIVE_HWM,
                ),
                context,
                self._clock,
                self._refused,
            )
            async with subscriber, asyncio.TaskGroup() as tasks:
                await self._receive(subscriber, tasks, context, watch)
                await self._end_replay()
        except ExceptionGroup as failed:
            raise failed.exceptions[0] from None
        finally:
            context.destroy(0)
        return self._stopping

    async def _receive(
        self,
        subscriber: Subscriber,
        tasks: asyncio.TaskGroup,
        context: zmq.Context[zmq.Socket[bytes]],
        watch: Callable[[Status], None] | None,
    ) -> None:
        while not self._stopping:
            delivery = await subscriber.receive(_LOOK)
            now = self._clock()
            for event in delivery.links:
                self._linked(event, subscriber.link.describe(now), now)
            self._take(delivery.frames)
            if self._replay_due and (self._replaying is None or self._replaying.done()):
                self._replay_due = False
                self._replaying = tasks.create_task(self._replay(context))
            self._writer.flush_if_due()
            self._link = subscriber.link.describe(now)
            self._check(now)
            if watch is not None:
                watch(self.status)

    def _check(self, now: float) -> None:
        bounds = self._bounds
        if self._stopping:
            return
        if bounds.seconds and now - self._began >= bounds.seconds:
            self.stop("seconds")
        elif bounds.max_bytes and self._writer.size >= bounds.max_bytes:
            self.stop("max_bytes")

    # -- what comes ---------------------------------------------------------------------------

    def _write(self, record: Record) -> None:
        self._writer.write(record if self._mask is None else self._mask.record(record))

    def _take(self, frames: Sequence[Frame]) -> None:
        """The frames of a delivery, and the odd messages in their places between them."""
        odd, self._odd = deque(self._odd), []
        for i, frame in enumerate(frames):
            while odd and odd[0][0] <= i:
                self._write(odd.popleft()[1])
            if self._stopping:
                return
            self._write(self._record(frame, replayed=False))
            self.live += 1
            if self._bounds.count and self.live >= self._bounds.count:
                self.stop("count")
        for _, record in odd:
            self._write(record)

    def _record(self, frame: Frame, *, replayed: bool) -> FrameRecord:
        return FrameRecord(
            src=self._target.src,
            at=frame.received_at,
            topic=frame.topic,
            seq=frame.seq,
            payload=frame.payload,
            replayed=replayed,
        )

    def _refused(self, parts: list[bytes], before: int) -> None:
        record = MessageRecord(src=self._target.src, at=self._clock(), parts=parts)
        self._odd.append((before, record))

    def _linked(self, event: LinkEvent, detail: str, now: float) -> None:
        self._write(LinkRecord(src=self._target.src, at=now, event=event.value, detail=detail))
        if event is LinkEvent.CONNECTED:
            self.connections += 1
            self._replay_due = bool(self._target.replay_endpoint)

    # -- replay -------------------------------------------------------------------------------

    async def _replay(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        """Everything that the engine still buffers, once per connection."""
        settings = ReplaySettings(
            endpoint=self._target.replay_endpoint, max_event_bytes=_MAX_MESSAGE
        )
        result = await ReplayClient(settings, context, self._clock).run(0, self._replayed)
        self._write(
            ReplayRecord(
                src=self._target.src,
                at=self._clock(),
                outcome=result.outcome.value,
                batches=result.batches,
                detail=result.detail,
            )
        )

    async def _end_replay(self) -> None:
        """A history with its end cut off explains less than none: it is worth a few seconds."""
        task, left = self._replaying, _REPLAY_PATIENCE
        while task is not None and not task.done() and left > 0 and not self._hurry:
            await asyncio.wait([task], timeout=_LOOK)
            left -= _LOOK
        if task is not None:
            task.cancel()

    async def _replayed(self, frames: list[Frame]) -> None:
        for frame in frames:
            self._write(self._record(frame, replayed=True))
            self.replayed += 1
        self._writer.flush_if_due()
        if self._bounds.max_bytes and self._writer.size >= self._bounds.max_bytes:
            self.stop("max_bytes")
            self._hurry = True
