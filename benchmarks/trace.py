"""What picking by the index is worth: a trace with real structure through a simulated fleet.

Conversations share system prompts and grow turn by turn; workers keep what they computed until room
runs out, least recently used first. The fleet's blocks are in a replica's table and each request is
scored as the daemon scores it. Everything is simulated but the scoring and the cost.
"""

from __future__ import annotations

import heapq
import json
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kvindexd import chain
from kvindexd.model import ADD, MUTATION, REMOVE, GroupInfo, Plane, Profile, Slot, WorkerKey
from kvindexd.replica.table import Table
from kvindexd.scoring.cost import Weights, miss_blocks
from kvindexd.scoring.geometry import WorkerOptions
from kvindexd.scoring.query import Query
from kvindexd.scoring.scorer import Candidate, Panel, candidate, score

BLOCK = 16
PLANE = Plane(0, "full_attention", BLOCK, 0, BLOCK)
PROFILE = Profile(
    groups=(GroupInfo(0, "full_attention", BLOCK, 0, "main", 1),),
    planes=(PLANE,),
    slots=(Slot(0, 0, BLOCK),),
)
PREFILL = 8_000.0
"""Tokens per second that a worker computes."""
DECODE = 60.0
"""Tokens per second that a request generates."""


class Request(NamedTuple):
    """One turn. `at`: seconds; `prompt`: token ids; `answer`: tokens generated."""

    at: float
    prompt: npt.NDArray[np.uint32]
    answer: int


class Trace(NamedTuple):
    """How the trace is made. Lengths in tokens (means of geometric laws), times in seconds."""

    conversations: int = 400
    systems: int = 12
    system_tokens: int = 1_500
    turns: int = 5
    turn_tokens: int = 250
    answer_tokens: int = 200
    think: float = 20.0
    rate: float = 4.0


def requests(shape: Trace, seed: int) -> list[Request]:
    """All turns of all conversations, by arrival. System prompts are popular by Zipf's law."""
    rng = np.random.default_rng(seed)

    def text(mean: int) -> npt.NDArray[np.uint32]:
        n = max(BLOCK, int(rng.exponential(mean)))
        return rng.integers(0, 128_000, n, dtype=np.uint32)

    systems = [text(shape.system_tokens) for _ in range(shape.systems)]
    popularity = 1 / np.arange(1, shape.systems + 1)
    popularity /= popularity.sum()
    out, start = [], 0.0
    for _ in range(shape.conversations):
        start += rng.exponential(1 / shape.rate)
        at, prompt = start, systems[int(rng.choice(shape.systems, p=popularity))]
        for _ in range(int(rng.geometric(1 / shape.turns))):
            prompt = np.concatenate([prompt, text(shape.turn_tokens)])
            answer = max(1, int(rng.exponential(shape.answer_tokens)))
            out.append(Request(at, prompt, answer))
            prompt = np.concatenate([prompt, rng.integers(0, 128_000, answer, dtype=np.uint32)])
            at += answer / DECODE + rng.exponential(shape.think)
    return sorted(out, key=lambda r: r.at)


class Worker:
    """One engine: an LRU of blocks, and when its prefill queue is empty again."""

    def __init__(self, number: int, table: Table, capacity: int) -> None:
        self.column = table.column(WorkerKey("", f"w{number:03}", 0))
        self.candidate: Candidate = candidate(self.column, PROFILE, WorkerOptions(), True)
        self._table, self._capacity = table, capacity
        self._planes = [table.plane_id(PLANE)]
        self._held: OrderedDict[int, None] = OrderedDict()
        self.free_at = 0.0
        self.active = 0

    def compute(self, keys: Sequence[int]) -> int:
        """Run a prompt; how many leading blocks were there already."""
        hit = 0
        for key in keys:
            if key not in self._held:
                break
            hit += 1
        fresh = [k for k in keys[hit:] if k not in self._held]
        for key in reversed(keys):  # the end of a prompt goes first when room runs out
            self._held[key] = None
            self._held.move_to_end(key)
        gone = []
        while len(self._held) > self._capacity:
            gone.append(self._held.popitem(last=False)[0])
        change = np.zeros(len(fresh) + len(gone), MUTATION)
        change["name"] = np.array(fresh + gone, np.uint64)
        change["op"] = np.repeat([ADD, REMOVE], [len(fresh), len(gone)])
        self._table.apply(self.column, self._planes, change)
        return hit


