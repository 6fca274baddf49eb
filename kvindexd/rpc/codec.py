"""Between our own types and the messages of index.proto."""

from __future__ import annotations

import time

from kvindexd.model import GroupInfo, WorkerKey
from kvindexd.registration import Registration
from kvindexd.rpc.errors import RequestError
from kvindexd.scoring.outcomes import Audit
from kvindexd.scoring.scorer import Scored
from kvindexd.v1 import index_pb2 as pb

TIER_NAMES = ("device", "host", "storage", "other")


def registration_of(worker: pb.Worker) -> Registration:
    """The input fields of a Worker message. Raises RequestError for an unknown role."""
    if worker.role not in pb.Role.values():
        raise RequestError(f"worker.role: {worker.role} is unknown; known: {pb.Role.keys()}")
    return Registration(
        worker_id=worker.worker_id,
        dp_rank=worker.dp_rank,
        dp_size=worker.dp_size,
        model=worker.model,
        namespace=worker.namespace,
        address=worker.address,
        kv_events_endpoint=worker.kv_events_endpoint,
        replay_endpoint=worker.replay_endpoint,
        topic=worker.topic,
        block_size=worker.block_size,
        engine=worker.engine,
        role=pb.Role.Name(worker.role),  # type: ignore[arg-type]  # one of RoleName, checked above
        kv_layout=worker.kv_layout,
        tp_size=worker.tp_size,
        num_kv_heads=worker.num_kv_heads,
        labels=dict(worker.labels),
        eagle=worker.eagle,
        bind_events=worker.bind_events,
        aliases=tuple(worker.aliases),
        chunk_size=worker.chunk_size,
        reports_reuse=worker.reports_reuse,
        hidden_groups=worker.hidden_groups,
        instance=worker.instance,
    )


def worker_message(r: Registration) -> pb.Worker:
    """A Worker message with the input fields filled in."""
    return pb.Worker(
        worker_id=r.worker_id,
        dp_rank=r.dp_rank,
        dp_size=r.dp_size,
        model=r.model,
        namespace=r.namespace,
        address=r.address,
        kv_events_endpoint=r.kv_events_endpoint,
        replay_endpoint=r.replay_endpoint,
        topic=r.topic,
        block_size=r.block_size,
        engine=r.engine,
        role=r.role,
        kv_layout=r.kv_layout,
        tp_size=r.tp_size,
        num_kv_heads=r.num_kv_heads,
        labels=r.labels,
        eagle=r.eagle,
        bind_events=r.bind_events,
        aliases=r.aliases,
        chunk_size=r.chunk_size,
        reports_reuse=r.reports_reuse,
        hidden_groups=r.hidden_groups,
        instance=r.instance,
        source=r.source,
    )


def group_message(info: GroupInfo, stores: int | None = None) -> pb.Group:
    """A catalogue entry; `stores` where a fresher count than the entry's is known."""
    return pb.Group(
        idx=max(0, info.idx),
        kind=info.kind,
        block_size=info.block_size,
        sliding_window=info.window,
        treated_as=info.treated_as,
        stores=info.stores if stores is None else stores,
    )


def score_message(
    key: WorkerKey,
    address: str,
    scored: Scored,
    *,
    state: int,
    staleness_ms: int,
    cost: float,
    active_blocks: int = 0,
) -> pb.WorkerScore:
    """One line of a ScoreWorkers answer."""
    message = held_message(scored)
    message.worker_id = key.worker_id
    message.dp_rank = key.dp_rank
    message.address = address
    message.active_blocks = active_blocks
    message.cost = cost
    message.state = state  # type: ignore[assignment]  # a WorkerState value
    message.staleness_ms = staleness_ms
    return message


def held_message(scored: Scored) -> pb.WorkerScore:
    """The part of a line that says what a worker holds of the prompt."""
    return pb.WorkerScore(
        matched_blocks=scored.matched // scored.block_size if scored.block_size else 0,
        matched_tokens=scored.matched,
        reusable_tokens=scored.reusable,
        device_tokens=scored.device,
        host_tokens=scored.host,
        storage_tokens=scored.storage,
        predicted_tokens=scored.predicted,
        block_size=scored.block_size,
        reason=scored.reason,
        upper_bound=scored.upper_bound,
    )


def audit_message(row: Audit) -> pb.WorkerAudit:
    """One line of an Audit answer."""
    return pb.WorkerAudit(
        worker_id=row.worker.worker_id,
        dp_rank=row.worker.dp_rank,
        namespace=row.worker.namespace,
        outcomes=row.outcomes,
        predicted_tokens=row.predicted_tokens,
        resting_tokens=row.resting_tokens,
        actual_tokens=row.actual_tokens,
        prompt_tokens=row.prompt_tokens,
        over=row.over,
        under=row.under,
        miscounted=row.miscounted,
        window=row.window,
        window_error=row.window_error,
        drifting=row.drifting,
        resyncs=row.resyncs,
    )


def unix_ms() -> int:
    """Milliseconds since the epoch."""
    return time.time_ns() // 1_000_000
