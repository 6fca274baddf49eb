"""What feed entries and store records do to the replica: all of its rules, and no I/O.

A batch is applied only as its rank's next revision. Whatever else comes - a hole, bytes that are
no mutations, a plane that nobody has named - makes the rank WANTED: it is loaded from the store
again, alone, and until then answers without the bits it had, which is to under-report.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Generic

import msgspec
import numpy as np
import numpy.typing as npt
import structlog

from kvindexd.model import MUTATION, Profile, WorkerKey
from kvindexd.replica.state import NEVER
from kvindexd.replica.view import Phase, R, ScopeView, WorkerView
from kvindexd.store import FeedEntry, Kind, WorkerRecord

log = structlog.get_logger(__name__)

BUFFER_BYTES = 32 << 20
"""Mutations kept for a rank while it is being loaded; beyond, its load starts over."""

LEASE_GRACE = 5.0
"""Seconds for which a lease seen being taken counts, until the store has been asked for its end."""

_profiles = msgspec.msgpack.Decoder(Profile)
_evidence = msgspec.msgpack.Decoder(dict[str, object])


class Book(Generic[R]):
    """Ranks, scopes and their tables.

    `parse` decodes a registration; it raises ValueError (msgspec's errors are) for what cannot be
    read. `on_applied(rank, ts)` is told of each engine batch once queries can see it, `ts` being
    the engine's clock in seconds. `on_change(view)` is told when something about a rank changes
    that operators look at; after its removal `views` has it no more.

    `counters` counts what went wrong or was left out; see `_want` and the names used below.
    """

    def __init__(
        self,
        parse: Callable[[bytes], R],
        on_applied: Callable[[WorkerKey, float], None],
        on_change: Callable[[WorkerView[R]], None],
    ) -> None:
        self._parse = parse
        self._on_applied = on_applied
        self._on_change = on_change
        self.on_mutations: Callable[[WorkerKey, npt.NDArray[np.void]], None] = lambda *_: None
        """Told of each rank's mutations (model.MUTATION) once queries can see them."""
        self.views: dict[WorkerKey, WorkerView[R]] = {}
        self.scopes: dict[tuple[str, str], ScopeView[R]] = {}
        self.wanted: dict[WorkerKey, None] = {}
        """Ranks to be loaded, first come first."""
        self.counters: Counter[str] = Counter()
        self._dirty: dict[WorkerKey, WorkerView[R]] = {}
        self._unreadable: dict[WorkerKey, bytes] = {}

    # -- ranks that come and go

    def _register(self, key: WorkerKey, raw: bytes) -> WorkerView[R] | None:
        """Add a rank or take over its changed registration; None if that cannot be read."""
        view = self.views.get(key)
        if view is not None and view.raw == raw:
            return view
        try:
            parsed = self._parse(raw)
        except ValueError as e:
            self._refuse(key, raw, e)
            return None
        self._unreadable.pop(key, None)
        if view is None:
            view = WorkerView(key, raw, parsed, self._scope(key.namespace, parsed.model))
            self.views[key] = view
            view.scope.add(view)
        elif view.scope.model != parsed.model:
            self._move(view, self._scope(key.namespace, parsed.model))
        view.raw, view.registration = raw, parsed
        view.generation += 1
        return view

    def _scope(self, namespace: str, model: str) -> ScopeView[R]:
        found = self.scopes.get((namespace, model))
        if found is None:
            found = self.scopes[(namespace, model)] = ScopeView(namespace, model)
        return found

    def _move(self, view: WorkerView[R], scope: ScopeView[R]) -> None:
        """To another model: its bits stay behind."""
        view.pending.clear()
        view.stamps.clear()
        view.scope.remove(view.key)
        view.scope = scope
        view.column = scope.table.column(view.key)
        scope.add(view)
        self._name_planes(view, view.profile)
        if view.revision or view.phase is not Phase.FOLLOWED:
            self._want(view, "model_changed")

    def _refuse(self, key: WorkerKey, raw: bytes, error: ValueError) -> None:
        if self._unreadable.get(key) == raw:
            return
        self._unreadable[key] = raw
        self.counters["registrations_unreadable"] += 1
        log.warning(
            "registration_unreadable",
            worker=str(key),
            error=str(error),
            fix="register the worker again; it is left out of all answers until then",
        )
        self.drop(key)

    def drop(self, key: WorkerKey) -> None:
        """Forget a rank with all its bits."""
        self.wanted.pop(key, None)
        self._dirty.pop(key, None)
        view = self.views.pop(key, None)
        if view is not None:
            view.scope.remove(key)
            view.phase = Phase.WANTED
            self._on_change(view)

    def reconcile(
        self, records: Iterable[WorkerRecord], concerns: Callable[[WorkerKey], bool], now: float
    ) -> None:
        """Make the ranks that `concerns` picks those of `records`, each to be loaded, those with
        a lease first."""
        listed = {r.key: r for r in records if concerns(r.key)}
        for key in [*self.views, *self._unreadable]:
            if key not in listed and concerns(key):
                self._unreadable.pop(key, None)
                self.drop(key)
        ordered = sorted(listed.values(), key=lambda r: r.expires_in_ms is None)
        for record in ordered:
            view = self.describe(record, now)
            if view is not None:
                self._want(view, "snapshot")

    def describe(self, record: WorkerRecord, now: float) -> WorkerView[R] | None:
        """Take over all that a record says of a rank besides its position."""
        view = self._register(record.key, record.registration)
        if view is None:
            return None
        view.owner = record.owner
        view.draining = record.draining
        view.counters = record.counters
        view.evidence = record.evidence
        left = record.expires_in_ms
        view.lease_until = NEVER if left is None else now + left / 1000
        if view.phase is not Phase.FOLLOWED:
            view.epoch = record.epoch  # so that the end of an earlier rank of its name is not its
        if record.heartbeat_ms is not None:
            view.evidence_at = max(view.evidence_at, now - record.heartbeat_ms / 1000)
        self._on_change(view)
        return view

    # -- loading

    def _want(self, view: WorkerView[R], reason: str) -> None:
        """Have a rank loaded; the bits it has are gone from now on."""
        if view.phase is Phase.FOLLOWED:
            log.warning(
                "worker_reloading",
                worker=str(view.key),
                reason=reason,
                epoch=view.epoch,
                revision=view.revision,
                cost="answers lack this worker for a moment",
            )
        self.counters[f"load_{reason}"] += 1
        view.phase = Phase.WANTED
        view.buffer, view.buffered = [], 0
        self._forget_bits(view)
        self.wanted[view.key] = None
        self._on_change(view)

    def begin_load(self, key: WorkerKey) -> WorkerView[R] | None:
        """From here on the rank's entries are kept until `end_load`; None if it is gone.

        `view.load` numbers the load: it is called off when the number or the phase changes.
        """
        self.wanted.pop(key, None)
        view = self.views.get(key)
        if view is not None:
            view.phase = Phase.LOADING
            view.load += 1
            view.buffer, view.buffered = [], 0
            self._forget_bits(view)
        return view

    def position(
        self, view: WorkerView[R], epoch: int, revision: int, profile: bytes | None
    ) -> None:
        """Set where a load stands, before its blocks are added. Raises ValueError for a profile
        that cannot be read."""
        view.epoch, view.revision = epoch, revision
        self._name_planes(view, _profiles.decode(profile) if profile else Profile())

    def add_blocks(self, view: WorkerView[R], mutations: npt.NDArray[np.void]) -> None:
        """Add a chunk of a load. Raises ValueError for a plane that its profile lacks."""
        view.scope.table.apply(view.column, view.plane_map, mutations)

    def end_load(self, view: WorkerView[R], last_seq: int, last_ts: float, now: float) -> None:
        """The load is complete: go on with the entries that came meanwhile."""
        buffer, view.buffer = view.buffer, []
        view.last_seq, view.last_ts = last_seq, last_ts
        view.phase = Phase.FOLLOWED
        self._on_change(view)
        for entry in buffer:
            self.take(entry, now)
        self.flush()

    def fail_load(self, view: WorkerView[R], reason: str) -> None:
        """The load came to nothing: have it done again."""
        self._want(view, reason)

    # -- the feed

    def take(self, entry: FeedEntry, now: float) -> None:
        """Take one entry in. Its mutations show in the tables with the next `flush`, which must
        come before anybody reads."""
        kind = entry.kind
        if kind is Kind.REG:
            self._registered(entry)
            return
        view = self.views.get(entry.worker)
        if view is None:
            if kind is Kind.GONE:
                self._unreadable.pop(entry.worker, None)
            else:
                self.counters["entries_of_unknown_workers"] += 1
        elif kind is Kind.BATCH:
            view.evidence_at = now
            self._held(view, entry)
        elif kind is Kind.CLEAR:
            if entry.epoch > view.epoch:  # a reset revokes the lease
                view.owner, view.lease_until, view.evidence = "", NEVER, {}
            self._held(view, entry)
            self._on_change(view)
        else:
            self._said(view, entry, now)

    def _held(self, view: WorkerView[R], entry: FeedEntry) -> None:
        """Entries about what a rank holds, which only make sense in order."""
        if view.phase is Phase.WANTED:
            return  # its load, which is yet to begin, will see what this entry did
        if view.phase is Phase.LOADING:
            view.buffer.append(entry)
            view.buffered += 200 + len(entry.mutations)
            if view.buffered > BUFFER_BYTES:
                self._want(view, "buffer_full")
            return
        if (entry.epoch, entry.revision) <= (view.epoch, view.revision):
            self.counters["entries_already_known"] += 1
        elif entry.kind is Kind.CLEAR:
            self._restart(view, entry.epoch)
            view.last_seq, view.last_ts = entry.seq, entry.ts
        else:
            self._batch(view, entry)

    def _batch(self, view: WorkerView[R], entry: FeedEntry) -> None:
        if entry.clear:
            self._restart(view, entry.epoch)
        if entry.epoch != view.epoch or entry.revision != view.revision + 1:
            self._want(view, "hole")
            return
        if len(entry.mutations) % MUTATION.itemsize:
            self._want(view, "malformed")
            return
        if entry.profile is not None:
            try:
                self._name_planes(view, _profiles.decode(entry.profile))
            except ValueError:
                self._want(view, "profile_unreadable")
                return
        view.revision = entry.revision
        view.pending.append(entry.mutations)
        if entry.seq >= 0:
            view.last_seq, view.last_ts = entry.seq, entry.ts
            view.stamps.append(entry.ts)
        self._dirty[view.key] = view

    def _restart(self, view: WorkerView[R], epoch: int) -> None:
        """The rank holds nothing, and an epoch begins."""
        self._forget_bits(view)
        self._name_planes(view, Profile())
        view.epoch, view.revision = epoch, 0
        view.last_seq, view.last_ts = -1, 0.0
        self._on_change(view)

    def _forget_bits(self, view: WorkerView[R]) -> None:
        view.pending.clear()
        view.stamps.clear()
        self._dirty.pop(view.key, None)
        view.column = view.scope.table.renew_column(view.key)
        view.generation += 1

    def _name_planes(self, view: WorkerView[R], profile: Profile) -> None:
        table = view.scope.table
        view.profile = profile
        view.plane_map = tuple(table.plane_id(plane) for plane in profile.planes)
        view.generation += 1

    def _registered(self, entry: FeedEntry) -> None:
        known = entry.worker in self.views
        view = self._register(entry.worker, entry.value)
        if view is None:
            return
        # An epoch that goes back: its record was lost and made anew.
        if (not known and entry.revision) or (known and entry.epoch < view.epoch):
            self._want(view, "registered_anew")
            return
        if not known:
            view.epoch, view.phase = entry.epoch, Phase.FOLLOWED
        self._on_change(view)

    def _said(self, view: WorkerView[R], entry: FeedEntry, now: float) -> None:
        """Entries about a rank itself, each of which replaces what the last one said."""
        if entry.kind is Kind.GONE:
            if entry.epoch >= view.epoch:  # else it has been registered again since
                self.drop(entry.worker)
            return
        if entry.kind is Kind.LEASE:
            view.owner = entry.owner
            view.lease_until = now + LEASE_GRACE if entry.owner else NEVER
            if entry.owner:
                view.evidence_at = now
        elif entry.kind is Kind.BEAT:
            view.evidence_at = now
            try:
                view.evidence = _evidence.decode(entry.value)
            except ValueError:
                self.counters["evidence_unreadable"] += 1
        elif entry.kind is Kind.DRAIN:
            view.draining = entry.draining
        elif entry.kind is Kind.OTHER:
            self.counters["entries_of_unknown_kind"] += 1
        self._on_change(view)

    @property
    def dirty(self) -> int:
        """Ranks with mutations that wait for `flush`."""
        return len(self._dirty)

    def flush(self) -> None:
        """Apply what `take` gathered, one call per rank."""
        dirty, self._dirty = self._dirty, {}
        for view in dirty.values():
            table = view.scope.table
            joined = view.pending[0] if len(view.pending) == 1 else b"".join(view.pending)
            stamps = view.stamps
            view.pending, view.stamps = [], []
            mutations = np.frombuffer(joined, MUTATION)
            try:
                table.apply(view.column, view.plane_map, mutations)
            except ValueError as e:
                worker = str(view.key)
                log.warning("mutations_refused", worker=worker, error=str(e), action="a reload")
                self._want(view, "unknown_plane")
                continue
            self.on_mutations(view.key, mutations)
            for ts in stamps:
                self._on_applied(view.key, ts)

    # -- leases

    def renewed(self, left: dict[WorkerKey, float], now: float) -> None:
        """Take over how long each rank's lease still runs (seconds; -inf = no owner)."""
        for key, seconds in left.items():
            view = self.views.get(key)
            if view is None:
                continue
            until = now + seconds
            if seconds > 0 and until > view.lease_until + 0.05:
                view.evidence_at = now  # it was renewed since we last asked
            view.lease_until = until

    def counted(self, records: Iterable[WorkerRecord]) -> None:
        """Take over the ingesters' counters."""
        for record in records:
            view = self.views.get(record.key)
            if view is not None:
                view.counters = record.counters

    def loading(self, now: float) -> Sequence[WorkerView[R]]:
        """Ranks with a lease that are not followed yet."""
        return [
            v for v in self.views.values() if v.phase is not Phase.FOLLOWED and v.lease_until > now
        ]
