"""Checks across ranks: who is whom, what must be equal or apart, and what engines say over HTTP."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator

from kvindexd.doctor.check_workers import ranks
from kvindexd.doctor.facts import Dial, Engine, Facts, Missing, Rank, Root, host_of, is_local
from kvindexd.doctor.report import Book, Hit, Outcome, Severity, Skip
from kvindexd.fleet import names_of, normal
from kvindexd.rpc.codec import registration_of

book = Book()
ERROR, WARNING, INFO = Severity

_RANDOM_HASHES = ("builtin", "xxhash", "xxhash_cbor")
"""vLLM's algorithms whose root differs per process unless PYTHONHASHSEED is set."""


def _worker(r: Rank) -> tuple[str, str]:
    return r.after.namespace, r.after.worker_id


def _by_model(all_ranks: Iterable[Rank]) -> Iterator[tuple[str, list[Rank]]]:
    found: dict[tuple[str, str], list[Rank]] = defaultdict(list)
    for r in all_ranks:
        found[r.after.namespace, r.after.model].append(r)
    for (namespace, model), members in found.items():
        yield f"{namespace}/{model}" if namespace else model, members


def _place(text: str, dial: Dial | Missing, owner: str) -> str:
    """One spelling for an endpoint, its name resolved where that worked. A loopback address is
    another one on each ingester's host."""
    place = normal(text.removeprefix("tcp://"))
    if isinstance(dial, Dial) and dial.resolved:
        place = min(dial.resolved)
    return f"{place} of {host_of(owner)}" if is_local(place) or is_local(text) else place


@book.check(
    "same-endpoint",
    ERROR,
    "ranks",
    provoked="two ranks have one kv_events_endpoint and topics that overlap",
    cost="each is credited with what the other holds",
    fix="give each engine, and each data-parallel rank (port + rank), an endpoint of its own",
)
def same_endpoint(f: Facts) -> Outcome:
    found: dict[tuple[bool, str], list[Rank]] = defaultdict(list)
    for r in ranks(f):
        place = _place(r.after.kv_events_endpoint, r.events, r.after.owner)
        found[r.after.bind_events, place].append(r)
    for (_, place), group in found.items():
        clash = [r for r in group if any(_overlap(r, o) for o in group if o is not r)]
        if clash:
            names = [r.name for r in clash]
            ids = {_worker(r) for r in clash}
            fix = ""
            if len(ids) == 1:
                fix = "rank r publishes on port + r: register rank r with that port"
            evidence = {"endpoint": place, "ranks": names}
            yield Hit(", ".join(names), f"all read {place}", evidence, fix)


def _overlap(a: Rank, b: Rank) -> bool:
    one, other = a.after.topic, b.after.topic
    return one.startswith(other) or other.startswith(one)


@book.check(
    "same-replay",
    ERROR,
    "ranks",
    provoked="ranks with endpoints of their own share one replay_endpoint",
    cost="a gap of one is filled with the other's events",
    fix="give each engine, and each data-parallel rank (port + rank), a replay socket of its own",
)
def same_replay(f: Facts) -> Outcome:
    found: dict[str, list[Rank]] = defaultdict(list)
    for r in ranks(f):
        if r.after.replay_endpoint:
            found[_place(r.after.replay_endpoint, r.replay_dial, r.after.owner)].append(r)
    for place, group in found.items():
        if len({r.after.kv_events_endpoint for r in group}) > 1:
            names = [r.name for r in group]
            evidence = {"replay_endpoint": place, "ranks": names}
            yield Hit(", ".join(names), f"all are replayed from {place}", evidence)


@book.check(
    "same-address",
    WARNING,
    "ranks",
    provoked="two workers have one address",
    cost="a gateway that names workers by address cannot tell them apart",
    fix="register data-parallel ranks of one engine under one worker id (--dp-rank), and remove"
    " what is there twice: kvindexd workers remove ID",
)
def same_address(f: Facts) -> Outcome:
    found: dict[str, list[Rank]] = defaultdict(list)
    for r in ranks(f):
        found[_place(r.after.address, r.address, r.after.owner)].append(r)
    for place, group in found.items():
        ids = sorted({"/".join(filter(None, _worker(r))) for r in group})
        if len(ids) > 1:
            yield Hit(", ".join(ids), f"all are at {place}", {"address": place, "workers": ids})


@book.check(
    "ranks-missing",
    WARNING,
    "ranks",
    provoked="a worker's dp_size is larger than the number of its registered ranks",
    cost="requests that land on the other ranks find their cache unknown",
    fix="register every rank: kvindexd workers add ID --dp-rank R --kv-events-endpoint port + R",
)
def ranks_missing(f: Facts) -> Outcome:
    for name, group in _by_worker(f):
        size = max(r.after.dp_size for r in group)
        have = {r.after.dp_rank for r in group}
        lacking = sorted(set(range(size)) - have)
        if lacking:
            what = f"{len(lacking)} of {size} ranks are not registered"
            yield Hit(name, what, {"dp_size": size, "missing": lacking})


