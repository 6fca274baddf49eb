"""An HTTP client on many keep-alive connections, in a process of its own; prints JSON.

    python -m benchmarks.gateway_load PORT PATH BODIES CONNECTIONS RATE

BODIES is a file of `client.pack_bodies`, each sent once. RATE 0: closed loop, each connection sends
when its answer is there; otherwise so many requests per second in all, evenly. Every answer is
checked: status, completeness, and that the upstream got the whole body.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import uvloop

from benchmarks.client import unpack_bodies

STALLED = 30.0
"""Seconds without any answer after which the run is given up."""


class Load:
    """What all connections share. Times in microseconds."""

    def __init__(self, bodies: Sequence[bytes], path: str, connections: int, rate: float) -> None:
        head = f"POST {path} HTTP/1.1\r\nhost: bench\r\ncontent-type: application/json\r\n"
        self._requests = [f"{head}content-length: {len(b)}\r\n\r\n".encode() + b for b in bodies]
        self._sizes = [len(b) for b in bodies]
        self._rate = rate
        self._next = 0
        self.idle = connections
        self.started = time.perf_counter()
        self.done = asyncio.Event()
        self.latencies: list[int] = []
        self.first_bytes: list[int] = []
        self.errors: Counter[str] = Counter()
        self.home = 0
        self.last = self.started

    def take(self) -> tuple[int, bytes, float] | None:
        """(number, bytes, when to send); None when all are sent."""
        number = self._next
        if number == len(self._requests):
            return None
        self._next += 1
        at = self.started + number / self._rate if self._rate else 0.0
        return number, self._requests[number], at

    def unsent(self) -> int:
        """Requests that no connection was left for."""
        return len(self._requests) - self._next

    def ended(self, number: int, begun: float, first: float, answer: bytes) -> None:
        """An answer is complete."""
        now = self.last = time.perf_counter()
        if not answer.startswith(b"HTTP/1.1 200 "):
            self.errors[answer[9:12].decode("ascii", "replace")] += 1
            return
        if b'"got": %d,' % self._sizes[number] not in answer:
            self.errors["body"] += 1
            return
        self.home += b'"home": true' in answer
        self.latencies.append(round((now - begun) * 1e6))
        self.first_bytes.append(round((first - begun) * 1e6))


class Connection(asyncio.Protocol):
    """One connection: send, wait for the whole answer, send again."""

    def __init__(self, load: Load) -> None:
        self._load = load
        self._raw = bytearray()
        self._number = -1
        self._begun = self._first = 0.0

    def connection_made(self, transport: Any) -> None:
        """Begin."""
        self._transport = transport
        self._load.idle -= 1
        self._go()

    def _go(self) -> None:
        taken = self._load.take()
        if taken is None:
            self._number = -1
            self._load.idle += 1
            self._transport.close()
            return
        number, request, at = taken
        ahead = at - time.perf_counter()
        if ahead > 0:
            loop = asyncio.get_running_loop()
            loop.call_later(ahead, lambda: self._send(number, request, time.perf_counter()))
        else:
            # Late by its own doing: what it waited for a free connection counts.
            self._send(number, request, at or time.perf_counter())

    def _send(self, number: int, request: bytes, begun: float) -> None:
        self._number, self._begun, self._first = number, begun, 0.0
        if not self._transport.is_closing():
            self._transport.write(request)

    def data_received(self, data: bytes) -> None:
        """Until the answer is complete."""
        self._first = self._first or time.perf_counter()
        self._raw += data
        head = self._raw.find(b"\r\n\r\n")
        if head < 0:
            return
        headers = bytes(self._raw[:head]).lower()
        mark = headers.find(b"\r\ncontent-length: ")
        if mark >= 0:
            size = int(headers[mark + 18 :].split(b"\r\n", 1)[0])
            if len(self._raw) < head + 4 + size:
                return
        elif not self._raw.endswith(b"\r\n0\r\n\r\n"):
            return
        answer = bytes(self._raw)
        self._raw.clear()
        self._load.ended(self._number, self._begun, self._first, answer)
        self._go()

    def connection_lost(self, exc: Exception | None) -> None:
        """Lost with a request under way: an error, and this connection is done."""
        if self._number >= 0:
            self._load.errors["connection"] += 1
            self._load.idle += 1
        self._load.done.set()


async def run(port: int, load: Load, connections: int) -> dict[str, Any]:
    """Send all; the figures."""
    loop = asyncio.get_running_loop()
    load.started = load.last = time.perf_counter()
    for _ in range(connections):
        await loop.create_connection(lambda: Connection(load), "127.0.0.1", port)
    while load.idle < connections:
        load.done.clear()
        try:
            async with asyncio.timeout(STALLED):
                await load.done.wait()
        except TimeoutError:
            if time.perf_counter() - load.last > STALLED:
                load.errors["stalled"] += connections - load.idle
                break
    if unsent := load.unsent():
        load.errors["unsent"] = unsent
    return {
        "seconds": load.last - load.started,
        "errors": dict(load.errors),
        "home": load.home,
        "latencies": load.latencies,
        "first_bytes": load.first_bytes,
    }


def main() -> None:
    """See the module's head."""
    port, path, file, connections, rate = sys.argv[1:6]
    bodies = unpack_bodies(Path(file).read_bytes())

    async def all_of_it() -> dict[str, Any]:
        load = Load(bodies, path, int(connections), float(rate))
        return await run(int(port), load, int(connections))

    print(json.dumps(uvloop.run(all_of_it())))


if __name__ == "__main__":
    main()
