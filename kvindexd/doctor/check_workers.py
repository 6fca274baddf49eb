"""Checks of each rank by what the daemon says of it: state, lease, counters, groups."""

from __future__ import annotations

import re
from collections.abc import Iterator

from kvindexd.doctor.facts import Facts, Missing, Rank
from kvindexd.doctor.fixes import bound, events_flag, start
from kvindexd.doctor.report import Book, Hit, Outcome, Severity, Skip
from kvindexd.groups import AUXILIARY_KINDS, MAIN_KINDS, NO_REUSE_KINDS
from kvindexd.v1 import index_pb2 as pb

book = Book()
ERROR, WARNING, INFO = Severity

_SILENT = re.compile(r"(\d+) s ago, no message since")
_CLAIMED = re.compile(r"its batches say rank (\d+)")
_GRACE = 30.0
_NOTHING_LOST = frozenset(
    f"dropped:{reason}"
    for reason in (
        "duplicate",
        "replay_overlap",
        "stale_replay",
        "superseded",
        "parked_expired",
        "parked_overflow",
    )
)
"""Drops of what is there already, or (parked) of what the check of orphans tells."""
_PARKED = 100
_STORES = 50
"""Stores of a rank after which all of its groups should have shown themselves."""


def ranks(f: Facts) -> list[Rank]:
    """All ranks; for checks that need them."""
    assert not isinstance(f.ranks, Missing)  # noqa: S101 - needed
    return list(f.ranks)


def _two_looks(f: Facts, subject: str = "") -> Iterator[Skip]:
    if not f.wait:
        yield Skip(subject, "needs two looks: give --wait SECONDS")


@book.check(
    "stale",
    ERROR,
    "ranks",
    provoked="a rank is STALE: its engine or its ingester is gone",
    cost="it is left out of answers; requests that it could serve from its cache go elsewhere",
    fix="bring the engine or its `kvindexd sidecar` back, or `kvindexd workers remove ID`",
)
def stale(f: Facts) -> Outcome:
    for r in ranks(f):
        if r.after.state == pb.STALE:
            evidence = {"detail": r.after.detail, "owner": r.after.owner}
            yield Hit(r.name, "STALE", evidence)


@book.check(
    "no-owner",
    ERROR,
    "ranks",
    provoked="no ingester holds a rank's lease",
    cost="its events are not read; what is indexed of it ages until it is left out",
    fix="start `kvindexd serve`, or `kvindexd sidecar` beside the engine, on the same Redis",
)
def no_owner(f: Facts) -> Outcome:
    for r in ranks(f):
        if not r.after.owner and not any(r.owners):
            yield Hit(r.name, "no ingester follows it", {"owner": "", "detail": r.after.detail})


@book.check(
    "owner-flaps",
    ERROR,
    "ranks",
    provoked="a rank's lease changed hands twice and more within --wait, or ingesters depose"
    " each other",
    cost="each change reads the whole rank from the store, and answers lag meanwhile",
    fix="run one ingester per rank, or raise ingest.lease_ttl if its process stalls for longer",
)
def owner_flaps(f: Facts) -> Outcome:
    yield from _two_looks(f)
    for r in ranks(f):
        deposed = sum(r.rise("stepped_down:deposed").values())
        if len([o for o in r.owners if o]) > 2 or deposed > 1:
            what = f"its lease was held by {len(set(r.owners) - {''})} ingesters in {f.wait:g} s"
            yield Hit(r.name, what, {"owners": list(r.owners), "deposed": deposed})


