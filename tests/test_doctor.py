"""Every check of `doctor` on facts: each fault alone is found by its check, and by that one only
where nothing follows from it; sound facts give no finding."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from doctor_facts import healthy, rank, samples, server, worker
from typer.testing import CliRunner

from kvindexd.cli.main import app
from kvindexd.config import load
from kvindexd.doctor.catalogue import CHECKS, table
from kvindexd.doctor.facts import (
    Dial,
    Facts,
    Missing,
    Process,
    Rank,
    Replayed,
    Root,
    TokenizerTry,
)
from kvindexd.doctor.probe_redis import SCRIPTED, reads
from kvindexd.doctor.report import Severity, chosen, judge
from kvindexd.model import Profile
from kvindexd.store.replies import LATER, NOT_MASTER
from kvindexd.v1 import index_pb2 as pb

ROOT = Path(__file__).parent.parent
Break = Callable[[Facts], None]
CASES: dict[str, list[tuple[str, Break]]] = {}


def breaks(id: str, subject: str = "") -> Callable[[Break], Break]:
    """Register what provokes a check, and about whom (a part of its subject)."""

    def add(fault: Break) -> Break:
        CASES.setdefault(id, []).append((subject, fault))
        return fault

    return add


def found(facts: Facts) -> set[str]:
    return {f.id for f in judge(CHECKS, facts).findings}


def changed(facts: Facts, **fields: Any) -> None:
    """Set fields of both looks at the first rank."""
    facts.ranks[0].before = worker("w0", 8000, **fields)
    facts.ranks[0].after = worker("w0", 8000, **fields)


def risen(facts: Facts, **counters: int) -> None:
    """Counters of the first rank that were 0 at the first look; `__` stands for a colon."""
    for name, n in counters.items():
        facts.ranks[0].after.counters[name.replace("__", ":")] = n


def settings(facts: Facts, **flags: Any) -> None:
    values = {k.replace("__", "."): v for k, v in flags.items()}
    facts.config = load(env={}, flags={"tokens.models": '{"m": "engine"}'} | values).config


def info(facts: Facts, **fields: str) -> None:
    facts.redis.servers = [server(**fields)]


def grew(facts: Facts, **values: float) -> None:
    facts.metrics.after = samples(**values)


# -- the daemon


@breaks("server-unreachable", "50051")
def _(f: Facts) -> None:
    f.reach.problem = "refused"


@breaks("server-not-ready")
def _(f: Facts) -> None:
    f.server.health = "NOT_SERVING"


@breaks("server-not-ready")
def _(f: Facts) -> None:
    f.metrics.ready = "w0#0 is being loaded"


@breaks("version-differs")
def _(f: Facts) -> None:
    f.host.version = "0.9"


@breaks("metrics-closed", "9400")
def _(f: Facts) -> None:
    f.metrics_reach.problem = "refused"


@breaks("no-workers")
def _(f: Facts) -> None:
    f.ranks, f.envoy, f.candidates = [], Missing("none"), Missing("none")


@breaks("replica-lag")
def _(f: Facts) -> None:
    f.server.lags = [10, 30, 20]


@breaks("apply-lag")
def _(f: Facts) -> None:
    grew(f, apply_lag_seconds_count=10, apply_lag_seconds_sum=25)


@breaks("redis-errors")
def _(f: Facts) -> None:
    grew(f, redis_errors_total__op__apply=3)


@breaks("calls-refused")
def _(f: Facts) -> None:
    grew(f, score_requests_total__code__RESOURCE_EXHAUSTED=3, score_requests_total__code__OK=9)


@breaks("never-matches")
def _(f: Facts) -> None:
    grew(f, matched_ratio_count=80, matched_ratio_sum=0)


@breaks("picks-never-completed")
def _(f: Facts) -> None:
    grew(f, picks_total=80, leases_ended_total__why__lease=60)


@breaks("picked-by-load")
def _(f: Facts) -> None:
    grew(f, ext_proc_requests_total__outcome__load=60, ext_proc_requests_total__outcome__cache=3)


@breaks("over-reports", "w0#0")
def _(f: Facts) -> None:
    row = pb.WorkerAudit(worker_id="w0", outcomes=30, over=20, predicted_tokens=900)
    f.server.audit = [row]


@breaks("over-reports", "w0#0")
def _(f: Facts) -> None:
    f.server.audit = [pb.WorkerAudit(worker_id="w0", outcomes=5, drifting=True)]


@breaks("miscounted", "w0#0")
def _(f: Facts) -> None:
    f.server.audit = [pb.WorkerAudit(worker_id="w0", outcomes=30, miscounted=5)]


# -- ranks


@breaks("stale", "w0#0")
def _(f: Facts) -> None:
    changed(f, state=pb.STALE, detail="the lease lapsed")


@breaks("no-owner", "w0#0")
def _(f: Facts) -> None:
    changed(f, owner="")
    f.ranks[0].owners = [""]


@breaks("owner-flaps", "w0#0")
def _(f: Facts) -> None:
    f.ranks[0].owners = ["a:1:x", "b:2:y", "a:1:x"]


@breaks("owner-flaps", "w0#0")
def _(f: Facts) -> None:
    risen(f, stepped_down__deposed=2)


@breaks("no-events", "w0#0")
def _(f: Facts) -> None:
    detail = "no events yet; connected to tcp://h:1 45 s ago, no message since"
    changed(f, detail=detail, last_seq=-1, groups=[], counters={})


@breaks("none-admitted", "w0#0")
def _(f: Facts) -> None:
    changed(f, groups=[pb.Group(idx=0, kind="encoder_only_attention", treated_as="ignored")])


@breaks("unknown-kind", "w0#0")
def _(f: Facts) -> None:
    new = pb.Group(idx=1, kind="brand_new", block_size=16, treated_as="ignored")
    changed(f, groups=[*worker("w0", 1).groups, new])


@breaks("kind-absent", "w0#0")
def _(f: Facts) -> None:
    changed(f, groups=[pb.Group(idx=0, kind="", block_size=16, treated_as="main")])


@breaks("hidden-groups", "w0#0")
def _(f: Facts) -> None:
    changed(f, hidden_groups=True)


@breaks("groups-missing", "w0#0")
def _(f: Facts) -> None:
    changed(f, groups=[pb.Group(idx=3, kind="full_attention", block_size=16, treated_as="main")])


@breaks("groups-missing", "w1#0")
def _(f: Facts) -> None:
    state = pb.Group(idx=1, kind="mamba", block_size=16, treated_as="auxiliary")
    changed(f, groups=[*worker("w0", 1).groups, state])


@breaks("unplaced", "w0#0")
def _(f: Facts) -> None:
    f.ranks[0].stored.profile = Profile(unlocated=4)


@breaks("gaps", "w0#0")
def _(f: Facts) -> None:
    risen(f, gaps=1)


@breaks("gaps", "w0#0")
def _(f: Facts) -> None:
    changed(f, counters={"event:BlockStored": 500, "lost_batches": 7})


@breaks("decode-errors", "w0#0")
def _(f: Facts) -> None:
    risen(f, decode_errors=1)


@breaks("decode-errors", "w0#0")
def _(f: Facts) -> None:
    changed(f, counters={"event:BlockStored": 500, "decode_errors": 50})


@breaks("events-dropped", "w0#0")
def _(f: Facts) -> None:
    risen(f, dropped__store_full=3)


@breaks("orphans", "w0#0")
def _(f: Facts) -> None:
    risen(f, orphans=5, orphans_adopted=2)


@breaks("orphans", "w0#0")
def _(f: Facts) -> None:
    f.ranks[0].stored.parked = 200


@breaks("restart-loop", "w0#0")
def _(f: Facts) -> None:
    risen(f, restarts=2)


@breaks("claims-expired", "w0#0")
def _(f: Facts) -> None:
    risen(f, claims_expired=9)


@breaks("rank-mismatch", "w0#0")
def _(f: Facts) -> None:
    f.ranks[0].heard.ranks = [3]


@breaks("rank-mismatch", "w0#0")
def _(f: Facts) -> None:
    changed(f, detail="connected; its batches say rank 2: check that the endpoint is this rank's")


@breaks("draining", "w0#0")
def _(f: Facts) -> None:
    changed(f, state=pb.DRAINING)


# -- sockets


@breaks("endpoint-unreachable", "w0#0")
def _(f: Facts) -> None:
    changed(f, state=pb.SYNCING, detail="never connected")
    f.ranks[0].events = Dial("h:1", "timeout")


@breaks("endpoint-unreachable", "w0#0")
def _(f: Facts) -> None:
    changed(f, state=pb.STALE, detail="connection to tcp://nowhere:1 lost 40 s ago")
    f.ranks[0].events = Dial("nowhere:1", "unresolvable")


@breaks("publisher-connects", "w0#0")
def _(f: Facts) -> None:
    changed(f, state=pb.SYNCING, detail="never connected to tcp://127.0.0.1:9000 in 9 s")
    f.ranks[0].events = Dial("127.0.0.1:9000", "refused")


@breaks("nobody-connects", "w0#0")
def _(f: Facts) -> None:
    detail = "listening on tcp://*:9, no publisher has connected in 9 s"
    changed(f, bind_events=True, detail=detail)


@breaks("address-unreachable", "w0#0")
def _(f: Facts) -> None:
    f.ranks[0].address = Dial("h:1", "refused")


@breaks("wrong-topic", "w0#0")
def _(f: Facts) -> None:
    changed(f, topic="kv@a")
    f.ranks[0].heard.topics, f.ranks[0].heard.registered = {"kv@b": 30}, 0


@breaks("topics-mixed", "w0#0")
def _(f: Facts) -> None:
    f.ranks[0].heard.topics = {"kv@a": 15, "kv@b": 15}


@breaks("clock-skew-engine", "w0#0")
def _(f: Facts) -> None:
    f.ranks[0].heard.skew = -4.0


@breaks("replay-missing", "w0#0")
def _(f: Facts) -> None:
    changed(f, replay_endpoint="")


@breaks("replay-unreachable", "w0#0")
def _(f: Facts) -> None:
    f.ranks[0].replay_dial = Dial("h:1", "refused")


@breaks("replay-silent", "w0#0")
def _(f: Facts) -> None:
    f.ranks[0].replay = Replayed("timeout", "no answer for 2 s")


@breaks("replay-other-engine", "w0#0")
def _(f: Facts) -> None:
    f.ranks[0].replay = Replayed("complete", "", 83, 4, 0, 3)


@breaks("replay-other-engine", "w0#0")
def _(f: Facts) -> None:
    f.ranks[0].replay.digest = 6


@breaks("replay-holes", "w0#0")
def _(f: Facts) -> None:
    f.ranks[0].replay.holes = 40


@breaks("replay-shallow", "w0#0")
def _(f: Facts) -> None:
    f.ranks[0].replay.first = 50


# -- the fleet


@breaks("same-endpoint", "w0#0, w1#0")
def _(f: Facts) -> None:
    f.ranks[0].events = f.ranks[1].events


@breaks("same-endpoint", "w0#0, w1#0")
def _(f: Facts) -> None:
    """By a name that stands for the other's address."""
    changed(f, kv_events_endpoint="tcp://localhost:9001")
    f.ranks[0].events = Dial("localhost:9001", "", ("127.0.0.1:9001",))


