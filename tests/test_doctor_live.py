"""`kvindexd doctor` as a process, against a fleet in which every part is broken in its own way, and
against one that is sound."""

from __future__ import annotations

import contextlib
import json
import resource
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import servers
import tokenizer_files
from daemon import Daemon, serving
from doctor_fleet import (
    ENV,
    Background,
    Fleet,
    Page,
    healthy_page,
    kind,
    run_doctor,
    slow,
    stored,
    take_turns,
    unused,
)
from typer.testing import CliRunner

from kvindexd.cli.main import app
from kvindexd.doctor.catalogue import CHECKS
from kvindexd.model import WorkerKey
from kvindexd.store import Store
from kvindexd.testing.engine import FakeEngine, free_ports
from kvindexd.testing.wire import encode_batch
from kvindexd.v1 import index_pb2 as pb

EXAMPLES = Path(__file__).parent.parent / "examples" / "envoy"


class Found:
    """A report, by check and subject."""

    def __init__(self, status: int, report: dict[str, Any]) -> None:
        self.status = status
        self.report = report

    def about(self, subject: str) -> dict[str, dict[str, Any]]:
        """Findings about a subject, by id."""
        return {f["id"]: f for f in self.report["findings"] if f["subject"] == subject}

    def one(self, id: str, subject: str = "") -> dict[str, Any]:
        """The finding of a check about a subject ("" = whoever it is about)."""
        named = [f for f in self.report["findings"] if f["id"] == id]
        hits = [f for f in named if not subject or f["subject"] == subject]
        skipped = [n for n in self.report["not_checked"] if n["id"] == id]
        assert hits, f"{id} {subject}: found {named}, not checked {skipped}"
        assert len(hits) == 1 or not subject
        return hits[0]


def build(fleet: Fleet) -> None:
    """Every fault that an engine or a registration can have, each at a worker of its own."""
    silence(fleet)
    misread(fleet)
    misregistered(fleet)
    lossy(fleet)
    unsteady(fleet)
    for name in ("ok", "dies", "drained", "flaps"):
        fleet.add(name)
    fleet.publishes("ok", lambda n: [stored(n % 8)])


def silence(fleet: Fleet) -> None:
    """Nothing comes, each time for another reason."""
    add, publishes = fleet.add, fleet.publishes
    fleet.register("never", kv_events_endpoint=f"tcp://{unused()}", address=unused())
    port = int(unused().rpartition(":")[2])
    add("connects", FakeEngine(port=port, connect=True))
    add("bound", bind_events=True, kv_events_endpoint=f"tcp://127.0.0.1:{free_ports(1)}")
    add("silent")
    add("topic", FakeEngine(topic="kv@pod@m"), topic="kv@other")
    publishes("topic", lambda n: [stored(n % 8)])
    add("useless")
    publishes("useless", lambda n: [stored(n % 8) | kind("encoder_only_attention")])


def misread(fleet: Fleet) -> None:
    """Something comes, and it is not what it should be."""
    add, publishes = fleet.add, fleet.publishes
    mixed = add("mixed")
    fleet.acts.append(lambda n: mixed.publish_raw(f"kv@{n % 2}", n, _batch(n)))
    add("strange")
    publishes("strange", lambda n: [stored(n % 8), stored(n % 8) | kind("brand_new", 1)])
    add("hybrid-a", model="h")
    publishes("hybrid-a", lambda n: [stored(n % 8), stored(n % 8) | kind("mamba", 1)])
    add("hybrid-b", model="h")
    publishes("hybrid-b", lambda n: [stored(n % 8)], every=1)
    add("legacy", engine="vllm")
    legacy = {k: v for k, v in stored(0).items() if k not in kind("")}
    publishes("legacy", lambda n: [legacy])
    for name, first in (("hash-a", 1), ("hash-b", 1001)):
        add(name, model="x").publish([stored(0) | {"block_hashes": [first]}])
    skewed = add("skewed")
    fleet.acts.append(lambda n: skewed.publish([stored(n % 8)], ts=1e9 + n) and None)


def misregistered(fleet: Fleet) -> None:
    """The registration does not fit the engine."""
    add, publishes = fleet.add, fleet.publishes
    add("size", block_size=32)
    publishes("size", lambda n: [stored(n % 8)])
    address = fleet.page(healthy_page()).address
    shared = add("twin-a", address=address)
    fleet.register("twin-b", kv_events_endpoint=shared.endpoint(), address=address)
    ranks = add("dp", FakeEngine(dp_size=2), dp_size=4)
    third = {"kv_events_endpoint": ranks.endpoint(1), "dp_rank": 3, "dp_size": 4}
    fleet.register("dp", address=unused(), **third)
    fleet.acts.append(lambda n: ranks.publish([stored(n % 8)], 1) and None)
    add("hidden", hidden_groups=True)
    models = [{"id": "other"}, {"id": "a", "parent": "m"}]
    page = Page(models, [1], enable_prefix_caching="False", num_gpu_blocks="1")
    add("off", address=fleet.page(page).address)
    publishes("off", lambda n: [stored(n % 8)])