@book.check(
    "no-events",
    WARNING,
    "ranks",
    provoked="a connected rank has said nothing for ingest.event_grace",
    cost="prompts score 0 there until it publishes",
    fix='start vLLM with --enable-prefix-caching --kv-events-config \'{"enable_kv_cache_events":'
    ' true, "publisher": "zmq", "endpoint": "tcp://*:5557"}\' (SGLang: --kv-events-config), or send'
    " it a request if it is idle",
)
def no_events(f: Facts) -> Outcome:
    grace = f.config.ingest.event_grace if not isinstance(f.config, Missing) else _GRACE
    for r in ranks(f):
        found = _SILENT.search(r.after.detail)
        never = r.after.last_seq < 0 and not r.after.groups
        if found and never and float(found[1]) >= grace:
            what = f"connected for {found[1]} s, and no event"
            flag = events_flag(r.after, endpoint=bound(r.after.kv_events_endpoint))
            fix = f"send it a request, if it is idle; else {start(r.after, flag)}"
            yield Hit(r.name, what, {"detail": r.after.detail, "grace": grace}, fix)


def _stores(r: Rank) -> int:
    """Stores that its engine announced since it was first registered."""
    return sum(r.total("event:BlockStored").values())


@book.check(
    "none-admitted",
    ERROR,
    "ranks",
    provoked="a rank stores blocks, all of kinds that are not indexed",
    cost="every prompt scores 0 there",
    fix='set groups.treat_as, such as {"KIND" = "main"}, if the kind is attention over all tokens',
)
def none_admitted(f: Facts) -> Outcome:
    for r in ranks(f):
        stores = _stores(r)
        kinds = sorted({g.kind for g in r.after.groups})
        if kinds and all(g.treated_as == "ignored" for g in r.after.groups):
            what = f"0 of {stores} stores admitted, all of kind {', '.join(kinds)}"
            fix = f'[groups]\ntreat_as = {{ "{kinds[0]}" = "main" }}'
            yield Hit(r.name, what, {"stores": stores, "kinds": kinds}, fix)


@book.check(
    "unknown-kind",
    WARNING,
    "ranks",
    provoked="some of a rank's groups are of a kind that kvindexd does not know",
    cost="their rule is not applied: reuse may be promised that will not happen",
    fix="set groups.treat_as for the kind (main, auxiliary or ignored), and update kvindexd",
)
def unknown_kind(f: Facts) -> Outcome:
    known = MAIN_KINDS | AUXILIARY_KINDS | NO_REUSE_KINDS | {""}
    for r in ranks(f):
        strange = sorted({g.kind for g in r.after.groups if g.kind not in known})
        ignored = [g for g in r.after.groups if g.treated_as == "ignored"]
        if strange and len(ignored) < len(r.after.groups):
            evidence = {"kinds": strange, "filtered": r.total("filtered:")}
            yield Hit(r.name, f"groups of kind {', '.join(strange)}", evidence)


@book.check(
    "kind-absent",
    INFO,
    "ranks",
    provoked="a vLLM rank's events name no KV-cache kind",
    cost="window and state groups cannot be told apart from attention; on a hybrid model answers"
    " are upper bounds",
    fix="update vLLM; with a hybrid model register the worker with --hidden-groups meanwhile",
)
def kind_absent(f: Facts) -> Outcome:
    for r in ranks(f):
        if r.after.engine.lower() == "vllm" and any(not g.kind for g in r.after.groups):
            groups = [g.idx for g in r.after.groups if not g.kind]
            yield Hit(r.name, "events without kv_cache_spec_kind", {"groups": groups})


@book.check(
    "hidden-groups",
    INFO,
    "ranks",
    provoked="a worker is registered with hidden_groups",
    cost="its answers are upper bounds: less may be reused than is said",
    fix="update the engine to one that publishes every KV-cache group, and register it without",
)
def hidden_groups(f: Facts) -> Outcome:
    for r in ranks(f):
        if r.after.hidden_groups:
            yield Hit(r.name, "some of its groups publish nothing", {"hidden_groups": True})