@breaks("same-replay", "w0#0, w1#0")
def _(f: Facts) -> None:
    f.ranks[0].replay_dial = f.ranks[1].replay_dial


@breaks("same-address", "w0, w1")
def _(f: Facts) -> None:
    f.ranks[0].address = f.ranks[1].address


@breaks("ranks-missing", "w0")
def _(f: Facts) -> None:
    changed(f, dp_size=4)


@breaks("ranks-differ", "w0")
def _(f: Facts) -> None:
    second = rank("w0", 8000, dp_rank=1, dp_size=2, kv_events_endpoint="tcp://127.0.0.1:9050")
    second.events = Dial("127.0.0.1:9050", "", ("127.0.0.1:9050",))
    f.ranks.append(second)


@breaks("block-size-mismatch", "w0#0")
def _(f: Facts) -> None:
    changed(f, block_size=32)


@breaks("block-sizes-differ", "m")
def _(f: Facts) -> None:
    group = pb.Group(idx=0, kind="full_attention", block_size=32, treated_as="main")
    changed(f, block_size=0, groups=[group])


@breaks("name-unknown", "10.0.0.9")
def _(f: Facts) -> None:
    f.candidates = ["10.0.0.9"]


@breaks("name-ambiguous", "127.0.0.1")
def _(f: Facts) -> None:
    f.candidates = ["127.0.0.1"]


