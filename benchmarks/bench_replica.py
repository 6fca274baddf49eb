"""The replica's table in numbers: lookup latency, apply rate, bytes per entry, worst stall.

    python benchmarks/bench_replica.py [--blocks 1000000] [--json]

One process, one thread, as the table runs in the daemon. Times are CPU time of the thread, so
that other load on the machine does not count beyond what it does to the caches; latencies are
medians (and 99th percentiles) over fresh queries; rates count mutations.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvindexd.model import ADD, MUTATION, REMOVE, Plane, WorkerKey
from kvindexd.replica.table import APPLY_SLICE, Table

Names = npt.NDArray[np.uint64]
DEVICE = Plane(0, "full_attention", 16, 0, 16)
HOST = Plane(1, "full_attention", 16, 0, 16)
RANKS = 64
PROMPT = 1000


def batch(names: Names, op: int = ADD) -> npt.NDArray[np.void]:
    """Mutations of plane 0 for these names."""
    out = np.zeros(len(names), MUTATION)
    out["name"], out["op"] = names, op
    out["parent"][1:] = names[:-1]
    return out


def random_names(rng: np.random.Generator, count: int) -> Names:
    """Names as XXH3 makes them."""
    return rng.integers(1, 2**64 - 1, count, dtype=np.uint64)


def timed(run: Callable[[], object]) -> float:
    """Seconds of one call."""
    start = time.thread_time()
    run()
    return time.thread_time() - start


def percentiles(times: Iterable[float]) -> dict[str, float]:
    """Microseconds: median, 99th percentile, worst."""
    ordered = np.sort(np.fromiter(times, float)) * 1e6
    picks = {"p50_us": 0.5, "p99_us": 0.99, "max_us": 1.0}
    return {k: round(float(ordered[int((len(ordered) - 1) * q)]), 1) for k, q in picks.items()}


def resident() -> int:
    """Resident bytes of this process."""
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def filled(blocks: int, *, chain: int, shared: bool = False) -> tuple[Table, Names]:
    """A table of `blocks` names in prompts, which came in pieces of `chain` blocks in no order,
    each on one rank or on all."""
    table, rng = Table(1), np.random.default_rng(1)
    planes = [table.plane_id(DEVICE)]
    columns = [table.column(WorkerKey("", f"w{i}", 0)) for i in range(RANKS)]
    names = random_names(rng, blocks)
    for i, low in enumerate(rng.permutation(range(0, blocks, chain)).tolist()):
        part = batch(names[low : low + chain])
        for column in columns if shared else [columns[i % RANKS]]:
            table.apply(column, planes, part)
    return table, names


def bench_lookup(blocks: int) -> dict[str, object]:
    """Lookup, one plane's masks and the AND along the prompt: 1,000 names, 64 ranks.

    Blocks came in pieces of 32, 256 or 4,096. `prefix`: lookups that may stop at the first miss.
    """
    out: dict[str, object] = {}
    for chain in (32, 256, 4096):
        table, names = filled(blocks, chain=chain)
        rng = np.random.default_rng(2)

        def held(rng: np.random.Generator = rng, names: Names = names) -> Names:
            at = int(rng.integers(0, len(names) - PROMPT))
            return names[at : at + PROMPT].copy()

        def half(rng: np.random.Generator = rng, held: Callable[[], Names] = held) -> Names:
            return np.concatenate([held()[: PROMPT // 2], random_names(rng, PROMPT // 2)])

        def scattered(rng: np.random.Generator = rng, names: Names = names) -> Names:
            return names[rng.integers(0, len(names), PROMPT)]

        def missing(rng: np.random.Generator = rng) -> Names:
            return random_names(rng, PROMPT)

        for label, make in (
            ("held", held),
            ("half_held", half),
            ("scattered", scattered),
            ("missing", missing),
        ):
            for suffix, prefix in (("", False), ("_prefix", True)):
                times = []
                for query in [make() for _ in range(500)]:
                    start = time.thread_time()
                    rows = table.lookup(query, prefix=prefix)
                    np.bitwise_and.accumulate(table.masks(rows, 0)[:, 0])
                    times.append(time.thread_time() - start)
                out[f"chain_{chain}_{label}{suffix}"] = percentiles(times)
    return out


def bench_apply(blocks: int) -> dict[str, object]:
    """Mutations per second by batch size, against a table that already holds `blocks`."""
    out: dict[str, object] = {}
    for size in (64, 512, APPLY_SLICE):
        table, names = filled(blocks, chain=1000)
        rng = np.random.default_rng(3)
        planes = [table.plane_id(DEVICE)]
        count = max(1, 262_144 // size)
        fresh = [random_names(rng, size) for _ in range(count)]
        work = {
            "new_blocks": [(i % RANKS, batch(n)) for i, n in enumerate(fresh)],
            "shared_blocks": [((i + 1) % RANKS, batch(n)) for i, n in enumerate(fresh)],
            "unshare": [((i + 1) % RANKS, batch(n, REMOVE)) for i, n in enumerate(fresh)],
            "evict": [(i % RANKS, batch(n, REMOVE)) for i, n in enumerate(fresh)],
        }
        turnover = []
        for i in range(count):
            old = names[i * (size // 2) :][: size // 2]
            column = (i * (size // 2) // 1000) % RANKS
            both = np.concatenate([batch(old, REMOVE), batch(random_names(rng, size // 2))])
            turnover.append((column, both))
        work["turnover"] = turnover
        for label, calls in work.items():
            start = time.thread_time()
            for column, mutations in calls:
                table.apply(column, planes, mutations)
            seconds = time.thread_time() - start
            done = sum(len(m) for _, m in calls)
            out[f"batch_{size}_{label}"] = {"mutations_per_s": round(done / seconds)}
    return out


def bench_memory(blocks: int) -> dict[str, object]:
    """Bytes per (worker, block) entry: by the table's own account and by resident memory."""
    out: dict[str, object] = {}
    names = random_names(np.random.default_rng(4), blocks)
    for label, planes, sharing in (
        ("private", 1, 1),
        ("private_2_tiers", 2, 1),
        ("shared_64", 1, 64),
    ):
        before = resident()
        table = Table(1)
        ids = [table.plane_id(p) for p in (DEVICE, HOST)[:planes]]
        columns = [table.column(WorkerKey("", f"w{i}", 0)) for i in range(RANKS)]
        for i, low in enumerate(range(0, blocks, 1000)):
            part = batch(names[low : low + 1000])
            if i % 4 == 3 and planes == 2:
                part["plane"] = 1
            for column in columns if sharing > 1 else [columns[i % RANKS]]:
                table.apply(column, ids, part)
        grown = resident() - before
        out[label] = {
            "entries": table.entries,
            "bytes_per_entry": round(table.nbytes / table.entries, 2),
            "resident_per_entry": round(grown / table.entries, 2),
        }
        del table
    return out


