"""What one lease on a rank does: sockets, replay, sequence, and writing, each by one task."""

from __future__ import annotations

import asyncio
import contextlib
import struct
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import msgspec
import structlog
import zmq

from kvindexd.ingest.actions import (
    Action,
    Apply,
    AskReplay,
    CancelReplay,
    Dropped,
    Gap,
    Lost,
    ReplayOutcome,
    Restarted,
    SequencerConfig,
)
from kvindexd.ingest.counting import RankCounters
from kvindexd.ingest.frame import Frame
from kvindexd.ingest.link import Link, LinkEvent
from kvindexd.ingest.replay import ReplayClient, ReplaySettings
from kvindexd.ingest.sequencer import Sequencer
from kvindexd.ingest.settings import IngestSettings
from kvindexd.ingest.transport import Delivery, Subscriber, SubscriberSettings
from kvindexd.ingest.writer import RankWriter
from kvindexd.registration import Registration
from kvindexd.security.gate import Endpoints
from kvindexd.store import Store
from kvindexd.store.errors import Fenced, NotRegistered, StoreUnavailable
from kvindexd.store.records import Lease
from kvindexd.wire import Batch

log = structlog.get_logger(__name__)

CHECK = "check"
"""Write where the sequence stands, to learn whether the store still knows the rank."""
RESYNC = "resync"
"""What an operator may ask of a rank's owner, see Store.ask."""
_INBOX = 64
_BURST = 256
_FLAP = 0.05
"""Seconds between heartbeats at least."""


class _Replayed(NamedTuple):
    request_id: int
    frames: Sequence[Frame]


class _ReplayEnded(NamedTuple):
    request_id: int
    outcome: ReplayOutcome
    detail: str


class _Asked(NamedTuple):
    """Something to be done; "" = only look whether there is."""

    what: str


_Item = Delivery | _Replayed | _ReplayEnded | _Asked
Listener = Callable[[Frame, Batch], None]


class Judge(Protocol):
    """Says how the rank is doing: (state, detail), from its link and its session."""

    def __call__(self, link: Link, session: Session, now: float) -> tuple[str, str]:
        """See RankIngest.judge."""
        ...


