"""Workers that a sidecar registered, from its [[workers]] or file, and that never came back."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import NamedTuple

import msgspec
import structlog

from kvindexd import registration as registrations
from kvindexd.discovery.metrics import DiscoveryMetrics
from kvindexd.model import WorkerKey
from kvindexd.store import NotRegistered, Store, StoreError

log = structlog.get_logger(__name__)

CONFIG = "config"
"""Source of what [[workers]] registers."""
LEASES = "leases"
"""Name under which this shows in metrics and logs."""
_LOOKS = 10
"""Looks per period, so that a worker goes at most a tenth of it too late."""


class Unowned(NamedTuple):
    """Since when worker ranks have no ingester, by our clock; and those due to be forgotten."""

    since: dict[WorkerKey, float]
    due: list[WorkerKey]


def unowned(
    before: Mapping[WorkerKey, float],
    leases: Mapping[WorkerKey, float],
    now: float,
    after: float,
) -> Unowned:
    """`leases`: seconds until each lease lapses, negative = lapsed, -inf = given back. `after`:
    seconds without one after which a rank is due, from when we saw that first: while the store was
    away, no lease could be renewed."""
    result = Unowned({}, [])
    for key, left in leases.items():
        if left > 0:
            continue
        result.since[key] = since = before.get(key, now)
        if now - since >= after:
            result.due.append(key)
    return result


def registers_itself(source: str) -> bool:
    """Whether it comes back with the process that registered it: from its [[workers]], or a file
    of its host's alone."""
    return source == CONFIG or (source.startswith("file:") and "@" in source)


class Forgetting:
    """Deregisters ranks that processes registered for themselves and that no ingester has owned for
    `after` seconds. Others stay: who registered them by a call does not do it again."""

    def __init__(self, store: Store, metrics: DiscoveryMetrics) -> None:
        self.after = 0.0
        self._store = store
        self._metrics = metrics
        self._changed = asyncio.Event()
        self._failure = ""

    def set(self, after: float) -> None:
        """Change the time; 0 = never forget."""
        self.after = after
        self._changed.set()

    async def run(self) -> None:
        """Until cancelled."""
        since: dict[WorkerKey, float] = {}
        while True:
            self._changed.clear()
            if self.after:
                try:
                    since = await self._look(since)
                    self._failure = ""
                except StoreError as e:
                    since = {}
                    self._failed(e)
            try:
                async with asyncio.timeout(self.after / _LOOKS if self.after else None):
                    await self._changed.wait()
            except TimeoutError:
                pass

    async def _look(self, before: Mapping[WorkerKey, float]) -> dict[WorkerKey, float]:
        state = unowned(before, await self._store.leases(), time.monotonic(), self.after)
        for key in state.due:
            await self._forget(key)
        return state.since

    async def _forget(self, key: WorkerKey) -> None:
        try:
            record = await self._store.get_worker(key)
            registration = registrations.decode(record.registration)
        except (NotRegistered, msgspec.MsgspecError):
            return
        alive = record.expires_in_ms is not None and record.expires_in_ms > 0
        if alive or not registers_itself(registration.source):
            return
        if await self._store.deregister(key, record.registration):
            self._metrics.changes.labels(LEASES, "removed").inc()
            log.info("worker_gone", worker=str(key), source=LEASES, unowned_seconds=self.after)

    def _failed(self, error: StoreError) -> None:
        self._metrics.errors.labels(LEASES).inc()
        if str(error) != self._failure:
            self._failure = str(error)
            log.warning(
                "discovery_failed",
                source=LEASES,
                error=str(error),
                cost="workers that are gone stay listed until it works",
            )
