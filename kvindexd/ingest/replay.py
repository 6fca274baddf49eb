"""Ask an engine for the batches it still buffers: one DEALER request, many replies, one end marker.

The server answers only `[b"", start_seq]`, and not at all to anything else; an engine that was
restarted, or runs without replay, is silent. So every request has a socket of its own, and ends in
bounded time whatever the server does. Live ingestion never waits for it.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import NamedTuple

import msgspec
import zmq

from kvindexd.ingest.actions import ReplayOutcome
from kvindexd.ingest.frame import SEQ_BYTES, Frame, FrameError, parse_replayed
from kvindexd.ingest.sockets import check_endpoint, is_ipv6, take, wait_readable, wait_writable


class ReplaySettings(msgspec.Struct, frozen=True, kw_only=True):
    """How to ask. Times in seconds.

    `reply_timeout`: longest silence before or between replies. `total_timeout`: longest request.
    `max_batches`: a reply longer than this is cut off. `receive_hwm` exceeds an engine's default
    buffer (10,000 batches): a server whose queue to us is full drops replies silently.
    """

    endpoint: str
    ipv6: bool | None = None
    max_event_bytes: int = 16 << 20
    receive_hwm: int = 20_000
    reply_timeout: float = 2.0
    total_timeout: float = 120.0
    max_batches: int = 1_000_000


class ReplayResult(NamedTuple):
    """How a request ended. `dropped`: refused replies by reason; `detail`: the outcome in words."""

    outcome: ReplayOutcome
    batches: int
    bytes: int
    dropped: dict[str, int]
    seconds: float
    detail: str


Deliver = Callable[[list[Frame]], Awaitable[None]]


class ReplayClient:
    """Runs replay requests, one at a time, for one rank."""

    def __init__(
        self,
        settings: ReplaySettings,
        context: zmq.Context[zmq.Socket[bytes]],
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Raises TransportError for an endpoint that cannot be used."""
        self._settings = settings
        self._endpoint = check_endpoint(settings.endpoint)
        self._context = context
        self._clock = clock

    async def run(
        self, start: int, deliver: Deliver, max_frames: int = 256, max_bytes: int = 4 << 20
    ) -> ReplayResult:
        """Ask for every batch from `start` on; `deliver` gets them in order, in bounded lists.

        Time spent in `deliver` does not count as the server's silence. Returns in bounded time
        and raises nothing of its own; cancelling it closes the socket.
        """
        request = _Request(self._settings, self._clock)
        socket = self._context.socket(zmq.DEALER)
        try:
            _configure(socket, self._settings, self._endpoint)
            socket.connect(self._endpoint)
            if await wait_writable(socket, self._settings.reply_timeout):
                socket.send_multipart([b"", start.to_bytes(SEQ_BYTES, "big")], zmq.NOBLOCK)
                await request.read(socket, deliver, max_frames, max_bytes)
            else:
                waited = f"{self._settings.reply_timeout:g} s"
                request.end(
                    ReplayOutcome.TIMEOUT, f"no connection to {self._endpoint} within {waited}"
                )
        except zmq.ZMQError as e:
            request.end(ReplayOutcome.FAILED, f"cannot ask {self._endpoint}: {e.strerror}")
        finally:
            socket.close(0)
        return request.result()


class _Request:
    """What one request has brought so far."""

    def __init__(self, settings: ReplaySettings, clock: Callable[[], float]) -> None:
        self._settings = settings
        self._clock = clock
        self._began = time.monotonic()
        self._batches = 0
        self._bytes = 0
        self._dropped: dict[str, int] = {}
        self._done = False
        self._outcome = ReplayOutcome.FAILED
        self._detail = "not sent"

    def end(self, outcome: ReplayOutcome, detail: str) -> None:
        self._done, self._outcome, self._detail = True, outcome, detail

    def result(self) -> ReplayResult:
        took = time.monotonic() - self._began
        return ReplayResult(
            self._outcome, self._batches, self._bytes, self._dropped, took, self._detail
        )

    async def read(
        self, socket: zmq.Socket[bytes], deliver: Deliver, max_frames: int, max_bytes: int
    ) -> None:
        settings = self._settings
        deadline = self._began + settings.total_timeout
        while not self._done:
            left = deadline - time.monotonic()
            if left <= 0:
                self.end(ReplayOutcome.TIMEOUT, f"not done after {settings.total_timeout:g} s")
            elif not await wait_readable((socket,), min(settings.reply_timeout, left)):
                said = f"{self._batches} batches, then silence" if self._batches else "no answer"
                self.end(ReplayOutcome.TIMEOUT, f"{said} for {settings.reply_timeout:g} s")
            else:
                frames = self._drain(socket, max_frames, max_bytes)
                if frames:
                    await deliver(frames)

    def _drain(self, socket: zmq.Socket[bytes], max_frames: int, max_bytes: int) -> list[Frame]:
        frames: list[Frame] = []
        now, size, taken = self._clock(), 0, 0
        while taken < max_frames and size < max_bytes:
            parts = take(socket)
            if parts is None:
                break
            taken += 1
            try:
                frame = parse_replayed(parts, self._settings.max_event_bytes, now)
            except FrameError as e:
                self._dropped[e.reason] = self._dropped.get(e.reason, 0) + 1
                continue
            if frame is None:
                self.end(ReplayOutcome.COMPLETE, f"{self._batches} batches")
                break
            frames.append(frame)
            size += len(frame.payload)
            self._count(frame)
            if self._done:
                break
        return frames

    def _count(self, frame: Frame) -> None:
        self._batches += 1
        self._bytes += len(frame.payload)
        if self._batches >= self._settings.max_batches:
            self.end(ReplayOutcome.FAILED, f"cut off after {self._batches} batches, no end marker")


def _configure(socket: zmq.Socket[bytes], settings: ReplaySettings, endpoint: str) -> None:
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.IPV6, int(is_ipv6(endpoint) if settings.ipv6 is None else settings.ipv6))
    socket.setsockopt(zmq.RCVHWM, settings.receive_hwm)
    socket.setsockopt(zmq.IMMEDIATE, 1)  # as for the subscription, see transport.py
    socket.setsockopt(zmq.MAXMSGSIZE, 4 * settings.max_event_bytes)
    socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
