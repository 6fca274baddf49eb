"""What a request costs when a real Envoy asks kvindexd where it should go.

The same Envoy, the same stand-in upstreams and the same kind of requests, with the ext_proc filter
(BUFFERED bodies, and FULL_DUPLEX_STREAMED) and without it; the ways take turns. Chats are text that
kvindexd tokenizes itself, each with a last turn that was never seen before, so that no cache of
token ids helps.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.client import pack_bodies
from benchmarks.gateway_envoy import Envoy
from benchmarks.gateway_prompts import CHAT, COMPLETION, Chats
from benchmarks.gateway_upstream import PIECE_SECONDS, PIECES
from benchmarks.measure import percentiles, until
from benchmarks.sides import MODEL, Ours
from benchmarks.workload import BLOCK, Engines, Prompts, payload, prefix_events
from kvindexd.testing.engine import free_ports
from kvindexd.v1 import index_pb2 as pb

WORKERS = 8
CONVERSATIONS = 64
CONNECTIONS = 16
WAYS = ("direct", "buffered", "full_duplex")
_USAGE = {"response_body_mode: NONE": "response_body_mode: STREAMED"}


class Case(NamedTuple):
    """One kind of load. `rate`: requests per second, 0 = as fast as answers come."""

    name: str
    kind: str
    requests: int
    rate: int = 0
    ways: tuple[str, ...] = WAYS


def cases(quick: bool) -> list[Case]:
    """What is measured. Full: 10,000 requests each way, as fast as they go."""
    n = 1_000 if quick else 10_000
    return [
        Case("chat, closed loop", "chat", n),
        Case("chat, 100/s", "chat", n // 10, rate=100),
        Case("token arrays, closed loop", "tokens", n // 5),
        Case("chat, streamed answers", "stream", n // 10, ways=(*WAYS, "buffered_usage")),
    ]


class Fleet:
    """Upstreams, engines' events, kvindexd and the Envoys."""

    def __init__(self, stack: contextlib.ExitStack, folder: Path) -> None:
        self.folder = folder
        self.chats = Chats(folder / "tokenizer", CONVERSATIONS, WORKERS)
        stack.callback(self.chats.close)
        self._upstreams, ports = _upstreams()
        stack.callback(self._upstreams.wait)
        stack.callback(self._upstreams.terminate)
        picker = free_ports(1)
        self.daemon = Ours(
            ext_proc__listen=f"127.0.0.1:{picker}",
            metrics__listen="127.0.0.1:0",
            tokens__models={MODEL: str(folder / "tokenizer")},
        )
        stack.callback(self.daemon.stop)
        engines = Engines(WORKERS)
        stack.callback(engines.close)
        self._fill(engines, ports)
        self.envoys: dict[str, Envoy] = {}
        for way, example, more in (
            ("direct", "buffered.yaml", {"picker": False}),
            ("buffered", "buffered.yaml", {}),
            ("full_duplex", "full_duplex.yaml", {}),
            ("buffered_usage", "buffered.yaml", {"replace": _USAGE}),
        ):
            self.envoys[way] = Envoy(folder, way, example, ports, picker, **more)
            stack.callback(self.envoys[way].stop)

    def _fill(self, engines: Engines, ports: Sequence[int]) -> None:
        """Register the workers, and have each hold its conversations."""
        for i, (endpoint, port) in enumerate(zip(engines.endpoints, ports, strict=True)):
            worker = pb.Worker(
                worker_id=f"w{i}",
                model=MODEL,
                address=f"127.0.0.1:{port}",
                kv_events_endpoint=endpoint,
            )
            self.daemon.admin.RegisterWorker(pb.RegisterWorkerRequest(worker=worker), timeout=30)
        engines.wait_subscribed(1)
        prompts = Prompts()
        self.held = []
        for i, home in enumerate(self.chats.homes):
            tokens = self.chats.held(i)
            blocks = len(tokens) // BLOCK
            self.held.append(len(tokens))
            events = list(prefix_events(tokens[: blocks * BLOCK], prompts.hashes(blocks)))
            engines.publish(home, payload(events))
        self.daemon.wait_applied([engines.sent(i) for i in range(WORKERS)])
        until(self._all_live, "all workers are live")

    def _all_live(self) -> bool:
        request = pb.ListWorkersRequest(model=MODEL, include_stale=True)
        return all(w.state == pb.LIVE for w in self.daemon.admin.ListWorkers(request).workers)

    def bodies(self, kind: str, count: int) -> list[bytes]:
        """Requests of one kind."""
        if kind == "tokens":
            return self.chats.token_bodies(count)
        return self.chats.bodies(count, stream=kind == "stream")

    def idle_cpu_percent(self, seconds: float = 2.0) -> float:
        """What kvindexd and its store take of a core without any request: heartbeats, metrics."""
        before, begun = self.daemon.cpu(), time.monotonic()
        time.sleep(seconds)
        return round(100 * (self.daemon.cpu() - before) / (time.monotonic() - begun), 1)

    def picks(self) -> Counter[str]:
        """Requests at the picker so far: by cache, by load, or refused with a status."""
        page = f"http://{self.daemon.metrics}/metrics"
        with urllib.request.urlopen(page, timeout=10) as answer:
            text = answer.read().decode()
        found = re.findall(r'^kvindexd_ext_proc_requests_total\{\w+="(\w+)"\} (\S+)$', text, re.M)
        return Counter({how: int(float(count)) for how, count in found})


