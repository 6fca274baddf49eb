"""Makes the registry what the sources want: one task, one look and one write at a time."""

from __future__ import annotations

import asyncio
import enum
import time
from collections.abc import Awaitable, Callable, Iterable

import msgspec
import structlog

from kvindexd import registration as registrations
from kvindexd.discovery.member import Member
from kvindexd.discovery.metrics import DiscoveryMetrics
from kvindexd.discovery.source import Backoff
from kvindexd.discovery.wanted import (
    Action,
    Deregister,
    Drain,
    Known,
    Owner,
    Register,
    leftovers,
    plan,
)
from kvindexd.model import WorkerKey
from kvindexd.registration import Registration
from kvindexd.store import Changed, NotRegistered, Store, StoreError, StoreUnavailable

log = structlog.get_logger(__name__)

Admit = Callable[[Registration, int], Awaitable[None]]
"""Raises, with the reason as its text, for a registration that must not be made; told how many
other ranks are registered."""


class _Outcome(enum.Enum):
    """Of what was to be done for one rank. AGAIN: it changed under our hands."""

    DONE = "done"
    AGAIN = "again"
    REFUSED = "refused"


class Reconciler:
    """Registers, updates, drains and deregisters for its members, each within what it owns."""

    def __init__(
        self,
        store: Store,
        metrics: DiscoveryMetrics,
        resync: float,
        *,
        admit: Admit,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        """`resync`: seconds between looks for what others removed. `on_change`: called when what
        the members own has changed."""
        self.members: dict[str, Member] = {}
        self.resync = resync
        self._store = store
        self._metrics = metrics
        self._admit = admit
        self._on_change = on_change
        self._changed = asyncio.Event()
        self._backoff = Backoff(0.2, 10.0)
        self._store_failure = ""
        self._registered = 0

    def member(self, owner: Owner) -> Member:
        """The member of this name; a new one if there is none."""
        if owner.source not in self.members:
            self.members[owner.source] = Member(owner, self._metrics, self._changed.set)
        member = self.members[owner.source]
        member.ended = False
        return member

    def end(self, name: str) -> None:
        """A source is no more: remove what it had registered, then forget it."""
        member = self.members[name]
        member.publish(())
        member.ended = True

    def sweep(self) -> None:
        """Compare everything registered with what each source wants when it has looked next: what
        another process has found meanwhile is not left over."""
        for member in self.members.values():
            member.sweep_next = member.owner.sweeps

    def owned(self) -> list[Registration]:
        """Everything that the members have registered and that is theirs."""
        return [r for member in self.members.values() for r in member.owned()]

    async def run(self) -> None:
        """Until cancelled."""
        resync_at = time.monotonic() + self.resync
        while True:
            self._changed.clear()
            pause = max(0.0, resync_at - time.monotonic())
            try:
                if not pause:
                    resync_at = time.monotonic() + self.resync
                    await self._look_for_missing()
                await self.step()
                self._store_works()
            except StoreError as e:
                self._store_failed(e)
                await asyncio.sleep(self._backoff.next())
                continue
            except Exception as e:
                for name in self.members:
                    self._metrics.errors.labels(name).inc()
                log.exception(
                    "discovery_source_failed",
                    source="reconciler",
                    error=repr(e),
                    action="starting it again",
                    fix="report this",
                )
                await asyncio.sleep(self._backoff.next())
                continue
            try:
                async with asyncio.timeout(min(pause, self.resync) or self.resync):
                    await self._changed.wait()
            except TimeoutError:
                pass

    async def step(self) -> None:
        """Do what is to be done now. Raises StoreError; what was done until then is remembered."""
        for member in list(self.members.values()):
            try:
                while member.published and (member.sweep or member.pending()):
                    if not await self._reconcile(member):
                        break
            finally:
                self._on_change()
            if member.ended and not member.pending():
                del self.members[member.name]
                self._metrics.forget(member.name)

    async def _reconcile(self, member: Member) -> bool:
        """Whether all that was pending has been dealt with."""
        view, keys = member.view, member.pending()
        if member.sweep:
            everything = await self._known(await self._store.leases())
            keys |= view.keys() | leftovers(member.owner, view, everything)
        known = await self._known(keys)
        steps = plan(member.owner, member.settled, view, known, keys)
        member.note_conflicts(keys, steps.conflicts)
        if any(isinstance(a, Register) and a.registration.key not in known for a in steps.actions):
            self._registered = len(await self._store.leases())
        todo: dict[WorkerKey, list[Action]] = {key: [] for key in keys}
        for action in steps.actions:
            todo[_key(action)].append(action)
        done = True
        for key, actions in todo.items():
            wanted = view.get(key)
            outcome = await self._carry_out(member, key, actions, known.get(key))
            if outcome is _Outcome.AGAIN:
                member.retry.add(key)
                done = False
                continue
            starting = wanted is not None and wanted.starting and key not in known
            member.settle(key, wanted, idle=starting or outcome is _Outcome.REFUSED)
            if outcome is _Outcome.REFUSED:
                member.refused.add(key)
        member.sweep = False
        return done

    async def _carry_out(
        self, member: Member, key: WorkerKey, actions: Iterable[Action], there: Known | None
    ) -> _Outcome:
        try:
            for action in actions:
                await self._act(member, key, action, there)
        except (Changed, NotRegistered):
            self._changed.set()
            return _Outcome.AGAIN
        except StoreUnavailable:
            raise
        except Exception as e:
            self._metrics.errors.labels(member.name).inc()
            log.error(
                "discovery_refused",
                worker=str(key),
                source=member.name,
                error=str(e),
                cost="the worker is not followed",
            )
            return _Outcome.REFUSED
        return _Outcome.DONE

    async def _act(
        self, member: Member, key: WorkerKey, action: Action, there: Known | None
    ) -> None:
        name = str(key)
        match action:
            case Register(wanted, replaced, instead_of):
                await self._admit(wanted, 0 if there else self._registered)
                await self._store.register(key, wanted.encode(), replaced, time.time(), instead_of)
                self._registered += there is None
                change = "added" if there is None else "replaced" if replaced else "updated"
                log.info(
                    "worker_discovered",
                    worker=name,
                    source=member.name,
                    change=change,
                    endpoint=wanted.kv_events_endpoint,
                )
            case Deregister(_, only):
                if not await self._store.deregister(key, only):
                    return
                change = "removed"
                log.info("worker_gone", worker=name, source=member.name)
                self._offer(key)
            case Drain(_, draining):
                await self._store.set_draining(key, draining, member.name)
                change = "draining" if draining else "undrained"
                log.info("worker_draining", worker=name, source=member.name, draining=draining)
        self._metrics.changes.labels(member.name, change).inc()

    def _offer(self, key: WorkerKey) -> None:
        """A rank is free: whoever else wants it may have it."""
        for member in self.members.values():
            if key in member.conflicts:
                member.retry.add(key)
                self._changed.set()

    async def _known(self, keys: Iterable[WorkerKey]) -> dict[WorkerKey, Known]:
        known = {}
        for key in keys:
            try:
                record = await self._store.get_worker(key)
            except NotRegistered:
                continue
            except StoreUnavailable:
                raise
            except StoreError:
                known[key] = Known(b"", None)
                continue
            try:
                registration = registrations.decode(record.registration)
            except msgspec.MsgspecError:
                registration = None
            known[key] = Known(
                record.registration, registration, record.draining, record.drained_by
            )
        return known

    async def _look_for_missing(self) -> None:
        """Have what somebody else removed, kept or refused looked at again."""
        registered = await self._store.leases()
        for member in self.members.values():
            if member.owner.insists:
                member.retry |= {key for key in member.view if key not in registered}
            member.retry |= member.conflicts.keys() | member.refused

    def _store_failed(self, error: StoreError) -> None:
        for name in self.members:
            self._metrics.errors.labels(name).inc()
        if str(error) != self._store_failure:
            self._store_failure = str(error)
            log.warning(
                "discovery_waits_for_the_store",
                error=str(error),
                cost="workers come and go unnoticed until it is back",
            )

    def _store_works(self) -> None:
        self._backoff.reset()
        if self._store_failure:
            self._store_failure = ""
            log.info("discovery_goes_on")


def _key(action: Action) -> WorkerKey:
    return action.registration.key if isinstance(action, Register) else action.key
