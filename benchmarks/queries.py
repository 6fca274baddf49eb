"""What a query costs: latency at the client, CPU at the server, both sides asked the same."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import xxhash

from benchmarks.client import pack_bodies
from benchmarks.feeder import Feeder
from benchmarks.measure import median, percentiles
from benchmarks.sides import MODEL, Ours, Peer, Side
from benchmarks.workload import Engines, Prompts, Tokens, payload, prefix_events
from kvindexd import chain
from kvindexd.v1 import index_pb2 as pb

PROMPTS = 4
BATCH = 32
SCORE = "/kvindexd.v1.KVIndex/ScoreWorkers"
SCORE_BATCH = "/kvindexd.v1.KVIndex/ScoreWorkersBatch"


class Case(NamedTuple):
    """One workload. `shape`: hit = every rank holds every prompt, graded = rank i of n holds the
    first (i+1)/n, miss = nobody anything. `by`: tokens, hashes, or hashes in batches of 32."""

    ranks: int
    blocks: int
    shape: str = "hit"
    by: str = "tokens"
    connections: int = 1

    def __str__(self) -> str:
        return (
            f"{self.ranks} ranks, {self.blocks} blocks, {self.shape}, by {self.by}, "
            f"{self.connections} connection{'s' * (self.connections > 1)}"
        )


class Fleet:
    """Simulated ranks that hold up to `PROMPTS` prompts, with the servers that follow them."""

    def __init__(self, ranks: int, blocks: int, shape: str, sides: Sequence[Side]) -> None:
        self.ranks, self.blocks, self.shape = ranks, blocks, shape
        self.sides = sides
        source = Prompts(ranks * 100_003 + blocks)
        prompts = PROMPTS if ranks * blocks <= 100_000 else 1  # or filling takes minutes
        self.prompts = [source.tokens(blocks) for _ in range(prompts)]
        self.asked = self.prompts
        if shape == "miss":
            self.asked = [source.tokens(blocks) for _ in range(prompts)]
        self.engines = Engines(ranks)
        for side in sides:
            assert isinstance(side, Ours | Peer)
            side.register(self.engines.endpoints)
        self.engines.wait_subscribed(len(sides))
        for prompt in self.prompts:
            hashes = source.hashes(blocks)
            for rank in range(ranks):
                held = blocks * (rank + 1) // ranks if shape == "graded" else blocks
                if held:
                    events = list(prefix_events(prompt[: held * 16], hashes[:held]))
                    self.engines.publish(rank, payload(events))
        for side in sides:
            if isinstance(side, Ours):
                side.wait_applied([self.engines.sent(r) for r in range(ranks)])
            elif isinstance(side, Peer):
                side.wait_scores(self.prompts[-1].tolist(), ranks)

    def close(self) -> None:
        """Stop all."""
        for side in self.sides:
            side.stop()
        self.engines.close()


def our_bodies(asked: Iterable[Tokens], by: str) -> list[bytes]:
    """Serialised requests; a batch asks the prompts in turn until it is full."""
    requests = []
    for tokens in asked:
        prompt = pb.Prompt(model=MODEL)
        packed = tokens.astype("<u4").tobytes()
        if by == "tokens":
            prompt.token_ids = packed
        else:
            keys = chain.prompt_keys(packed)
            prompt.chain.packed = b"".join(k.to_bytes(8, "little") for k in keys)
            prompt.chain.tokens = len(tokens)
        requests.append(pb.ScoreWorkersRequest(prompt=prompt))
    if by != "batches":
        return [r.SerializeToString() for r in requests]
    many = [requests[i % len(requests)] for i in range(BATCH)]
    return [pb.ScoreWorkersBatchRequest(requests=many).SerializeToString()]


def peer_bodies(asked: Iterable[Tokens], by: str) -> list[bytes]:
    """Serialised requests, without needless spaces."""
    out = []
    for tokens in asked:
        body: dict[str, Any] = {"model_name": MODEL}
        if by == "tokens":
            body["token_ids"] = tokens.tolist()
        else:
            packed = tokens.astype("<u4").tobytes()
            hashes = (
                xxhash.xxh3_64_intdigest(packed[i : i + 64], 1337)
                for i in range(0, len(packed), 64)
            )
            body["block_hashes"] = [h - 2**64 if h >= 2**63 else h for h in hashes]
        out.append(json.dumps(body, separators=(",", ":")).encode())
    return out


def _calls(side: Side, fleet: Fleet, by: str) -> tuple[list[str], list[bytes]]:
    if isinstance(side, Ours):
        path = SCORE_BATCH if by == "batches" else SCORE
        return ["grpc", side.target, path], our_bodies(fleet.asked, by)
    assert isinstance(side, Peer)
    path = "/query" if by == "tokens" else "/query_by_hash"
    return ["http", f"127.0.0.1:{side.port}", path], peer_bodies(fleet.asked, by)


def measure(side: Side, fleet: Fleet, by: str, connections: int, seconds: float) -> dict[str, Any]:
    """One run of closed-loop clients: latency in us per call, CPU in us per query."""
    kind, bodies = _calls(side, fleet, by)
    with tempfile.NamedTemporaryFile() as file:
        Path(file.name).write_bytes(pack_bodies(bodies))
        command = [sys.executable, "-m", "benchmarks.client", *kind, file.name, str(seconds)]
        clients = [
            subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            for _ in range(connections)
        ]
        for client in clients:
            assert client.stdout is not None
            if client.stdout.readline() != b"connected\n":
                raise RuntimeError(f"a client of {side.name} did not connect")
        before = side.cpu()
        for client in clients:
            assert client.stdin is not None
            client.stdin.write(b"\n")
            client.stdin.flush()
        results = [json.loads(client.communicate()[0]) for client in clients]
        used = side.cpu() - before
    times = [t for r in results for t in r["times"]]
    per_call = BATCH if by == "batches" and isinstance(side, Ours) else 1
    warm = min(20, len(bodies)) * connections
    return {
        **percentiles(times),
        "cpu_us": round(used / ((len(times) + warm) * per_call) * 1e6, 1),
        "per_second": round(sum(len(r["times"]) / r["seconds"] * per_call for r in results)),
        "calls": len(times),
        "answer_bytes": results[0]["answer_bytes"],
    }


def compare(fleet: Fleet, case: Case, repeats: int, seconds: float) -> dict[str, Any]:
    """Both sides in turn, `repeats` times; medians, and our medians over the peer's."""
    runs: dict[str, list[dict[str, Any]]] = {side.name: [] for side in fleet.sides}
    for i in range(repeats):
        order = list(fleet.sides) if i % 2 == 0 else list(reversed(fleet.sides))
        for side in order:
            runs[side.name].append(measure(side, fleet, case.by, case.connections, seconds))
    out: dict[str, Any] = {"case": str(case), **case._asdict(), "repeats": repeats}
    for name, results in runs.items():
        out[name] = {k: round(median(r[k] for r in results), 1) for k in results[0]}
    if {"kvindexd", "peer"} <= set(runs):
        ours, peer = runs["kvindexd"], runs["peer"]
        for key in ("p50", "cpu_us"):
            ratios = [a[key] / b[key] for a, b in zip(ours, peer, strict=True) if b[key]]
            out[f"{key}_ratio"] = round(median(ratios), 3) if ratios else None
    return out


