"""The state of one subscription's connection, told from the socket monitor's events."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Any

import msgspec
import zmq

MONITORED = (
    zmq.EVENT_CONNECTED
    | zmq.EVENT_CONNECT_RETRIED
    | zmq.EVENT_ACCEPTED
    | zmq.EVENT_LISTENING
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_CLOSED
    | zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)

_HANDSHAKE_FAILURES = {
    int(zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL): "the peer broke off the ZMQ handshake",
    int(zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL): "the peer does not speak ZMTP, or is no publisher",
    int(zmq.EVENT_HANDSHAKE_FAILED_AUTH): "the peer refused our ZMQ credentials",
}

_RETRY_DUE = 0.5
"""Seconds within which ZeroMQ announces a retry after a connection ended; in fact at once."""


class LinkState(enum.Enum):
    """Where a subscription stands. The values are metric labels."""

    CONNECTING = "connecting"  # never connected so far
    LISTENING = "listening"  # bound, no publisher has connected so far
    CONNECTED = "connected"
    DISCONNECTED = "disconnected"  # was connected; reconnecting, or bound and waiting


class LinkEvent(enum.Enum):
    """What happened to a subscription's connection."""

    CONNECTED = "connected"  # handshake done: frames flow from here on
    DISCONNECTED = "disconnected"
    CONNECT_FAILED = "connect_failed"  # the first failure after a change; retries go on
    HANDSHAKE_FAILED = "handshake_failed"
    RECREATED = "recreated"  # we replaced the socket: its framing was out of step


class Link(msgspec.Struct):
    """One subscription's connection. Times are Unix seconds, None = not yet."""

    endpoint: str
    bind: bool
    state: LinkState
    since: float
    connected_at: float | None = None
    disconnected_at: float | None = None
    last_frame_at: float | None = None
    connects: int = 0
    disconnects: int = 0
    failed_connects: int = 0
    failed_handshakes: int = 0
    recreated: int = 0
    last_error: str = ""
    peers: int = 0
    _descriptors: set[int] = msgspec.field(default_factory=set)
    _attempt_at: float = 0.0
    _failing: bool = False
    _ended_at: float | None = None

    @classmethod
    def new(cls, endpoint: str, bind: bool, now: float) -> Link:
        state = LinkState.LISTENING if bind else LinkState.CONNECTING
        return cls(endpoint, bind, state, now, _attempt_at=now)

    def describe(self, now: float) -> str:
        """The state in words, with what to do about it."""
        if self.state is LinkState.CONNECTED:
            heard = self.last_frame_at
            if heard is None or (self.connected_at is not None and heard < self.connected_at):
                return f"connected to {self.endpoint} {self._ago(now)}, no message since"
            return f"connected to {self.endpoint}, last message {now - heard:.0f} s ago"
        if self.state is LinkState.LISTENING:
            return (
                f"listening on {self.endpoint}, no publisher has connected in {self._ago(now)}; "
                "an engine whose endpoint is '*' or '::' binds itself: connect to it instead"
            )
        error = f" ({self.last_error})" if self.last_error else ""
        if self.state is LinkState.DISCONNECTED:
            return f"connection to {self.endpoint} lost {self._ago(now)}{error}; retrying"
        hint = ""
        if self.failed_connects:
            hint = (
                "; is the engine up, with KV events enabled? vLLM listens only when its endpoint "
                "is tcp://*:PORT; told a concrete host it connects, and kvindexd must bind "
                "(bind_events)"
            )
        return f"never connected to {self.endpoint} in {self._ago(now)}{error}{hint}"

    def _ago(self, now: float) -> str:
        seconds = f"{max(0.0, now - self.since):.0f} s"
        waiting = self.state in (LinkState.CONNECTING, LinkState.LISTENING)
        return seconds if waiting else f"{seconds} ago"

    # -- changes -----------------------------------------------------------------------------

    def observe(self, event: Mapping[str, Any], now: float) -> LinkEvent | None:
        """Take in one monitor event; returns what it means, None if nothing new."""
        kind, value = int(event["event"]), int(event["value"])
        if kind in (zmq.EVENT_CONNECTED, zmq.EVENT_ACCEPTED):
            self._descriptors.add(value)
            self._ended_at = None
        elif kind == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            return self._up(now)
        elif kind in (zmq.EVENT_DISCONNECTED, zmq.EVENT_CLOSED):
            self._descriptors.discard(value)
            self._ended_at = now
            return self._down(now)
        elif kind in _HANDSHAKE_FAILURES:
            self.failed_handshakes += 1
            self._ended_at = now
            self.last_error = _HANDSHAKE_FAILURES[kind]
            return self._failed(LinkEvent.HANDSHAKE_FAILED)
        elif kind == zmq.EVENT_CONNECT_RETRIED:
            self._ended_at = None
            return self._not_connected(now)
        return None

    def abandoned(self, now: float) -> bool:
        """Whether ZeroMQ has ended this connection for good: it ended, and no retry was announced.

        So it does after any breach of protocol: a peer that is no publisher, or a message beyond
        the size limit. A new socket is needed then.
        """
        return not self.bind and self._ended_at is not None and now - self._ended_at > _RETRY_DUE

    def heard(self, now: float) -> None:
        """A frame arrived."""
        self.last_frame_at = now

    def replaced(self, why: str, now: float) -> None:
        """The socket was recreated and connects anew."""
        self.recreated += 1
        self.last_error = why
        self._descriptors.clear()
        self._ended_at = None
        self._attempt_at = now
        self.peers = 0
        if self.state is LinkState.CONNECTED:
            self._change(LinkState.DISCONNECTED, now)
            self.disconnects += 1
            self.disconnected_at = now

    def _up(self, now: float) -> LinkEvent:
        self.peers = max(1, min(self.peers + 1, len(self._descriptors)))
        self.connects += 1
        self.connected_at = now
        self.last_error = ""
        self._failing = False
        self._change(LinkState.CONNECTED, now)
        return LinkEvent.CONNECTED

    def _down(self, now: float) -> LinkEvent | None:
        self.peers = min(self.peers, len(self._descriptors))
        self._attempt_at = now
        if self.state is not LinkState.CONNECTED or self.peers:
            return None
        self.disconnects += 1
        self.disconnected_at = now
        self._change(LinkState.DISCONNECTED, now)
        return LinkEvent.DISCONNECTED

    def _not_connected(self, now: float) -> LinkEvent | None:
        """A retry was scheduled: the attempt before it failed, unless a connection just ended."""
        if self.disconnected_at is not None and now - self.disconnected_at < 0.001:
            return None
        took, self._attempt_at = now - self._attempt_at, now
        self.failed_connects += 1
        if not self.last_error or not self.failed_handshakes:
            self.last_error = "no answer" if took > 2.0 else "refused or unreachable"
        return self._failed(LinkEvent.CONNECT_FAILED)

    def _failed(self, event: LinkEvent) -> LinkEvent | None:
        first, self._failing = not self._failing, True
        return event if first else None

    def _change(self, state: LinkState, now: float) -> None:
        self.state = state
        self.since = now