@breaks("prefix-caching-off", "w0#0")
def _(f: Facts) -> None:
    f.ranks[0].engine.config["enable_prefix_caching"] = "False"


@breaks("hash-per-process", "m")
def _(f: Facts) -> None:
    f.ranks[0].heard.roots = [Root("16:aa", "99")]


@breaks("hash-per-process", "w0#0")
def _(f: Facts) -> None:
    f.ranks[0].heard.roots = f.ranks[0].replay.roots = []
    f.ranks[0].engine.config["prefix_caching_hash_algo"] = "builtin"


@breaks("more-than-capacity", "w0#0")
def _(f: Facts) -> None:
    f.ranks[0].engine.config["num_gpu_blocks"] = "499"


@breaks("model-differs", "w0#0")
def _(f: Facts) -> None:
    f.ranks[0].engine.models = ["another"]


@breaks("adapters-differ", "m")
def _(f: Facts) -> None:
    f.ranks[0].engine.adapters = ["sql"]


# -- the store


@breaks("redis-unreachable")
def _(f: Facts) -> None:
    f.redis_reach.problem = "refused"


@breaks("redis-old")
def _(f: Facts) -> None:
    info(f, redis_version="6.0.16")


@breaks("redis-evicts")
def _(f: Facts) -> None:
    info(f, maxmemory_policy="volatile-lru")


