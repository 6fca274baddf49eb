"""One rank of the engine stand-in: a publishing socket, a replay thread, and what they share."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence

import zmq

from kvindexd.testing.wire import END_SEQ

REPLAY_MODES = ("normal", "untopical", "silent", "empty", "cut", "holes")
"""How replay requests are answered.

`normal`: `[b"", topic, seq, payload]` per batch and the end marker. `untopical`: the older form
without the topic. `silent`: not at all. `empty`: the end marker alone. `cut`: half the batches and
no end marker. `holes`: a few, then nothing but the last, as when the sender's queue runs over.
"""

_SEQ = (3).to_bytes(8, "big")
GARBAGE: dict[str, list[bytes]] = {
    "one_part": [b"hello"],
    "no_topic": [_SEQ, b"\x93\x00\x90\x00"],
    "four_parts": [b"", _SEQ, b"\x93\x00\x90\x00", b"extra"],
    "short_seq": [b"", b"\x03", b"\x93\x00\x90\x00"],
    "end_marker": [b"", END_SEQ, b""],
    "shifted": [_SEQ, b"\x93\x00\x90\x00", b""],
}
"""Malformed messages by name, as part lists."""

_BEFORE_HOLE = 12
_BIND_PATIENCE = 2.0


class Publisher:
    """One rank. Sequence, buffer and events socket are guarded by one lock."""

    def __init__(
        self,
        rank: int,
        endpoint: str,
        replay_endpoint: str | None,
        topic: bytes,
        buffer_steps: int,
        connect: bool,
        send_hwm: int = 100_000,
    ) -> None:
        """`endpoint` and `replay_endpoint` may end with port 0 or `*`: `start` puts the real one.

        `send_hwm`: messages that may wait for a slow subscriber before more are dropped, 0 = any.
        """
        self.rank = rank
        self.endpoint = endpoint
        self.replay_endpoint = replay_endpoint
        self._topic = topic
        self._buffer_steps = buffer_steps
        self._connect = connect
        self._send_hwm = send_hwm
        self._lock = threading.Lock()
        self._mode = "normal"
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._reset()

    def _reset(self) -> None:
        self.next_seq = 0
        self._buffer: deque[tuple[int, bytes, bytes]] = deque(maxlen=self._buffer_steps)
        self._subscriptions = 0
        self._requests: list[int] = []
        self._drops: deque[bool] = deque()  # per batch to come: may it be replayed
        self._duplicates = 0
        self._swap = False
        self._held_back: list[bytes] | None = None

    # -- life --------------------------------------------------------------------------------

    def start(self, buffered: Iterable[tuple[int, bytes, bytes]] = ()) -> None:
        """Open the sockets. Raises OSError naming the endpoint when one cannot be bound.

        `buffered`: (seq, topic, payload) of batches sent before anybody listened, for replay.
        """
        if self._context is not None:
            return
        self._reset()
        self._buffer.extend(buffered)
        if self._buffer:
            self.next_seq = self._buffer[-1][0] + 1
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        router: zmq.Socket[bytes] | None = None
        try:
            # To a subscriber an XPUB is a PUB; to us it tells who has subscribed.
            events = self._socket(context, zmq.XPUB)
            events.setsockopt(zmq.XPUB_VERBOSER, 1)
            events.setsockopt(zmq.SNDHWM, self._send_hwm)
            if self._connect:
                events.connect(self.endpoint)
            else:
                self.endpoint = _bind(events, self.endpoint)
            if self.replay_endpoint is not None:
                router = self._socket(context, zmq.ROUTER)
                # vLLM leaves the default of 1,000, beyond which a ROUTER drops replies silently,
                # or does not, as the machine's load has it; here that is what `holes` is for.
                router.setsockopt(zmq.SNDHWM, 0)
                self.replay_endpoint = _bind(router, self.replay_endpoint)
        except BaseException:
            context.destroy(linger=0)
            raise
        self._context, self._events = context, events
        self._stopping = threading.Event()
        self._thread = None
        if router is not None:
            name = f"fake-engine-replay-{self.rank}"
            self._thread = threading.Thread(target=self._serve, args=(router,), name=name)
            self._thread.daemon = True
            self._thread.start()

    def stop(self, drain: float = 0.0) -> None:
        """Close everything; the addresses are free again when this returns.

        `drain`: seconds that subscribers have to take what was sent; else it is lost.
        """
        with self._lock:
            context, self._context = self._context, None
            if context is None:
                return
            self._stopping.set()
            linger = round(drain * 1000)
            self._events.close(linger)
        if self._thread is not None:
            self._thread.join()
        context.destroy(linger=linger)

    def _socket(self, context: zmq.Context[zmq.Socket[bytes]], kind: int) -> zmq.Socket[bytes]:
        socket = context.socket(kind)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.IPV6, int("[" in self.endpoint))
        return socket

    def wait_subscribed(self, count: int, deadline: float) -> None:
        """Until `count` subscriptions are in place. Raises TimeoutError at `deadline`."""
        while self.subscriptions() < count:
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"{self.endpoint}: {self.subscriptions()} subscriptions, expected {count}"
                )
            time.sleep(0.002)

    def subscriptions(self) -> int:
        """Subscriptions in place right now."""
        with self._lock:
            self._running()
            while True:
                try:
                    change = self._events.recv(zmq.NOBLOCK)
                except zmq.Again:
                    return self._subscriptions
                self._subscriptions += {1: 1, 0: -1}.get(change[0] if change else 2, 0)

    # -- publishing --------------------------------------------------------------------------

    def publish(self, payload: bytes) -> int:
        """Number a batch, send it as the faults in force say, keep it for replay."""
        with self._lock:
            self._running()
            seq = self.next_seq
            self.next_seq += 1
            self._emit(self._topic, seq, seq.to_bytes(8, "big"), payload)
            return seq

    def publish_raw(self, topic: bytes, seq: int | bytes, payload: bytes) -> None:
        """The same with a number and topic given from outside."""
        number = seq if isinstance(seq, int) else int.from_bytes(seq, "big")
        with self._lock:
            self._running()
            seq_bytes = seq if isinstance(seq, bytes) else seq.to_bytes(8, "big")
            self._emit(topic, number, seq_bytes, payload)
            self.next_seq = number + 1

    def send_parts(self, parts: Sequence[bytes]) -> None:
        """Send a message as it stands."""
        with self._lock:
            self._running()
            self._events.send_multipart(list(parts))

    def _emit(self, topic: bytes, seq: int, seq_bytes: bytes, payload: bytes) -> None:
        replayable = True
        parts = [topic, seq_bytes, payload]
        if self._drops:
            replayable = self._drops.popleft()
        elif self._swap:
            self._swap, self._held_back = False, parts
        else:
            copies = 2 if self._duplicates else 1
            self._duplicates = max(0, self._duplicates - 1)
            for _ in range(copies):
                self._events.send_multipart(parts)
            if self._held_back is not None:
                self._events.send_multipart(self._held_back)
                self._held_back = None
        if replayable:
            self._buffer.append((seq, topic, payload))

    def _running(self) -> None:
        if self._context is None:
            raise RuntimeError(f"engine stand-in {self.endpoint} is stopped: call start() first")

    # -- faults ------------------------------------------------------------------------------

    def drop_next(self, count: int, replayable: bool) -> None:
        with self._lock:
            self._drops.extend([replayable] * count)

    def duplicate_next(self, count: int) -> None:
        with self._lock:
            self._duplicates += count

    def swap_next(self) -> None:
        with self._lock:
            self._swap = True

    def set_replay_mode(self, mode: str) -> None:
        """Raises ValueError for a mode that is none of REPLAY_MODES."""
        if mode not in REPLAY_MODES:
            raise ValueError(f"replay mode {mode!r}: expected one of {', '.join(REPLAY_MODES)}")
        with self._lock:
            self._mode = mode

    def replay_requests(self) -> list[int]:
        with self._lock:
            return list(self._requests)

    # -- replay ------------------------------------------------------------------------------

    def _serve(self, router: zmq.Socket[bytes]) -> None:
        while not self._stopping.is_set():
            if router.poll(20):
                self._answer(router, router.recv_multipart())
        router.close(0)

    def _answer(self, router: zmq.Socket[bytes], request: list[bytes]) -> None:
        if len(request) != 3:
            return  # as vLLM: any other framing gets no answer at all
        client, _, start_bytes = request
        start = int.from_bytes(start_bytes, "big")
        with self._lock:
            self._requests.append(start)
            mode = self._mode
            batches = [batch for batch in self._buffer if batch[0] >= start]
        if mode == "silent":
            return
        if mode == "empty":
            batches = []
        elif mode == "cut":
            batches = batches[: len(batches) // 2]
        elif mode == "holes":
            batches = [*batches[:_BEFORE_HOLE], *batches[_BEFORE_HOLE:][-1:]]
        older = mode == "untopical"
        for seq, topic, payload in batches:
            head = [client, b""] if older else [client, b"", topic]
            router.send_multipart([*head, seq.to_bytes(8, "big"), payload])
        if mode != "cut":
            head = [client, b""] if older else [client, b"", b""]
            router.send_multipart([*head, END_SEQ, b""])


def _bind(socket: zmq.Socket[bytes], endpoint: str) -> str:
    """Bind, waiting for a predecessor on the same address to be gone; the endpoint to name."""
    deadline = time.monotonic() + _BIND_PATIENCE
    while True:
        try:
            socket.bind(endpoint)
            if endpoint.endswith((":0", ":*")):
                return socket.getsockopt_string(zmq.LAST_ENDPOINT)
            return endpoint
        except zmq.ZMQError as e:
            if e.errno != zmq.EADDRINUSE or time.monotonic() > deadline:
                raise OSError(e.errno, f"cannot bind {endpoint}: {e.strerror}") from e
            time.sleep(0.01)
