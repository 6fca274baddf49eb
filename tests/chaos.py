"""A fleet under random faults, and a model of the truth that the index is compared with.

Engines are processes that only publish; what they hold is kept here, by one block pool each, so
that the truth survives whatever is killed. Two checks:

- always: what an answer credits a worker with was held by one and the same incarnation of its
  engine, and once an answer showed an incarnation, no later one shows an older;
- at quiescence: exactly the blocks held now are in the index, on every daemon. Where events were
  lost for good (no replay, or a replay that was broken on purpose) the index may lack blocks, never
  have too many, until the engine clears its cache.
"""

from __future__ import annotations

import contextlib
import json
import random
import shutil
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import servers
from daemon import Daemon

from kvindexd import chain
from kvindexd.testing.blockpool import BlockPool
from kvindexd.testing.process import EngineProcess
from kvindexd.v1 import index_pb2 as pb
from kvindexd.v1 import index_pb2_grpc as rpc

BLOCK = 16
POOL = 48
QUIET = 45.0
"""Seconds that a fleet may take to recover from everything."""
GARBAGE = ("one_part", "no_topic", "four_parts", "short_seq", "end_marker", "shifted")
SETTINGS = {
    "ingest.lease_ttl": 1.5,
    "ingest.heartbeat": 0.3,
    "ingest.replay_timeout": 0.5,
    "redis.timeout": 1.0,
    "log.level": "info",
    "ext_proc.listen": "",
}


@dataclass
class Incarnation:
    """One life of an engine's cache. `ever`: keys of all blocks it has held at some time."""

    number: int
    ever: set[int] = field(default_factory=set)


class Engine:
    """A publishing process, and here what it really holds."""

    def __init__(self, name: str, rng: random.Random, replay: bool = True) -> None:
        self.name = name
        self.replay = replay
        self._rng = rng
        self.process = EngineProcess(*([] if replay else ["--replay-port", "-1"]))
        self.lives: list[Incarnation] = []
        self.lock = threading.Lock()
        self.next_seq = 0
        self._prompts: dict[tuple[int, ...], list[int]] = {}
        self.fates: deque[bool] = deque()  # of the next batches, which are lost: may it be replayed
        self.replay_broken = False
        self._begin()

    def _begin(self) -> None:
        self.pool = BlockPool(num_blocks=POOL)
        self._prompts = {}
        self.next_seq = 0
        self.fates.clear()
        self.replay_broken = False
        # Where events were lost for good, the index may lack blocks.
        self.lossy = not self.replay
        with self.lock:
            self.lives.append(Incarnation(len(self.lives)))

    @property
    def life(self) -> Incarnation:
        return self.lives[-1]

    def run(self, tokens: list[int], output: int = 0) -> None:
        """Serve a prompt and publish what that did to the cache, in one batch."""
        extra = [self._rng.randrange(1 << 17) for _ in range(output)]
        whole = (*tokens, *extra)
        keys = chain.prompt_keys(whole)
        self.pool.run(tokens, extra)
        self._prompts[whole] = keys
        with self.lock:
            self.life.ever.update(keys)
        self.flush()

    def clear(self) -> None:
        """Reset the prefix cache; announced with the next batch."""
        self.pool.reset()
        # Everything lost is forgotten by whoever hears of this.
        self.lossy = not self.replay or self.replay_broken

    def flush(self) -> None:
        """Publish what there is, even if that is nothing."""
        events = self.pool.take_events()
        self.next_seq = self.process.call("publish", events=events)["seq"] + 1
        if self.fates and not (self.fates.popleft() and self.replay):
            self.lossy = True

    def lose(self, count: int, replayable: bool) -> None:
        """Lose the batches that come next."""
        self.process.call("drop_next", count=count, replayable=replayable)
        self.fates.extend([replayable] * count)

    def kill(self) -> None:
        """kill -9: all it held is gone."""
        self.process.kill()
        self._begin()

    def held(self) -> set[int]:
        """Keys of the blocks it holds right now."""
        out: set[int] = set()
        for tokens, keys in self._prompts.items():
            (copies,) = self.pool.copies(tokens)
            out.update(key for key, n in zip(keys, copies, strict=True) if n)
        return out

    def trim(self) -> None:
        """Forget prompts of which nothing is held, so that a long run stays cheap."""
        held = self.held()
        for tokens in [t for t, keys in self._prompts.items() if not held.intersection(keys)]:
            del self._prompts[tokens]