def bench_growth(blocks: int) -> dict[str, object]:
    """From empty to `blocks`, 64 and 4,096 at a time: what one call can take at worst."""
    out: dict[str, object] = {}
    rng = np.random.default_rng(5)
    for size in (64, APPLY_SLICE):
        table = Table(1)
        planes = [table.plane_id(DEVICE)]
        times, curve, target = [], {}, 1_000
        while table.rows < blocks:
            part = batch(random_names(rng, size))
            start = time.thread_time()
            table.apply(0, planes, part)
            times.append(time.thread_time() - start)
            if table.rows >= target:
                curve[str(target)] = round(table.nbytes / table.rows, 1)
                target *= 10
        out[f"batch_{size}"] = {**percentiles(times), "bytes_per_block_at": curve}
    out["forget_a_worker"] = _forget(table)
    return out


def _forget(table: Table) -> dict[str, object]:
    who = WorkerKey("", "w", 0)
    assert table.column(who) == 0
    renew = timed(lambda: table.renew_column(who))
    times = [timed(table.scrub)]
    while table.scrub_pending:
        times.append(timed(table.scrub))
    return {"call_us": round(renew * 1e6, 1), "scrub_s": round(sum(times), 2), **percentiles(times)}


def main() -> None:
    """Run all and print a table, or JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, default=1_000_000)
    parser.add_argument("--only", choices=["lookup", "apply", "memory", "growth"])
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    suites: dict[str, Callable[[int], dict[str, object]]] = {
        "memory": bench_memory,
        "lookup": bench_lookup,
        "apply": bench_apply,
        "growth": bench_growth,
    }
    chosen = [args.only] if args.only else list(suites)
    results = {name: suites[name](args.blocks) for name in chosen}
    if args.json:
        print(json.dumps({"blocks": args.blocks, **results}))
        return
    for suite, rows in results.items():
        print(f"{suite} ({args.blocks:,} blocks)")
        for label, figures in rows.items():
            print(f"  {label:28} {json.dumps(figures)}")


if __name__ == "__main__":
    main()