def lossy(fleet: Fleet) -> None:
    """Messages are lost, and what should bring them back does not."""
    losing = fleet.add("lossy", replay_endpoint="")

    def lose(n: int) -> None:
        if n % 20 == 5:
            losing.drop_next()
        losing.publish([stored(n % 8)])

    fleet.acts.append(lose)
    fleet.add("mute").replay_mode("silent")
    fleet.add("unheard", replay_endpoint=f"tcp://{unused()}")
    stranger = fleet.stack.enter_context(FakeEngine())
    fleet.add("foreign", replay_endpoint=stranger.replay_endpoint())
    first = fleet.add("shares-a")
    fleet.add("shares-b", replay_endpoint=first.replay_endpoint())
    holes = fleet.add("holes")
    for n in range(40):
        holes.publish([stored(n % 8)])
    holes.replay_mode("holes")
    fleet.add("shallow", FakeEngine(buffer_steps=5))
    fleet.publishes("shallow", lambda n: [stored(n % 8)], every=1)


def unsteady(fleet: Fleet) -> None:
    """Counters that rise while one looks."""
    garbled = fleet.add("garbled")

    def garble(n: int) -> None:
        garbled.publish_raw("", n, b"\xc1")
        garbled.garbage("short_seq")

    fleet.acts.append(garble)
    fleet.add("orphan")
    fleet.publishes("orphan", lambda n: [stored(n + 1, parent=10_000 + n)])
    loops = fleet.add("loops")
    fleet.acts.append(lambda n: loops.publish_raw("", n % 20, _batch(n)))


def _batch(n: int) -> bytes:
    return encode_batch(time.time(), [stored(n % 8)])


def settle(fleet: Fleet, daemon: Daemon) -> None:
    """What must have happened before the doctor looks."""
    for name in ("ok", "foreign", "dies", "shallow", "mute"):
        fleet.engines[name].wait_subscribed()
        for n in range(8):
            fleet.engines[name].publish([stored(n)])
    for name in ("ok", "foreign", "shallow", "mute"):
        daemon.until_seq(name, 7)
    fleet.engines["dies"].stop()
    daemon.admin.DrainWorker(pb.DrainWorkerRequest(worker_id="drained"), timeout=5)
    daemon.until(lambda: daemon.worker("dies").state == pb.STALE, "stale")
    daemon.until(lambda: "1 s ago" in daemon.worker("silent").detail, "silent for a second")


def mispromise(daemon: Daemon) -> None:
    """Promises that the engine does not keep, on a prompt that it counts otherwise."""
    prompt = pb.Prompt(model="m", tokens=pb.TokenIds(ids=range(16 * 8)))
    score = pb.ScoreWorkersRequest(prompt=prompt, candidates=["ok"])
    for n in range(24):
        pick = pb.PickWorkerRequest(score=score, request_id=f"r{n}")
        daemon.index.PickWorker(pick, timeout=5)
        done = pb.CompleteRequestRequest(request_id=f"r{n}", cached_tokens=0, prompt_tokens=200)
        daemon.index.CompleteRequest(done, timeout=5)
    for n in range(60):
        daemon.index.PickWorker(pb.PickWorkerRequest(score=score, request_id=f"x{n}"), timeout=5)


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Found]:
    """One run of the doctor over everything that is broken."""
    folder = tmp_path_factory.mktemp("doctor")
    tokenizer_files.make(folder / "tokenizer", None)
    with contextlib.ExitStack() as stack:
        redis = stack.enter_context(servers.start_valkey())
        background = stack.enter_context(Background())
        fleet = Fleet(stack, background)
        build(fleet)
        settings = ENV | {"workers": fleet.workers, "pick.lease": 1.0, "ext_proc.listen": ""}
        daemon = Daemon(**settings, redis__url=redis.url)
        stack.callback(daemon.kill)
        daemon.start()
        settle(fleet, daemon)
        mispromise(daemon)
        ending = threading.Event()
        turns = background.enter(Store(redis.url))
        flapping = background.start(take_turns(turns, WorkerKey("", "flaps", 0), ending))
        unfit(redis, daemon)
        envoy = folder / "envoy.yaml"
        text = (EXAMPLES / "buffered.yaml").read_text()
        envoy.write_text(text.replace("failure_mode_allow: true", "failure_mode_allow: false"))
        url = f"redis://doc:pw@127.0.0.1:{slow(background, redis.port, 0.03)}"
        models = {"m": str(folder / "tokenizer"), "h": str(folder / "nowhere")}
        settings = ENV | {"ingest.heartbeat": 1.0, "tokens.models": models}
        with fleet.busy():
            names = ["--candidate", "nobody:1", "--candidate", "127.0.0.1"]
            options = ["--wait", "2", "--timeout", "2", "--envoy", str(envoy), *names]
            status, report = run_doctor(daemon, *options, url=url, settings=settings)
        ending.set()
        flapping.result(10)
        yield Found(status, report)


