"""An engine stand-in: vLLM's event wire over real sockets, with restarts and faults on demand.

In a test: `with FakeEngine() as engine: ...`. As a process of its own, to be killed or stopped:
`python -m kvindexd.testing.engine --port 5557` (see `kvindexd.testing.process`).
"""

from __future__ import annotations

import contextlib
import random
import socket as sockets
import time
from collections.abc import Iterable, Sequence
from typing import Self

from kvindexd.testing.publisher import GARBAGE, REPLAY_MODES, Publisher
from kvindexd.testing.wire import CapturedFrame, Event, encode_batch

__all__ = ["GARBAGE", "REPLAY_MODES", "FakeEngine", "free_ports"]

_ATTEMPTS = 5


def free_ports(count: int, host: str = "127.0.0.1") -> int:
    """The first of `count` consecutive TCP ports that nothing listens on right now, and that no
    outgoing connection is given before they are bound."""
    family = sockets.AF_INET6 if ":" in host else sockets.AF_INET
    for _ in range(200):
        # Linux takes ports of outgoing connections from 32,768 on.
        first = random.randrange(15_000, 32_700 - count)  # noqa: S311 - a guess, checked below
        with contextlib.ExitStack() as stack:
            try:
                for port in range(first, first + count):
                    probe = stack.enter_context(sockets.socket(family, sockets.SOCK_STREAM))
                    probe.bind((host, port))
            except OSError:
                continue
            return first
    raise OSError(f"no {count} consecutive free ports found on {host}")


class FakeEngine:
    """One engine: `dp_size` ranks, rank r on `port + r`, each with its own sequence and buffer.

    Every method may be called from any thread and blocks for microseconds, but `restart`, `start`
    and `wait_subscribed`. Close it with `stop`, or use it as a context manager.
    """

    def __init__(
        self,
        *,
        port: int = 0,
        replay_port: int | None = 0,
        host: str = "127.0.0.1",
        dp_size: int = 1,
        topic: str = "",
        buffer_steps: int = 10_000,
        connect: bool = False,
    ) -> None:
        """Port 0 picks a free one; `replay_port=None`: no replay, as by default in vLLM.

        `buffer_steps`: batches kept for replay. `connect`: the events socket connects to `port`
        instead of binding it, as vLLM does when told a concrete host. Raises OSError when a port
        is taken.
        """
        self._last_ts = 0.0
        picked = port == 0 or replay_port == 0
        for attempt in range(_ATTEMPTS):
            self.ranks = _ranks(port, replay_port, host, dp_size, topic, buffer_steps, connect)
            try:
                self.start()
                return
            except OSError:
                self.stop()
                # A free port may be taken by the time it is bound; a given one is not ours to move.
                if not picked or attempt == _ATTEMPTS - 1:
                    raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    # -- life --------------------------------------------------------------------------------

    def start(self) -> None:
        """Open the sockets with sequence 0 and an empty buffer; a running rank is left alone."""
        for rank in self.ranks:
            rank.start()

    def stop(self) -> None:
        """Close all sockets at once; what they still held is lost, as when the process dies."""
        for rank in self.ranks:
            rank.stop()

    def restart(self, rank: int | None = None) -> None:
        """A new process in place: same ports, sequence 0, empty buffer, nothing announced."""
        for one in self.ranks if rank is None else [self.ranks[rank]]:
            one.stop()
            one.start()

    def wait_subscribed(
        self, count: int = 1, rank: int | None = None, timeout: float = 10.0
    ) -> None:
        """Block until `count` subscriptions have reached each rank. Raises TimeoutError.

        A subscriber (re)subscribes only while its own thread polls: in an asyncio test, call this
        through `asyncio.to_thread`.
        """
        deadline = time.monotonic() + timeout
        for one in self.ranks if rank is None else [self.ranks[rank]]:
            one.wait_subscribed(count, deadline)

    # -- where -------------------------------------------------------------------------------

    def endpoint(self, rank: int = 0) -> str:
        """ZMQ endpoint of a rank's events."""
        return self.ranks[rank].endpoint

    def replay_endpoint(self, rank: int = 0) -> str:
        """ZMQ endpoint of a rank's replay, "" if it has none."""
        return self.ranks[rank].replay_endpoint or ""

    def next_seq(self, rank: int = 0) -> int:
        """The sequence number that the next batch will get."""
        return self.ranks[rank].next_seq

    # -- publishing --------------------------------------------------------------------------

    def publish(self, events: Iterable[Event], rank: int = 0, ts: float | None = None) -> int:
        """Send one batch and keep it for replay; returns its sequence number.

        `ts`: the engine's clock in seconds; by default the time, never twice the same.
        """
        if ts is None:
            self._last_ts = ts = max(time.time(), self._last_ts + 1e-6)
        return self.ranks[rank].publish(encode_batch(ts, events, rank))

    def publish_raw(
        self, topic: bytes | str, seq: int | bytes, payload: bytes, rank: int = 0
    ) -> None:
        """Send a recorded batch byte for byte and keep it for replay; the numbering goes on."""
        topic = topic.encode() if isinstance(topic, str) else topic
        self.ranks[rank].publish_raw(topic, seq, payload)

    def play(self, frames: Sequence[CapturedFrame], rank: int = 0) -> int:
        """Publish recorded frames of one publisher; returns how many."""
        for frame in frames:
            self.publish_raw(frame.topic, frame.seq_bytes, frame.payload, rank)
        return len(frames)

    # -- faults ------------------------------------------------------------------------------

    def send_parts(self, parts: Sequence[bytes], rank: int = 0) -> None:
        """Send any multipart message at all on the events socket."""
        self.ranks[rank].send_parts(parts)

    def garbage(self, kind: str, rank: int = 0) -> None:
        """Send one malformed message; `kind` is a key of GARBAGE. It takes up no number."""
        self.ranks[rank].send_parts(GARBAGE[kind])

    def drop_next(self, count: int = 1, rank: int = 0, *, replayable: bool = True) -> None:
        """Number the next batches but do not send them; they can be replayed unless told not to."""
        self.ranks[rank].drop_next(count, replayable)

    def duplicate_next(self, count: int = 1, rank: int = 0) -> None:
        """Send each of the next batches twice."""
        self.ranks[rank].duplicate_next(count)

    def swap_next(self, rank: int = 0) -> None:
        """Hold the next batch back and send it behind the one after it."""
        self.ranks[rank].swap_next()

    def replay_mode(self, mode: str, rank: int = 0) -> None:
        """How replay requests are answered from now on; `mode` is one of REPLAY_MODES."""
        self.ranks[rank].set_replay_mode(mode)

    def replay_requests(self, rank: int = 0) -> list[int]:
        """Start sequences of the replay requests seen since the rank was started."""
        return self.ranks[rank].replay_requests()


def _ranks(
    port: int,
    replay_port: int | None,
    host: str,
    dp_size: int,
    topic: str,
    buffer_steps: int,
    connect: bool,
) -> list[Publisher]:
    port = port or free_ports(dp_size, host)
    while replay_port == 0:
        found = free_ports(dp_size, host)
        replay_port = found if abs(found - port) >= dp_size else 0
    name = f"[{host}]" if ":" in host else host
    return [
        Publisher(
            rank,
            f"tcp://{name}:{port + rank}",
            f"tcp://{name}:{replay_port + rank}" if replay_port is not None else None,
            topic.encode(),
            buffer_steps,
            connect,
        )
        for rank in range(dp_size)
    ]


if __name__ == "__main__":
    from kvindexd.testing.control import main

    main()
