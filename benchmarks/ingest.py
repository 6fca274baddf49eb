"""From an engine's socket to the store, and on to where queries see it."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hiredis

from benchmarks.feeder import Feeder
from benchmarks.measure import median, percentiles, until
from benchmarks.sides import MODEL, Ours, Peer, Side
from kvindexd.model import WorkerKey
from kvindexd.store.embedded import valkey_binary

Say = Callable[[str], None]


class Valkey(Side):
    """A store without persistence, for measuring what writes to it."""

    name = "valkey"

    def __init__(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="kvx-bench"))
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = int(probe.getsockname()[1])
        self.url = f"redis://127.0.0.1:{self.port}"
        self.process = subprocess.Popen(
            [
                *(str(valkey_binary()), "--port", str(self.port), "--bind", "127.0.0.1"),
                *("--dir", str(self._folder), "--save", "", "--appendonly", "no"),
            ],
            stdout=subprocess.DEVNULL,
        )
        until(self._connected, "valkey listens")

    def _connected(self) -> bool:
        try:
            self.ask("PING")
        except OSError:
            return False
        return True

    def ask(self, *command: str | bytes) -> Any:
        """One command on a connection of its own."""
        with socket.create_connection(("127.0.0.1", self.port), 10) as connection:
            packed = hiredis.pack_command(command)  # type: ignore[arg-type]
            connection.sendall(packed)
            reader = hiredis.Reader(notEnoughData=Ellipsis)
            while (reply := reader.gets()) is Ellipsis:
                reader.feed(connection.recv(65536))
            return reply

    def last_seq(self, worker: str) -> int:
        """The last batch that is stored of a worker."""
        store_id = WorkerKey("", worker, 0).store_id
        found = self.ask("HGET", "kvx:{0}:w:" + store_id, "sq")
        return int(found) if found else -1

    def stop(self) -> None:
        """End it and remove its folder."""
        super().stop()
        shutil.rmtree(self._folder, ignore_errors=True)


def workers(endpoints: list[str]) -> list[dict[str, object]]:
    """Configuration of a sidecar for these event endpoints."""
    return [
        {
            "worker_id": f"w{i}",
            "model": MODEL,
            "address": f"10.0.0.{i % 250 + 1}:8000",
            "kv_events_endpoint": endpoint,
        }
        for i, endpoint in enumerate(endpoints)
    ]


def to_store(blocks: int, step: int, ranks: int = 1) -> dict[str, Any]:
    """One `sidecar`, everything that its engines publish at once, until it is in the store."""
    events = blocks // step
    store = Valkey()
    feeder = Feeder(ranks, events, step)
    sidecar = Ours("sidecar", store.url, workers=workers(feeder.endpoints))
    try:
        before, before_store = sidecar.cpu(), store.cpu()
        feeder.go()
        report = feeder.report()
        wanted = dict(enumerate(report["last"]))
        until(
            lambda: all(store.last_seq(f"w{i}") == seq for i, seq in wanted.items()),
            "everything is in the store",
            600,
        )
        seconds = time.time() - report["began"]
        return {
            "blocks_per_s": round(blocks / seconds),
            "events_per_s": round(events / seconds),
            "cpu_us_per_block": round((sidecar.cpu() - before) / blocks * 1e6, 2),
            "store_cpu_us_per_block": round((store.cpu() - before_store) / blocks * 1e6, 2),
            "store_bytes_per_block": round(store.resident() / blocks, 1),
        }
    finally:
        feeder.stop()
        sidecar.stop()
        store.stop()


def to_peer(python: str, blocks: int, step: int) -> dict[str, Any]:
    """The same events into the peer, until it has counted them all in its answers."""
    events = blocks // step
    feeder = Feeder(1, events, step)
    peer = Peer(python)
    try:
        peer.register(feeder.endpoints)
        before = peer.cpu()
        feeder.go()
        report = feeder.report()
        idle = peer.cpu()
        still = time.time()
        while True:  # it says nowhere what it has applied: done when it rests
            time.sleep(0.05)
            now = peer.cpu()
            if now - idle > 0.011:
                idle, still = now, time.time()
            elif time.time() - still > 0.5:
                break
        seconds = max(report["ended"], still) - report["began"]
        return {
            "blocks_per_s": round(blocks / seconds),
            "events_per_s": round(events / seconds),
            "cpu_us_per_block": round((peer.cpu() - before) / blocks * 1e6, 2),
        }
    finally:
        feeder.stop()
        peer.stop()


def visibility(rate: int, seconds: float, step: int = 64, ranks: int = 8) -> dict[str, Any]:
    """Milliseconds from publishing to visible in another process's replica, at a steady rate."""
    store = Valkey()
    feeder = Feeder(ranks, int(rate * seconds) // step, step, rate)
    sidecar = Ours("sidecar", store.url, workers=workers(feeder.endpoints))
    watcher = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.watcher", store.url],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert watcher.stdout is not None
        assert watcher.stdin is not None
        if watcher.stdout.readline() != "ready\n":
            raise RuntimeError("the watcher did not start")
        feeder.go()
        report = feeder.report()
        time.sleep(1.0)
        watcher.stdin.write("\n")
        watcher.stdin.flush()
        ages = json.loads(watcher.stdout.readline())
        sent = sum(seq + 1 for seq in report["last"])
        return {
            "blocks_per_s": round(sent * step / (report["ended"] - report["began"])),
            "batches": len(ages),
            "missing": sent - len(ages),
            **{f"{k}_ms": v for k, v in percentiles(ages, 1e3).items()},
        }
    finally:
        assert watcher.stdin is not None
        watcher.stdin.close()
        watcher.wait(10)
        feeder.stop()
        sidecar.stop()
        store.stop()


def run(peer: str | None, *, quick: bool, say: Say) -> dict[str, Any]:
    """Rates by event size, against the peer where there is one, and visibility."""
    out: dict[str, Any] = {}
    repeats = 1 if quick else 3
    for step, blocks in ((64, 128_000 if quick else 384_000), (1, 10_000 if quick else 40_000)):
        ours, theirs = [], []
        for _ in range(repeats):
            ours.append(to_store(blocks, step))
            if peer is not None:
                theirs.append(to_peer(peer, blocks, step))
        row = {k: median(r[k] for r in ours) for k in ours[0]}
        out[f"events_of_{step}"] = {"kvindexd": row, "blocks": blocks, "repeats": repeats}
        if theirs:
            out[f"events_of_{step}"]["peer"] = {k: median(r[k] for r in theirs) for k in theirs[0]}
        say(f"ingest, events of {step} blocks: {json.dumps(out[f'events_of_{step}'])}")
    for rate in (5_000, 20_000) if quick else (5_000, 20_000, 60_000):
        runs = [visibility(rate, 3 if quick else 6) for _ in range(repeats)]
        row = {k: median(r[k] for r in runs) for k in runs[0]}
        out[f"visible_at_{rate}"] = row
        say(f"visible, {rate} blocks/s: {json.dumps(row)}")
    return out