@breaks("redis-full")
def _(f: Facts) -> None:
    info(f, used_memory="810")


@breaks("redis-not-durable")
def _(f: Facts) -> None:
    info(f, aof_enabled="0")


@breaks("redis-write-error")
def _(f: Facts) -> None:
    info(f, aof_last_write_status="err")


@breaks("redis-slow")
def _(f: Facts) -> None:
    f.redis.servers[0].latency = 0.05


@breaks("redis-acl")
def _(f: Facts) -> None:
    f.redis.servers[0].denied = {"XADD": "no permission"}


@breaks("redis-replica")
def _(f: Facts) -> None:
    info(f, role="slave")


@breaks("redis-schema")
def _(f: Facts) -> None:
    f.redis.servers[0].schema = "99"


@breaks("redis-other")
def _(f: Facts) -> None:
    f.redis.ranks = frozenset({"/w0/0"})


@breaks("clock-skew-redis")
def _(f: Facts) -> None:
    f.redis.servers[0].skew = -3.0


@breaks("redis-clients")
def _(f: Facts) -> None:
    info(f, connected_clients="9000")


# -- settings, host, tokenizers


@breaks("config-invalid")
def _(f: Facts) -> None:
    f.config_problem = "ingest.heartbeat is 0"


@breaks("lease-too-short")
def _(f: Facts) -> None:
    settings(f, ingest__lease_ttl=3, ingest__heartbeat=2)


@breaks("lease-too-short")
def _(f: Facts) -> None:
    settings(f, redis__timeout=12)


@breaks("peer-timeout-long")
def _(f: Facts) -> None:
    settings(f, ingest__peer_timeout=60)


@breaks("replay-timeout-long")
def _(f: Facts) -> None:
    settings(f, ingest__replay_timeout=60)


@breaks("listens-openly", "server.listen")
def _(f: Facts) -> None:
    settings(f, server__listen="0.0.0.0:50051")