def run(
    cases: Sequence[Case],
    make_sides: Callable[[], list[Side]],
    *,
    quick: bool,
    say: Callable[[str], None],
) -> list[dict[str, Any]]:
    """All cases, grouped by the fleet that they need; more runs of those that targets speak of."""
    out = []
    groups: dict[tuple[int, int, str], list[Case]] = {}
    for case in cases:
        groups.setdefault((case.ranks, case.blocks, case.shape), []).append(case)
    for (ranks, blocks, shape), members in groups.items():
        fleet = Fleet(ranks, blocks, shape, make_sides())
        try:
            for case in members:
                aimed = (case.ranks, case.blocks, case.connections) == (64, 1000, 1)
                repeats, seconds = (5 if aimed else 3, 2.0) if not quick else (3, 1.0)
                result = compare(fleet, case, repeats, seconds)
                say(describe(result))
                out.append(result)
        finally:
            fleet.close()
    return out


def describe(result: dict[str, Any]) -> str:
    """One line for the terminal."""
    parts = [f"{result['case']:62}"]
    for name in ("kvindexd", "peer"):
        if name in result:
            r = result[name]
            parts.append(
                f"{name} p50 {r['p50']:8.0f} p99 {r['p99']:8.0f} cpu {r['cpu_us']:8.0f} us"
            )
    if "p50_ratio" in result:
        parts.append(f"ratio p50 {result['p50_ratio']} cpu {result['cpu_us_ratio']}")
    return " | ".join(parts)


def run_busy(
    make_sides: Callable[[], list[Side]], say: Callable[[str], None], rate: int = 20_000
) -> list[dict[str, Any]]:
    """Token queries while blocks come in from one more rank, `rate` a second."""
    case, seconds, repeats = Case(64, 1000), 2.0, 3
    fleet = Fleet(case.ranks, case.blocks, case.shape, make_sides())
    lasts = 3 + (seconds + 3) * repeats * len(fleet.sides)
    feeder = Feeder(1, int(rate * lasts) // 64, 64, rate, len(fleet.sides))
    try:
        for side in fleet.sides:
            assert isinstance(side, Ours | Peer)
            side.register(feeder.endpoints, first=case.ranks)
        feeder.go()
        result = compare(fleet, case, repeats, seconds)
        result["case"] += f", {rate} blocks/s coming in"
        say(describe(result))
        return [result]
    finally:
        fleet.close()
        feeder.stop()
