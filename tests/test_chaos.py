"""A short run of the fleet under faults; the long ones are in tests/soak."""

from __future__ import annotations

import time
from pathlib import Path

from chaos import DAEMON, STORE, WIRE, Fleet

ROUNDS = [
    ["frame_lost", "frame_reordered", "engine_kill", "frame_repeated", "frame_garbage"],
    ["daemon_kill", "frame_lost", "redis_kill", "engine_kill"],
    ["redis_wiped", "frame_lost_for_good", "daemon_pause", "frame_lost"],
    ["replay_broken", "frame_lost", "redis_rolled_back", "engine_kill", "redis_pause"],
    ["daemon_stop", "engine_pause", "redis_wiped", "engine_kill", "frame_reordered"],
]
SOAK_SECONDS = 12.0


def test_after_every_round_of_faults_the_index_is_the_truth(tmp_path: Path) -> None:
    named = {name for faults in ROUNDS for name in faults}
    assert named == {*WIRE, *STORE, *DAEMON, "engine_kill"}, "every kind of fault is in it"
    with Fleet(20, tmp_path) as fleet:
        for faults in ROUNDS:
            fleet.round(faults)
        figures = fleet.note()
        assert figures.differences == 0
        assert figures.quiescent == 2 * len(ROUNDS)
        assert figures.answers > 100
        assert figures.credited > 100
        assert figures.recoveries["engine restarts"] >= 4
        assert figures.recoveries["replays"] >= 4
        assert figures.recoveries["store rewritten"] >= 1


def test_a_short_soak_leaves_no_difference(tmp_path: Path) -> None:
    """Faults of the wire, engines and the store at random points; memory is in the long one."""
    faults = [*WIRE, *WIRE, "engine_kill", "engine_kill", *STORE]
    with Fleet(21, tmp_path) as fleet:
        until = time.monotonic() + SOAK_SECONDS
        while time.monotonic() < until:
            fleet.round(fleet.rng.sample(faults, 4))
        assert fleet.note().differences == 0
