"""One owned task per registered worker rank, started, stopped and restarted as ranks come."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

import structlog
import zmq

from kvindexd.ingest.settings import IngestSettings
from kvindexd.ingest.transport import new_context
from kvindexd.ingest.worker import RankIngest
from kvindexd.model import WorkerKey
from kvindexd.registration import Registration
from kvindexd.security.gate import Gate
from kvindexd.store import Store
from kvindexd.telemetry import Metrics

log = structlog.get_logger(__name__)

_PATIENCE = 5.0
"""Seconds that a rank gets to save where it stands and to release its lease."""


class Supervisor:
    """Runs a RankIngest per rank. `set_rank` and `drop_rank` may be called at any time while
    `run` runs; a rank whose task fails is started again, and its neighbours notice nothing."""

    def __init__(
        self, store: Store, settings: IngestSettings, metrics: Metrics, gate: Gate | None = None
    ) -> None:
        """`gate`: says where ranks may be; None = anywhere."""
        self._store = store
        self._settings = settings
        self._metrics = metrics
        self._gate = gate or Gate()
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._ranks: dict[WorkerKey, tuple[RankIngest, asyncio.Task[None]]] = {}
        self._wanted: dict[WorkerKey, Registration] = {}
        self._changed = asyncio.Event()

    def rank(self, key: WorkerKey) -> RankIngest | None:
        """The rank's task, if this process runs one."""
        found = self._ranks.get(key)
        return found[0] if found is not None else None

    @property
    def owned(self) -> int:
        """Ranks whose lease this process holds."""
        return sum(rank.session is not None for rank, _ in self._ranks.values())

    def registrations(self) -> list[Registration]:
        """The ranks that are to be followed."""
        return list(self._wanted.values())

    def set_rank(self, registration: Registration) -> None:
        """Follow a rank from now on, or anew where what it takes to follow it changed."""
        if self._wanted.get(registration.key) != registration:
            self._wanted[registration.key] = registration
            self._changed.set()

    def drop_rank(self, key: WorkerKey) -> None:
        """Stop following a rank."""
        if self._wanted.pop(key, None) is not None:
            self._changed.set()

    def set_all(self, registrations: Iterable[Registration]) -> None:
        """Follow exactly these ranks."""
        wanted = {r.key: r for r in registrations}
        for key in [k for k in self._wanted if k not in wanted]:
            self.drop_rank(key)
        for registration in wanted.values():
            self.set_rank(registration)

    async def run(self) -> None:
        """Until cancelled; then every rank saves where it stands and releases its lease."""
        self._context = new_context()
        try:
            async with asyncio.TaskGroup() as tasks:
                while True:
                    self._changed.clear()
                    await self._reconcile(tasks)
                    await self._changed.wait()
        finally:
            self._ranks.clear()
            self._context.destroy(linger=0)

    async def _reconcile(self, tasks: asyncio.TaskGroup) -> None:
        outdated = [k for k, (r, _) in self._ranks.items() if self._wanted.get(k) != r.registration]
        stopped = []
        for key in outdated:
            _, task = self._ranks.pop(key)
            task.cancel()
            stopped.append(task)
            if key not in self._wanted:
                self._metrics.forget_worker(str(key))
        if stopped:
            await _ended(stopped)
        for key, registration in self._wanted.items():
            if key not in self._ranks:
                self._start(tasks, registration)

    def _start(self, tasks: asyncio.TaskGroup, registration: Registration) -> None:
        assert self._context is not None  # noqa: S101 - set by run
        rank = RankIngest(
            registration, self._store, self._settings, self._metrics, self._context, self._gate
        )
        task = tasks.create_task(self._guard(rank), name=f"rank {rank.key}")
        self._ranks[rank.key] = (rank, task)

    async def _guard(self, rank: RankIngest) -> None:
        """A fault of ours in one rank costs that rank a restart, and nothing else."""
        pause = 1.0
        while True:
            try:
                await rank.run()
            except Exception as e:
                log.exception(
                    "rank_failed",
                    worker=str(rank.key),
                    error=repr(e),
                    cost="its events wait; it starts again",
                    fix="report this",
                )
                rank.counters.add("internal_errors")
                rank.detail = f"internal error, restarting: {e!r}"
                await asyncio.sleep(pause)
                pause = min(60.0, pause * 2)
            else:
                return


async def _ended(tasks: Iterable[asyncio.Task[None]]) -> None:
    """Until all of these, which are cancelled, have ended: whatever waits behind them waits too."""
    _, pending = await asyncio.wait(tasks, timeout=_PATIENCE)
    while pending:
        log.error(
            "rank_did_not_stop", tasks=[t.get_name() for t in pending], action="cancelling it again"
        )
        for task in pending:
            task.cancel()
        _, pending = await asyncio.wait(pending, timeout=_PATIENCE)
