"""Load beyond what a daemon can take, and what it does then: run by hand, prints figures.

    PYTHONPATH=.:tests python benchmarks/overload.py [--seconds 60] [--calls 1000000]

Three parts: callers with deadlines of 1 ms; a publisher that sends as fast as it can, far above the
sustainable rate; calls that are all cancelled. Short forms of all three are tests.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import tempfile
import time
from collections import Counter
from typing import Any

import grpc
from daemon import Daemon, serving
from reliability import QUICK, counter, matched, stored
from test_field_rpc import rss

from kvindexd import chain
from kvindexd.testing.engine import FakeEngine
from kvindexd.v1 import index_pb2 as pb
from kvindexd.v1 import index_pb2_grpc

MIB = 1 << 20
CALLERS = 64


def crowd(daemon: Daemon) -> None:
    """1,500 callers at once with 1,024-block prompts and 1 ms each."""
    prompt = pb.Prompt(model="m", token_ids=chain.pack_tokens([*range(16 * 1024)]))
    request = pb.ScoreWorkersRequest(prompt=prompt)
    calls = [daemon.index.ScoreWorkers.future(request, timeout=0.001) for _ in range(1500)]
    ends: Counter[str] = Counter()
    for call in calls:
        error: Any = call.exception()
        ends["OK" if error is None else error.code().name] += 1
    began = time.monotonic()
    daemon.index.ScoreWorkers(request, timeout=10)
    took = (time.monotonic() - began) * 1000
    print(f"crowd: {dict(ends)}; the next patient caller waited {took:.1f} ms")


def flood(daemon: Daemon, engine: FakeEngine, seconds: float) -> None:
    """A publisher without any limit for some time; then how long until all is right."""
    assert daemon.process is not None
    before, most, sent = rss(daemon.process.pid), 0, engine.next_seq()
    began = time.monotonic()
    while time.monotonic() - began < seconds:
        for _ in range(200):
            engine.publish([stored(n % 2000, 8) for n in range(sent, sent + 8)])
            sent += 1
        most = max(most, rss(daemon.process.pid))
    rate = (sent - 1) / (time.monotonic() - began)
    stopped = time.monotonic()
    done = daemon.worker("w").last_seq
    engine.publish([{"type": "AllBlocksCleared"}])
    last = engine.publish([stored(0, 4)])
    daemon.until(lambda: daemon.worker("w").last_seq == last, "caught up", 600)
    took = time.monotonic() - stopped
    assert matched(daemon, 4) == 4
    gaps, lost = counter(daemon, "gaps"), counter(daemon, "lost_batches")
    print(
        f"flood: {rate:.0f} batches/s sent for {seconds:.0f} s, {done} of {last} applied by then; "
        f"caught up in {took:.1f} s; gaps {gaps}, lost {lost}; RSS +{(most - before) / MIB:.0f} MiB"
    )


async def _cancel_all(address: str, calls: int) -> Counter[str]:
    """Calls that are all cancelled, most of them after they have reached the server."""
    ends: Counter[str] = Counter()
    prompt = pb.Prompt(model="m", token_ids=chain.pack_tokens([*range(16 * 3 + 1)]))
    request = pb.ScoreWorkersRequest(prompt=prompt)

    async def some(stub: Any, count: int, rng: random.Random) -> None:
        for _ in range(count):
            call = stub.ScoreWorkers(request, timeout=20)
            await asyncio.sleep(rng.choice((0.0, 0.0, 0.001, 0.003)))
            ends["cancelled" if call.cancel() else "answered before"] += 1

    async with grpc.aio.insecure_channel(address) as channel:
        stub = index_pb2_grpc.KVIndexStub(channel)
        async with asyncio.TaskGroup() as group:
            for n in range(CALLERS):
                group.create_task(some(stub, calls // CALLERS, random.Random(n)))
    return ends


def cancelled(daemon: Daemon, calls: int) -> None:
    """Cancelled calls in ten parts, and the daemon's memory after each."""
    assert daemon.process is not None
    ends: Counter[str] = Counter()
    memory: list[float] = []
    began = time.monotonic()
    for part in range(11):  # the first fills caches and pools, and is not counted
        done = asyncio.run(_cancel_all(daemon.ready["grpc"], calls // 10))
        ends += done if part else Counter()
        memory.append(round(rss(daemon.process.pid) / MIB, 1))
        print(f"cancelled: part {part} of 10, RSS {memory[-1]} MiB", flush=True)
    assert matched(daemon, 3) == 3
    print(
        f"cancelled: {dict(ends)} in {time.monotonic() - began:.0f} s; "
        f"RSS {memory[1]} MiB after the first tenth, {memory[-1]} MiB after the last"
    )


def main() -> None:
    """All parts, one after the other."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="length of the flood")
    parser.add_argument("--calls", type=int, default=1_000_000, help="calls to cancel")
    options = parser.parse_args()
    settings = QUICK | {
        "ingest.lease_ttl": 20.0,
        "ingest.rcvhwm": 5000,
        "ingest.replay_timeout": 5.0,
    }
    with (
        tempfile.TemporaryDirectory() as folder,
        FakeEngine() as engine,
        serving(**settings, index__data_dir=folder) as daemon,
    ):
        daemon.register("w", engine.endpoint(), replay_endpoint=engine.replay_endpoint())
        engine.wait_subscribed()
        engine.publish([stored(0, 3)])
        daemon.until_seq("w", 0)
        crowd(daemon)
        flood(daemon, engine, options.seconds)
        cancelled(daemon, options.calls)


if __name__ == "__main__":
    main()