def _by_worker(f: Facts) -> Iterator[tuple[str, list[Rank]]]:
    found: dict[tuple[str, str], list[Rank]] = defaultdict(list)
    for r in ranks(f):
        found[_worker(r)].append(r)
    for key, group in found.items():
        yield "/".join(filter(None, key)), group


@book.check(
    "ranks-differ",
    WARNING,
    "ranks",
    provoked="ranks of one worker are registered with other models, dp_size, roles or addresses",
    cost="picks name a rank that is not there, or another model's",
    fix="register all ranks of a worker alike, but for --dp-rank and the endpoints",
)
def ranks_differ(f: Facts) -> Outcome:
    for name, group in _by_worker(f):
        differing = {
            field: sorted({str(getattr(r.after, field)) for r in group})
            for field in ("model", "dp_size", "address", "role")
        }
        differing = {k: v for k, v in differing.items() if len(v) > 1}
        if differing:
            yield Hit(name, f"its ranks differ in {', '.join(differing)}", differing)


@book.check(
    "block-size-mismatch",
    ERROR,
    "ranks",
    provoked="the events show another block size than is registered",
    cost="answers use the events' size; a gateway that hashes by the registered one finds nothing",
    fix="register the size that the engine uses (--block-size), or 0 to learn it",
)
def block_size_mismatch(f: Facts) -> Outcome:
    for r in ranks(f):
        shown = r.main_size()
        if r.after.block_size and shown and shown != r.after.block_size:
            what = f"registered {r.after.block_size} tokens per block, events show {shown}"
            fix = f"kvindexd workers add {r.after.worker_id} ... --block-size {shown}"
            yield Hit(r.name, what, {"registered": r.after.block_size, "events": shown}, fix)


@book.check(
    "block-sizes-differ",
    WARNING,
    "ranks",
    provoked="workers of one model have other block sizes",
    cost="clients that send chain hashes of one unit get 0 from the others",
    fix="start all engines of a model with one --block-size (SGLang: --page-size)",
)
def block_sizes_differ(f: Facts) -> Outcome:
    for model, group in _by_model(ranks(f)):
        sizes: dict[str, list[str]] = defaultdict(list)
        for r in group:
            if r.main_size():
                sizes[str(r.main_size())].append(r.name)
        if len(sizes) > 1:
            yield Hit(model, f"block sizes {', '.join(sizes)} in one model", dict(sizes))


@book.check(
    "name-unknown",
    ERROR,
    "ranks",
    "candidates",
    provoked="a name that gateways use (--candidate) is no worker's",
    cost="that worker is never picked, or its requests are never scored",
    fix="register it as --address or --alias; an IP with and without its port are both known",
)
def name_unknown(f: Facts) -> Outcome:
    assert not isinstance(f.candidates, Missing)  # noqa: S101 - needed
    known = {r.name: names_of(registration_of(r.after)) for r in ranks(f)}
    for name in f.candidates:
        if not any({name.strip(), normal(name)} & names for names in known.values()):
            what = f"no worker is called {name!r}"
            yield Hit(name, what, {"name": name, "addresses": [r.after.address for r in ranks(f)]})


@book.check(
    "name-ambiguous",
    WARNING,
    "ranks",
    "candidates",
    provoked="a name that gateways use stands for several workers",
    cost="the gateway takes one worker's score for another's",
    fix="have the gateway name workers by host:port, or give each an --alias of its own",
)
def name_ambiguous(f: Facts) -> Outcome:
    assert not isinstance(f.candidates, Missing)  # noqa: S101 - needed
    for name in f.candidates:
        wanted = {name.strip(), normal(name)}
        hit = [r for r in ranks(f) if wanted & names_of(registration_of(r.after))]
        ids = sorted({"/".join(filter(None, _worker(r))) for r in hit})
        if len(ids) > 1:
            yield Hit(name, f"{name!r} stands for {', '.join(ids)}", {"workers": ids})


@book.check(
    "prefix-caching-off",
    ERROR,
    "ranks",
    provoked="an engine's metrics page says enable_prefix_caching=False",
    cost="it reuses nothing",
    fix="start vLLM with --enable-prefix-caching (SGLang: without --disable-radix-cache)",
)
def prefix_caching_off(f: Facts) -> Outcome:
    for r in ranks(f):
        config = _cache_config(r)
        if isinstance(config, Skip):
            yield config
        elif config.get("enable_prefix_caching", "").lower() == "false":
            yield Hit(r.name, "prefix caching is off", {"enable_prefix_caching": "False"})