class Witness:
    """Asks one daemon all the time, and holds each answer against the truth."""

    def __init__(self, fleet: Fleet, daemon: Daemon, seed: int) -> None:
        self._fleet = fleet
        self._daemon = daemon
        self._rng = random.Random(seed)
        self._oldest: Counter[str] = Counter()
        self._stop = threading.Event()
        self.asked = self.credited = self.unanswered = 0
        self.false: list[str] = []
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(10)

    def reset(self) -> None:
        """An older state of the store was put back: older incarnations may be seen again."""
        self._oldest.clear()

    def _run(self) -> None:
        address, channel, stub = "", None, None
        while not self._stop.wait(0.004):
            now_at = self._daemon.ready.get("grpc", "")
            if not now_at:
                continue
            if now_at != address:
                if channel is not None:
                    channel.close()
                address, channel = now_at, grpc.insecure_channel(now_at)
                stub = rpc.KVIndexStub(channel)
            tokens = self._fleet.some_prompt(self._rng)
            prompt = pb.Prompt(model="m", token_ids=chain.pack_tokens([*tokens, 1]))
            generation = self._fleet.rollbacks
            try:
                scores = stub.ScoreWorkers(pb.ScoreWorkersRequest(prompt=prompt), timeout=2).scores
            except (grpc.RpcError, ValueError):
                self.unanswered += 1
                continue
            if generation == self._fleet.rollbacks:
                self._judge(scores, chain.prompt_keys(tokens))
        if channel is not None:
            channel.close()

    def _judge(self, scores: list[pb.WorkerScore], keys: list[int]) -> None:
        self.asked += 1
        for score in scores:
            credited = keys[: score.matched_tokens // BLOCK]
            self.credited += len(credited)
            if credited:
                self._place(self._fleet.engines[score.worker_id], credited)

    def _place(self, engine: Engine, credited: list[int]) -> None:
        oldest = self._oldest[engine.name]
        with engine.lock:
            fits = [i.number for i in engine.lives if i.ever.issuperset(credited)]
        if not any(n >= oldest for n in fits):
            self.false.append(
                f"{engine.name}: {len(credited)} blocks credited; incarnations {fits} held them, "
                f"{oldest} had been seen by then, {engine.life.number} is running"
            )
        elif min(fits) > oldest:
            self._oldest[engine.name] = min(fits)


@dataclass
class Figures:
    """What a run did and found."""

    seed: int
    batches: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    recoveries: Counter[str] = field(default_factory=Counter)
    quiescent: int = 0
    compared: int = 0
    differences: int = 0
    answers: int = 0
    credited: int = 0
    seconds: float = 0.0
    slowest_recovery: float = 0.0
    rss: list[dict[str, int]] = field(default_factory=list)

    def lines(self) -> Iterator[str]:
        yield f"seed {self.seed}, {self.seconds:.0f} s, {self.batches} batches"
        yield "faults: " + ", ".join(f"{k} {n}" for k, n in sorted(self.faults.items()))
        yield "recoveries: " + ", ".join(f"{k} {n}" for k, n in sorted(self.recoveries.items()))
        yield (
            f"{self.quiescent} times quiescent (slowest {self.slowest_recovery:.1f} s), "
            f"{self.compared} blocks compared, {self.differences} differences"
        )
        yield f"{self.answers} answers checked on the way, {self.credited} blocks credited in them"


class Fleet:
    """Engines, two daemons that compete for them, one Redis. Use as a context manager."""

    def __init__(self, seed: int, folder: Path, *, kill_daemons: bool = True) -> None:
        self.rng = random.Random(seed)
        self.figures = Figures(seed)
        self.kill_daemons = kill_daemons
        self._folder = folder
        self._stack = contextlib.ExitStack()
        self.engines: dict[str, Engine] = {}
        self.daemons: list[Daemon] = []
        self.witnesses: list[Witness] = []
        self.rollbacks = 0
        self._lost: dict[int, Counter[str]] = {}
        self._saved = False
        self._paused: list[Callable[[], None]] = []
        self._shared = [self._tokens(self.rng.randrange(2, 9)) for _ in range(12)]
        self._recent: list[list[int]] = list(self._shared)

    def __enter__(self) -> Fleet:
        try:
            self._start()
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _start(self) -> None:
        self.redis = self._stack.enter_context(
            servers.server(servers.VALKEY, "--save", "", "--appendonly", "yes")
        )
        for name, replay in (("e0", True), ("e1", True), ("e2", False)):
            self.engines[name] = Engine(name, self.rng, replay)
            self._stack.callback(self.engines[name].process.stop)
        config = self._folder / "fleet.toml"
        config.write_text("\n".join(map(_worker_toml, self.engines.values())))
        settings = SETTINGS | {"config": str(config), "redis.url": self.redis.url}
        for i in range(2):
            daemon = Daemon(**settings).start()
            self.daemons.append(daemon)
            self._stack.callback(daemon.kill)
            witness = Witness(self, daemon, self.figures.seed + i)
            self.witnesses.append(witness)
            witness.start()
            self._stack.callback(witness.stop)

    # -- prompts ------------------------------------------------------------------------------

    def _tokens(self, blocks: int) -> list[int]:
        return [self.rng.randrange(1 << 17) for _ in range(blocks * BLOCK)]

    def _prompt(self) -> list[int]:
        base = self.rng.choice(self._shared)
        if self.rng.random() < 0.4:
            return base
        start = base[: self.rng.randrange(len(base) // BLOCK + 1) * BLOCK]
        return [*start, *self._tokens(self.rng.randrange(1, 6))]

    def some_prompt(self, rng: random.Random) -> list[int]:
        """One that an engine was asked lately."""
        return rng.choice(self._recent)

    def work(self, requests: int) -> None:
        """Let engines serve so many prompts."""
        for _ in range(requests):
            engine = self.rng.choice(list(self.engines.values()))
            if self.rng.random() < 0.01:
                engine.clear()
            prompt = self._prompt()
            self._recent = [*self._recent[-199:], prompt]
            engine.run(prompt, self.rng.choice([0, 0, 0, 16, 40]))
            self.figures.batches += 1

    # -- faults -------------------------------------------------------------------------------

    def fault(self, name: str) -> None:
        """Inject one fault by the name of its method."""
        self.figures.faults[name] += 1
        getattr(self, name)()

    def _some_engine(self, replay: bool | None = None) -> Engine:
        fitting = [e for e in self.engines.values() if replay is None or e.replay == replay]
        return self.rng.choice(fitting)

    def frame_lost(self) -> None:
        self._some_engine().lose(self.rng.randrange(1, 4), replayable=True)

    def frame_repeated(self) -> None:
        self._some_engine().process.call("duplicate_next", count=self.rng.randrange(1, 4))

    def frame_reordered(self) -> None:
        self._some_engine().process.call("swap_next")

    def frame_garbage(self) -> None:
        self._some_engine().process.call("garbage", kind=self.rng.choice(GARBAGE))

    def frame_lost_for_good(self) -> None:
        self._some_engine().lose(1, replayable=False)

    def replay_broken(self) -> None:
        engine = self._some_engine(replay=True)
        mode = self.rng.choice(["silent", "cut", "holes", "untopical"])
        engine.process.call("replay_mode", mode=mode)
        engine.replay_broken = mode != "untopical"
        engine.lossy = engine.lossy or engine.replay_broken

    def engine_kill(self) -> None:
        engine = self._some_engine()
        self._saved = False
        engine.kill()
        if self.rng.random() < 0.5:
            self.work_elsewhere(engine)
        engine.process.start()
        if not engine.replay:
            # Without replay a number is all the evidence there is: see docs/reliability.md.
            with contextlib.suppress(RuntimeError, TimeoutError):
                engine.process.call("wait_subscribed", timeout=8.0)

    def work_elsewhere(self, down: Engine) -> None:
        others = [e for e in self.engines.values() if e is not down]
        for _ in range(3):
            self.rng.choice(others).run(self._prompt())
            self.figures.batches += 1

    def engine_pause(self) -> None:
        engine = self._some_engine()
        engine.process.pause()
        time.sleep(self.rng.uniform(0.05, 0.4))
        engine.process.resume()

    def daemon_kill(self) -> None:
        self._restart(lambda d: d.kill())

    def daemon_stop(self) -> None:
        self._restart(lambda d: _stopped(d))

    def _restart(self, end: Callable[[Daemon], object]) -> None:
        daemon = self.rng.choice(self.daemons)
        self._note_recoveries(daemon)
        daemon.ready = {}
        end(daemon)
        self.witnesses[self.daemons.index(daemon)].reset()
        self.work(self.rng.randrange(4))
        daemon.start()

    def daemon_pause(self) -> None:
        """Longer than its lease lives: it wakes up deposed."""
        daemon = self.rng.choice(self.daemons)
        daemon.pause()
        until = time.monotonic() + self.rng.choice([0.3, 2.2])
        while time.monotonic() < until:
            self.work(1)
            time.sleep(0.05)
        daemon.resume()

    def redis_pause(self) -> None:
        self.redis.pause()
        until = time.monotonic() + self.rng.choice([0.2, 1.5])
        while time.monotonic() < until:
            self.work(1)
            time.sleep(0.05)
        self.redis.resume()

    def redis_kill(self) -> None:
        self.redis.kill()
        self.work(self.rng.randrange(4))
        self.redis.start()

    def redis_wiped(self) -> None:
        self.redis.kill()
        shutil.rmtree(self.redis.folder / "appendonlydir", ignore_errors=True)
        self._saved = False
        self.work(self.rng.randrange(4))
        self.redis.start()

    def redis_rolled_back(self) -> None:
        """It comes back with an older state, as after a failover or from a backup."""
        copy = self._folder / "backup"
        if not self._saved:
            shutil.rmtree(copy, ignore_errors=True)
            self.redis.pause()
            shutil.copytree(self.redis.folder / "appendonlydir", copy)
            self.redis.resume()
            self._saved = True
            self.work(10)
        self._saved = False
        self.redis.kill()
        self.rollbacks += 1
        shutil.rmtree(self.redis.folder / "appendonlydir")
        shutil.copytree(copy, self.redis.folder / "appendonlydir")
        self.redis.start()
        for witness in self.witnesses:
            witness.reset()
        self.rollbacks += 1

    # -- rounds -------------------------------------------------------------------------------

    def round(self, faults: list[str]) -> None:
        """Faults in the midst of work, then quiescence and the comparison."""
        for name in faults:
            self.work(self.rng.randrange(1, 12))
            self.fault(name)
        self.work(self.rng.randrange(1, 12))
        self.settle()
        for engine in self.engines.values():
            if engine.lossy:
                engine.clear()
                engine.lossy = False
        self.work(12)
        self.settle()
        for engine in self.engines.values():
            engine.lossy = engine.lossy or not engine.replay
            engine.trim()

    def settle(self) -> None:
        """Until the index equals the truth. AssertionError with the differences if it does not."""
        for engine in self.engines.values():
            if engine.replay:
                engine.process.call("replay_mode", mode="normal")
                engine.replay_broken = False
            # Whatever was held back or dropped before shows as a gap by now.
            for _ in range(4 + len(engine.fates)):
                engine.flush()
                self.figures.batches += 1
        started = time.monotonic()
        truth = {name: engine.held() for name, engine in self.engines.items()}
        keys = sorted(
            set().union(*truth.values(), *(self._stray(e) for e in self.engines.values()))
        )
        for daemon in self.daemons:
            self._until_equal(daemon, truth, keys)
        took = time.monotonic() - started
        self.figures.slowest_recovery = max(self.figures.slowest_recovery, took)
        self.figures.quiescent += 1
        self.figures.compared += len(keys) * len(self.daemons)
        self._no_false_credit()

    def _stray(self, engine: Engine) -> list[int]:
        """Some keys that were held once, to be found absent."""
        gone = sorted(engine.life.ever)
        return self.rng.sample(gone, min(len(gone), 100))

    def _until_equal(self, daemon: Daemon, truth: dict[str, set[int]], keys: list[int]) -> None:
        until = time.monotonic() + QUIET
        speak = time.monotonic() + 1.0
        problem: object = ""
        while time.monotonic() < until:
            if time.monotonic() > speak:
                # Without replay, what nobody listened to shows only when something follows.
                speak = time.monotonic() + 1.0
                for engine in self.engines.values():
                    if not engine.replay:
                        engine.flush()
            try:
                problem = self._differences(daemon, truth, keys)
            except grpc.RpcError as e:
                problem = e.details()
            if not problem:
                return
            time.sleep(0.1)
        self.figures.differences += 1
        raise AssertionError(f"not as in truth after {QUIET} s: {problem}\n{daemon.log()}")

    def _differences(self, daemon: Daemon, truth: dict[str, set[int]], keys: list[int]) -> str:
        for name, engine in self.engines.items():
            worker = daemon.worker(name)
            if worker.state != pb.LIVE or worker.last_seq != engine.next_seq - 1:
                return (
                    f"{name}: {pb.WorkerState.Name(worker.state)} at {worker.last_seq}, "
                    f"expected LIVE at {engine.next_seq - 1}: {worker.detail}"
                )
            have, held = worker.blocks["device"], len(truth[name])
            if have > held or (have < held and not engine.lossy):
                return f"{name}: {have} blocks, holds {held}; counters {dict(worker.counters)}"
        for key in keys:
            holders = _holders(daemon, key)
            for name, engine in self.engines.items():
                if (name in holders) == (key in truth[name]):
                    continue
                if name in holders or not engine.lossy:
                    return f"{name}: block {key:x} in the index {name in holders}"
        return ""

    def _no_false_credit(self) -> None:
        for witness in self.witnesses:
            self.figures.answers += witness.asked
            self.figures.credited += witness.credited
            witness.asked = witness.credited = 0
            if witness.false:
                self.figures.differences += len(witness.false)
                raise AssertionError("false credit: " + "; ".join(witness.false[:10]))

    # -- figures ------------------------------------------------------------------------------

    def _note_recoveries(self, daemon: Daemon) -> None:
        """Count what the daemon says it recovered from, by its log."""
        names = {
            "gap": "gaps",
            "engine_restarted": "engine restarts",
            "store_rewritten": "store rewritten",
            "registered_again": "registered again",
            "rank_owned": "lease taken",
            "rank_stepped_down": "stepped down",
            "events_lost": "losses admitted",
            "store_back": "store back",
        }
        for record in daemon.records:
            event = str(record.get("event"))
            if event == "replay_ended" and record.get("outcome") == "complete":
                self.figures.recoveries["replays"] += 1
            elif event in names:
                self.figures.recoveries[names[event]] += 1
        daemon.records.clear()

    def note(self) -> Figures:
        """The figures so far."""
        for daemon in self.daemons:
            self._note_recoveries(daemon)
        return self.figures

    def rss(self) -> dict[str, int]:
        """Resident memory of the daemons, in kB."""
        out = {}
        for i, daemon in enumerate(self.daemons):
            assert daemon.process is not None
            status = Path(f"/proc/{daemon.process.pid}/status").read_text()
            out[f"daemon {i}"] = int(status.split("VmRSS:")[1].split()[0])
        return out


WIRE = ["frame_lost", "frame_repeated", "frame_reordered", "frame_garbage", "frame_lost_for_good"]
WIRE += ["replay_broken", "engine_pause"]
STORE = ["redis_pause", "redis_kill", "redis_wiped", "redis_rolled_back"]
DAEMON = ["daemon_kill", "daemon_stop", "daemon_pause"]


def _holders(daemon: Daemon, key: int) -> set[str]:
    try:
        found = daemon.admin.GetBlock(pb.GetBlockRequest(hash=key, model="m"), timeout=5)
    except grpc.RpcError as e:
        if e.code() is grpc.StatusCode.NOT_FOUND:
            return set()
        raise
    return {h.worker_id for h in found.holders}


def _stopped(daemon: Daemon) -> None:
    status = daemon.stop()
    assert status == 0, f"exit status {status} after SIGTERM\n{daemon.log()}"


def _worker_toml(engine: Engine) -> str:
    fields = {
        "worker_id": engine.name,
        "model": "m",
        "address": f"{engine.name}.test:8000",
        "kv_events_endpoint": engine.process.endpoints[0],
        "replay_endpoint": engine.process.replay_endpoints[0],
    }
    return "[[workers]]\n" + "\n".join(f"{k} = {json.dumps(v)}" for k, v in fields.items())
