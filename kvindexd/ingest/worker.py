"""One ingest task per worker rank: hold the lease, follow the engine, write the index."""

from __future__ import annotations

import asyncio
import random

import msgspec
import structlog
import zmq

from kvindexd import registration as registrations
from kvindexd.groups import Treatment
from kvindexd.ingest.counting import RankCounters
from kvindexd.ingest.link import Link, LinkState
from kvindexd.ingest.session import Session
from kvindexd.ingest.settings import IngestSettings
from kvindexd.ingest.transport import TransportError
from kvindexd.registering import register_again
from kvindexd.registration import Registration
from kvindexd.security.gate import Endpoints, Gate, Unresolved, endpoints_of
from kvindexd.security.networks import Forbidden
from kvindexd.store import Store
from kvindexd.store.errors import (
    Fenced,
    LeaseHeld,
    NotRegistered,
    StoreError,
    StoreUnavailable,
)
from kvindexd.store.records import Lease
from kvindexd.telemetry import Metrics

log = structlog.get_logger(__name__)

_BEATS_BARRED = 5
"""Heartbeats between looks at an endpoint that is forbidden."""
_NO_EVENTS = "prompts score 0 here until it publishes"
_NO_HITS = "every prompt scores 0 here; groups.treat_as can override a kind"


class RankIngest:
    """Follows one rank until cancelled, and while it is not registered waits until it is.

    One owner at a time: without the lease it waits and touches no socket. Everything that the
    engine says passes through one inbox and is carried out by one task, in order.
    """

    def __init__(
        self,
        registration: Registration,
        store: Store,
        settings: IngestSettings,
        metrics: Metrics,
        context: zmq.Context[zmq.Socket[bytes]],
        gate: Gate,
    ) -> None:
        """`gate`: says whether, and where, the rank's endpoints may be connected to."""
        self.registration = registration
        self.key = registration.key
        self._store = store
        self._settings = settings
        self._metrics = metrics
        self._context = context
        self._gate = gate
        self._barred = ""
        self._linked = False
        self._log = log.bind(worker=str(self.key))
        self.counters = RankCounters(str(self.key), metrics)
        self.session: Session | None = None
        self.detail = "waiting for the lease"
        self.state = "SYNCING"
        self._birth = store.birth
        self._degraded = ""
        self._gone = False
        self._none_admitted = False
        self._silent = False

    # -- the lease ----------------------------------------------------------------------------

    async def run(self) -> None:
        """Follow the rank until this task is cancelled."""
        while True:
            # A TaskGroup that ends by an error while it is cancelled tells of the error alone.
            if (task := asyncio.current_task()) is not None and task.cancelling():
                raise asyncio.CancelledError
            try:
                await self._own(await self._acquire())
            except NotRegistered as e:
                if not await self._register_again(e):
                    await self._wait_for_registration(e)
            except Fenced as e:
                self._stepped_down("deposed", e)
            except (StoreError, TransportError) as e:
                self._stepped_down("failed", e)
                await asyncio.sleep(random.uniform(0.5, 1.5))  # noqa: S311 - jitter

    async def _wait_for_registration(self, why: NotRegistered) -> None:
        """Deregistered: whoever told us to follow it ends this task, or registers it anew."""
        if not self._gone:
            self._gone = True
            self.detail = str(why)
            self._log.info("rank_gone")
        await asyncio.sleep(self._settings.heartbeat * random.uniform(0.8, 1.2))  # noqa: S311

    async def _register_again(self, why: NotRegistered) -> bool:
        """Whether the store had lost its data, and knows the rank again."""
        try:
            self._birth = await register_again(self._store, self.registration, self._birth, why)
            await asyncio.sleep(self._settings.lease_ttl)  # an owner would write it anew
        except NotRegistered:
            return False
        except StoreError as e:
            self._stepped_down("failed", e)
            await asyncio.sleep(random.uniform(0.5, 1.5))  # noqa: S311 - jitter
        return True

    def _stepped_down(self, why: str, error: Exception) -> None:
        self.counters.add(f"stepped_down:{why}")
        self.detail = f"{why}: {error}"
        self._log.warning(
            "rank_stepped_down", why=why, error=str(error), action="waiting for the lease again"
        )

    async def _acquire(self) -> Lease:
        """Wait for the lease."""
        waiting = ""
        ttl = int(self._settings.lease_ttl * 1000)
        while True:
            try:
                if waiting:
                    await self._let_the_owner_rebuild()
                lease = await self._store.acquire(self.key, self._settings.owner, ttl)
                if await self._superseded(lease):
                    await asyncio.sleep(self._settings.heartbeat)
                    continue
            except LeaseHeld as e:
                if e.owner != waiting:
                    waiting = e.owner
                    self.detail = f"standby: owned by {e.owner}"
                    self._log.info("rank_standby", owner=e.owner, expires_in=e.expires_in)
                pause = min(max(e.expires_in, 0.05), self._settings.heartbeat)
                await asyncio.sleep(pause * random.uniform(1.0, 1.2))  # noqa: S311 - jitter
            except StoreUnavailable as e:
                if self._degraded != "store":
                    self._degraded = "store"
                    self._log.warning(
                        "store_unavailable",
                        error=str(e),
                        cost="the rank is not followed until the store is back",
                    )
                await asyncio.sleep(random.uniform(0.2, 1.0))  # noqa: S311 - jitter
            else:
                self._degraded, self._gone = "", False
                self._log.info("rank_owned", epoch=lease.epoch, last_seq=lease.last_seq)
                return lease

    async def _superseded(self, lease: Lease) -> bool:
        """Whether the rank now names another engine than the one we follow: what ours announces
        must not be credited to it. A change after this look revokes the lease."""
        record = await self._store.get_worker(self.key)
        try:
            known = registrations.decode(record.registration)
        except msgspec.MsgspecError:
            return False
        if not self.registration.replaces_cache(known):
            return False
        self.detail = (
            f"registered anew with {known.kv_events_endpoint} for {known.address}; this process "
            f"follows {self.registration.kv_events_endpoint}: change its configuration, or theirs"
        )
        self._log.warning(
            "rank_superseded", detail=self.detail, cost="this process follows nobody for the rank"
        )
        await self._store.release(lease)
        return True

    async def _let_the_owner_rebuild(self) -> None:
        """After the store lost its data, its last owner has the only copy: let it go first."""
        await self._store.verify()
        if self._store.birth != self._birth:
            self._birth = self._store.birth
            self._log.info("rank_standby_longer", reason="its owner may write it anew")
            await asyncio.sleep(self._settings.lease_ttl)

    async def _own(self, lease: Lease) -> None:
        """Everything done under one lease."""
        endpoints = await self._where(lease)
        session = Session(
            self.registration,
            self._store,
            lease,
            self._settings,
            self.counters,
            self._context,
            self.judge,
            endpoints,
        )
        self.session = session
        try:
            await self._run(session, endpoints)
        except BaseExceptionGroup as group:
            raise _cause(group) from None
        finally:
            self.session = None
            await self._hand_over(session)

    async def _run(self, session: Session, endpoints: Endpoints) -> None:
        if endpoints == endpoints_of(self.registration):
            await session.run()
            return
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(session.run(), name=f"session {self.key}")
            tasks.create_task(self._follow_names(endpoints), name=f"names {self.key}")
            await asyncio.Event().wait()  # see Session.run

    async def _follow_names(self, endpoints: Endpoints) -> None:
        """End the session when its engine is gone and its name stands for another address: sockets
        are given addresses, and would try the old one for ever."""
        while True:
            await asyncio.sleep(self._settings.heartbeat)
            if not self._linked:
                try:
                    now = await self._gate.endpoints(self.registration)
                except Unresolved:
                    continue
                except Forbidden as e:
                    raise TransportError(str(e)) from None
                if now != endpoints:
                    raise TransportError(f"{endpoints.events} is {now.events} now")

    async def _where(self, lease: Lease) -> Endpoints:
        """What to connect to. While that is nothing, owns the rank, and says why, in the store
        too: nobody else could connect either."""
        found: Endpoints | None = None
        try:
            while found is None:
                try:
                    found = await self._gate.endpoints(self.registration)
                except (Forbidden, Unresolved) as e:
                    await self._barred_by(lease, e)
            self._barred = ""
            return found
        finally:
            if found is None:
                await self._release(lease)

    async def _barred_by(self, lease: Lease, why: Forbidden | Unresolved) -> None:
        self.state, self.detail = "STALE", str(why)
        if self.detail != self._barred:
            self._barred = self.detail
            self._log.warning("rank_barred", why=self.detail, cost="nothing is known of the rank")
        evidence = {"state": "STALE", "detail": self.detail, "last_event_ms": 0}
        # A name may get its address at any moment; what is forbidden seldom changes.
        for _ in range(1 if isinstance(why, Unresolved) else _BEATS_BARRED):
            await self._store.renew(lease, None, evidence)
            await asyncio.sleep(self._settings.heartbeat * random.uniform(0.8, 1.0))  # noqa: S311

    async def _release(self, lease: Lease) -> None:
        try:
            async with asyncio.timeout(2.0):
                await self._store.release(lease)
        except (StoreError, TimeoutError) as e:
            self._log.info("lease_not_released", error=str(e) or "no answer in time")

    async def _hand_over(self, session: Session) -> None:
        """Write what is queued and release the lease, if it is still ours and the store answers."""
        try:
            async with asyncio.timeout(2.0):
                await session.save()
                await self._store.release(session.writer.lease)
        except (StoreError, TimeoutError) as e:
            self._log.info("lease_not_released", error=str(e) or "no answer in time")

    # -- what the session reports -------------------------------------------------------------

    def judge(self, link: Link, session: Session, now: float) -> tuple[str, str]:
        """(state, detail) as operators see them; logs each change of finding once."""
        self._linked = link.state is LinkState.CONNECTED
        self.state, self.detail = self._judged(link, session, now)
        return self.state, self.detail

    def _judged(self, link: Link, session: Session, now: float) -> tuple[str, str]:
        words = link.describe(now)
        self._note_silence(link, session, now, words)
        if link.state is not LinkState.CONNECTED:
            lost = link.state is LinkState.DISCONNECTED
            stale = lost and now - link.since > self._settings.event_grace
            return ("STALE" if stale else "SYNCING"), words
        if session.syncing:
            return "SYNCING", f"catching up: {session.sync_reason}; {words}"
        problem = self._finding(session)
        if problem:
            return "LIVE", problem
        if session.lost:
            return "LIVE", f"{session.lost} batches were lost and their claims kept; {words}"
        claimed = session.writer.claimed_rank
        if claimed is not None:
            words += f"; its batches say rank {claimed}: check that the endpoint is this rank's"
        if session.writer.residency.catalogue.groups:
            return "LIVE", words
        if link.last_frame_at is None and self.registration.topic:
            words += f"; does the engine publish under a topic like {self.registration.topic!r}?"
        return "LIVE", f"no events yet; {words}"

    def _note_silence(self, link: Link, session: Session, now: float, words: str) -> None:
        """Warn of an engine that has said nothing for the grace time: it may be idle, or its
        events be off, on another port, or under another topic."""
        heard = link.last_frame_at is not None or session.writer.residency.catalogue.groups
        silent = not heard and now - link.since > self._settings.event_grace
        if silent != self._silent:
            self._silent = silent
            self._metrics.worker_silent.labels(str(self.key)).set(silent)
            if silent:
                self._log.warning("no_events", detail=words, cost=_NO_EVENTS)
            else:
                self._log.info("events")

    def _finding(self, session: Session) -> str:
        residency = session.writer.residency
        groups = residency.catalogue.groups.values()
        stores = sum(g.stores for g in groups)
        ignored = [g for g in groups if g.treated_as is Treatment.IGNORED]
        none_admitted = stores > 0 and len(ignored) == len(residency.catalogue.groups)
        if none_admitted != self._none_admitted:
            self._none_admitted = none_admitted
            self._metrics.worker_nothing_indexed.labels(str(self.key)).set(none_admitted)
            kinds = sorted({g.kind for g in ignored})
            if none_admitted:
                self._log.warning("none_admitted", stores=stores, kinds=kinds, cost=_NO_HITS)
            else:
                self._log.info("admitting")
        if none_admitted:
            kinds = sorted({g.kind for g in ignored})
            return f"0 of {stores} stores admitted, all of kind {', '.join(kinds)}: {_NO_HITS}"
        expected = self.registration.block_size
        shown = residency.main_block_size()
        if expected and shown and expected != shown:
            return (
                f"block size mismatch: registered {expected}, events show {shown}; "
                "answers use the events' size"
            )
        return ""


def _cause(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The exception that ended a session: a fault of ours before what the store said."""
    leaves: list[BaseException] = []
    for e in group.exceptions:
        leaves.append(_cause(e) if isinstance(e, BaseExceptionGroup) else e)
    return next((e for e in leaves if not isinstance(e, StoreError)), leaves[0])