def _cache_config(r: Rank) -> dict[str, str] | Skip:
    if isinstance(r.engine, Missing):
        return Skip(r.name, r.engine.why)
    if isinstance(r.engine.config, Missing):
        return Skip(r.name, r.engine.config.why)
    return dict(r.engine.config)


@book.check(
    "hash-per-process",
    WARNING,
    "ranks",
    provoked="an engine hashes blocks with an algorithm whose root is random per process, or the"
    " same first block has other hashes on workers of one model",
    cost="hashes mean nothing to other processes: no sharing of offloaded blocks, and on hybrid"
    " models sparse window and state blocks cannot be placed",
    fix="start every engine with --prefix-caching-hash-algo sha256_cbor, or with one and the same"
    " PYTHONHASHSEED=0 in its environment",
)
def hash_per_process(f: Facts) -> Outcome:
    for model, group in _by_model(ranks(f)):
        shared = _shared_roots(group)
        split = next((by for by in shared if len(set(by.values())) > 1), None)
        if split is not None:
            what = "one first block, several hashes"
            yield Hit(model, what, {"hashes": split})
        elif not shared:
            for r in group:
                config = _cache_config(r)
                algorithm = "" if isinstance(config, Skip) else _algorithm(config)
                if algorithm in _RANDOM_HASHES:
                    what = f"hashes by {algorithm}, with a seed per process unless PYTHONHASHSEED"
                    evidence = {"prefix_caching_hash_algo": algorithm}
                    yield Hit(r.name, f"{what} is set", evidence, severity=INFO)


def _shared_roots(group: list[Rank]) -> list[dict[str, str]]:
    """Hashes by rank, of each first block that several ranks named. What one rank named in two
    ways is left out: something that is not on the wire, such as a salt, is in its hash."""
    found: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for r in group:
        for root in _roots(r):
            found[root.content][r.name].add(root.hash)
    return [
        {name: next(iter(hashes)) for name, hashes in by.items()}
        for by in found.values()
        if len(by) > 1 and all(len(hashes) == 1 for hashes in by.values())
    ]


def _algorithm(config: dict[str, str]) -> str:
    return config.get("prefix_caching_hash_algo", "").lower().rpartition(".")[2]


def _roots(r: Rank) -> list[Root]:
    heard = [] if isinstance(r.heard, Missing) else list(r.heard.roots)
    return heard + ([] if isinstance(r.replay, Missing) else list(r.replay.roots))


@book.check(
    "more-than-capacity",
    WARNING,
    "ranks",
    provoked="the index credits a rank with more device blocks than its engine has",
    cost="blocks are promised that were evicted without a word",
    fix="kvindexd workers resync ID; if it returns, --reports-reuse is missing in its registration",
)
def more_than_capacity(f: Facts) -> Outcome:
    for r in ranks(f):
        config = _cache_config(r)
        if isinstance(config, Skip):
            yield config
            continue
        text = config.get("num_gpu_blocks", "")
        capacity, held = int(text) if text.isdigit() else 0, r.after.blocks.get("device", 0)
        if capacity and held > capacity:
            evidence = {"held": held, "num_gpu_blocks": capacity}
            yield Hit(r.name, f"credited with {held} blocks of {capacity}", evidence)


@book.check(
    "model-differs",
    WARNING,
    "ranks",
    provoked="an engine's /v1/models does not name the model that its worker is registered for",
    cost="requests for the served name find no worker",
    fix="register the served name (--model), or start the engine with --served-model-name",
)
def model_differs(f: Facts) -> Outcome:
    for r in ranks(f):
        models = _models(r)
        if isinstance(models, Skip):
            yield models
        elif r.after.model not in models:
            what = f"registered for {r.after.model!r}, serves {', '.join(models) or 'nothing'}"
            yield Hit(r.name, what, {"registered": r.after.model, "served": models})


def _models(r: Rank) -> list[str] | Skip:
    if isinstance(r.engine, Missing):
        return Skip(r.name, r.engine.why)
    if isinstance(r.engine.models, Missing):
        return Skip(r.name, r.engine.models.why)
    return list(r.engine.models)


@book.check(
    "adapters-differ",
    WARNING,
    "ranks",
    provoked="workers of one model have other LoRA adapters loaded",
    cost="a pick can send an adapter's request where it is not loaded",
    fix="load the adapters everywhere (--lora-modules), or tell workers apart by --label",
)
def adapters_differ(f: Facts) -> Outcome:
    for model, group in _by_model(ranks(f)):
        asked = {
            r.name: sorted(r.engine.adapters)
            for r in group
            if isinstance(r.engine, Engine) and not isinstance(r.engine.models, Missing)
        }
        labels = {r.name: sorted(r.after.labels.items()) for r in group}
        if len({str(a) for a in asked.values()}) > 1 and len({str(v) for v in labels.values()}) < 2:
            yield Hit(model, "adapters differ from worker to worker", {"adapters": asked})
