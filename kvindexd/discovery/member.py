"""One source as the reconciler keeps it: what it said, what has been done about it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

import msgspec
import structlog

from kvindexd.discovery.metrics import DiscoveryMetrics
from kvindexd.discovery.wanted import Owner, View, Wanted, changed
from kvindexd.model import WorkerKey
from kvindexd.registration import InvalidRegistration, Registration

log = structlog.get_logger(__name__)


class _Prepared(NamedTuple):
    """A registration as the source gave it, with the source's name, and what is wrong with it."""

    given: Registration
    registration: Registration
    problem: str = ""


class Member:
    """The `Report` of one source.

    `view`: what it wants; `settled`: as of which view each rank has been dealt with; `retry`:
    ranks to look at though the view has not changed; `sweep`: look at everything registered,
    `sweep_next`: once the source has looked again; `refused`: ranks that could not be registered;
    `idle`: ranks that are wanted and not registered, for now.
    """

    def __init__(self, owner: Owner, metrics: DiscoveryMetrics, wake: Callable[[], None]) -> None:
        self.owner = owner
        self.name = owner.source
        self.view: View = {}
        self.settled: dict[WorkerKey, Wanted] = {}
        self.retry: set[WorkerKey] = set()
        self.conflicts: dict[WorkerKey, str] = {}
        self.refused: set[WorkerKey] = set()
        self.idle: set[WorkerKey] = set()
        self.published = False
        self.sweep = False
        self.sweep_next = owner.sweeps
        self.ended = False
        self._metrics = metrics
        self._wake = wake
        self._unusable: dict[str, str] = {}
        self._failure = ""
        self._prepared: dict[int, _Prepared] = {}
        self.show()

    # -- what the source says -----------------------------------------------------------------

    def publish(self, found: Iterable[Wanted], unusable: Mapping[str, str] | None = None) -> None:
        """Take its whole view."""
        problems = dict(unusable or {})
        view: dict[WorkerKey, Wanted] = {}
        prepared: dict[int, _Prepared] = {}
        for wanted in found:
            one = self._prepare(wanted.registration)
            prepared[id(one.given)] = one
            registration = one.registration
            if one.problem:
                problems[str(registration.key)] = one.problem
                continue
            if registration.key in view:
                problems[str(registration.key)] = "found twice; the first one counts"
                continue
            view[registration.key] = wanted._replace(registration=registration)
        self._prepared = prepared
        self._note_unusable(problems)
        self.view, self.published = view, True
        self.works()
        self.show()
        self._wake()

    def _prepare(self, given: Registration) -> _Prepared:
        """Most of a view is what it was: thousands of workers must not be checked at each change
        of one."""
        known = self._prepared.get(id(given))
        if known is not None and known.given is given:
            return known
        registration = msgspec.structs.replace(given, source=self.name)
        try:
            registration.check()
        except InvalidRegistration as e:
            return _Prepared(given, registration, str(e))
        return _Prepared(given, registration)

    def failed(self, why: str) -> None:
        """Count it, and log what was not logged last."""
        self._metrics.errors.labels(self.name).inc()
        if why != self._failure:
            self._failure = why
            kept = len(self.view)
            log.warning(
                "discovery_failed",
                source=self.name,
                error=why,
                workers_kept=kept,
                cost="workers come and go unnoticed until it works",
            )

    def works(self) -> None:
        """Looking works."""
        if self.published and self.sweep_next:
            self.sweep, self.sweep_next = True, False
            self._wake()
        if self._failure:
            self._failure = ""
            log.info("discovery_works_again", source=self.name)

    def _note_unusable(self, problems: dict[str, str]) -> None:
        for what, why in problems.items():
            if self._unusable.get(what) != why:
                self._metrics.errors.labels(self.name).inc()
                log.warning(
                    "discovery_unusable",
                    source=self.name,
                    found=what,
                    error=why,
                    cost="it is left out",
                )
        self._unusable = problems

    # -- what the reconciler does -------------------------------------------------------------

    def pending(self) -> set[WorkerKey]:
        """Ranks to look at now."""
        if not self.published:
            return set()
        return changed(self.settled, self.view) | self.retry

    def settle(self, key: WorkerKey, wanted: Wanted | None, *, idle: bool = False) -> None:
        """What the view wanted of a rank has been done, or, with `idle`, is not to be now."""
        self.retry.discard(key)
        self.refused.discard(key)
        self.idle.discard(key)
        if idle:
            self.idle.add(key)
        if wanted is None:
            self.settled.pop(key, None)
        else:
            self.settled[key] = wanted

    def note_conflicts(
        self, looked_at: Iterable[WorkerKey], found: Mapping[WorkerKey, str]
    ) -> None:
        """Keep who owns what this source wants; each logged once."""
        for key in looked_at:
            other = found.get(key)
            if other is None:
                self.conflicts.pop(key, None)
            elif self.conflicts.get(key) != other:
                self.conflicts[key] = other
                log.warning(
                    "discovery_conflict",
                    worker=str(key),
                    source=self.name,
                    owner=other,
                    cost="it stays as its owner registered it",
                )
        self.show()

    def owned(self) -> list[Registration]:
        """The registrations that are this source's now."""
        return [
            w.registration
            for key, w in self.settled.items()
            if key not in self.conflicts and key not in self.idle
        ]

    def show(self) -> None:
        """Bring the gauges up to date."""
        if not self.ended:
            self._metrics.show(self.name, len(self.view), len(self.conflicts))
