"""Load beyond what a daemon can take, and what it does then: run by hand, prints figures.

    PYTHONPATH=.:tests python benchmarks/overload.py [seconds]

Three parts: callers with deadlines of 1 ms; a publisher far above the sustainable rate with Redis
slowed down; calls of which a third is cancelled. Short forms of all three are tests.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections import Counter
from typing import Any

from daemon import Daemon, serving
from reliability import QUICK, counter, matched, stored
from test_field_rpc import _cancel_some, rss

from kvindexd import chain
from kvindexd.testing.engine import FakeEngine
from kvindexd.v1 import index_pb2 as pb

MIB = 1 << 20


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


def cancelled(daemon: Daemon, calls: int) -> None:
    """Calls of which a third is cancelled."""
    assert daemon.process is not None
    _cancel_some(daemon, calls // 4)
    before = rss(daemon.process.pid)
    _cancel_some(daemon, calls)
    print(f"cancelled: {calls} calls; RSS {(rss(daemon.process.pid) - before) / MIB:+.1f} MiB")


def main() -> None:
    """All parts, one after the other."""
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else 60.0
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
        cancelled(daemon, int(200 * seconds))
        flood(daemon, engine, seconds)


if __name__ == "__main__":
    main()
