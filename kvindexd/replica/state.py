"""What state a worker rank is in, from facts and a time; pure."""

from __future__ import annotations

import enum
from typing import NamedTuple


class State(enum.StrEnum):
    """A worker rank's state, by its name in the API (WorkerState)."""

    UNKNOWN = "UNKNOWN"
    LIVE = "LIVE"
    SYNCING = "SYNCING"
    STALE = "STALE"
    DRAINING = "DRAINING"


NEVER = float("-inf")
"""The time of something that has not happened, and the end of a lease that nobody holds."""


class Facts(NamedTuple):
    """What is known of a rank. Times in seconds of one monotonic clock.

    `lease_until`: when the ingester's lease lapses unless renewed; NEVER without an ingester.
    `loaded`: the replica has all that the store holds of it. `reported`, `detail`: the state and
    its words as the ingester last put them ("" = nothing said). `last_seq`: -1 before any event.
    """

    lease_until: float = NEVER
    owner: str = ""
    loaded: bool = False
    draining: bool = False
    reported: str = ""
    detail: str = ""
    last_seq: int = -1


class Judged(NamedTuple):
    """A state and why, in words."""

    state: State
    detail: str


def judge(facts: Facts, now: float) -> Judged:
    """The state at `now`.

    Without a lease nobody vouches for the entries, so that comes before everything else; so does
    an ingester that says it has lost its engine. With the store away leases cannot be seen being
    renewed, and states turn STALE by age, as they must.
    """
    if facts.lease_until <= now:
        return Judged(State.STALE, _why_no_lease(facts, now))
    if facts.reported == State.STALE:
        return Judged(State.STALE, facts.detail or "its ingester has lost the engine")
    if facts.draining:
        return Judged(State.DRAINING, facts.detail or "draining")
    if not facts.loaded:
        return Judged(State.SYNCING, "being loaded from the store")
    if facts.reported == State.SYNCING:
        return Judged(State.SYNCING, facts.detail or "its ingester is catching up with the engine")
    if facts.last_seq < 0:
        return Judged(State.LIVE, facts.detail or "no events yet")
    return Judged(State.LIVE, facts.detail)


def _why_no_lease(facts: Facts, now: float) -> str:
    if facts.lease_until == NEVER:
        return "no ingester has it; start one, or see why it cannot take the lease"
    held = f" of {facts.owner}" if facts.owner else ""
    return f"the lease{held} lapsed {now - facts.lease_until:.1f} s ago"