@breaks("listens-openly", "metrics.listen")
def _(f: Facts) -> None:
    settings(f, metrics__listen="[::]:9400")


@breaks("tokens-in-clear")
def _(f: Facts) -> None:
    settings(f, server__listen="0.0.0.0:50051", auth__tokens='{"admin": ["0123456789abcdef"]}')


@breaks("files-limit", "pid 7")
def _(f: Facts) -> None:
    f.host.processes = [Process(7, 1024, 900, 90)]


@breaks("no-uvloop")
def _(f: Facts) -> None:
    f.host.uvloop = False


@breaks("no-native-hash")
def _(f: Facts) -> None:
    f.host.native = False


@breaks("tokenizer-missing", "m")
def _(f: Facts) -> None:
    settings(f, tokens__models='{"other": "engine"}')


@breaks("tokenizer-missing", "m")
def _(f: Facts) -> None:
    """No tokenizer at all, and Envoy asks for picks."""
    settings(f, tokens__models="{}")
    f.envoy = Missing("none")
    grew(f, ext_proc_requests_total__outcome__cache=3)


@breaks("tokenizer-fails", "m")
def _(f: Facts) -> None:
    f.tokenizers = [TokenizerTry("m", "/models/m", "there is no file")]


@breaks("tokenizer-differs", "m")
def _(f: Facts) -> None:
    f.tokenizers = [TokenizerTry("m", "/models/m", "", "7 ids here and 8 there")]


@breaks("tokenizer-failed-before", "m")
def _(f: Facts) -> None:
    grew(f, tokenizer_failures_total__model__m=3)


@breaks("token-cache-small")
def _(f: Facts) -> None:
    settings(f, tokens__cache_tokens=1000)


@breaks("feed-short")
def _(f: Facts) -> None:
    f.ranks[0].after.revision += 3 * 10_000


# -- the whole


def test_sound_facts_give_no_finding_and_every_check_runs() -> None:
    report = judge(CHECKS, healthy())
    assert report.findings == []
    assert report.not_checked == []
    assert report.sound == [c.id for c in CHECKS]
    assert not report.bad


@pytest.mark.parametrize(
    ("id", "nth"), [(id, n) for id, cases in CASES.items() for n in range(len(cases))]
)
def test_each_fault_is_found_by_its_check(id: str, nth: int) -> None:
    subject, fault = CASES[id][nth]
    facts = healthy()
    fault(facts)
    hits = [f for f in judge(CHECKS, facts).findings if f.id == id]
    assert hits, found(facts)
    assert any(subject in f.subject for f in hits), hits
    for f in hits:
        assert f.evidence
        assert f.fix
        assert f.cost
        assert f.what
        msgspec.json.encode(f)


FOLLOWS = {
    "no-workers": set(),
    "no-owner": set(),
    "nobody-connects": set(),
    "endpoint-unreachable": {"stale"},
    "none-admitted": {"groups-missing"},
    "rank-mismatch": set(),
    "ranks-missing": set(),
    "ranks-differ": {"same-replay", "ranks-missing", "rank-mismatch", "redis-other"},
    "wrong-topic": {"topics-mixed"},
    "same-address": {"name-ambiguous"},
    "listens-openly": {"listens-openly"},
    "tokens-in-clear": {"listens-openly"},
    "lease-too-short": {"replay-timeout-long"},
    "tokenizer-missing": {"tokenizer-missing"},
}
"""What else a fault makes true."""


@pytest.mark.parametrize("id", list(CASES))
def test_a_fault_provokes_nothing_that_does_not_follow_from_it(id: str) -> None:
    for _, fault in CASES[id]:
        facts = healthy()
        fault(facts)
        assert found(facts) - {id} <= FOLLOWS.get(id, set())


def test_every_check_has_a_test_that_provokes_it() -> None:
    import test_doctor_envoy

    tested = set(CASES) | set(test_doctor_envoy.CASES)
    assert tested == {c.id for c in CHECKS}
    assert len(CHECKS) == len(tested)


# -- what is not a fault