class Session:
    """The tasks and the state of one lease."""

    def __init__(
        self,
        registration: Registration,
        store: Store,
        lease: Lease,
        settings: IngestSettings,
        counters: RankCounters,
        context: zmq.Context[zmq.Socket[bytes]],
        judge: Judge,
        endpoints: Endpoints,
    ) -> None:
        """`endpoints`: what to connect to, the registration's or what its names stand for."""
        self._registration = registration
        self._name = str(registration.key)
        self._store = store
        self._lease = lease
        self._settings = settings
        self._counters = counters
        self._judge = judge
        self._log = log.bind(worker=self._name)
        self.listeners: set[Listener] = set()
        self._inbox: asyncio.Queue[_Item] = asyncio.Queue(_INBOX)
        self._replay: ReplayClient | None = None
        if endpoints.replay:
            self._replay = ReplayClient(
                ReplaySettings(
                    endpoint=endpoints.replay,
                    reply_timeout=settings.replay_timeout,
                    max_event_bytes=settings.max_event_bytes,
                ),
                context,
            )
        self._subscriber = Subscriber(
            SubscriberSettings(
                endpoint=endpoints.events,
                topic=registration.topic,
                bind=registration.bind_events,
                max_event_bytes=settings.max_event_bytes,
                receive_hwm=settings.receive_hwm,
                heartbeat_interval=settings.peer_timeout / 3,
                heartbeat_timeout=settings.peer_timeout,
            ),
            context,
        )
        self._config = SequencerConfig(
            replay=self._replay is not None, buffer_batches=settings.buffer_batches
        )
        self._sequencer = Sequencer(self._config)
        options = msgspec.structs.replace(
            settings.options, reports_reuse=registration.reports_reuse
        )
        self.writer = RankWriter(
            store, lease, options, registration, counters, lambda: self._sequencer.state()
        )
        self._tasks: asyncio.TaskGroup | None = None
        self._replaying: tuple[int, asyncio.Task[None]] | None = None
        self._asked: dict[str, None] = {}
        self._changed = asyncio.Event()
        self._told = ""
        self.lost = 0
        self.sync_reason = "reading the store"
        self._loaded = False

    @property
    def syncing(self) -> bool:
        """Whether what is indexed may not be all there is."""
        return not self._loaded or self._sequencer.syncing

    async def run(self) -> None:
        """Until cancelled, or until the store says that the lease is not ours any more."""
        await self._load()
        self.writer.watch(self._show)
        async with self._subscriber, asyncio.TaskGroup() as tasks:
            self._tasks = tasks
            tasks.create_task(self._receive(), name=f"receive {self._name}")
            tasks.create_task(self._consume(), name=f"consume {self._name}")
            tasks.create_task(self.writer.run(), name=f"write {self._name}")
            tasks.create_task(self._beat(), name=f"heartbeat {self._name}")
            # Only a group whose body still waits takes back the cancellation with which it ends
            # the body when a task fails; else we would be taken for cancelled ever after.
            await asyncio.Event().wait()

    async def _load(self) -> None:
        if not self._lease.intact:
            self._log.warning("records_missing", cost="the rank is cleared and replayed")
            self.writer.reset(incarnation=True)
        else:
            snapshot = await self._store.load(self._registration.key)
            try:
                self._sequencer = Sequencer(self._config, await self.writer.load(snapshot))
            except (LookupError, ValueError, struct.error, msgspec.MsgspecError) as e:
                # Records that contradict each other would stop the rank at every attempt.
                self._log.error(
                    "records_unreadable", error=repr(e), cost="the rank is cleared and replayed"
                )
                self._counters.add("internal_errors")
                self.writer.reset(incarnation=True)
        self._loaded = True

    async def save(self) -> None:
        """Write what is queued, and where the sequence stands."""
        if self._loaded:
            self.writer.save()
            await self.writer.flush()

    def _show(self, frame: Frame, batch: Batch) -> None:
        for listener in tuple(self.listeners):
            listener(frame, batch)

    # -- tasks --------------------------------------------------------------------------------

    async def _receive(self) -> None:
        """Owns the SUB socket."""
        while True:
            delivery = await self._subscriber.receive(within=1.0)
            if delivery.frames or delivery.links or delivery.dropped:
                await self._inbox.put(delivery)

    async def _consume(self) -> None:
        """Carries out everything that happens, in order; the writer's task writes it in bursts."""
        while True:
            items = await self._next()
            now = time.time()
            for item in items:
                await self._take(item, now)
            await self._carry_out(self._sequencer.tick(now))
            if self.writer.residency.needs_replay:
                self.writer.residency.needs_replay = False
                await self._carry_out(self._sequencer.resync(now))
            if self._judge(self._subscriber.link, self, now)[0] != self._told:
                self._changed.set()
            self.writer.wake()
            await asyncio.sleep(0)  # all of this may have gone without a pause

    async def _next(self) -> list[_Item]:
        wake = self._sequencer.wake_at
        timeout = None if wake is None else max(0.0, wake - time.time())
        items: list[_Item] = []
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                items.append(await self._inbox.get())
        while len(items) < _BURST and not self._inbox.empty():
            items.append(self._inbox.get_nowait())
        items += map(_Asked, self._asked)
        self._asked.clear()
        return items

    def _remind(self, what: str) -> None:
        """Have something done by whoever applies, without waiting for room in its inbox: the lease
        must be renewed meanwhile."""
        self._asked[what] = None
        with contextlib.suppress(asyncio.QueueFull):
            self._inbox.put_nowait(_Asked(""))

    async def _beat(self) -> None:
        """Renews the lease, with what is known of the engine; takes requests left for us."""
        link, down = self._subscriber.link, False
        while True:
            now = time.time()
            state, detail = self._judge(link, self, now)
            self._told = state
            evidence = {
                "state": state,
                "detail": detail,
                "last_event_ms": round((link.last_frame_at or 0.0) * 1000),
            }
            lease = self.writer.lease
            idle_at = None if lease.lock.locked() else lease.position
            try:
                result = await self._store.renew(lease, None, evidence)
                if result.ask is not None:
                    self._remind(result.ask)
                if lease.position == idle_at != result.position and not lease.lock.locked():
                    # A failover or an older state: the next write finds out, so make one.
                    self._remind(CHECK)
                if down:
                    down = False
                    self._log.info("heartbeat_back")
                    await self._store.verify()
            except NotRegistered:
                # Deregistered, or lost by the store: the next write tells which.
                self._remind(CHECK)
            except Fenced as e:
                if self.writer.lease is lease and not self.writer.moving:
                    if e.owner:
                        raise
                    self._remind(CHECK)  # revoked, or lost and registered again by others
            except StoreUnavailable as e:
                if not down:
                    down = True
                    self._log.warning("heartbeat_failed", error=str(e), cost="it turns STALE")
            await self._until_due()

    async def _until_due(self) -> None:
        """A heartbeat's interval, or less when the state changes: until it is told, answers go on
        vouching for a rank that has a hole. A state that flaps is told a few times a second."""
        pause = min(_FLAP, self._settings.heartbeat)
        await asyncio.sleep(pause)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._settings.heartbeat - pause):
                await self._changed.wait()
        self._changed.clear()

    # -- what happens -------------------------------------------------------------------------

    async def _take(self, item: _Item, now: float) -> None:
        sequencer = self._sequencer
        if isinstance(item, Delivery):
            for reason, n in item.dropped.items():
                self._counters.add(f"dropped:{reason}", n)
            for event in item.links:
                self._counters.add(f"link:{event.value}")
                if event is LinkEvent.CONNECTED:
                    await self._carry_out(sequencer.connected(now))
            for frame in item.frames:
                await self._carry_out(sequencer.live(frame, now))
        elif isinstance(item, _Replayed):
            for frame in item.frames:
                await self._carry_out(sequencer.replayed(item.request_id, frame, now))
        elif isinstance(item, _ReplayEnded):
            self._counters.add(f"replay:{item.outcome.value}")
            emit = self._log.info if item.outcome is ReplayOutcome.COMPLETE else self._log.warning
            emit("replay_ended", outcome=item.outcome.value, detail=item.detail)
            await self._carry_out(sequencer.replay_ended(item.request_id, item.outcome, now))
        elif item.what == CHECK:
            self.writer.save()
        elif item.what == RESYNC:
            self._log.info("resync_asked")
            await self._carry_out(sequencer.resync(now))

    async def _carry_out(self, actions: Sequence[Action]) -> None:
        for action in actions:
            if isinstance(action, Apply):
                await self.writer.apply(action.frame)
                self.writer.wake()
                await self.writer.room()
            elif isinstance(action, Restarted):
                self._restarted(action)
            elif isinstance(action, Lost):
                self._lose(action)
            elif isinstance(action, Gap):
                self._counters.add("gaps")
                first, last = action.first, action.last
                self._log.warning("gap", first=first, last=last, action="a replay, if there is one")
            elif isinstance(action, AskReplay):
                self._ask(action)
            elif isinstance(action, CancelReplay):
                self._cancel_replay(action)
            elif isinstance(action, Dropped):
                self._counters.add(f"dropped:{action.reason}")

    def _restarted(self, action: Restarted) -> None:
        asked = action.reason in (RESYNC, "repair")
        self._counters.add("resyncs" if asked else "restarts")
        self.lost = 0
        emit = self._log.info if asked else self._log.warning
        emit(
            "engine_restarted",
            reason=action.reason,
            last_seq=action.last_seq,
            cost="what it held is forgotten until it is announced again",
        )
        self.writer.reset(incarnation=True)

    def _lose(self, action: Lost) -> None:
        n = action.last - action.first + 1
        self._counters.add("lost_batches", n)
        keep = self._settings.on_lost_events == "keep"
        self._log.warning(
            "events_lost",
            first=action.first,
            last=action.last,
            reason=action.reason,
            policy=self._settings.on_lost_events,
            cost="answers may be wrong" if keep else "the rank's claims are dropped",
        )
        if keep:
            self.lost += n
        else:
            self.writer.reset(incarnation=False)

    # -- replay -------------------------------------------------------------------------------

    def _ask(self, action: AskReplay) -> None:
        if self._tasks is None or self._replay is None:
            return
        self.sync_reason = f"replay from {action.start} ({action.why})"
        task = self._tasks.create_task(
            self._run_replay(action.request_id, action.start), name=f"replay {self._name}"
        )
        self._replaying = (action.request_id, task)

    async def _run_replay(self, request_id: int, start: int) -> None:
        assert self._replay is not None  # noqa: S101 - _ask checks it

        async def deliver(frames: Sequence[Frame]) -> None:
            await self._inbox.put(_Replayed(request_id, frames))

        result = await self._replay.run(start, deliver)
        for reason, n in result.dropped.items():
            self._counters.add(f"dropped:{reason}", n)
        await self._inbox.put(_ReplayEnded(request_id, result.outcome, result.detail))

    def _cancel_replay(self, action: CancelReplay) -> None:
        if self._replaying is not None and self._replaying[0] == action.request_id:
            self._replaying[1].cancel()
            self._replaying = None