def unfit(redis: servers.Server, daemon: Daemon) -> None:
    """A server that was fit when the daemon started."""
    redis("SETRANGE", "somebody else's", 40_000_000, "x")
    redis("CONFIG", "SET", "maxmemory-policy", "allkeys-lru")
    used = int(redis("INFO", "memory").decode().partition("used_memory:")[2].split()[0])
    redis("CONFIG", "SET", "maxmemory", int(used * 1.15))
    redis("ACL", "SETUSER", "doc", "on", ">pw", "~*", "+@all", "-hset", "-xread")
    assert daemon.process is not None
    pid = daemon.process.pid
    _, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    open_now = len(list(Path(f"/proc/{pid}/fd").iterdir()))
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (open_now + 50, hard))


LIVE = [
    ("endpoint-unreachable", "never#0"),
    ("address-unreachable", "never#0"),
    ("publisher-connects", "connects#0"),
    ("nobody-connects", "bound#0"),
    ("no-events", "silent#0"),
    ("wrong-topic", "topic#0"),
    ("topics-mixed", "mixed#0"),
    ("none-admitted", "useless#0"),
    ("unknown-kind", "strange#0"),
    ("block-size-mismatch", "size#0"),
    ("same-endpoint", "twin-a#0, twin-b#0"),
    ("same-address", "twin-a, twin-b"),
    ("ranks-missing", "dp"),
    ("ranks-differ", "dp"),
    ("rank-mismatch", "dp#3"),
    ("replay-missing", "lossy#0"),
    ("gaps", "lossy#0"),
    ("replay-silent", "mute#0"),
    ("replay-unreachable", "unheard#0"),
    ("replay-other-engine", "foreign#0"),
    ("replay-shallow", "shallow#0"),
    ("replay-holes", "holes#0"),
    ("same-replay", "shares-a#0, shares-b#0"),
    ("clock-skew-engine", "skewed#0"),
    ("decode-errors", "garbled#0"),
    ("events-dropped", "garbled#0"),
    ("orphans", "orphan#0"),
    ("restart-loop", "loops#0"),
    ("owner-flaps", "flaps#0"),
    ("groups-missing", "hybrid-b#0"),
    ("kind-absent", "legacy#0"),
    ("hidden-groups", "hidden#0"),
    ("prefix-caching-off", "off#0"),
    ("more-than-capacity", "off#0"),
    ("model-differs", "off#0"),
    ("adapters-differ", "m"),
    ("hash-per-process", "x"),
    ("stale", "dies#0"),
    ("draining", "drained#0"),
    ("name-unknown", "nobody:1"),
    ("name-ambiguous", "127.0.0.1"),
    ("over-reports", "ok#0"),
    ("miscounted", "ok#0"),
    ("picks-never-completed", ""),
    ("apply-lag", ""),
    ("redis-evicts", ""),
    ("redis-full", ""),
    ("redis-not-durable", ""),
    ("redis-slow", ""),
    ("redis-acl", ""),
    ("files-limit", ""),
    ("lease-too-short", "ingest.lease_ttl"),
    ("tokenizer-missing", "x"),
    ("tokenizer-fails", "h"),
    ("tokenizer-differs", "m"),
    ("envoy-fails-closed", ""),
    ("envoy-workers-unknown", ""),
]


@pytest.mark.parametrize(("id", "subject"), LIVE)
def test_each_fault_is_found_where_it_is(broken: Found, id: str, subject: str) -> None:
    finding = broken.one(id, subject)
    assert finding["evidence"]
    assert finding["fix"]
    assert finding["cost"]


def test_a_sound_worker_among_them_is_left_alone(broken: Found) -> None:
    # Its promises were broken by the test; nothing else is.
    assert set(broken.about("ok#0")) <= {"over-reports", "miscounted"}