def quiet(change: Break) -> set[str]:
    facts = healthy()
    change(facts)
    return found(facts)


def test_what_looks_like_a_fault_and_is_none() -> None:
    def young(f: Facts) -> None:
        detail = "no events yet; connected to tcp://h:1 5 s ago, no message since"
        changed(f, detail=detail, last_seq=-1, groups=[], counters={})
        f.ranks[0].replay = Replayed("complete", "0 batches")

    def taken_over(f: Facts) -> None:
        f.ranks[0].owners = ["a:1:x", "b:2:y"]

    def restarted_once(f: Facts) -> None:
        risen(f, restarts=1)

    def adopted(f: Facts) -> None:
        risen(f, orphans=5, orphans_adopted=5)

    def heard_twice(f: Facts) -> None:
        risen(f, dropped__duplicate=5, dropped__replay_overlap=2)

    def two_ranks(f: Facts) -> None:
        """Two ranks of one engine share its address."""
        changed(f, dp_size=2)
        second = rank("w0", 8000, dp_rank=1, dp_size=2)
        second.events = Dial("127.0.0.1:9050", "", ("127.0.0.1:9050",))
        second.replay_dial = Dial("127.0.0.1:9051", "", ("127.0.0.1:9051",))
        second.heard.ranks = [1]
        f.ranks.append(second)
        f.redis.ranks |= {"/w0/1"}

    def apart_by_topic(f: Facts) -> None:
        for r, topic in zip(f.ranks, ("kv@a", "kv@b"), strict=True):
            r.before.topic = r.after.topic = topic
            r.heard.topics = {topic: 30, "kv@other": 30}
        f.ranks[0].events = f.ranks[1].events

    def registered_as_hidden(f: Facts) -> None:
        changed(f, hidden_groups=True, groups=[pb.Group(idx=3, kind="full_attention",
                block_size=16, treated_as="main")])  # fmt: skip

    def sglang(f: Facts) -> None:
        group = pb.Group(idx=0, kind="", block_size=16, treated_as="main")
        changed(f, engine="sglang", groups=[group])

    def unlimited(f: Facts) -> None:
        info(f, maxmemory="0", used_memory="99999")

    def snapshots(f: Facts) -> None:
        info(f, aof_enabled="0", save="3600 1")

    def replay_went_on(f: Facts) -> None:
        f.ranks[0].replay.last = 120

    def same_seed(f: Facts) -> None:
        for r in f.ranks:
            r.engine.config["prefix_caching_hash_algo"] = "xxhash"

    def behind_but_catching_up(f: Facts) -> None:
        f.server.lags = [500, 300, 20]

    def behind_now_and_then(f: Facts) -> None:
        f.server.lags = [20, 0, 30]

    for change in (
        young, taken_over, restarted_once, adopted, heard_twice, two_ranks, apart_by_topic, sglang,
        unlimited, snapshots, replay_went_on, same_seed, behind_but_catching_up,
        behind_now_and_then,
    ):  # fmt: skip
        assert quiet(change) == set(), change.__name__
    assert quiet(registered_as_hidden) == {"hidden-groups"}


def test_sidecars_may_all_use_one_loopback_endpoint() -> None:
    """Each in its own pod: 127.0.0.1 is another engine for each of them."""
    facts = healthy()
    sidecars(facts, ["pod-a:7:x", "pod-b:7:x"])
    assert found(facts) == set()
    facts = healthy()
    sidecars(facts, ["pod-a:7:x", "pod-a:8:y"])
    assert {"same-endpoint", "same-replay"} <= found(facts) | {"same-replay"}
    assert "same-endpoint" in found(facts)


def sidecars(facts: Facts, owners: list[str]) -> None:
    """All ranks with the same loopback endpoints, each followed by one of `owners`."""
    for r, owner in zip(facts.ranks, owners, strict=True):
        for look in (r.before, r.after):
            look.kv_events_endpoint = "tcp://127.0.0.1:5557"
            look.replay_endpoint = "tcp://127.0.0.1:5558"
            look.owner = owner
        r.owners = [owner]
        r.events = r.replay_dial = Missing("elsewhere")


