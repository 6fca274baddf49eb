"""States of a worker rank, from facts and a time."""

from __future__ import annotations

import pytest

from kvindexd.replica.state import NEVER, Facts, State, judge

HELD = Facts(lease_until=100.0, owner="pod-a", loaded=True, last_seq=3)


@pytest.mark.parametrize(
    ("facts", "now", "state", "words"),
    [
        (HELD, 99.9, State.LIVE, ""),
        (HELD, 100.0, State.STALE, "the lease of pod-a lapsed 0.0 s ago"),
        (HELD, 112.3, State.STALE, "the lease of pod-a lapsed 12.3 s ago"),
        (HELD._replace(lease_until=NEVER), 0.0, State.STALE, "no ingester has it"),
        (HELD._replace(last_seq=-1), 1.0, State.LIVE, "no events yet"),
        (HELD._replace(loaded=False), 1.0, State.SYNCING, "being loaded"),
        (HELD._replace(reported="SYNCING", detail="gap"), 1.0, State.SYNCING, "gap"),
        (HELD._replace(reported="STALE", detail="engine away"), 1.0, State.STALE, "engine away"),
        (HELD._replace(reported="LIVE", detail="fine"), 1.0, State.LIVE, "fine"),
        (HELD._replace(draining=True), 1.0, State.DRAINING, "draining"),
        (HELD._replace(draining=True, reported="SYNCING"), 1.0, State.DRAINING, "draining"),
        (HELD._replace(draining=True), 101.0, State.STALE, "lapsed"),
        (HELD._replace(draining=True, reported="STALE"), 1.0, State.STALE, "lost the engine"),
        (HELD._replace(loaded=False, draining=True), 1.0, State.DRAINING, "draining"),
        (HELD._replace(loaded=False), 101.0, State.STALE, "lapsed"),
    ],
)
def test_states(facts: Facts, now: float, state: State, words: str) -> None:
    judged = judge(facts, now)
    assert judged.state is state
    assert words in judged.detail
    if not words:
        assert judged.detail == ""
