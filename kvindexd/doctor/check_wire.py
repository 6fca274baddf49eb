"""Checks of each rank's sockets, by probes of our own: dialled, listened to, asked for a replay."""

from __future__ import annotations

from kvindexd.doctor.check_workers import ranks
from kvindexd.doctor.facts import Dial, Facts, Missing, Rank
from kvindexd.doctor.fixes import bound, events_flag, start
from kvindexd.doctor.report import Book, Hit, Outcome, Severity, Skip

book = Book()
ERROR, WARNING, INFO = Severity

_SKEW = 1.0
"""Seconds between two clocks that matter: apply_lag and every age would be off by it."""
_NOT_FROM_HERE = "its ingester is connected, and this host is not: run this command there"


def _answers(dial: Dial | Missing) -> bool:
    return isinstance(dial, Dial) and not dial.problem


@book.check(
    "endpoint-unreachable",
    ERROR,
    "ranks",
    provoked="a rank's kv_events_endpoint cannot be dialled, and neither can its address",
    cost="nothing is indexed of it: prompts score 0 there",
    fix="start the engine, open the port between the hosts, or register the right endpoint",
)
def endpoint_unreachable(f: Facts) -> Outcome:
    for r in ranks(f):
        if r.after.bind_events:
            continue
        if isinstance(r.events, Missing):
            yield Skip(r.name, r.events.why)
        elif r.events.problem and r.connected:
            yield Skip(r.name, _NOT_FROM_HERE)
        elif r.events.problem and not _connects(r):
            what = f"{r.events.target}: {r.events.problem}"
            evidence = {
                "endpoint": r.after.kv_events_endpoint,
                "problem": r.events.problem,
                "detail": r.after.detail,
            }
            yield Hit(r.name, what, evidence, _unreachable_fix(r.events))


def _unreachable_fix(dial: Dial) -> str:
    if dial.problem == "unresolvable":
        return f"register a name that resolves here, or the IP address, instead of {dial.target}"
    if dial.problem == "timeout":
        return f"open {dial.target} in the firewall or NetworkPolicy between ingester and engine"
    return ""


def _connects(r: Rank) -> bool:
    """The engine is there and nobody listens where its events should come from."""
    refused = isinstance(r.events, Dial) and r.events.problem == "refused"
    return refused and _answers(r.address) and not r.connected


@book.check(
    "publisher-connects",
    ERROR,
    "ranks",
    provoked="the engine's address answers, and nobody listens on its kv_events_endpoint: its"
    " events are off, on another port, or it connects instead of binding",
    cost="nothing is indexed of it: prompts score 0 there",
    fix="have the engine bind: endpoint tcp://*:PORT (vLLM binds only for *, ::, ipc and inproc),"
    " or register the worker with --bind-events",
)
def publisher_connects(f: Facts) -> Outcome:
    for r in ranks(f):
        if r.after.bind_events:
            continue
        if isinstance(r.events, Missing):
            yield Skip(r.name, r.events.why)
        elif isinstance(r.address, Missing):
            yield Skip(r.name, r.address.why)
        elif _connects(r):
            what = f"{r.after.address} answers, but nobody listens on {r.events.target}"
            evidence = {"endpoint": r.after.kv_events_endpoint, "address": r.after.address}
            flag = events_flag(r.after, endpoint=bound(r.after.kv_events_endpoint))
            fix = f"{start(r.after, flag)}, or register the worker with --bind-events"
            yield Hit(r.name, what, evidence, fix)


@book.check(
    "nobody-connects",
    ERROR,
    "ranks",
    provoked="kvindexd binds a rank's endpoint, and no publisher has connected to it",
    cost="nothing is indexed of it: prompts score 0 there",
    fix="tell the engine to connect: endpoint tcp://HOST-OF-KVINDEXD:PORT; or, if it binds itself,"
    " register the worker without --bind-events",
)
def nobody_connects(f: Facts) -> Outcome:
    for r in ranks(f):
        if r.after.bind_events and "no publisher has connected" in r.after.detail:
            evidence = {"endpoint": r.after.kv_events_endpoint, "detail": r.after.detail}
            yield Hit(r.name, f"nobody connected to {r.after.kv_events_endpoint}", evidence)


@book.check(
    "address-unreachable",
    ERROR,
    "ranks",
    provoked="the address that serves a rank's requests cannot be dialled",
    cost="picks of this worker fail at the gateway",
    fix="register the host:port that serves the engine's HTTP: kvindexd workers add ID --address",
)
def address_unreachable(f: Facts) -> Outcome:
    for r in ranks(f):
        if isinstance(r.address, Missing):
            yield Skip(r.name, r.address.why)
        elif r.address.problem:
            evidence = {"address": r.after.address, "problem": r.address.problem}
            yield Hit(r.name, f"{r.address.target}: {r.address.problem}", evidence)