def test_what_only_the_ingester_can_reach_is_not_called_unreachable() -> None:
    facts = healthy()
    facts.ranks[0].events = facts.ranks[0].replay_dial = Dial("10.0.0.5:5557", "timeout")
    facts.ranks[0].heard = facts.ranks[0].replay = Missing("no message")
    report = judge(CHECKS, facts)
    assert report.findings == []
    skipped = {n.id: n.why for n in report.not_checked}
    assert "run this command there" in skipped["endpoint-unreachable"]
    assert "run this command there" in skipped["replay-unreachable"]


def test_a_server_that_keeps_no_audit_is_said_so() -> None:
    facts = healthy()
    facts.server.audit = Missing("UNIMPLEMENTED")
    report = judge(CHECKS, facts)
    assert {n.id for n in report.not_checked} == {"over-reports", "miscounted"}


def test_salted_first_blocks_do_not_look_like_another_seed() -> None:
    facts = healthy()
    facts.ranks[0].heard.roots = [Root("16:aa", "01"), Root("16:aa", "07")]
    assert found(facts) == set()


def test_ranks_that_all_say_0_are_only_told_of() -> None:
    """External data parallelism: every engine believes that it is rank 0, on a port of its own."""
    facts = healthy()
    changed(facts, dp_rank=1, dp_size=2)
    hits = [f for f in judge(CHECKS, facts).findings if f.id == "rank-mismatch"]
    assert [f.severity for f in hits] == [Severity.INFO]


def test_a_nearly_full_server_is_an_error_when_it_is_full() -> None:
    facts = healthy()
    info(facts, used_memory="960")
    (hit,) = judge(CHECKS, facts).findings
    assert (hit.id, hit.severity) == ("redis-full", Severity.ERROR)


def test_flags_are_those_of_the_engine_at_hand() -> None:
    def fix(**fields: Any) -> str:
        facts = healthy()
        changed(facts, state=pb.SYNCING, detail="never connected", **fields)
        facts.ranks[0].events = Dial("127.0.0.1:9000", "refused")
        (hit,) = [f for f in judge(CHECKS, facts).findings if f.id == "publisher-connects"]
        return hit.fix

    vllm = fix(engine="vllm", topic="kv@pod@m")
    assert vllm.startswith('start vLLM with --kv-events-config \'{"enable_kv_cache_events": true')
    assert '"endpoint": "tcp://*:9000"' in vllm
    assert '"topic": "kv@pod@m"' in vllm
    sglang = fix(engine="sglang")
    assert sglang.startswith('start SGLang with --kv-events-config \'{"publisher": "zmq"')
    assert "enable_kv_cache_events" not in sglang
    assert fix(engine="other").startswith("start the engine with")


# -- what could not be gathered


PARTS = [f.name for f in dataclasses.fields(Facts) if "Missing" in str(f.type)]
PROBES = [f.name for f in dataclasses.fields(Rank) if "Missing" in str(f.type)]


@pytest.mark.parametrize("part", PARTS)
def test_a_check_without_its_facts_says_so_and_is_not_sound(part: str) -> None:
    facts = healthy()
    setattr(facts, part, Missing("the dog ate it"))
    report = judge(CHECKS, facts)
    skipped = {n.id: n.why for n in report.not_checked}
    assert set(skipped) == {c.id for c in CHECKS if part in c.needs}
    assert set(skipped.values()) == {"the dog ate it"}
    assert not set(skipped) & set(report.sound)
    assert report.findings == []


@pytest.mark.parametrize("part", PROBES)
def test_a_probe_that_could_not_run_is_told_for_its_rank(part: str) -> None:
    facts = healthy()
    setattr(facts.ranks[0], part, Missing("no way there"))
    report = judge(CHECKS, facts)
    skipped = [n for n in report.not_checked if n.why == "no way there"]
    assert skipped
    assert {n.subject for n in report.not_checked} == {"w0#0"}
    assert report.findings == []


