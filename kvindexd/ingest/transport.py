"""One rank's subscription: a SUB socket that is watched, validated and drained in batches."""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple, Self

import msgspec
import structlog
import zmq
from zmq.utils.monitor import parse_monitor_message

from kvindexd.ingest.frame import Frame, FrameError, looks_shifted, parse_live
from kvindexd.ingest.link import MONITORED, Link, LinkEvent
from kvindexd.ingest.sockets import (
    TransportError,
    check_endpoint,
    is_ipv6,
    new_context,
    take,
    wait_readable,
)

__all__ = [
    "Delivery",
    "Link",
    "LinkEvent",
    "Subscriber",
    "SubscriberSettings",
    "TransportError",
    "new_context",
]

log = structlog.get_logger(__name__)

_MAX_RECREATE_WAIT = 60.0
_numbers = itertools.count()
_OUT_OF_STEP = 4
"""Messages in a row that look shifted before the socket is replaced. Replacing it loses whatever
waits in it, so that one piece of garbage must cost itself only."""
_LOOK = 1.0
"""Seconds between looks at a connection that tells nothing."""


class SubscriberSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How to subscribe. Times in seconds.

    `ipv6`: None switches it on for IPv6 literals; set it for names that only have an AAAA record.
    `receive_hwm`: messages that may wait in the socket; beyond that ZeroMQ drops, which shows as
    a gap. `max_event_bytes`: a larger payload is dropped and counted; four times as large costs
    the connection, which bounds memory.
    """

    endpoint: str
    topic: str = ""
    bind: bool = False
    ipv6: bool | None = None
    max_event_bytes: int = 16 << 20
    receive_hwm: int = 20_000
    heartbeat_interval: float = 5.0
    heartbeat_timeout: float = 15.0
    connect_timeout: float = 5.0
    reconnect_min: float = 0.1
    reconnect_max: float = 5.0
    keepalive_idle: int = 30
    keepalive_interval: int = 10
    keepalive_count: int = 3


class Delivery(NamedTuple):
    """What one `receive` brought: link events first, they happened before the frames.

    `dropped`: messages refused, by reason (`bad_parts`, `bad_seq`, `too_large`).
    """

    frames: list[Frame]
    links: list[LinkEvent]
    dropped: dict[str, int]


class Subscriber:
    """A subscription. One task owns it: that task opens, receives and closes.

    Use as an async context manager, or call `open` and `close`.
    """

    def __init__(
        self,
        settings: SubscriberSettings,
        context: zmq.Context[zmq.Socket[bytes]],
        clock: Callable[[], float] = time.time,
        on_refused: Callable[[list[bytes], int], None] | None = None,
    ) -> None:
        """`on_refused` is shown the parts of every message that is no numbered batch, and how
        many frames of the same delivery came before it.

        Raises TransportError for an endpoint that cannot be used.
        """
        self._settings = settings
        self._on_refused = on_refused
        self._endpoint = check_endpoint(settings.endpoint, bind=settings.bind)
        self._context = context
        self._clock = clock
        self._log = log.bind(endpoint=self._endpoint)
        self._socket: zmq.Socket[bytes] | None = None
        self._monitor: zmq.Socket[bytes] | None = None
        self._recreate_at = 0.0
        self._recreate_wait = 1.0
        self._shifted = 0
        self.link = Link.new(self._endpoint, settings.bind, clock())
        self.dropped: Counter[str] = Counter()

    async def __aenter__(self) -> Self:
        self.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    @property
    def endpoint(self) -> str:
        """The endpoint in use; after binding port 0 or `*`, the real one."""
        if self._socket is not None and self._settings.bind:
            return self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        return self._endpoint

    def open(self) -> None:
        """Create the socket and connect (in the background) or bind.

        Raises TransportError when the address cannot be bound or resolved.
        """
        settings = self._settings
        socket = self._context.socket(zmq.SUB)
        monitor = self._context.socket(zmq.PAIR)
        try:
            _configure(socket, settings, self._endpoint)
            # From here on events are queued for us, so that the first connection is not missed.
            _watch(socket, monitor)
            socket.subscribe(settings.topic)
            if settings.bind:
                socket.bind(self._endpoint)
            else:
                socket.connect(self._endpoint)
        except zmq.ZMQError as e:
            _close(socket, monitor)
            verb = "bind" if settings.bind else "connect to"
            hint = "; is another process bound to it?" if e.errno == zmq.EADDRINUSE else ""
            raise TransportError(f"cannot {verb} {self._endpoint}: {e.strerror}{hint}") from e
        self._socket, self._monitor = socket, monitor

    def close(self) -> None:
        """Close the socket; what it still holds is dropped, a replay brings it back."""
        socket, monitor, self._socket, self._monitor = self._socket, self._monitor, None, None
        if socket is not None and monitor is not None:
            _close(socket, monitor)

    async def receive(
        self, within: float | None = None, max_frames: int = 64, max_bytes: int = 1 << 20
    ) -> Delivery:
        """Wait for something to happen, then take all that is there, within bounds.

        Empty if nothing does `within` seconds. May be cancelled at any time: nothing is lost by it.
        """
        socket, monitor = self._socket, self._monitor
        if socket is None or monitor is None:
            raise RuntimeError("subscriber is not open: call open() first")
        delivery = Delivery([], [], {})
        deadline = None if within is None else time.monotonic() + within
        while True:
            left = _LOOK if deadline is None else min(_LOOK, deadline - time.monotonic())
            if await wait_readable((socket, monitor), left):
                self._drain_monitor(monitor, delivery)
                self._drain(socket, delivery, max_frames, max_bytes)
            elif self.link.abandoned(self._clock()):
                self._recreate("abandoned", delivery)
            if any(delivery) or (deadline is not None and time.monotonic() >= deadline):
                return delivery

    def _drain_monitor(self, monitor: zmq.Socket[bytes], delivery: Delivery) -> None:
        now = self._clock()
        while (parts := take(monitor)) is not None:
            event = self.link.observe(parse_monitor_message(parts), now)
            if event is not None:
                delivery.links.append(event)
                self._tell(event, now)

    def _drain(
        self, socket: zmq.Socket[bytes], delivery: Delivery, max_frames: int, max_bytes: int
    ) -> None:
        now, taken, size = self._clock(), 0, 0
        while taken < max_frames and size < max_bytes:
            parts = take(socket)
            if parts is None:
                break
            taken += 1
            size += len(parts[-1])
            try:
                delivery.frames.append(parse_live(parts, self._settings.max_event_bytes, now))
            except FrameError as e:
                self._refuse(e, parts, delivery)
                if self._out_of_step(parts) and self._recreate("framing out of step", delivery):
                    return
            else:
                self._shifted = 0
        if delivery.frames:
            self.link.heard(now)
            self._recreate_wait = 1.0

    def _refuse(self, error: FrameError, parts: list[bytes], delivery: Delivery) -> None:
        delivery.dropped[error.reason] = delivery.dropped.get(error.reason, 0) + 1
        if not self.dropped[error.reason]:  # the first of its kind; then the counter tells
            self._log.warning(
                "frame_refused",
                reason=error.reason,
                detail=str(error),
                sizes=[*map(len, parts)],
                cost="such messages are not indexed; a counter has how many",
                fix="see what else publishes on this endpoint",
            )
        self.dropped[error.reason] += 1
        if self._on_refused is not None:
            self._on_refused(parts, len(delivery.frames))

    def _out_of_step(self, parts: list[bytes]) -> bool:
        self._shifted = self._shifted + 1 if looks_shifted(parts) else 0
        return self._shifted >= _OUT_OF_STEP

    def _recreate(self, why: str, delivery: Delivery) -> bool:
        """Replace the socket; seldom, should the peer be to blame.

        A bound socket stays: its address is free again only when ZeroMQ has closed it for good.
        """
        now = self._clock()
        if now < self._recreate_at or self._settings.bind:
            return False
        self._recreate_at = now + self._recreate_wait
        self._recreate_wait = min(_MAX_RECREATE_WAIT, self._recreate_wait * 2)
        self._shifted = 0
        self.close()
        self.open()
        self.link.replaced(why, now)
        delivery.links.append(LinkEvent.RECREATED)
        self._tell(LinkEvent.RECREATED, now)
        return True

    def _tell(self, event: LinkEvent, now: float) -> None:
        good = event is LinkEvent.CONNECTED
        emit = self._log.info if good else self._log.warning
        emit(
            f"link_{event.value}",
            detail=self.link.describe(now),
            **({} if good else {"cost": "no events come until it is connected"}),
        )


def _watch(socket: zmq.Socket[bytes], monitor: zmq.Socket[bytes]) -> None:
    """Have a socket's events sent to `monitor`, however many: ZeroMQ's I/O thread waits where they
    cannot be sent, and all sockets with it."""
    monitor.setsockopt(zmq.RCVHWM, 0)
    monitor.setsockopt(zmq.LINGER, 0)
    address = f"inproc://monitor-{next(_numbers)}"
    socket.monitor(address, MONITORED)
    monitor.connect(address)


def _close(socket: zmq.Socket[bytes], monitor: zmq.Socket[bytes]) -> None:
    """Close both, in the one order that cannot hang: with its reader gone, an event that comes now
    would hold the I/O thread, and the end of the monitoring would wait for that thread for ever."""
    socket.monitor(None, 0)
    monitor.close(0)
    socket.close(0)


def _configure(socket: zmq.Socket[bytes], settings: SubscriberSettings, endpoint: str) -> None:
    """All options go before connect or bind: ZeroMQ applies them to later connections only."""

    def ms(seconds: float) -> int:
        return max(1, round(seconds * 1000))

    ipv6 = is_ipv6(endpoint) if settings.ipv6 is None else settings.ipv6
    options: dict[int, int] = {
        zmq.LINGER: 0,
        zmq.IPV6: int(ipv6),
        zmq.RCVHWM: settings.receive_hwm,
        # A new pipe per connection. ZeroMQ ends the whole *process* ("_input_stopped") when a
        # reader that was behind empties a pipe that has outlived its connection (libzmq 3937).
        zmq.IMMEDIATE: 1,
        zmq.MAXMSGSIZE: 4 * settings.max_event_bytes,
        zmq.CONNECT_TIMEOUT: ms(settings.connect_timeout),
        zmq.RECONNECT_IVL: ms(settings.reconnect_min),
        zmq.RECONNECT_IVL_MAX: ms(settings.reconnect_max),
        # A peer that vanishes without FIN is silent for ever: only heartbeats tell.
        zmq.HEARTBEAT_IVL: ms(settings.heartbeat_interval),
        zmq.HEARTBEAT_TIMEOUT: ms(settings.heartbeat_timeout),
        zmq.HEARTBEAT_TTL: ms(settings.heartbeat_timeout),
        zmq.TCP_KEEPALIVE: 1,
        zmq.TCP_KEEPALIVE_IDLE: settings.keepalive_idle,
        zmq.TCP_KEEPALIVE_INTVL: settings.keepalive_interval,
        zmq.TCP_KEEPALIVE_CNT: settings.keepalive_count,
    }
    for option, value in options.items():
        socket.setsockopt(option, value)
