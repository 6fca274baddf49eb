"""One worker rank, and one model's ranks, as queries see them."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Generic, Protocol, TypeVar

from kvindexd.model import Plane, Profile, Tier, WorkerKey
from kvindexd.replica.state import NEVER, Facts, Judged, State, judge
from kvindexd.replica.table import Table
from kvindexd.store import FeedEntry


class Parsed(Protocol):
    """A decoded registration: all that the replica itself reads of it."""

    @property
    def model(self) -> str:
        """The model that the worker serves."""
        ...


R = TypeVar("R", bound=Parsed)


class Phase(enum.Enum):
    """How far the replica has got with a rank: what the store holds is still to be read, being
    read, or followed."""

    WANTED = enum.auto()
    LOADING = enum.auto()
    FOLLOWED = enum.auto()


class WorkerView(Generic[R]):
    """A worker rank as the replica knows it. Only the replica writes to it.

    The same object lives as long as the rank is registered; `generation` changes whenever its
    registration, column, profile or plane map does, so that what was derived from them can be
    kept until then. `column` and `plane_map` (the rank's plane id -> the table's) belong to the
    scope's table. `epoch`, `revision`, `last_seq` and `last_ts` (engine clock, seconds; 0 before
    any batch) are of the last batch that queries can see. `judged` is its state as of a second ago
    or less, which saves queries deriving it. `lag_ms`: from the engine's clock to visible, of the
    last batch; -1 = none yet. Times are of time.monotonic().
    """

    __slots__ = (
        "_generation",
        "buffer",
        "buffered",
        "column",
        "counters",
        "draining",
        "epoch",
        "evidence",
        "evidence_at",
        "judged",
        "key",
        "lag_ms",
        "last_seq",
        "last_ts",
        "lease_until",
        "load",
        "owner",
        "pending",
        "phase",
        "plane_map",
        "profile",
        "raw",
        "registration",
        "revision",
        "scope",
        "stamps",
    )

    def __init__(self, key: WorkerKey, raw: bytes, registration: R, scope: ScopeView[R]) -> None:
        self.key = key
        self.raw = raw
        self.registration = registration
        self.scope = scope
        self.column = scope.table.column(key)
        self.profile = Profile()
        self.plane_map: tuple[int, ...] = ()
        self.epoch = 0
        self.revision = 0
        self.last_seq = -1
        self.last_ts = 0.0
        self.lag_ms = -1
        self.owner = ""
        self.draining = False
        self.lease_until = NEVER
        self.evidence_at = NEVER
        self.evidence: Mapping[str, object] = {}
        self.counters: Mapping[str, int] = {}
        self.phase = Phase.WANTED
        self._generation = 0
        self.judged = Judged(State.UNKNOWN, "")
        # Between reading and applying: the replica's own.
        self.pending: list[bytes] = []
        self.stamps: list[float] = []
        self.buffer: list[FeedEntry] = []
        self.buffered = 0
        self.load = 0

    @property
    def generation(self) -> int:
        """See the class; a change is one of its scope's, too."""
        return self._generation

    @generation.setter
    def generation(self, value: int) -> None:
        self._generation = value
        self.scope.generation += 1

    def facts(self) -> Facts:
        """What its state is derived from."""
        return Facts(
            self.lease_until,
            self.owner,
            self.phase is Phase.FOLLOWED,
            self.draining,
            str(self.evidence.get("state", "")),
            str(self.evidence.get("detail", "")),
            self.last_seq,
        )

    def judge(self, now: float) -> Judged:
        """State and detail at `now` (the replica's clock)."""
        return judge(self.facts(), now)

    def staleness_ms(self, now: float) -> int:
        """Since the last applied batch or heartbeat; the largest uint32 if there was none."""
        if self.evidence_at == NEVER:
            return 2**32 - 1
        return min(2**32 - 1, max(0, int((now - self.evidence_at) * 1000)))

    def tier_blocks(self) -> dict[Tier, int]:
        """Blocks that the replica holds of this rank per tier: those of the group kind and spec
        that has most, since every group announces its own copy of a block."""
        counts = self.scope.table.counts(self.column).tolist()
        out: dict[Tier, int] = {}
        for plane, count in zip(self.scope.table.planes, counts, strict=True):
            tier = Tier(plane.tier)
            out[tier] = max(count, out.get(tier, 0))
        return out


class ScopeView(Generic[R]):
    """One model of one namespace: its table, and its ranks in order of registration here.

    `generation` changes whenever a rank comes, goes, or changes its own.
    """

    __slots__ = ("_workers", "generation", "members", "model", "namespace", "table")

    def __init__(self, namespace: str, model: str) -> None:
        self.namespace = namespace
        self.model = model
        self.table = Table()
        self.generation = 0
        self.members: dict[WorkerKey, WorkerView[R]] = {}
        self._workers: tuple[WorkerView[R], ...] | None = ()

    @property
    def workers(self) -> tuple[WorkerView[R], ...]:
        """All ranks, whatever their state; the same tuple until one comes or goes."""
        if self._workers is None:
            self._workers = tuple(self.members.values())
        return self._workers

    def add(self, view: WorkerView[R]) -> None:
        """Let a rank take part in answers."""
        self.members[view.key] = view
        self.generation += 1
        self._workers = None

    def remove(self, key: WorkerKey) -> None:
        """Forget a rank and its bits; with the last one the table's memory goes, too."""
        self.members.pop(key, None)
        self.generation += 1
        self._workers = None
        self.table.free_column(key)
        if not self.members:
            self.table = Table()

    def holders(self, name: int) -> tuple[int, int, list[tuple[WorkerView[R], list[Plane]]]] | None:
        """(parent, length in tokens, [(rank, planes)]) of a block; None when nobody holds it."""
        info = self.table.block(name)
        if info is None:
            return None
        by_column = {v.column: v for v in self.members.values()}
        planes = self.table.planes
        found = [
            (by_column[column], [planes[p] for p in ids])
            for column, ids in info.holders
            if column in by_column
        ]
        return info.parent, info.length, found
