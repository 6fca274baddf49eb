"""Clocks, process times and sizes, read from /proc; and what machine this is."""

from __future__ import annotations

import contextlib
import datetime
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

_TICK = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGESIZE")


def children(pid: int) -> list[int]:
    """A process and all that it started, as far as they still run."""
    found = [pid]
    for tasks in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for child in tasks.read_text().split():
                found += children(int(child))
    return found


def cpu_seconds(pids: Iterable[int]) -> float:
    """User and system time of these processes so far; the resolution is one tick, 10 ms."""
    total = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            total += int(fields[11]) + int(fields[12])
    return total / _TICK


def resident_bytes(pids: Iterable[int]) -> int:
    """Resident memory of these processes."""
    total = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            total += int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE
    return total


def peak_bytes(pid: int) -> int:
    """The most that a process was ever resident with."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0


def percentiles(seconds: Sequence[float], unit: float = 1e6) -> dict[str, float]:
    """p50, p99 and the worst of some times; in microseconds unless told otherwise."""
    ordered = sorted(seconds)
    last = len(ordered) - 1
    return {
        name: round(ordered[round(last * q)] * unit, 1)
        for name, q in (("p50", 0.5), ("p99", 0.99), ("max", 1.0))
    }


def median(values: Iterable[float]) -> float:
    """The middle one, to three significant places or so."""
    return statistics.median(values)


def until(condition: Callable[[], Any], what: str, deadline: float = 60.0) -> Any:
    """Poll a condition until it holds. Raises TimeoutError naming what was waited for."""
    end = time.monotonic() + deadline
    while time.monotonic() < end:
        if found := condition():
            return found
        time.sleep(0.005)
    raise TimeoutError(f"{what}: not within {deadline} s")


def machine() -> dict[str, Any]:
    """What the figures depend on beside the code."""
    model = ""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.partition(":")[2].strip()
            break
    names = ("numpy", "grpcio", "protobuf", "pyzmq", "redis", "hiredis", "xxhash", "msgspec")
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "cpu": model,
        "cores": os.cpu_count(),
        "load_average": round(os.getloadavg()[0], 2),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "packages": {n: metadata.version(n) for n in names},
    }
