"""A recorded worker in process: sequence, state machine, presence and scoring, without a store."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable

import msgspec
import numpy as np

from kvindexd.capturing.reader import Capture
from kvindexd.capturing.records import (
    FrameRecord,
    LinkRecord,
    MessageRecord,
    Record,
    ReplayRecord,
)
from kvindexd.ingest.actions import (
    Action,
    Apply,
    AskReplay,
    Dropped,
    Gap,
    Lost,
    ReplayOutcome,
    Restarted,
    SequencerConfig,
)
from kvindexd.ingest.frame import Frame
from kvindexd.ingest.link import LinkEvent
from kvindexd.ingest.sequencer import Sequencer
from kvindexd.model import ADD, MUTATION, BatchDelta, Plane, Profile
from kvindexd.registration import Registration
from kvindexd.residency import Options, Residency
from kvindexd.scoring.geometry import WorkerOptions, geometry
from kvindexd.scoring.match import Bools, match
from kvindexd.scoring.query import Query
from kvindexd.wire import Batch, BatchError, decode_batch


class SetPresence:
    """Presence of one worker as plain sets of names per plane: the simplest index there is."""

    workers = 1

    def __init__(self) -> None:
        self.names: dict[Plane, set[int]] = {}
        self.profile = Profile()
        self._query: Query | None = None

    def apply(self, delta: BatchDelta) -> None:
        """Take in what one batch changes."""
        if delta.clear:
            self.names.clear()
        if delta.profile is not None:
            self.profile = msgspec.msgpack.decode(delta.profile, type=Profile)
        for m in np.frombuffer(delta.mutations, MUTATION):
            names = self.names.setdefault(self.profile.planes[int(m["plane"])], set())
            (names.add if m["op"] == ADD else names.discard)(int(m["name"]))

    def ask(self, query: Query) -> SetPresence:
        """This presence, for one query."""
        self._query = query
        return self

    def held(self, plane: Plane, entry: int) -> Bools | None:
        """[entries, 1]: which names of the query this worker holds."""
        if self._query is None or plane not in self.names:
            return None
        names = self._query.names(self.profile.unit, self.profile.lookahead, entry)
        if names is None:
            return None
        have = self.names[plane]
        return np.array([n in have for n in names.tolist()], bool).reshape(-1, 1)

    def score(
        self, query: Query, options: WorkerOptions, *, hybrid: bool, device_only: bool
    ) -> tuple[int, int]:
        """(matched, reusable) tokens of the query."""
        shape = geometry(self.profile, options, hybrid)
        found = match(self.ask(query), shape, query.tokens, device_only=device_only)
        return int(found.matched[0]), int(found.reusable[0])


class Exchange:
    """What the replay socket returned after one connection."""

    def __init__(self) -> None:
        self.frames: dict[int, Frame] = {}
        self.outcome = ReplayOutcome.TIMEOUT
        self.first_live: int | None = None
        self.live: set[tuple[int, int]] = set()

    def note_live(self, frame: Frame) -> None:
        """This came from the subscription of the same connection."""
        if self.first_live is None:
            self.first_live = frame.seq
        self.live.add((frame.seq, frame.digest))

    def settle(self) -> None:
        """Leave what came live too to come then, so that every probe sees its own moment."""
        before = {s: f for s, f in self.frames.items() if (s, f.digest) not in self.live}
        self.frames = before or self.frames
        self.live = set()


def exchanges(capture: Capture, src: str) -> list[Exchange]:
    """Per connection of a source, in order, what replays brought; [] where none was asked for."""
    if not capture.header.includes_replay:
        return []
    found: list[Exchange] = [Exchange()]
    connected = asked = False
    for r in capture.records():
        if not isinstance(r, FrameRecord | LinkRecord | ReplayRecord) or r.src != src:
            continue
        if isinstance(r, LinkRecord):
            if r.event == LinkEvent.CONNECTED.value:
                if connected:
                    found.append(Exchange())
                connected = True
        elif isinstance(r, ReplayRecord):
            known = r.outcome in {o.value for o in ReplayOutcome}
            found[-1].outcome = ReplayOutcome(r.outcome) if known else ReplayOutcome.FAILED
            asked = True
        elif r.replayed:
            asked = True
            found[-1].frames[r.seq] = frame_of(r)
        else:
            found[-1].note_live(frame_of(r))
    for exchange in found:
        exchange.settle()
    return found if asked else []


def frame_of(record: FrameRecord) -> Frame:
    """The frame that the ingester would have made of it."""
    return Frame.of(record.topic, record.seq, record.payload, record.at)


class Rank:
    """One recorded worker rank, told its records in order, as an ingester would be.

    `counters` has the names that GetWorker shows; `events` counts decoded events by type.
    """

    def __init__(self, registration: Registration, replays: list[Exchange] | None = None) -> None:
        """`replays`: what `exchanges` found; a rank without any has no replay endpoint."""
        self.registration = registration
        self.residency = Residency(Options(reports_reuse=registration.reports_reuse))
        self.presence = SetPresence()
        self.counters: Counter[str] = Counter()
        self.events: Counter[str] = Counter()
        self.first_seq = -1
        self._replays = replays or []
        self._sequencer = Sequencer(SequencerConfig(replay=bool(replays)))
        self._connections = 0
        self._last_ts = 0.0

    @property
    def last_seq(self) -> int:
        """Sequence of the last batch applied, -1 = none."""
        return self._sequencer.last_seq

    def take(self, record: Record) -> None:
        """One record of this rank's source, in the order of the file."""
        at = getattr(record, "at", 0.0)
        wake = self._sequencer.wake_at
        if wake is not None and at >= wake:
            self._carry_out(self._sequencer.tick(at), at)
        if isinstance(record, FrameRecord) and not record.replayed:
            frame = frame_of(record)
            if self.first_seq < 0:
                self.first_seq = frame.seq
            self._carry_out(self._sequencer.live(frame, at), at)
        elif isinstance(record, LinkRecord):
            self.counters[f"link:{record.event}"] += 1
            if record.event == LinkEvent.CONNECTED.value:
                self._connections += 1
                self._carry_out(self._sequencer.connected(at), at)
        elif isinstance(record, MessageRecord):
            self.counters["dropped:no_batch"] += 1

    def score(self, query: Query, *, hybrid: bool = True, device_only: bool) -> tuple[int, int]:
        """(matched, reusable) tokens."""
        options = self.registration.options
        return self.presence.score(query, options, hybrid=hybrid, device_only=device_only)

    # -- what the sequencer wants -------------------------------------------------------------

    def _carry_out(self, actions: Iterable[Action], at: float) -> None:
        queue = deque(actions)
        while queue:
            action = queue.popleft()
            if isinstance(action, Apply):
                self._apply(action.frame)
            elif isinstance(action, Restarted):
                self.counters["restarts"] += 1
                self.residency.reset(incarnation=True)
            elif isinstance(action, Lost):
                self._lose(action)
            elif isinstance(action, Gap):
                self.counters["gaps"] += self._began(action.first)
            elif isinstance(action, AskReplay):
                queue.extend(self._replay(action, at))
            elif isinstance(action, Dropped):
                self.counters[f"dropped:{action.reason}"] += 1

    def _began(self, first: int) -> bool:
        """Whether batches from `first` on are missing from the middle: what was published before
        the capture began is no gap."""
        return first > 0

    def _lose(self, action: Lost) -> None:
        if self._began(action.first):
            self.counters["lost_batches"] += action.last - action.first + 1
        self.residency.reset(incarnation=False)

    def _replay(self, ask: AskReplay, at: float) -> list[Action]:
        """The answer as it was recorded, as far as it was."""
        if not self._replays:
            return []
        exchange = self._replays[min(max(self._connections - 1, 0), len(self._replays) - 1)]
        out: list[Action] = []
        for seq in sorted(exchange.frames):
            if seq >= ask.start:
                out += self._sequencer.replayed(ask.request_id, exchange.frames[seq], at)
        self.counters[f"replay:{exchange.outcome.value}"] += 1
        return [*out, *self._sequencer.replay_ended(ask.request_id, exchange.outcome, at)]

    # -- what the wire says -------------------------------------------------------------------

    def _apply(self, frame: Frame) -> None:
        try:
            batch = decode_batch(frame.payload)
        except BatchError as e:
            self.counters["decode_errors"] += 1
            self.counters[f"dropped:{e.reason}"] += 1
            batch = Batch(frame.ts if frame.ts is not None else self._last_ts, [])
        self._last_ts = batch.ts
        if batch.rank is not None and batch.rank != self.registration.dp_rank:
            self.counters["rank_mismatch"] += 1
        for event in batch.events:
            self.events[type(event).__name__] += 1
        now = frame.received_at or batch.ts
        delta = self.residency.apply(batch, seq=frame.seq, digest=frame.digest, now=now)
        self.counters.update(delta.counters)
        self.presence.apply(delta)
