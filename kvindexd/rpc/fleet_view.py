"""The replica as the services see it: scopes, members, messages; nothing here asks Redis."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping

from kvindexd.fleet import NO_FILTER, Chosen, Member, Scope, select
from kvindexd.model import Tier, WorkerKey
from kvindexd.registration import Registration
from kvindexd.replica.replica import Replica
from kvindexd.replica.view import ScopeView, WorkerView
from kvindexd.rpc import codec, lines
from kvindexd.scoring.scorer import Candidate, candidate
from kvindexd.v1 import index_pb2 as pb

Stamp = tuple[WorkerView[Registration], int]
_MEMBERS_AGE = 0.05
"""Seconds for which a scope's members (states included) are computed once."""


class FleetView:
    """Answers what the services ask about models and worker ranks."""

    def __init__(
        self,
        replica: Replica[Registration],
        *,
        hybrid: bool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._replica = replica
        self._hybrid = hybrid
        self._clock = clock
        self.engine_load: Callable[[WorkerKey], pb.EngineLoad | None] = lambda _: None
        """What a rank's engine says of its own load, where anybody asks it."""
        self.account: Callable[[WorkerKey], Mapping[str, int]] = lambda _: {}
        """What this process's picks say of a rank, by the names of Worker.counters."""
        self._candidates: dict[WorkerKey, tuple[Stamp, Candidate, bytes]] = {}
        self._scopes: dict[tuple[str, str], tuple[float, int, Scope]] = {}

    # -- scoring ------------------------------------------------------------------------------

    def scope(self, namespace: str, model: str) -> Scope | None:
        """The model's table and ranks; with model "" the only one that has a live rank."""
        view = self._replica.scope(namespace, model)
        if view is None or not view.members:
            return None
        return self._scope(view)

    def _scope(self, view: ScopeView[Registration]) -> Scope:
        """States may be a few milliseconds old; columns and profiles never: a column that a
        clear gave up soon speaks of somebody else."""
        now = self._clock()
        key = (view.namespace, view.model)
        cached = self._scopes.get(key)
        if cached is not None and now - cached[0] < _MEMBERS_AGE and cached[1] == view.generation:
            return cached[2]
        members = [self._member(w, now) for w in sorted(view.workers, key=lambda w: w.key)]
        usual = Chosen(select(members, NO_FILTER))
        made = Scope(view.model, view.namespace, view.table, members, usual)
        self._scopes[key] = (now, view.generation, made)
        return made

    def _member(self, view: WorkerView[Registration], now: float) -> Member:
        state, staleness = view.judge(now).state, view.staleness_ms(now)
        known, identity = self._known(view)
        return Member(
            view.key,
            view.registration,
            known,
            state,
            staleness,
            view.epoch,
            lines.head(identity, state, staleness),
        )

    def _known(self, view: WorkerView[Registration]) -> tuple[Candidate, bytes]:
        """What of a rank changes with its generation only."""
        cached = self._candidates.get(view.key)
        if cached is not None and cached[0] == (view, view.generation):
            return cached[1], cached[2]
        made = candidate(view.column, view.profile, view.registration.options, self._hybrid)
        identity = lines.identity(view.key, view.registration.address)
        self._candidates[view.key] = ((view, view.generation), made, identity)
        return made, identity

    def scopes(self) -> list[Scope]:
        """All models of all namespaces that have a registered rank."""
        return [self._scope(view) for view in self._replica.scopes() if view.members]

    def models(self, namespace: str) -> list[str]:
        """Models that have a registered rank in the namespace."""
        scopes = self._replica.scopes()
        return sorted(s.model for s in scopes if s.namespace == namespace and s.members)

    def any_address(self, namespace: str, model: str) -> str | None:
        """host:port of some rank of a model that is live, None where there is none."""
        scope = self.scope(namespace, model)
        live = [m for m in scope.members if m.state == "LIVE"] if scope is not None else []
        return random.choice(live).registration.address if live else None  # noqa: S311

    def revision(self) -> str:
        """A name for what the replica has applied so far."""
        return self._replica.revision()

    # -- administration -----------------------------------------------------------------------

    def view(self, key: WorkerKey) -> WorkerView[Registration] | None:
        """One rank, None where the replica knows none."""
        return self._replica.worker(key)

    def views(self) -> list[WorkerView[Registration]]:
        """All ranks, by name."""
        return sorted(self._replica.workers(), key=lambda v: v.key)

    def ranks(self, namespace: str, worker_id: str) -> list[WorkerKey]:
        """All ranks of one worker."""
        return [v.key for v in self.views() if v.key[:2] == (namespace, worker_id)]

    def message(self, view: WorkerView[Registration]) -> pb.Worker:
        """A rank as message Worker, output fields included."""
        now = self._clock()
        judged = view.judge(now)
        message = codec.worker_message(view.registration)
        load = self.engine_load(view.key)
        if load is not None:
            message.engine_load.CopyFrom(load)
        message.state = getattr(pb, judged.state)
        message.detail = judged.detail
        message.epoch = view.epoch
        message.revision = view.revision
        message.last_seq = view.last_seq
        message.owner = view.owner
        message.last_event_ms_ago = _event_age(view)
        for tier, n in view.tier_blocks().items():
            message.blocks[codec.TIER_NAMES[tier]] = n
        message.groups.extend(codec.group_message(g) for g in view.profile.groups)
        for name, count in view.counters.items():
            message.counters[name] = max(0, count)
        return message

    def listed(self, view: WorkerView[Registration]) -> pb.Worker:
        """A rank as message Worker, with what changes all the time: ages, lag and picks."""
        message = self.message(view)
        for name, n in self.account(view.key).items():
            message.counters[name] = n
        age = view.staleness_ms(self._clock())
        if age < 2**32 - 1:
            message.counters["evidence_age_ms"] = age
        if view.lag_ms >= 0:
            message.counters["apply_lag_ms"] = view.lag_ms
        return message

    def block(self, name: int, model: str) -> pb.GetBlockResponse | None:
        """Who holds a block, in whatever namespace serves the model ("" = any model)."""
        found: pb.GetBlockResponse | None = None
        for scope in self._replica.scopes():
            if model and scope.model != model:
                continue
            held = scope.holders(name)
            if held is None:
                continue
            parent, length, holders = held
            found = found or pb.GetBlockResponse(hash=name, parent=parent, depth=length)
            for view, planes in holders:
                groups = {
                    g.idx
                    for g in view.profile.groups
                    for p in planes
                    if (g.kind, g.block_size, g.window) == (p.kind, p.block_size, p.window)
                }
                found.holders.add(
                    worker_id=view.key.worker_id,
                    dp_rank=view.key.dp_rank,
                    tiers=sorted({codec.TIER_NAMES[Tier(p.tier)] for p in planes}),
                    groups=sorted(max(0, g) for g in groups),
                )
        return found

    def stats(self) -> pb.IndexStatsResponse:
        """Sizes of the index as this process holds it."""
        response = pb.IndexStatsResponse(
            index_revision=self.revision(), replica_lag=self._replica.lag or 0
        )
        for scope in self._replica.scopes():
            response.blocks += scope.table.rows
            response.entries += scope.table.entries
            response.bytes += scope.table.nbytes
            response.per_model[scope.model] += scope.table.rows
            response.workers += len(scope.workers)
        return response


def _event_age(view: WorkerView[Registration]) -> int:
    last = view.evidence.get("last_event_ms")
    if not isinstance(last, int) or last <= 0:
        return 0
    return max(0, codec.unix_ms() - last)
