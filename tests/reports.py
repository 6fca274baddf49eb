"""A Report that remembers, for tests of sources without a registry."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from typing import Any

from kvindexd.discovery.source import Source
from kvindexd.discovery.wanted import Wanted


class Reported:
    """`view`: worker id -> state, None before the first one."""

    def __init__(self) -> None:
        self.view: dict[str, str] | None = None
        self.wanted: list[Wanted] = []
        self.unusable: dict[str, str] = {}
        self.failures: list[str] = []
        self.worked = 0

    def publish(self, found: Iterable[Wanted], unusable: Mapping[str, str] | None = None) -> None:
        self.wanted = list(found)
        self.unusable = dict(unusable or {})
        self.view = {w.registration.worker_id: _state(w) for w in self.wanted}

    def failed(self, why: str) -> None:
        self.failures.append(why)

    def works(self) -> None:
        self.worked += 1


def _state(wanted: Wanted) -> str:
    if wanted.starting:
        return "starting"
    return "draining" if wanted.draining else "live"


@contextlib.asynccontextmanager
async def reporting(source: Source) -> AsyncIterator[Reported]:
    """A source that runs until the block ends, and must not have ended by itself."""
    report = Reported()
    task = asyncio.create_task(source.run(report))
    try:
        yield report
        assert not task.done(), task
    finally:
        task.cancel()
        await asyncio.wait((task,))


async def until(condition: Callable[[], Any], what: str = "") -> None:
    """Wait for a condition, with a deadline."""
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end, what or "condition"
        await asyncio.sleep(0.005)
