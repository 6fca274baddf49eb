"""A scorer's picking side, assembled: picker, service, exchange with other scorers, metrics."""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
import time
from collections import Counter
from collections.abc import Callable

from kvindexd.config import Config
from kvindexd.model import WorkerKey
from kvindexd.registration import Registration
from kvindexd.replica.replica import Replica
from kvindexd.rpc.fleet_view import FleetView
from kvindexd.rpc.index_service import RequestLimits
from kvindexd.rpc.load_sharing import LoadSharing
from kvindexd.rpc.pick_service import PickService
from kvindexd.rpc.prediction_watch import watch_predictions
from kvindexd.scoring.cost import Weights
from kvindexd.scoring.outcomes import DriftOptions, Outcome
from kvindexd.scoring.picker import Picker, PickSettings
from kvindexd.store import Store
from kvindexd.telemetry import Metrics

_GAUGE_INTERVAL = 1.0


def pick_settings(config: Config) -> PickSettings:
    """Section [pick] as the picker takes it."""
    p = config.pick
    weights = Weights(
        p.overlap_weight,
        p.host_weight,
        p.storage_weight,
        p.prefill_weight,
        p.decode_weight,
        p.mixed_weight,
    )
    drift = DriftOptions(p.drift_threshold, p.drift_window, p.drift_minimum, p.drift_cooldown)
    return PickSettings(
        weights, p.prediction_ttl, p.lease, p.recent_half_life, p.max_requests, drift
    )


class ServiceObserver:
    """Calls of the service as metrics."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def scored(self, code: str, seconds: float, matched_ratio: float | None) -> None:
        """One scoring call ended."""
        self._metrics.score_requests_total.labels(code).inc()
        self._metrics.score_latency_seconds.observe(seconds)
        if matched_ratio is not None:
            self._metrics.matched_ratio.observe(matched_ratio)

    def picked(self, worker: WorkerKey, prompt_tokens: int, reusable: int) -> None:
        """A request was sent to a worker rank."""
        name = str(worker)
        self._metrics.picks_total.labels(name).inc()
        self._metrics.picked_prompt_tokens_total.labels(name).inc(prompt_tokens)
        self._metrics.picked_reusable_tokens_total.labels(name).inc(reusable)

    def completed(self, how: str, outcome: Outcome | None) -> None:
        """A request ended."""
        self._metrics.completions_total.labels(how).inc()
        if outcome is not None:
            self.turned_out(outcome)

    def turned_out(self, outcome: Outcome) -> None:
        """An engine reported what it reused."""
        metrics, name = self._metrics, str(outcome.worker)
        error = outcome.predicted - outcome.actual
        metrics.predicted_vs_actual_tokens.labels(name).observe(error)
        metrics.completed_prompt_tokens_total.labels(name).inc(outcome.prompt_tokens)
        metrics.completed_predicted_tokens_total.labels(name).inc(outcome.predicted)
        metrics.completed_cached_tokens_total.labels(name).inc(outcome.actual)


def request_limits(config: Config) -> RequestLimits:
    """The bounds on one call."""
    limits = config.limits
    return RequestLimits(
        limits.max_prompt_tokens, limits.max_candidates, limits.max_batch, limits.max_labels
    )


class Picking:
    """One scorer's picks; `run` is its background work."""

    def __init__(
        self, config: Config, metrics: Metrics, store: Store, replica: Replica[Registration]
    ) -> None:
        self._config = config
        self._metrics = metrics
        self._replica = replica
        self._counted: Counter[str] = Counter()
        self._observer = ServiceObserver(metrics)
        self.picker = Picker(pick_settings(config))
        self.sharing = LoadSharing(
            store,
            self.picker,
            f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(3)}",
            interval=config.pick.share_interval,
            on_outcome=self._observer.turned_out,
            waiting_weight=config.engine_metrics.waiting_weight,
            epoch_of=self._epoch_of_plain,
        )
        watch_predictions(replica, self.picker)

    def _epoch_of_plain(self, key: WorkerKey) -> int | None:
        """The epoch of a rank that can resume behind any block; None for other ranks."""
        view = self._replica.worker(key)
        if view is None or view.profile.lookahead:
            return None
        plain = all(g.treated_as != "auxiliary" for g in view.profile.groups)
        return view.epoch if plain else None

    def service(self, fleet: FleetView, refused: Callable[[str], None]) -> PickService:
        """The KVIndex service over a fleet. `refused`: told the reason of each call that is over a
        limit."""
        limits = self._config.limits
        fleet.engine_load = self.sharing.engine_load
        fleet.account = self.account
        return PickService(
            fleet,
            self._observer,
            limits=request_limits(self._config),
            max_concurrent_calls=limits.max_concurrent_calls,
            picker=self.picker,
            pick_observer=self._observer,
            peers=self.sharing,
            refused=refused,
        )

    def account(self, key: WorkerKey) -> dict[str, int]:
        """Picks of a rank and how they turned out, by the names of Worker.counters."""
        picker = self.picker
        found = {}
        if (tally := picker.tallies.get(key)) is not None:
            found = {
                "picks": tally.picks,
                "pick_prompt_tokens": tally.prompt_tokens,
                "pick_reusable_tokens": tally.reusable_tokens,
            }
        if (outcome := picker.drift.of(key)) is not None:
            found |= {
                "outcomes": outcome.outcomes,
                "outcome_prompt_tokens": outcome.prompt_tokens,
                "outcome_cached_tokens": outcome.actual_tokens,
            }
        return found

    async def run(self) -> None:
        """Exchange load with other scorers, and keep the metrics up to date, until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.sharing.run(), name="load-sharing")
            tasks.create_task(self._gauges(), name="pick-gauges")

    async def _gauges(self) -> None:
        while True:
            self.picker.ledger.expire(time.monotonic())
            self.picker.predictions.expire(time.monotonic())
            self._metrics.requests_in_flight.set(len(self.picker.ledger))
            for view in self._replica.workers():
                gauge = self._metrics.worker_drifting.labels(str(view.key))
                gauge.set(self.picker.drift.drifting(view.key))
            self._count()
            await asyncio.sleep(_GAUGE_INTERVAL)

    def _count(self) -> None:
        """What the pure parts counted since the last look."""
        p, ledger = self.picker.predictions, self.picker.ledger
        now = Counter(
            confirmed=p.confirmed,
            dropped=p.dropped,
            expired=p.expired,
            refused=p.refused,
            lease=ledger.expired,
            full=ledger.evicted,
            unknown=self.sharing.dropped,
        )
        for name, n in (now - self._counted).items():
            if name in ("lease", "full"):
                self._metrics.leases_ended_total.labels(name).inc(n)
            elif name == "unknown":
                self._metrics.completions_total.labels(name).inc(n)
            else:
                self._metrics.predictions_total.labels(name).inc(n)
        self._counted = now
