"""Take each mechanism of docs/reliability.md away, in a copy, and see its test fail.

    python tests/mutations.py [--trust] [NAME ...]

The tests must pass as they are, which is tried first unless `--trust` says that they do. Exits with
1 if a test passes without its mechanism, or a mutation no longer applies.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
I = "kvindexd/ingest"  # noqa: E741
S = "kvindexd/store"


class Mutation(NamedTuple):
    """`edits`: (file, text, replacement); `test`: what must fail then, as pytest takes it."""

    name: str
    edits: tuple[tuple[str, str, str], ...]
    test: str


def m(name: str, file: str, old: str, new: str, test: str) -> Mutation:
    return Mutation(name, ((file, old, new),), test)


LEASE, RESTART = "tests/test_reliability_lease.py", "tests/test_reliability_restart.py"
GAPS, LIVENESS = "tests/test_reliability_gaps.py", "tests/test_reliability_liveness.py"
REDIS, SHUTDOWN = "tests/test_reliability_redis.py", "tests/test_reliability_shutdown.py"
TOPOLOGIES = "tests/test_reliability_topologies.py"
FENCE = "if w[2] ~= fence then return {'FENCED', w[3] or ''} end"

MUTATIONS = [
    Mutation(
        "no fencing: any token is accepted",
        (
            (f"{S}/apply.lua", FENCE, ""),
            (f"{S}/renew.lua", FENCE.replace("fence", "ARGV[2]"), ""),
        ),
        f"{LEASE} -k paused_owner",
    ),
    m(
        "a lapsed lease is not free",
        f"{S}/acquire.lua",
        "held_by ~= owner and expiry > now",
        "held_by ~= owner",
        f"{LEASE} -k paused_owner",
    ),
    m(
        "no heartbeat",
        f"{I}/session.py",
        'tasks.create_task(self._beat(), name=f"heartbeat {self._name}")',
        "pass",
        f"{LEASE} -k without_lease",
    ),
    m(
        "the lease is not released at the end",
        f"{I}/worker.py",
        "await self._store.release(session.writer.lease)",
        "pass",
        f"{SHUTDOWN} -k orderly",
    ),
    m(
        "a standby takes an emptied store at once",
        f"{I}/worker.py",
        "await asyncio.sleep(self._settings.lease_ttl)",
        "pass",
        f"{LEASE} -k emptied",
    ),
    m(
        "a rank without lease is not stale",
        "kvindexd/replica/state.py",
        "if facts.lease_until <= now:",
        "if False:",
        f"{LEASE} -k without_lease",
    ),
    m(
        "where the sequence stood is not taken over",
        f"{I}/session.py",
        "self._sequencer = Sequencer(self._config, await self.writer.load(snapshot))",
        "self._sequencer = Sequencer(self._config)",
        f"{RESTART} -k resumes_where",
    ),
    m(
        "the waiting room is not restored",
        "kvindexd/rank_state.py",
        "self.waiting.load(parked)",
        "pass",
        f"{RESTART} -k waits_for_its_parent",
    ),
    m(
        "a number that goes back is late, not a restart",
        f"{I}/sequencer.py",
        "elif frame.ts is not None and frame.ts > top_ts:",
        "elif False:",
        f"{RESTART} -k in_place",
    ),
    m(
        "what replay returns is not compared",
        f"{I}/sequencer.py",
        "elif known is not None or (last and frame.ts is not None and frame.ts > last.ts):",
        "elif False:",
        f"{RESTART} -k both_restart",
    ),
    m(
        "an empty replay buffer says nothing",
        f"{I}/sequencer.py",
        "elif self._proven or self._suspected:",
        "elif False:",
        f"{RESTART} -k idle_engine",
    ),
    m(
        "a store that lost its data is not written anew",
        f"{I}/writer.py",
        "except (Diverged, Damaged, NotRegistered) as e:",
        "except ZeroDivisionError as e:",
        f"{RESTART} -k without_its_data",
    ),
    m(
        "an unwritten clear does not begin a new sequence",
        f"{I}/writer.py",
        "if seq >= 0 or delta.clear:",
        "if seq >= 0:",
        f"{RESTART} -k emptied",
    ),
    m(
        "a clear that is due begins no new sequence when the store is rewritten",
        f"{I}/writer.py",
        "self._start() if self.residency.cleared else self._stand",
        "self._stand",
        "tests/test_writer.py -k new_incarnation",
    ),
    m(
        "the heartbeat takes an own new lease for another's",
        f"{I}/session.py",
        "if self.writer.lease is lease and not self.writer.moving:",
        "if True:",
        "tests/test_session.py -k anothers",
    ),
    m(
        "a rank that others register again is given up",
        f"{I}/writer.py",
        "if e.owner or e is rewind:",
        "if True:",
        "tests/test_session.py -k others_may",
    ),
    m(
        "heartbeats do not compare what is stored",
        f"{I}/session.py",
        "if lease.position == idle_at != result.position and not lease.lock.locked():",
        "if False:",
        f"{RESTART} -k older_state",
    ),
    m(
        "missing records are not noticed",
        f"{S}/apply.lua",
        "if held ~= expected and ARGV[13] ~= '1' then",
        "if false then",
        f"{RESTART} -k vanish",
    ),
    m(
        "a missing record is taken for a deregistration",
        "kvindexd/registering.py",
        "if registration.key not in await store.leases():",
        "if True:",
        f"{RESTART} -k vanish",
    ),
    m(
        "an epoch that goes back is ignored by replicas",
        "kvindexd/replica/book.py",
        "or (known and entry.epoch < view.epoch)",
        "",
        f"{RESTART} -k vanish",
    ),
    m(
        "the profile is not written with a rewrite",
        "kvindexd/rank_state.py",
        'self._saved, self._saved_shape = (b"", b""), ()',
        'self._saved = (b"", b"")',
        "tests/test_chaos.py -k every_round",
    ),
    m(
        "holes are given up at once",
        f"{I}/sequencer.py",
        "if not self._config.replay:\n                self._order.give_up",
        "if True:\n                self._order.give_up",
        f"{GAPS} -k replayed_from_where",
    ),
    m(
        "nothing is asked on connecting",
        f"{I}/session.py",
        "await self._carry_out(sequencer.connected(now))",
        "pass",
        f"{GAPS} -k late_joiner",
    ),
    m(
        "live batches do not wait for a replay",
        f"{I}/sequencer.py",
        "if self._flight is not None:\n            self._hold(frame, now, out)",
        "if self._flight is not None:\n            self._apply(frame, False, out)",
        f"{GAPS} -k live_batches_wait",
    ),
    m(
        "what was applied is not recognised",
        f"{I}/sequencer.py",
        "if known is not None and known.digest == frame.digest:\n"
        '            out.append(Dropped(frame.seq, "duplicate"))',
        "if known is not None and known.digest == frame.digest:\n"
        "            self._apply(frame, False, out)",
        f"{GAPS} -k reordered",
    ),
    m(
        "a silent replay server is waited for",
        f"{I}/session.py",
        "reply_timeout=settings.replay_timeout",
        "reply_timeout=30.0",
        f"{GAPS} -k silent_replay",
    ),
    m(
        "what was lost while replay was silent is never read back",
        f"{I}/order.py",
        "self.missed = last",
        "pass",
        f"{GAPS} -k silent_replay",
    ),
    m(
        "no back-off after a failed replay",
        f"{I}/sequencer.py",
        "self._retry_at = now + wait * self._rng.uniform(0.5, 1.0)",
        "self._retry_at = now",
        f"{GAPS} -k silent_replay",
    ),
    m(
        "lost events never reset a rank",
        f"{I}/session.py",
        'keep = self._settings.on_lost_events == "keep"',
        "keep = True",
        f"{GAPS} -k older_than",
    ),
    m(
        "lost events always reset a rank",
        f"{I}/session.py",
        'keep = self._settings.on_lost_events == "keep"',
        "keep = False",
        f"{GAPS} -k older_than",
    ),
    m(
        "that nothing is admitted is no finding",
        f"{I}/worker.py",
        "none_admitted = stores > 0 and",
        "none_admitted = False and",
        f"{LIVENESS} -k four_kinds",
    ),
    m(
        "the connection's state is not reported",
        f"{I}/worker.py",
        "if link.state is not LinkState.CONNECTED:",
        "if False:",
        f"{LIVENESS} -k gone",
    ),
    m(
        "no ZMTP heartbeats",
        f"{I}/transport.py",
        "zmq.HEARTBEAT_IVL: ms(settings.heartbeat_interval)",
        "zmq.HEARTBEAT_IVL: 0",
        f"{LIVENESS} -k half_open",
    ),
    m(
        "the monitor's reader is closed before the socket",
        f"{I}/transport.py",
        "    socket.monitor(None, 0)\n    monitor.close(0)\n",
        "    monitor.close(0)\n    socket.monitor(None, 0)\n",
        f"{LIVENESS} -k ends",
    ),
    m(
        "one shifted message replaces the socket",
        f"{I}/transport.py",
        "_OUT_OF_STEP = 4",
        "_OUT_OF_STEP = 1",
        "tests/test_transport.py -k between_good_ones",
    ),
    Mutation(
        "no timeout on commands",
        (
            (f"{S}/pool.py", "asyncio.timeout(within)", "asyncio.timeout(None)"),
            (f"{S}/connect.py", "asyncio.timeout(self.limits.deadline)", "asyncio.timeout(None)"),
        ),
        f"{REDIS} -k silent_redis",
    ),
    Mutation(
        "a connection is used again after a cancelled command",
        (
            (
                f"{S}/pool.py",
                "            await self.drop()\n            raise\n        self.alive",
                "            self.alive = True\n            raise\n        self.alive",
            ),
            (
                f"{S}/pool.py",
                "read_response(disable_decoding=True)",
                "read_response(disable_decoding=True, disconnect_on_error=False)",
            ),
        ),
        f"{REDIS} -k cancelled_calls",
    ),
    m(
        "a write that is repeated after a lost reply is not recognised",
        f"{S}/apply.lua",
        "if w[7] == call then",
        "if false then",
        f"{REDIS} -k lost_replies",
    ),
    m(
        "a full server ends the session",
        f"{I}/writer.py",
        "except StoreFull as e:",
        "except ZeroDivisionError as e:",
        f"{REDIS} -k full_redis",
    ),
    m(
        "an evicting policy is accepted",
        f"{S}/checks.py",
        'elif identity.policy != "noeviction":',
        "elif False:",
        f"{REDIS} -k evicting",
    ),
    Mutation(
        "the master is resolved once",
        (
            (f"{S}/topology.py", "_RESOLVE_TTL = 2.0", "_RESOLVE_TTL = 1e9"),
            (f"{S}/topology.py", "self._valid_until = 0.0\n\n    def", "pass\n\n    def"),
        ),
        f"{TOPOLOGIES} -k sentinel",
    ),
    m(
        "all workers in one shard",
        f"{S}/keys.py",
        "def shard_of(key: WorkerKey, shards: int) -> int:",
        "def shard_of(key: WorkerKey, shards: int) -> int:\n    return 0\n\n\n"
        "def _shard_of(key: WorkerKey, shards: int) -> int:",
        f"{TOPOLOGIES} -k shards",
    ),
    m(
        "health goes on serving until the end",
        "kvindexd/rpc/server.py",
        "await self._health.enter_graceful_shutdown()\n"
        "        if self._health.watches:\n"
        "            await asyncio.sleep(min(_MOVING_ON, self._grace))\n"
        "        self._health.ending.set()",
        "pass",
        f"{SHUTDOWN} -k orderly",
    ),
    m(
        "health watches are not ended",
        "kvindexd/rpc/server.py",
        "self._health.ending.set()",
        "pass",
        f"{SHUTDOWN} -k orderly",
    ),
    m(
        "no grace for calls in flight",
        "kvindexd/rpc/server.py",
        "await self._server.stop(self._grace)",
        "await self._server.stop(0)",
        f"{SHUTDOWN} -k orderly",
    ),
    m(
        "endless grace for calls in flight",
        "kvindexd/rpc/server.py",
        "await self._server.stop(self._grace)",
        "await self._server.stop(3600)",
        f"{SHUTDOWN} -k never_end",
    ),
    m(
        "handing over waits for the store for ever",
        f"{I}/worker.py",
        "async with asyncio.timeout(2.0):",
        "async with asyncio.timeout(None):",
        f"{SHUTDOWN} -k redis_that_is_away",
    ),
]


def _try(mutation: Mutation, folder: Path) -> str:
    """What came of it: "" = as it should be."""
    touched: dict[Path, str] = {}
    try:
        for file, old, new in mutation.edits:
            path = folder / file
            text = path.read_text()
            touched.setdefault(path, text)
            if text.count(old) != 1:
                return f"does not apply: {text.count(old)} times in {file}"
            path.write_text(text.replace(old, new))
        target, _, keyword = mutation.test.partition(" -k ")
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", target]
        run = subprocess.run(
            [*command, "-k", keyword], cwd=folder, capture_output=True, text=True, timeout=300
        )
        if run.returncode == 1:
            return ""
        return f"pytest ended with {run.returncode}: {run.stdout[-300:]}"
    finally:
        for path, text in touched.items():
            path.write_text(text)


def _passes_untouched(folder: Path, chosen: list[Mutation]) -> bool:
    files = sorted({mutation.test.partition(" -k ")[0] for mutation in chosen})
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *files]
    return subprocess.run(command, cwd=folder).returncode == 0


def main(names: list[str]) -> int:
    """Try those whose name contains one of `names`, or all."""
    trust = "--trust" in names
    names = [name for name in names if name != "--trust"]
    chosen = [x for x in MUTATIONS if not names or any(name in x.name for name in names)]
    bad = 0
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "tree"
        ignore = shutil.ignore_patterns(".git", ".venv*", "*.egg-info", "__pycache__", ".*_cache")
        shutil.copytree(ROOT, folder, ignore=ignore)
        if not trust and not _passes_untouched(folder, chosen):
            print("the tests do not pass as they are")
            return 1
        for mutation in chosen:
            problem = _try(mutation, folder)
            bad += bool(problem)
            said = f"NOT CAUGHT ({problem})" if problem else "caught"
            print(f"{said}: {mutation.name} [{mutation.test}]", flush=True)
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
