"""Plays the engines of a fleet in a process of its own, at full speed or at a given rate.

    python -m benchmarks.feeder RANKS EVENTS BLOCKS_PER_EVENT RATE SUBSCRIBERS

It prints the endpoints as JSON, waits for a line on stdin and for the subscribers, publishes EVENTS
batches of one event round robin over the ranks, and prints when it began and ended (Unix seconds)
and the last sequence number of each rank. RATE is in blocks per second, 0 = as fast as it goes.
Every batch carries the time at which it is sent. It then waits for stdin to close.
"""

from __future__ import annotations

import json
import struct
import subprocess
import sys
import time
from typing import Any

from benchmarks.workload import Engines, Prompts, payload, prefix_events


def make(ranks: int, events: int, step: int) -> list[tuple[int, bytes]]:
    """(rank, payload) of each batch: prompts of 64 blocks, `step` at a time."""
    source = Prompts(step)
    chain = max(64, step)
    out: list[tuple[int, bytes]] = []
    queues: list[list[dict[str, object]]] = [[] for _ in range(ranks)]
    while len(out) < events:
        rank = len(out) % ranks
        if not queues[rank]:
            tokens, hashes = source.tokens(chain), source.hashes(chain)
            queues[rank] = list(prefix_events(tokens, hashes, step))
        out.append((rank, payload([queues[rank].pop(0)], 0.0)))
    return out


def main() -> None:
    """See the module's head."""
    ranks, events, step, rate, subscribers = map(int, sys.argv[1:])
    engines = Engines(ranks)
    batches = make(ranks, events, step)
    print(json.dumps(engines.endpoints), flush=True)
    sys.stdin.readline()
    engines.wait_subscribed(subscribers)
    time.sleep(0.2)
    began = time.time()
    pack_time = struct.Struct(">d").pack
    for i, (rank, body) in enumerate(batches):
        if rate:
            due = began + i * step / rate
            while (left := due - time.time()) > 0:
                time.sleep(left)
        # `[ts, ...]`: a fixarray, then the float's nine bytes.
        engines.publish(rank, body[:2] + pack_time(time.time()) + body[10:])
    ended = time.time()
    last = [engines.sent(r) for r in range(ranks)]
    print(json.dumps({"began": began, "ended": ended, "last": last}), flush=True)
    sys.stdin.read()
    engines.close()


class Feeder:
    """The feeder's process, seen from the benchmark."""

    def __init__(
        self, ranks: int, events: int, step: int, rate: int = 0, subscribers: int = 1
    ) -> None:
        arguments = [str(n) for n in (ranks, events, step, rate, subscribers)]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.feeder", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        self.endpoints: list[str] = json.loads(self.process.stdout.readline())

    def go(self) -> None:
        """Start once everybody has subscribed."""
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def report(self) -> dict[str, Any]:
        """What it did, when it is done."""
        assert self.process.stdout is not None
        return dict(json.loads(self.process.stdout.readline()))

    def stop(self) -> None:
        """End it, in the midst of its work if need be."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.process.wait(1)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


if __name__ == "__main__":
    main()
