"""The fleet as JSON, and its history, from the replica and the metrics of this process."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

import msgspec
from prometheus_client import Counter, Histogram

from kvindexd._version import __version__
from kvindexd.model import WorkerKey
from kvindexd.registration import Registration
from kvindexd.replica.replica import Replica
from kvindexd.replica.view import WorkerView
from kvindexd.rpc.codec import TIER_NAMES
from kvindexd.telemetry import Metrics
from kvindexd.ui.history import INTERVAL, FleetHistory, RankHistory, Sample, Totals, columns

MAX_ROWS = 2_000
_YIELD_SECONDS = 0.002
_FRESH = 1.0
"""Seconds for which one rendering of the fleet serves all who ask."""
_NEVER = 2**32 - 1


class Fleet:
    """Takes a sample every two seconds, and renders what the page asks for."""

    def __init__(self, replica: Replica[Registration], metrics: Metrics, role: str) -> None:
        self._replica = replica
        self._metrics = metrics
        self._role = role
        self.account: Callable[[WorkerKey], Mapping[str, int]] = lambda _: {}
        """FleetView.account, once the service is up: what picks say of a rank."""
        self._history = FleetHistory()
        self._ranks: dict[WorkerKey, RankHistory] = {}
        self._lag, self._ratio, self._picks, self._latency = (Totals() for _ in range(4))
        self._sampled = time.monotonic()
        self._rendering = asyncio.Lock()
        self._rendered: tuple[float, bytes] = (float("-inf"), b"")

    # -- sampling -----------------------------------------------------------------------------

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await self._sample()
            await asyncio.sleep(INTERVAL)

    async def _sample(self) -> None:
        events = 0.0
        async for view in self._views():
            rank = self._ranks.setdefault(view.key, RankHistory())
            total = sum(n for name, n in view.counters.items() if name.startswith("event:"))
            position = (view.epoch, view.revision)
            rank.add(time.monotonic(), total, position, view.lag_ms)
            events += rank.rate
        for key in [k for k in self._ranks if self._replica.worker(k) is None]:
            del self._ranks[key]
        now = time.monotonic()
        passed, self._sampled = max(now - self._sampled, 0.001), now
        _, lag = self._lag.change(*_totals(self._metrics.apply_lag_seconds))
        _, ratio = self._ratio.change(*_totals(self._metrics.matched_ratio))
        _, picks = self._picks.change(
            _sum(self._metrics.picked_prompt_tokens_total),
            _sum(self._metrics.picked_reusable_tokens_total),
        )
        calls, latency = self._latency.change(*_totals(self._metrics.score_latency_seconds))
        self._history.add(
            Sample(
                time.time(),
                events,
                None if lag is None else lag * 1000,
                ratio,
                picks,
                calls / passed,
                None if latency is None else latency * 1000,
            )
        )

    async def _views(self) -> AsyncIterator[WorkerView[Registration]]:
        """All ranks, with pauses in which others run."""
        started = time.perf_counter()
        for view in sorted(self._replica.workers(), key=lambda v: v.key):
            if self._replica.worker(view.key) is view:
                yield view
            if time.perf_counter() - started > _YIELD_SECONDS:
                await asyncio.sleep(0)
                started = time.perf_counter()

    # -- rendering ----------------------------------------------------------------------------

    async def fleet(self) -> bytes:
        """`/ui/api/fleet`."""
        async with self._rendering:
            if time.monotonic() - self._rendered[0] > _FRESH:
                self._rendered = (time.monotonic(), await self._render())
            return self._rendered[1]

    async def _render(self) -> bytes:
        rows: list[bytes] = []
        async for view in self._views():
            if len(rows) < MAX_ROWS:
                rows.append(msgspec.json.encode(self._row(view)))
        stats, last = self._replica.stats(), self._history.last
        requests, _ = _totals(self._metrics.score_latency_seconds)
        head = {
            "time": time.time(),
            "version": __version__,
            "role": self._role,
            "not_ready": self._replica.not_ready(),
            "lag": self._replica.lag,
            "index": {"blocks": stats.blocks, "entries": stats.entries, "bytes": stats.bytes},
            "scoring": {
                "requests": int(requests),
                "per_second": round(last.requests, 2) if last else 0.0,
                "hit_ratio": last.hit_ratio if last else None,
                "latency_ms": last.latency_ms if last else None,
            },
            "left_off": max(0, len(self._replica.workers()) - len(rows)),
        }
        return msgspec.json.encode(head)[:-1] + b',"workers":[' + b",".join(rows) + b"]}"

    def _row(self, view: WorkerView[Registration]) -> dict[str, Any]:
        now, registration = time.monotonic(), view.registration
        judged, evidence = view.judge(now), view.staleness_ms(now)
        rank = self._ranks.get(view.key)
        return {
            "worker_id": view.key.worker_id,
            "dp_rank": view.key.dp_rank,
            "namespace": view.key.namespace,
            "model": registration.model,
            "address": registration.address,
            "role": registration.role,
            "owner": view.owner,
            "state": judged.state,
            "detail": judged.detail,
            "evidence_ms": evidence if evidence < _NEVER else None,
            "lag_ms": view.lag_ms if view.lag_ms >= 0 else None,
            "epoch": view.epoch,
            "seq": view.last_seq,
            "blocks": {TIER_NAMES[tier]: n for tier, n in view.tier_blocks().items()},
            "events_per_second": round(rank.rate, 2) if rank else 0.0,
            **_counted(view.counters),
            **_picked(self.account(view.key)),
        }

    def history(self, since: int) -> bytes:
        """`/ui/api/history`."""
        number, samples = self._history.since(since)
        return msgspec.json.encode({"next": number, "interval": INTERVAL} | columns(samples))

    def worker(self, key: WorkerKey) -> bytes | None:
        """`/ui/api/worker`; None if the rank is not registered."""
        view = self._replica.worker(key)
        if view is None:
            return None
        events, lag = self._ranks.get(key, RankHistory()).samples()
        now = time.time()
        times = [round(now - INTERVAL * (len(events) - 1 - i), 1) for i in range(len(events))]
        return msgspec.json.encode(
            {
                "worker": self._row(view),
                "registration": view.registration,
                "groups": [msgspec.structs.asdict(g) for g in view.profile.groups],
                "counters": dict(sorted({**view.counters, **self.account(key)}.items())),
                "history": {"time": times, "events": events, "lag_ms": lag},
            }
        )


def _counted(counters: Mapping[str, int]) -> dict[str, int]:
    def family(name: str) -> int:
        return sum(n for key, n in counters.items() if key.startswith(name))

    return {
        "gaps": counters.get("gaps", 0),
        "lost_batches": counters.get("lost_batches", 0),
        "restarts": counters.get("restarts", 0),
        "orphans": counters.get("orphans", 0),
        "filtered": family("filtered:"),
        "dropped": family("dropped:"),
    }


def _picked(account: Mapping[str, int]) -> dict[str, Any]:
    tokens = account.get("pick_prompt_tokens", 0)
    ratio = account.get("pick_reusable_tokens", 0) / tokens if tokens else None
    return {"picks": account.get("picks", 0), "hit_ratio": ratio}


def _totals(histogram: Histogram) -> tuple[float, float]:
    """(count, sum) of a histogram without labels."""
    (family,) = histogram.collect()
    found = {s.name.rpartition("_")[2]: s.value for s in family.samples}
    return found["count"], found["sum"]


def _sum(counter: Counter) -> float:
    """A counter's value over all of its labels."""
    (family,) = counter.collect()
    return sum(s.value for s in family.samples if s.name.endswith("_total"))