@book.check(
    "groups-missing",
    WARNING,
    "ranks",
    provoked="a rank's group numbers have holes, or a worker of the same model shows groups that"
    f" it lacks, after {_STORES} stores",
    cost="the missing groups' rules are not applied: reuse may be promised that will not happen",
    fix="kvindexd workers add ID ... --hidden-groups: answers then say that they are upper bounds",
)
def groups_missing(f: Facts) -> Outcome:
    shown: dict[tuple[str, str], set[str]] = {}
    for r in ranks(f):
        kinds = shown.setdefault((r.after.namespace, r.after.model), set())
        kinds |= {g.kind for g in r.after.groups if g.kind in AUXILIARY_KINDS}
    for r in ranks(f):
        if r.after.hidden_groups or _stores(r) < _STORES:
            continue
        seen = {g.idx for g in r.after.groups}
        holes = sorted(set(range(max(seen, default=0))) - seen)
        own = {g.kind for g in r.after.groups}
        lacks = sorted(shown[r.after.namespace, r.after.model] - own)
        if holes or lacks:
            evidence = {"seen": sorted(seen), "unseen": holes, "kinds_of_others": lacks}
            what = f"groups that publish nothing: {', '.join(map(str, holes or lacks))}"
            yield Hit(r.name, what, evidence)


@book.check(
    "unplaced",
    WARNING,
    "ranks",
    provoked="blocks of window or state groups are held whose place in a prompt is unknown",
    cost="they are not counted: less reuse is promised than will happen",
    fix="run vLLM with --prefix-caching-hash-algo sha256_cbor, whose hashes kvindexd can follow",
)
def unplaced(f: Facts) -> Outcome:
    for r in ranks(f):
        if isinstance(r.stored, Missing):
            yield Skip(r.name, r.stored.why)
        elif r.stored.profile.unlocated:
            n = r.stored.profile.unlocated
            yield Hit(r.name, f"{n} blocks without a place", {"unlocated": n})


@book.check(
    "gaps",
    WARNING,
    "ranks",
    provoked="gaps or lost batches rise (warning); batches were lost earlier (info)",
    cost="what cannot be replayed costs the rank all its claims (ingest.on_lost_events)",
    fix="raise hwm and buffer_steps of --kv-events-config, set replay_endpoint, and see that the"
    " ingester is close to the engine and not starved of CPU",
)
def gaps(f: Facts) -> Outcome:
    yield from _two_looks(f)
    for r in ranks(f):
        fresh, old = r.rise("gaps", "lost_batches"), r.total("lost_batches")
        if fresh:
            what = f"{sum(fresh.values())} gaps or lost batches within {f.wait:g} s"
            yield Hit(r.name, what, {"rise": fresh, "total": r.total("gaps", "lost_batches")})
        elif old:
            what = f"{old['lost_batches']} batches were lost for good, none of them just now"
            yield Hit(r.name, what, {"total": old}, severity=INFO)


@book.check(
    "decode-errors",
    WARNING,
    "ranks",
    provoked="decode errors rise, or are more than 1% of the events",
    cost="what those events said is not in the index",
    fix="update kvindexd if the engine is newer, and check that nothing else publishes on the"
    " endpoint; counters `dropped:` of `kvindexd workers show ID` name the reasons",
)
def decode_errors(f: Facts) -> Outcome:
    yield from _two_looks(f)
    for r in ranks(f):
        bad, events = r.total("decode_errors"), sum(r.total("event:").values())
        n = sum(bad.values())
        rise = r.rise("decode_errors")
        if rise or n > max(10, events / 100):
            what = f"{n} events were not understood, beside {events} that were"
            yield Hit(r.name, what, {"decode_errors": n, "events": events, "rise": rise})


@book.check(
    "events-dropped",
    WARNING,
    "ranks",
    provoked="events are dropped for another reason than that they came twice, or faults of"
    " kvindexd's own are counted",
    cost="what those events said is not in the index",
    fix="look the reason up in docs/reliability.md; store_full: more maxmemory; too_large: raise"
    " ingest.max_event_bytes; bad_parts, bad_seq: another publisher is on the endpoint",
)
def events_dropped(f: Facts) -> Outcome:
    yield from _two_looks(f)
    for r in ranks(f):
        rise = r.rise("dropped:", "internal_errors")
        rise = {k: n for k, n in rise.items() if k not in _NOTHING_LOST}
        if rise:
            what = f"{sum(rise.values())} events dropped within {f.wait:g} s"
            yield Hit(r.name, what, {"rise": rise})


