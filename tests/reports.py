"""A Report that remembers, for tests of sources without a registry."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import AsyncIterator, Iterable, Mapping

import waiting

from kvindexd.discovery.source import Source
from kvindexd.discovery.wanted import Wanted

until = functools.partial(waiting.becomes, deadline=20.0)


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
