"""Long runs, by `make soak` only. KVINDEXD_SOAK_SECONDS: length (1800), KVINDEXD_SOAK_SEED (1),
KVINDEXD_SOAK_REPORT: a file that the figures are appended to as well."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).parents[1]))

from chaos import STORE, WIRE, Figures, Fleet

SECONDS = float(os.environ.get("KVINDEXD_SOAK_SECONDS", "1800"))
SEED = int(os.environ.get("KVINDEXD_SOAK_SEED", "1"))
KILLS = int(os.environ.get("KVINDEXD_SOAK_KILLS", "50"))
REPORT = os.environ.get("KVINDEXD_SOAK_REPORT", "")
GROWTH = 1.10
"""What the resident memory may grow by, from the second to the last quarter of a run."""


def _report(title: str, figures: Figures, *more: str) -> None:
    lines = [title, *figures.lines(), *more, ""]
    print("\n".join(lines))
    if REPORT:
        with Path(REPORT).open("a", encoding="utf-8") as file:
            file.write("\n".join(lines) + "\n")


def _progress(figures: Figures, seconds: float) -> None:
    if REPORT:
        figures.seconds = seconds
        lines = [*figures.lines(), *_memory(figures.rss)]
        Path(REPORT + ".now").write_text("\n".join(lines) + "\n", encoding="utf-8")


def test_every_process_is_killed_at_fifty_random_points(tmp_path: Path) -> None:
    """kill -9 of an engine, a kvindexd, the Redis, in the midst of work."""
    kinds = ["engine_kill", "daemon_kill", "redis_kill"]
    began = time.monotonic()
    with Fleet(SEED, tmp_path) as fleet:
        todo = kinds * KILLS
        fleet.rng.shuffle(todo)
        for start in range(0, len(todo), 6):
            fleet.round(todo[start : start + 6])
        figures = fleet.note()
        figures.seconds = time.monotonic() - began
        _report("kills", figures)
        assert figures.differences == 0
        assert all(figures.faults[kind] == KILLS for kind in kinds)


def test_a_long_run_leaves_no_difference_and_memory_flat(tmp_path: Path) -> None:
    """Every fault but the end of a daemon, whose memory is watched; daemons are paused, and lose
    the lease by that. Between rounds some plain work."""
    faults = [*WIRE, *WIRE, *WIRE, *STORE, "engine_kill", "engine_kill", "daemon_pause"]
    began = time.monotonic()
    with Fleet(SEED, tmp_path) as fleet:
        while (at := time.monotonic() - began) < SECONDS:
            fleet.work(40)
            fleet.round(fleet.rng.sample(faults, 5))
            fleet.figures.rss.append({"at": round(at), **fleet.rss()})
            _progress(fleet.note(), at)
        figures = fleet.note()
        figures.seconds = time.monotonic() - began
        growth = _growth(figures.rss)
        _report("soak", figures, *_memory(figures.rss), f"growth: {growth}")
        assert figures.differences == 0
        if len(figures.rss) >= 40:
            assert all(g < GROWTH for g in growth.values()), growth


def _quarters(rss: list[dict[str, int]], name: str) -> list[float]:
    step = max(1, len(rss) // 4)
    parts = [rss[i * step : (i + 1) * step] or rss for i in range(4)]
    return [median(one[name] for one in part) for part in parts]


def _growth(rss: list[dict[str, int]]) -> dict[str, float]:
    names = [name for name in rss[0] if name != "at"]
    quarters = {name: _quarters(rss, name) for name in names}
    return {name: round(q[3] / q[1], 3) for name, q in quarters.items()}


def _memory(rss: list[dict[str, int]]) -> list[str]:
    names = [name for name in rss[0] if name != "at"]
    return [f"RSS of {n}, kB, median per quarter: {_quarters(rss, n)}" for n in names]