def _upstreams() -> tuple[subprocess.Popen[str], list[int]]:
    command = [sys.executable, "-m", "benchmarks.gateway_upstream", str(WORKERS)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    ports: list[int] = json.loads(process.stdout.readline())
    return process, ports


@dataclass
class Sum:
    """All rounds of one case one way. CPU in seconds, times in microseconds."""

    latencies: list[int] = field(default_factory=list)
    first_bytes: list[int] = field(default_factory=list)
    errors: Counter[str] = field(default_factory=Counter)
    picks: Counter[str] = field(default_factory=Counter)
    requests: int = 0
    home: int = 0
    without_pick: int = 0
    seconds: float = 0.0
    picker_cpu: float = 0.0
    envoy_cpu: float = 0.0

    def figures(self) -> dict[str, Any]:
        """What is reported; milliseconds where not told otherwise."""
        out: dict[str, Any] = {
            "requests": self.requests,
            "errors": dict(self.errors),
            "without_pick": self.without_pick,
            "by": dict(self.picks),
            "at_home": round(self.home / self.requests, 3),
            "per_second": round(len(self.latencies) / max(self.seconds, 1e-9)),
            "picker_cpu_us": round(1e6 * self.picker_cpu / self.requests),
            "envoy_cpu_us": round(1e6 * self.envoy_cpu / self.requests),
        }
        for name, times in (("", self.latencies), ("first_byte_", self.first_bytes)):
            found = percentiles(times or [0], 1e-3)
            out |= {f"{name}{k}_ms": round(v, 2) for k, v in found.items()}
        return out


def one_round(fleet: Fleet, way: str, case: Case, count: int, total: Sum) -> None:
    """Send `count` requests one way and add up what came of it."""
    bodies = fleet.bodies(case.kind, count)
    file = fleet.folder / "bodies"
    file.write_bytes(pack_bodies(bodies))
    envoy = fleet.envoys[way]
    path = COMPLETION if case.kind == "tokens" else CHAT
    command = [sys.executable, "-m", "benchmarks.gateway_load", str(envoy.port), path]
    command += [str(file), str(CONNECTIONS), str(case.rate)]
    picks, failed = fleet.picks(), envoy.without_pick()
    before = fleet.daemon.cpu(), envoy.cpu()
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, timeout=600)
    total.picker_cpu += fleet.daemon.cpu() - before[0]
    total.envoy_cpu += envoy.cpu() - before[1]
    got = json.loads(done.stdout)
    total.requests += count
    total.latencies += got["latencies"]
    total.first_bytes += got["first_bytes"]
    total.errors.update(got["errors"])
    total.seconds += got["seconds"]
    total.home += got["home"]
    total.picks.update(fleet.picks() - picks)
    total.without_pick += envoy.without_pick() - failed


def one_case(fleet: Fleet, case: Case, say: Callable[[str], None]) -> Iterator[dict[str, Any]]:
    """The ways take turns, five rounds each, so that a busy spell of the machine meets them all."""
    sums = {way: Sum() for way in case.ways}
    for way in case.ways:
        one_round(fleet, way, case._replace(rate=0), 100, Sum())  # connections, caches, code
    rounds = 5
    for _ in range(rounds):
        for way, total in sums.items():
            one_round(fleet, way, case, case.requests // rounds, total)
    direct = sums["direct"].figures()
    for way, total in sums.items():
        row = {"case": case.name, "way": way} | total.figures()
        if way == "direct":
            del row["without_pick"], row["by"], row["picker_cpu_us"]
        else:
            for key in ("p50_ms", "p99_ms"):
                row[f"added_{key}"] = round(row[key] - direct[key], 2)
        say(f"gateway: {json.dumps(row)}")
        yield row


def run(*, quick: bool, say: Callable[[str], None]) -> dict[str, Any]:
    """All cases."""
    begun = os.getloadavg()[0]
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvx-gateway")))
        fleet = Fleet(stack, folder)
        sample = fleet.bodies("chat", 200)
        setup = {
            "workers": WORKERS,
            "connections": CONNECTIONS,
            "conversations": CONVERSATIONS,
            "body_bytes": round(sum(map(len, sample)) / len(sample)),
            "prompt_tokens": round(sum(len(fleet.chats.tokens(b)) for b in sample[:50]) / 50),
            "held_tokens": round(sum(fleet.held) / len(fleet.held)),
            "stream": f"{PIECES} pieces, {PIECE_SECONDS * 1000:g} ms apart",
            "idle_cpu_percent": fleet.idle_cpu_percent(),
            "load_average_at_start": round(begun, 2),
        }
        say(f"gateway: {json.dumps(setup)}")
        rows = [row for case in cases(quick) for row in one_case(fleet, case, say)]
    return {"setup": setup | {"notes": _notes(begun)}, "rows": rows}


def _notes(load: float) -> str:
    cores = os.cpu_count() or 1
    here = f"client, upstreams, Envoy and kvindexd share {cores} cores"
    if load > 0.3 * cores:
        here += f", on which other programs ran, too (load average {load:.1f} at the start)"
    return here
