"""What needs no server: matching, and the replica's table (bench_replica.py has more of that)."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np

from benchmarks.bench_replica import DEVICE, bench_apply, bench_memory, percentiles
from benchmarks.bootstrap import PROFILE
from benchmarks.measure import median
from benchmarks.sides import MODEL
from benchmarks.workload import Prompts
from kvindexd import chain
from kvindexd.model import ADD, MUTATION, WorkerKey
from kvindexd.registration import Registration
from kvindexd.registration import decode as decode_registration
from kvindexd.replica.book import Book
from kvindexd.replica.table import Table
from kvindexd.scoring.geometry import WorkerOptions
from kvindexd.scoring.query import ChainQuery
from kvindexd.scoring.scorer import Panel, candidate, leading_run, score
from kvindexd.store import FeedEntry, Kind

PROMPTS = 32
_CALLS = 2_000


def filled(ranks: int, blocks: int, shape: str) -> tuple[Table, list[Any], Panel]:
    """A table with 32 prompts, their keys, and all ranks as candidates; shapes as in queries."""
    table, source = Table(), Prompts(ranks + blocks)
    planes = [table.plane_id(DEVICE)]
    columns = [table.column(WorkerKey("", f"w{i}", 0)) for i in range(ranks)]
    asked = []
    for _ in range(PROMPTS):
        keys = np.array(chain.prompt_keys(source.tokens(blocks).astype("<u4").tobytes()), np.uint64)
        asked.append(keys)
        if shape == "miss":
            continue
        for i, column in enumerate(columns):
            held = keys[: len(keys) * (i + 1) // ranks] if shape == "graded" else keys
            part = np.zeros(len(held), MUTATION)
            part["name"], part["op"] = held, ADD
            table.apply(column, planes, part)
    return table, asked, Panel([candidate(c, PROFILE, WorkerOptions(), True) for c in columns])


def matching(ranks: int, blocks: int, shape: str) -> dict[str, Any]:
    """Keys to each rank's depth (`match`), and to its scores (`score`), in microseconds."""
    table, asked, panel = filled(ranks, blocks, shape)
    columns = panel.groups[0][1]
    plane = table.find_plane(DEVICE)
    out: dict[str, Any] = {}
    match_times, score_times = [], []
    for i in range(_CALLS):
        keys = asked[i % PROMPTS]
        start = time.perf_counter()
        if plane is not None:
            leading_run(table.masks(table.lookup(keys, prefix=True), plane), columns)
        match_times.append(time.perf_counter() - start)
        query = ChainQuery(keys, 16, len(keys) * 16, None)
        start = time.perf_counter()
        score(table, query, panel)
        score_times.append(time.perf_counter() - start)
    out["match"] = percentiles(match_times)
    out["score"] = percentiles(score_times)
    return out


def hashing(blocks: int) -> dict[str, Any]:
    """Chain keys of a prompt, in microseconds: as installed, and without the C module."""
    packed = Prompts(9).tokens(blocks).astype("<u4").tobytes()
    times: dict[str, list[float]] = {"installed": [], "plain": []}
    for _ in range(200):
        for name, extend in (("installed", chain.extend_packed), ("plain", chain.extend_plain)):
            start = time.perf_counter()
            extend(0, packed, 16)
            times[name].append(time.perf_counter() - start)
    return {name: percentiles(t) for name, t in times.items()}


def feed_apply(entries: int, size: int, ranks: int = 64) -> dict[str, Any]:
    """Feed entries of `size` mutations through the replica's own rules, flushed as it does; rates
    by the clock, and by the CPU time of the one thread that does it."""
    book: Book[Registration] = Book(decode_registration, lambda _w, _t: None, lambda _v: None)
    keys = [WorkerKey("", f"w{i}", 0) for i in range(ranks)]
    for key in keys:
        who = Registration(
            worker_id=key.worker_id,
            model=MODEL,
            address="10.0.0.1:8000",
            kv_events_endpoint="tcp://127.0.0.1:5557",
        )
        entry = FeedEntry(worker=key, epoch=1, revision=0, kind=Kind.REG, value=who.encode())
        book.take(entry, 0.0)
    rng = np.random.default_rng(6)
    profile = msgspec.msgpack.encode(PROFILE)
    made = []
    for i in range(entries):
        part = np.zeros(size, MUTATION)
        part["name"], part["op"] = rng.integers(1, 2**63, size, dtype=np.uint64), ADD
        # Batches of one rank come in runs, as a busy worker's do.
        rank, revision = i // 16 % ranks, i // (16 * ranks) * 16 + i % 16 + 1
        made.append(
            FeedEntry(
                worker=keys[rank],
                epoch=1,
                revision=revision,
                seq=revision - 1,
                ts=1.0,
                mutations=part.tobytes(),
                profile=profile if revision == 1 else None,
            )
        )
    start, before = time.perf_counter(), time.thread_time()
    work = 0
    for entry in made:
        book.take(entry, 1.0)
        work += size
        if work + 200 * book.dirty >= 4_000:  # as Replica._apply slices it
            book.flush()
            work = 0
    book.flush()
    seconds, used = time.perf_counter() - start, time.thread_time() - before
    held = sum(s.table.entries for s in book.scopes.values())
    if held != entries * size:
        raise AssertionError(f"{held} entries held of {entries * size}")
    count = entries * size
    return {"mutations_per_s": round(count / seconds), "per_cpu_s": round(count / used)}


def run(*, quick: bool, say: Callable[[str], None]) -> dict[str, Any]:
    """All of it."""
    blocks = 200_000 if quick else 1_000_000
    out: dict[str, Any] = {}
    shapes = [(64, 1000, s) for s in ("hit", "graded", "miss")]
    if not quick:
        shapes += [(r, 1000, "hit") for r in (1, 8, 512)] + [
            (64, b, "hit") for b in (10, 100, 8000)
        ]
    for ranks, prompt, shape in shapes:
        name = f"match_{ranks}_ranks_{prompt}_blocks_{shape}"
        out[name] = matching(ranks, prompt, shape)
        say(f"{name}: {json.dumps(out[name])}")
    out["hash_1000_blocks"] = hashing(1000)
    say(f"hash_1000_blocks: {json.dumps(out['hash_1000_blocks'])}")
    for size in (1, 64, 512):
        entries = max(200, min(20_000, blocks // size))
        runs = [feed_apply(entries, size) for _ in range(5)]
        out[f"feed_entries_of_{size}"] = {k: median(r[k] for r in runs) for k in runs[0]}
        say(f"feed_entries_of_{size}: {out[f'feed_entries_of_{size}']}")
    out["apply"] = bench_apply(blocks)
    out["memory"] = bench_memory(blocks)
    say(f"apply: {json.dumps(out['apply'])}")
    say(f"memory: {json.dumps(out['memory'])}")
    return out