@book.check(
    "wrong-topic",
    ERROR,
    "ranks",
    provoked="messages come without a topic filter, and none under the registered topic",
    cost="nothing is indexed of it: prompts score 0 there",
    fix="register the topic that the engine uses (--topic), or none for all",
)
def wrong_topic(f: Facts) -> Outcome:
    for r in ranks(f):
        if not r.after.topic:
            continue
        if isinstance(r.heard, Missing):
            yield Skip(r.name, r.heard.why)
        elif not r.heard.messages:
            yield Skip(r.name, f"no message within {r.heard.seconds:g} s")
        elif not r.heard.registered:
            topic = next(iter(r.heard.topics))
            what = f"its {r.heard.messages} messages have topic {topic!r}, not {r.after.topic!r}"
            evidence = {"registered": r.after.topic, "heard": dict(r.heard.topics)}
            yield Hit(
                r.name,
                what,
                evidence,
                f"kvindexd workers add {r.after.worker_id} ..."
                f" --topic {topic!r}" + (" (or without --topic)" if topic else ""),
            )


@book.check(
    "topics-mixed",
    WARNING,
    "ranks",
    provoked="messages of several topics pass a rank's subscription",
    cost="two publishers are read as one engine: sequence numbers clash, and the index is reset"
    " again and again",
    fix="register each publisher as a worker of its own, with its --topic",
)
def topics_mixed(f: Facts) -> Outcome:
    for r in ranks(f):
        if isinstance(r.heard, Missing):
            yield Skip(r.name, r.heard.why)
            continue
        passing = {t: n for t, n in r.heard.topics.items() if t.startswith(r.after.topic)}
        if len(passing) > 1:
            what = f"{len(passing)} topics on one endpoint"
            yield Hit(r.name, what, {"heard": passing, "registered": r.after.topic})


@book.check(
    "clock-skew-engine",
    WARNING,
    "ranks",
    provoked=f"an engine's clock and this host's differ by {_SKEW:g} s and more",
    cost="apply_lag_seconds and the ages of events are wrong by as much",
    fix="run chrony or systemd-timesyncd on the engine's host: timedatectl set-ntp true",
)
def clock_skew_engine(f: Facts) -> Outcome:
    for r in ranks(f):
        if isinstance(r.heard, Missing):
            yield Skip(r.name, r.heard.why)
        elif r.heard.skew is None:
            yield Skip(r.name, f"no batch within {r.heard.seconds:g} s")
        elif abs(r.heard.skew) >= _SKEW:
            way = "behind" if r.heard.skew > 0 else "ahead of"
            what = f"its clock is {abs(r.heard.skew):.1f} s {way} this host's"
            yield Hit(r.name, what, {"skew_seconds": round(r.heard.skew, 3)})


@book.check(
    "replay-missing",
    WARNING,
    "ranks",
    provoked="a rank has no replay_endpoint",
    cost="any lost message drops the rank's claims, and a restart of kvindexd loses what was"
    " published meanwhile",
    fix='add "replay_endpoint": "tcp://*:5558" to the engine\'s --kv-events-config, and register'
    " it with --replay-endpoint tcp://HOST:5558",
)
def replay_missing(f: Facts) -> Outcome:
    for r in ranks(f):
        if not r.after.replay_endpoint:
            endpoint = r.after.kv_events_endpoint
            flag = events_flag(r.after, endpoint=bound(endpoint), replay_endpoint="tcp://*:5558")
            fix = f"{start(r.after, flag)}, and register it with --replay-endpoint tcp://HOST:5558"
            yield Hit(r.name, "no replay_endpoint", {"replay_endpoint": ""}, fix)


@book.check(
    "replay-unreachable",
    WARNING,
    "ranks",
    provoked="nobody listens on a rank's replay_endpoint",
    cost="any lost message drops the rank's claims",
    fix='add "replay_endpoint" to the engine\'s --kv-events-config, or register the right one',
)
def replay_unreachable(f: Facts) -> Outcome:
    for r in ranks(f):
        if not r.after.replay_endpoint:
            continue
        if isinstance(r.replay_dial, Missing):
            yield Skip(r.name, r.replay_dial.why)
        elif r.replay_dial.problem and isinstance(r.events, Dial) and r.events.problem:
            if r.connected:
                yield Skip(r.name, _NOT_FROM_HERE)
        elif r.replay_dial.problem:
            evidence = {
                "replay_endpoint": r.after.replay_endpoint,
                "problem": r.replay_dial.problem,
            }
            yield Hit(r.name, f"{r.replay_dial.target}: {r.replay_dial.problem}", evidence)