def test_without_a_second_look_nothing_is_said_of_rates() -> None:
    facts = healthy()
    facts.wait = 0.0
    skipped = {n.id for n in judge(CHECKS, facts).not_checked}
    rates = "replica-lag apply-lag redis-errors owner-flaps restart-loop gaps decode-errors"
    rates += " events-dropped orphans claims-expired feed-short"
    assert skipped == set(rates.split())


# -- the catalogue, and the command


def test_the_store_is_asked_for_every_command_that_kvindexd_uses() -> None:
    store = ROOT / "kvindexd" / "store"
    lua = "".join(p.read_text() for p in store.glob("*.lua"))
    scripted = set(re.findall(r"redis\.p?call\('([A-Z]+)'", lua))
    python = "".join(p.read_text() for p in store.glob("*.py") if p.name != "embedded.py")
    own = set(re.findall(r"[(,]\s*\"([A-Z]{3,})\",\s*[a-z\"(]", python)) | {"EVAL", "EVALSHA"}
    own &= set(re.findall(r"[A-Z]+", python))
    asked = {str(c[0]) for c in reads(0)}
    assert scripted <= asked | {c[0] for c in SCRIPTED}
    topology = {"SENTINEL", "CLUSTER", "ROLE", "ASKING"}
    options = {"COUNT", "BLOCK", "STREAMS", "WITHSCORES", "SAMPLES", "USAGE", "MATCH"}
    errors = {*NOT_MASTER, *LATER, "NOPERM", "NOAUTH", "WRONGPASS", "OOM"}
    assert own - topology - options - errors <= asked


def test_the_table_in_the_documentation_is_that_of_the_checks() -> None:
    hint = "put what `python -m kvindexd.doctor.catalogue` prints into docs/doctor.md"
    assert table() in (ROOT / "docs" / "doctor.md").read_text(), hint


def test_patterns_choose_checks() -> None:
    ids = {c.id for c in chosen(CHECKS, ["redis-*", "stale"])}
    assert "stale" in ids
    assert "redis-acl" in ids
    assert all(i == "stale" or i.startswith("redis-") for i in ids)
    with pytest.raises(ValueError, match="no check is called 'redis'"):
        chosen(CHECKS, ["redis"])


def test_wrong_usage_is_status_2_and_the_list_needs_nobody() -> None:
    run = CliRunner()
    wrong = run.invoke(app, ["doctor", "--only", "nothing-like-it"])
    assert wrong.exit_code == 2
    assert "--list" in wrong.output
    listed = run.invoke(app, ["doctor", "--list", "--json"])
    assert listed.exit_code == 0
    rows = msgspec.json.decode(listed.output)["checks"]
    assert [r["id"] for r in rows] == [c.id for c in CHECKS]


def test_nobody_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each thing that does not answer is an error of its own, and the rest is not checked."""
    monkeypatch.delenv("KVINDEXD_CONFIG", raising=False)
    nobody = "127.0.0.1:1"
    args = ["--server", nobody, "--metrics", nobody, "--redis", f"redis://:pw@{nobody}/0"]
    run = CliRunner()
    done = run.invoke(app, ["doctor", *args, "--wait", "0", "--timeout", "0.3", "--json"])
    assert done.exit_code == 1
    report = msgspec.json.decode(done.output)
    ids = {f["id"] for f in report["findings"]}
    assert {"server-unreachable", "metrics-closed", "redis-unreachable"} <= ids
    assert "no-workers" in {n["id"] for n in report["not_checked"]}
    assert "pw@" not in done.output


def test_settings_that_cannot_be_used_are_a_finding(tmp_path: Path) -> None:
    file = tmp_path / "kvindexd.toml"
    file.write_text("[ingest]\nheartbeat = 60\n")
    run = CliRunner()
    args = ["--config", str(file), "--only", "config-invalid", "--only", "lease-too-short"]
    done = run.invoke(app, ["doctor", *args])
    assert done.exit_code == 1
    assert "ERROR config-invalid" in done.output
    assert "not checked: lease-too-short" in done.output