@book.check(
    "orphans",
    WARNING,
    "ranks",
    provoked=f"stores whose parent is unknown grow, or expire, or {_PARKED} and more of them wait",
    cost="their blocks are not credited",
    fix="`kvindexd workers resync ID` (needs replay_endpoint); on a decode worker that receives its"
    " prefix by transfer this is how it is",
)
def orphans(f: Facts) -> Outcome:
    yield from _two_looks(f)
    for r in ranks(f):
        rise, adopted = r.rise("orphans"), r.rise("orphans_adopted")
        expired = r.rise("dropped:parked_expired", "dropped:parked_overflow")
        parked = 0 if isinstance(r.stored, Missing) else r.stored.parked
        growing = sum(rise.values()) - sum(adopted.values())
        if growing > 0 or expired or parked >= _PARKED:
            evidence = {"waiting": parked, "rise": rise | adopted | expired}
            yield Hit(r.name, f"{parked} stores wait for their parent", evidence)


@book.check(
    "restart-loop",
    ERROR,
    "ranks",
    provoked="the engine restarted twice and more within --wait, or two publishers alternate",
    cost="its cache is forgotten each time: every prompt scores 0 there",
    fix="see the engine's own log; if it is up all the time, two engines publish on one endpoint:"
    " give each its own port",
)
def restart_loop(f: Facts) -> Outcome:
    yield from _two_looks(f)
    for r in ranks(f):
        n = sum(r.rise("restarts").values())
        if n >= 2:
            evidence = {"restarts": n, "epochs": [r.before.epoch, r.after.epoch]}
            yield Hit(r.name, f"{n} restarts within {f.wait:g} s", evidence)


@book.check(
    "claims-expired",
    WARNING,
    "ranks",
    provoked="blocks or hashes are given up because of limits.blocks_per_rank or bindings_per_rank",
    cost="blocks that the engine holds are not credited",
    fix="raise limits.blocks_per_rank and limits.bindings_per_rank above the engine's block count",
)
def claims_expired(f: Facts) -> Outcome:
    yield from _two_looks(f)
    for r in ranks(f):
        rise = r.rise("claims_expired", "bindings_forgotten")
        if rise:
            yield Hit(r.name, f"{sum(rise.values())} given up", {"rise": rise})


@book.check(
    "rank-mismatch",
    WARNING,
    "ranks",
    provoked="batches name another data-parallel rank than the endpoint is registered as (info"
    " where they say 0)",
    cost="none if the endpoint is right; else one rank's cache is credited to another",
    fix="rank r publishes on port + r: give each rank its own kv_events_endpoint, or --dp-rank",
)
def rank_mismatch(f: Facts) -> Outcome:
    for r in ranks(f):
        said = {int(n) for n in _CLAIMED.findall(r.after.detail)}
        if not isinstance(r.heard, Missing):
            said |= set(r.heard.ranks)
        wrong = sorted(said - {r.after.dp_rank})
        if wrong:
            evidence = {"registered": r.after.dp_rank, "batches_say": sorted(said)}
            what = f"registered as rank {r.after.dp_rank}, its batches say {wrong[0]}"
            # Engines that know nothing of their siblings all say 0, on ports of their own.
            yield Hit(r.name, what, evidence, severity=INFO if wrong == [0] else None)


@book.check(
    "draining",
    INFO,
    "ranks",
    provoked="a worker is marked as draining",
    cost="it gets no new requests from PickWorker",
    fix="kvindexd workers remove ID; to have it serve again, add it anew",
)
def draining(f: Facts) -> Outcome:
    for r in ranks(f):
        if r.after.state == pb.DRAINING:
            yield Hit(r.name, "draining", {"state": "DRAINING"})