Choose = Callable[[list[Worker], Query, int], Worker]


def round_robin(workers: list[Worker], _query: Query, turn: int) -> Worker:
    """The next one."""
    return workers[turn % len(workers)]


def least_loaded(workers: list[Worker], _query: Query, turn: int) -> Worker:
    """The one with the fewest blocks in flight, ties in turn."""
    n = len(workers)
    return min((workers[(turn + i) % n] for i in range(n)), key=lambda w: w.active)


def by_index(workers: list[Worker], query: Query, turn: int) -> Worker:
    """Lowest cost: blocks to compute plus blocks in flight, ties in turn."""
    table = workers[0]._table
    scored = score(table, query, Panel([w.candidate for w in workers]))
    n, weights = len(workers), Weights()
    costs = [
        miss_blocks(s, w.candidate.geometry, query.tokens, BLOCK, weights).weighted + w.active
        for w, s in zip(workers, scored, strict=True)
    ]
    return workers[min(range(n), key=lambda i: (round(costs[i], 6), (i - turn) % n))]


def play(trace: Sequence[Request], choose: Choose, fleet: int, capacity: int) -> dict[str, float]:
    """Hit ratio of all prompt tokens, and time to the first token by a simple queueing model."""
    table = Table()
    workers = [Worker(i, table, capacity) for i in range(fleet)]
    ending: list[tuple[float, int, int]] = []
    waits, hits, total = [], 0, 0
    for turn, request in enumerate(trace):
        while ending and ending[0][0] <= request.at:
            _, number, blocks = heapq.heappop(ending)
            workers[number].active -= blocks
        query = Query(request.prompt.astype("<u4").tobytes())
        worker = choose(workers, query, turn)
        keys = chain.prompt_keys(request.prompt.astype("<u4").tobytes())
        hit = worker.compute(keys) * BLOCK
        begin = max(request.at, worker.free_at)
        worker.free_at = begin + (len(request.prompt) - hit) / PREFILL
        waits.append(worker.free_at - request.at)
        worker.active += len(keys)
        done = worker.free_at + request.answer / DECODE
        heapq.heappush(ending, (done, workers.index(worker), len(keys)))
        hits += hit
        total += len(request.prompt)
    ordered = sorted(waits)
    return {
        "hit_ratio": round(hits / total, 3),
        "ttft_p50_ms": round(ordered[len(ordered) // 2] * 1e3, 1),
        "ttft_p95_ms": round(ordered[int(len(ordered) * 0.95)] * 1e3, 1),
    }


def policies() -> Iterator[tuple[str, Choose]]:
    """By name."""
    yield "round_robin", round_robin
    yield "least_loaded", least_loaded
    yield "index", by_index


def run(*, quick: bool, say: Callable[[str], None]) -> dict[str, Any]:
    """One trace, three policies, caches from scarce to ample (blocks per worker)."""
    shape = Trace(conversations=120 if quick else 300)
    trace = requests(shape, seed=11)
    out: dict[str, Any] = {"requests": len(trace), "trace": shape._asdict(), "workers": 8}
    for capacity in (2_000,) if quick else (1_000, 2_000, 5_000):
        for name, choose in policies():
            out[f"{name}_{capacity}"] = play(trace, choose, 8, capacity)
            figures = json.dumps(out[f"{name}_{capacity}"])
            say(f"trace, {capacity} blocks a worker, {name}: {figures}")
    return out
