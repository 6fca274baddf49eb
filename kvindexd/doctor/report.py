"""What a check is, what it finds, and how all of them are run over the facts."""

from __future__ import annotations

import enum
import fnmatch
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import msgspec

from kvindexd.doctor.facts import Facts, Missing


class Severity(enum.StrEnum):
    """How bad a finding is: answers are wrong or absent; they may become so; worth knowing."""

    ERROR = "error"
    WARNING = "warning"
    INFO = "info"


class Hit(NamedTuple):
    """One thing that a check found. `evidence`: the actual values, JSON-able. `fix` and
    `severity` where the check's own do not fit this case."""

    subject: str
    what: str
    evidence: dict[str, Any]
    fix: str = ""
    severity: Severity | None = None


class Skip(NamedTuple):
    """A part of a check that could not run. `subject`: what it would have looked at."""

    subject: str
    why: str


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """A hit with all that is known of its check. `cost`: what an operator loses by it."""

    id: str
    severity: Severity
    subject: str
    what: str
    evidence: dict[str, Any]
    cost: str
    fix: str


class NotChecked(msgspec.Struct, frozen=True, kw_only=True):
    """A check, or its part about one subject ("" = all of it), that could not run."""

    id: str
    subject: str
    why: str


Outcome = Iterator[Hit | Skip]


class Check(NamedTuple):
    """One check. `needs`: names of Facts without which it cannot run. `provoked`: what makes it
    find something; `fix`: what to do about it, unless a hit says so more exactly."""

    id: str
    severity: Severity
    needs: tuple[str, ...]
    provoked: str
    cost: str
    fix: str
    run: Callable[[Facts], Outcome]


class Report(msgspec.Struct, kw_only=True):
    """What a run found. `sound`: ids of checks that ran and found nothing."""

    findings: list[Finding]
    not_checked: list[NotChecked]
    sound: list[str]

    @property
    def bad(self) -> bool:
        """Whether there is an error or a warning among the findings."""
        return any(f.severity is not Severity.INFO for f in self.findings)


class Book:
    """The checks of one module, in order: `check` is the decorator that adds one."""

    def __init__(self) -> None:
        self.checks: list[Check] = []

    def check(
        self,
        id: str,
        severity: Severity,
        *needs: str,
        provoked: str,
        cost: str,
        fix: str,
    ) -> Callable[[Callable[[Facts], Outcome]], Callable[[Facts], Outcome]]:
        """Add the decorated function as a check."""

        def add(run: Callable[[Facts], Outcome]) -> Callable[[Facts], Outcome]:
            self.checks.append(Check(id, severity, needs, provoked, cost, fix, run))
            return run

        return add


def chosen(checks: Sequence[Check], patterns: Iterable[str]) -> list[Check]:
    """The checks whose id matches any of the patterns (`redis-*`); all without patterns.

    Raises ValueError for a pattern that matches none.
    """
    patterns = list(patterns)
    for pattern in patterns:
        if not any(fnmatch.fnmatchcase(c.id, pattern) for c in checks):
            raise ValueError(f"no check is called {pattern!r}; see `kvindexd doctor --list`")
    if not patterns:
        return list(checks)
    return [c for c in checks if any(fnmatch.fnmatchcase(c.id, p) for p in patterns)]


_ORDER = {s: i for i, s in enumerate(Severity)}


def judge(checks: Iterable[Check], facts: Facts) -> Report:
    """Run the checks. Findings come worst first."""
    report = Report(findings=[], not_checked=[], sound=[])
    for check in checks:
        _run(check, facts, report)
    report.findings.sort(key=lambda f: _ORDER[f.severity])
    return report


def _run(check: Check, facts: Facts, report: Report) -> None:
    for need in check.needs:
        fact = getattr(facts, need)
        if isinstance(fact, Missing):
            report.not_checked.append(NotChecked(id=check.id, subject="", why=fact.why))
            return
    whole = True
    for outcome in check.run(facts):
        whole = False
        if isinstance(outcome, Skip):
            skipped = NotChecked(id=check.id, subject=outcome.subject, why=outcome.why)
            report.not_checked.append(skipped)
            continue
        report.findings.append(
            Finding(
                id=check.id,
                severity=outcome.severity or check.severity,
                subject=outcome.subject,
                what=outcome.what,
                evidence=outcome.evidence,
                cost=check.cost,
                fix=outcome.fix or check.fix,
            )
        )
    if whole:
        report.sound.append(check.id)