def test_findings_carry_the_values_that_were_seen(broken: Found) -> None:
    assert broken.status == 1
    assert broken.one("block-size-mismatch")["evidence"] == {"registered": 32, "events": 16}
    assert set(broken.one("redis-acl")["evidence"]["denied"]) == {"HSET", "XREAD"}
    assert broken.one("redis-evicts")["evidence"] == {"maxmemory_policy": "allkeys-lru"}
    assert broken.one("ranks-missing")["evidence"]["missing"] == [1, 2]
    assert list(broken.one("wrong-topic")["evidence"]["heard"]) == ["kv@pod@m"]
    assert "bind" in broken.one("publisher-connects")["fix"]
    severities = [f["severity"] for f in broken.report["findings"]]
    assert severities == sorted(severities, key=["error", "warning", "info"].index)
    assert ":pw@" not in json.dumps(broken.report)


def test_what_could_not_be_looked_at_is_said(broken: Found) -> None:
    skipped = {(n["id"], n["subject"]): n["why"] for n in broken.report["not_checked"]}
    assert "kvindexd binds this endpoint" in skipped["topics-mixed", "bound#0"]
    assert "no batch" in skipped["clock-skew-engine", "silent#0"]
    ran = {f["id"] for f in broken.report["findings"]} | set(broken.report["sound"])
    assert ran | {id for id, _ in skipped} == {c.id for c in CHECKS}


def test_a_healthy_deployment_gives_no_finding(tmp_path: Path) -> None:
    """Everything that can be asked for is there, and all of it is as it should be."""
    settings = {"ext_proc.listen": "", "tokens.models": {"m": "engine"}}
    with contextlib.ExitStack() as stack:
        redis = stack.enter_context(servers.start_valkey(*servers.DURABLE))
        fleet = Fleet(stack, stack.enter_context(Background()))
        pages = [fleet.page(healthy_page()) for _ in range(2)]
        for n, page in enumerate(pages):
            fleet.add(f"w{n}", address=page.address, block_size=16, engine="vllm")
            fleet.publishes(f"w{n}", lambda n: [stored(n % 8)])
        daemon = Daemon(**settings, workers=fleet.workers, redis__url=redis.url)
        stack.callback(daemon.kill)
        daemon.start()
        for name, engine in fleet.engines.items():
            engine.wait_subscribed()
            engine.publish([stored(0)])
            daemon.until_seq(name, 0)
        envoy = tmp_path / "envoy.yaml"
        text = (EXAMPLES / "buffered.yaml").read_text()
        for old, page in zip(("8000", "8001"), pages, strict=True):
            text = text.replace(f"port_value: {old}", f"port_value: {page.address[10:]}")
        envoy.write_text(text)
        with fleet.busy():
            options = ["--wait", "1", "--envoy", str(envoy), "--candidate", pages[0].address]
            status, report = run_doctor(daemon, *options, url=redis.url, settings=settings)
        metrics_alone(daemon.ready["metrics"])
    assert [(f["id"], f["subject"], f["evidence"]) for f in report["findings"]] == []
    assert status == 0
    # The rest has nothing to look at: no local tokenizer, and a replay that has not wrapped yet.
    assert {n["id"] for n in report["not_checked"]} <= {"tokenizer-differs"}
    assert len(report["sound"]) >= len(CHECKS) - 1


def metrics_alone(address: str) -> None:
    """Rates are told over the whole wait, without the gRPC side too."""
    args = ["--server", unused(), "--metrics", address, "--wait", "0.5", "--json"]
    began = time.monotonic()
    done = CliRunner().invoke(app, ["doctor", "--only", "redis-errors", *args])
    assert time.monotonic() - began >= 0.5
    assert done.exit_code == 0, done.output
    assert json.loads(done.output)["sound"] == ["redis-errors"]


def test_nobody_registered_and_nobody_to_follow_them() -> None:
    """A scorer alone: first without workers, then with one that no ingester has."""

    def asked() -> set[str]:
        args = ["--server", daemon.ready["grpc"], "--metrics", daemon.ready["metrics"], "--json"]
        args += ["--only", "no-*er*", "--only", "server-not-ready", "--wait", "0"]
        done = CliRunner().invoke(app, ["doctor", *args])
        return {f["id"] for f in json.loads(done.output)["findings"]}

    with servers.start_valkey() as redis, serving("scorer", redis__url=redis.url) as daemon:
        assert asked() == {"no-workers"}
        daemon.register("w", f"tcp://{unused()}")
        assert asked() == {"no-owner"}