@book.check(
    "replay-silent",
    WARNING,
    "ranks",
    provoked="a replay socket takes the request and does not answer to its end",
    cost="each gap holds the rank up for ingest.replay_timeout, and then drops its claims",
    fix="check that replay_endpoint is the ROUTER socket of this very engine and not its events"
    " port; restart the engine if its publisher thread hangs",
)
def replay_silent(f: Facts) -> Outcome:
    for r in ranks(f):
        if not _asked(r):
            continue
        if isinstance(r.replay, Missing):
            yield Skip(r.name, r.replay.why)
        elif r.replay.outcome != "complete":
            evidence = {
                "replay_endpoint": r.after.replay_endpoint,
                "outcome": r.replay.outcome,
                "detail": r.replay.detail,
                "batches": r.replay.batches,
            }
            yield Hit(r.name, f"replay: {r.replay.detail}", evidence)


def _asked(r: Rank) -> bool:
    """Whether a replay socket is registered and takes connections; else another check says so."""
    return bool(r.after.replay_endpoint) and not (
        isinstance(r.replay_dial, Dial) and r.replay_dial.problem
    )


@book.check(
    "replay-other-engine",
    WARNING,
    "ranks",
    provoked="the replay ends before what was already applied, or holds another batch under the"
    " same number: it is another engine's, or the engine was restarted unnoticed",
    cost="a gap would be filled with another cache's events, or the old cache is still credited",
    fix="check that replay_endpoint and kv_events_endpoint are of one process; then `kvindexd"
    " workers resync ID`",
)
def replay_other_engine(f: Facts) -> Outcome:
    for r in ranks(f):
        if not _asked(r):
            continue
        if isinstance(r.replay, Missing):
            yield Skip(r.name, r.replay.why)
            continue
        replay, known = r.replay, r.before.last_seq
        if replay.outcome != "complete" or known < 0 or r.before.epoch != r.after.epoch:
            continue
        evidence = {"replay_last": replay.last, "applied": known, "replay_batches": replay.batches}
        if replay.last < known:
            holds = f"ends at {replay.last}" if replay.batches else "is empty"
            yield Hit(r.name, f"batch {known} was applied, but the replay {holds}", evidence)
        elif _another_batch(r):
            yield Hit(r.name, f"batch {replay.digest_seq} is another one in the replay", evidence)


def _another_batch(r: Rank) -> bool:
    if isinstance(r.replay, Missing) or isinstance(r.stored, Missing):
        return False
    same = r.replay.digest_seq == r.stored.last_seq and r.replay.digest is not None
    return same and r.replay.digest != r.stored.last_digest


@book.check(
    "replay-holes",
    WARNING,
    "ranks",
    provoked="a replay has holes: its socket drops what it cannot send at once",
    cost="long outages are not bridged: the rank's claims are dropped",
    fix='raise "hwm" in the engine\'s --kv-events-config above buffer_steps, and run the ingester'
    " on the engine's host",
)
def replay_holes(f: Facts) -> Outcome:
    for r in ranks(f):
        if not _asked(r):
            continue
        if isinstance(r.replay, Missing):
            yield Skip(r.name, r.replay.why)
        elif r.replay.holes:
            evidence = {
                "missing": r.replay.holes,
                "came": r.replay.batches,
                "first": r.replay.first,
                "last": r.replay.last,
            }
            yield Hit(r.name, f"{r.replay.holes} batches missing inside the replay", evidence)


@book.check(
    "replay-shallow",
    WARNING,
    "ranks",
    provoked="at the rate of now, a rank's replay buffer is shorter than --outage (60 s)",
    cost="when kvindexd is away for longer, the rank's claims are dropped",
    fix="raise buffer_steps in the engine's --kv-events-config",
)
def replay_shallow(f: Facts) -> Outcome:
    for r in ranks(f):
        if not _asked(r):
            continue
        if isinstance(r.replay, Missing):
            yield Skip(r.name, r.replay.why)
        elif isinstance(r.heard, Missing):
            yield Skip(r.name, r.heard.why)
        elif r.replay.outcome == "complete" and not r.heard.messages:
            yield Skip(r.name, f"no message within {r.heard.seconds:g} s: its rate is not known")
        elif r.replay.outcome == "complete" and r.replay.first > 0 and r.replay.asked == 0:
            depth = r.replay.last - r.replay.first + 1
            rate = r.heard.messages / r.heard.seconds
            if depth / rate < f.outage:
                what = f"{depth} batches at {rate:.1f}/s bridge {depth / rate:.0f} s"
                evidence = {
                    "buffer_batches": depth,
                    "batches_per_second": round(rate, 2),
                    "bridges_seconds": round(depth / rate, 1),
                    "outage_seconds": f.outage,
                }
                steps = int(2 * f.outage * rate) + 1
                fix = start(r.after, events_flag(r.after, buffer_steps=steps) + " (merged)")
                yield Hit(r.name, what, evidence, fix)
