"""Checks of the daemon itself: is it there, is it ready, and what do its own metrics say."""

from __future__ import annotations

from kvindexd.doctor.facts import Facts, Missing, Pages, Rank, Server
from kvindexd.doctor.report import Book, Hit, Outcome, Severity, Skip

book = Book()
ERROR, WARNING, INFO = Severity

_LAG_SECONDS = 1.0
_BEHIND = 10
_ENOUGH = 50
"""Requests or samples before a ratio is judged."""


@book.check(
    "server-unreachable",
    ERROR,
    provoked="nobody answers gRPC at --server",
    cost="gateways get no answer and route without the cache",
    fix="start `kvindexd serve`, or name the right address with --server HOST:PORT",
)
def server_unreachable(f: Facts) -> Outcome:
    if f.reach.problem:
        yield Hit(f.reach.target, "kvindexd does not answer", {"error": f.reach.problem})


@book.check(
    "server-not-ready",
    ERROR,
    "server",
    provoked="gRPC health is not SERVING, or /readyz is not 200",
    cost="gateways that check health do not ask; what is answered may lack workers",
    fix="wait for the replica to load; if it stays, see the store findings and the daemon's log",
)
def server_not_ready(f: Facts) -> Outcome:
    assert isinstance(f.server, Server)  # noqa: S101 - needed
    why = f.metrics.ready if isinstance(f.metrics, Pages) else ""
    if f.server.health != "SERVING" or why:
        evidence = {"health": f.server.health, "readyz": why or "ready"}
        yield Hit(f.server.address, "the server is not ready", evidence)


@book.check(
    "version-differs",
    INFO,
    "server",
    "host",
    provoked="the server runs another version of kvindexd than this command",
    cost="checks and fixes here may not fit it",
    fix="install the same version on both sides: pip install kvindexd==VERSION",
)
def version_differs(f: Facts) -> Outcome:
    assert isinstance(f.server, Server)  # noqa: S101 - needed
    assert not isinstance(f.host, Missing)  # noqa: S101 - needed
    theirs = f.server.version
    if theirs and theirs != f.host.version:
        evidence = {"server": theirs, "here": f.host.version}
        yield Hit(
            f.server.address,
            f"the server is version {theirs}, this is {f.host.version}",
            evidence,
            f"pip install kvindexd=={theirs}",
        )


@book.check(
    "metrics-closed",
    WARNING,
    "metrics_reach",
    provoked="metrics.listen does not answer",
    cost="no metrics, no /healthz and no /readyz: nobody is told of anything below",
    fix="set metrics.listen of the daemon (KVINDEXD_METRICS__LISTEN), or name it with --metrics",
)
def metrics_closed(f: Facts) -> Outcome:
    assert not isinstance(f.metrics_reach, Missing)  # noqa: S101 - needed
    if f.metrics_reach.problem:
        yield Hit(
            f.metrics_reach.target,
            "the metrics port does not answer",
            {"error": f.metrics_reach.problem},
        )


@book.check(
    "no-workers",
    WARNING,
    "ranks",
    provoked="no worker is registered",
    cost="every request is answered NOT_FOUND",
    fix="kvindexd workers add ID --model M --address HOST:PORT --kv-events-endpoint tcp://HOST:5557",
)
def no_workers(f: Facts) -> Outcome:
    if not f.ranks:
        yield Hit(f.reach.target, "no worker is registered", {"workers": 0})


@book.check(
    "replica-lag",
    WARNING,
    "server",
    provoked=f"{_BEHIND} feed entries and more wait for the replica at every look, and no fewer at"
    " the end",
    cost="answers are older than what the store knows",
    fix="give the process a core of its own, or start more `kvindexd scorer` beside it",
)
def replica_lag(f: Facts) -> Outcome:
    assert isinstance(f.server, Server)  # noqa: S101 - needed
    lags = list(f.server.lags)
    if not f.wait:
        yield Skip(f.server.address, "needs two looks: give --wait SECONDS")
    elif lags and min(lags) >= _BEHIND and lags[-1] >= lags[0]:
        what = f"the replica is {lags[-1]} feed entries behind and does not catch up"
        evidence = {"first": lags[0], "least": min(lags), "last": lags[-1], "looks": len(lags)}
        yield Hit(f.server.address, what, evidence)


@book.check(
    "apply-lag",
    WARNING,
    "metrics",
    provoked=f"from engine clock to visible took {_LAG_SECONDS:g} s and more on average",
    cost="prompts are scored against a cache as it was seconds ago",
    fix="see clock-skew-engine, redis-slow and replica-lag; else give the ingester more CPU",
)
def apply_lag(f: Facts) -> Outcome:
    assert isinstance(f.metrics, Pages)  # noqa: S101 - needed
    name = "kvindexd_apply_lag_seconds"
    count = f.metrics.rise(f"{name}_count")
    if not f.wait:
        yield Skip(f.reach.target, "needs two looks: give --wait SECONDS")
    elif not count:
        return
    elif (mean := f.metrics.rise(f"{name}_sum") / count) >= _LAG_SECONDS:
        what = f"batches became visible {mean:.1f} s after the engines sent them"
        yield Hit(f.reach.target, what, {"mean_seconds": round(mean, 3), "batches": int(count)})


@book.check(
    "redis-errors",
    WARNING,
    "metrics",
    provoked="kvindexd_redis_errors_total rises",
    cost="events wait in memory, and answers age",
    fix="see the store findings, and `redis_latency_seconds` by op on the metrics page",
)
def redis_errors(f: Facts) -> Outcome:
    assert isinstance(f.metrics, Pages)  # noqa: S101 - needed
    failed = f.metrics.rise("kvindexd_redis_errors_total")
    if not f.wait:
        yield Skip(f.reach.target, "needs two looks: give --wait SECONDS")
    elif failed:
        ops = {op: int(n) for op, n in f.metrics.by("kvindexd_redis_errors_total", "op").items()}
        what = f"{failed:.0f} Redis calls failed within {f.wait:g} s"
        yield Hit(f.reach.target, what, {"failed": int(failed), "total_by_op": ops})


@book.check(
    "calls-refused",
    WARNING,
    "metrics",
    provoked="scoring calls were answered RESOURCE_EXHAUSTED",
    cost="those requests were routed without the cache",
    fix="raise limits.max_concurrent_calls (or limits.max_prompt_tokens, for long prompts), or"
    " start more `kvindexd scorer`",
)
def calls_refused(f: Facts) -> Outcome:
    assert isinstance(f.metrics, Pages)  # noqa: S101 - needed
    name = "kvindexd_score_requests_total"
    refused, total = f.metrics.total(name, code="RESOURCE_EXHAUSTED"), f.metrics.total(name)
    if refused:
        what = f"{refused:.0f} of {total:.0f} scoring calls were refused"
        yield Hit(f.reach.target, what, {"refused": int(refused), "calls": int(total)})


@book.check(
    "never-matches",
    WARNING,
    "metrics",
    "ranks",
    provoked=f"no prompt of {_ENOUGH} and more matched a single block, although blocks are held",
    cost="the index is of no use: every request is routed by load alone",
    fix="compare the tokens: `kvindexd explain --model M @PROMPT.json` and the engine's /tokenize;"
    " usual causes are another chat template, a missing BOS, or an adapter or salt left out",
)
def never_matches(f: Facts) -> Outcome:
    assert isinstance(f.metrics, Pages)  # noqa: S101 - needed
    name = "kvindexd_matched_ratio"
    asked, sum_ = f.metrics.total(f"{name}_count"), f.metrics.total(f"{name}_sum")
    held = sum(sum(r.after.blocks.values()) for r in _ranks(f))
    if asked >= _ENOUGH and not sum_ and held:
        what = f"none of {asked:.0f} prompts matched anything"
        yield Hit(f.reach.target, what, {"prompts": int(asked), "matched": 0, "blocks_held": held})


@book.check(
    "picks-never-completed",
    WARNING,
    "metrics",
    provoked=f"half and more of {_ENOUGH} and more picks ended by their lease",
    cost="ended requests count as load for minutes, and picks avoid idle workers",
    fix="have the gateway call CompleteRequest; with Envoy set response_trailer_mode: SEND",
)
def picks_never_completed(f: Facts) -> Outcome:
    assert isinstance(f.metrics, Pages)  # noqa: S101 - needed
    picks = f.metrics.total("kvindexd_picks_total")
    ended = f.metrics.by("kvindexd_leases_ended_total", "why")
    lapsed = sum(ended.values())
    if picks >= _ENOUGH and lapsed >= picks / 2:
        what = f"{lapsed:.0f} of {picks:.0f} picked requests were never reported as ended"
        yield Hit(f.reach.target, what, {"picks": int(picks), "ended_by": ended})


@book.check(
    "picked-by-load",
    WARNING,
    "metrics",
    provoked=f"half and more of {_ENOUGH} and more ext_proc requests were picked by load alone",
    cost="the prompt's prefix played no part in where those requests went",
    fix="see `why` in the dynamic metadata `kvindexd` (Envoy's access log): set tokens.models, send"
    " the body (request_body_mode: BUFFERED), or raise ext_proc.budget",
)
def picked_by_load(f: Facts) -> Outcome:
    assert isinstance(f.metrics, Pages)  # noqa: S101 - needed
    by = f.metrics.by("kvindexd_ext_proc_requests_total", "outcome")
    load, cache = by.get("load", 0.0), by.get("cache", 0.0)
    if load + cache >= _ENOUGH and load >= cache:
        what = f"{load:.0f} of {load + cache:.0f} requests through Envoy were picked by load alone"
        yield Hit(f.reach.target, what, {"outcomes": by})


@book.check(
    "over-reports",
    WARNING,
    "server",
    provoked="a worker reused less than was promised: it is marked as drifting, or most of 20 and"
    " more outcomes were over",
    cost="requests go where the cache does not help",
    fix="kvindexd audit ID --replay, then `kvindexd workers resync ID`; if it returns: --eagle,"
    " --chunk-size or --hidden-groups is missing in its registration",
)
def over_reports(f: Facts) -> Outcome:
    assert isinstance(f.server, Server)  # noqa: S101 - needed
    if isinstance(f.server.audit, Missing):
        yield Skip(f.server.address, f.server.audit.why)
        return
    for a in f.server.audit:
        if a.drifting or (a.outcomes >= 20 and a.over > a.outcomes / 2):
            evidence = {
                "outcomes": a.outcomes,
                "predicted_tokens": a.predicted_tokens,
                "actual_tokens": a.actual_tokens,
                "over": a.over,
                "window_error": round(a.window_error, 3),
                "drifting": a.drifting,
            }
            what = f"promised {a.predicted_tokens} tokens, reused {a.actual_tokens}"
            yield Hit(f"{a.worker_id}#{a.dp_rank}", what, evidence)


@book.check(
    "miscounted",
    WARNING,
    "server",
    provoked="an engine counted other prompt lengths than kvindexd in a tenth and more of 10 and"
    " more outcomes",
    cost="prompts are tokenized otherwise than by the engine and can hardly match",
    fix='use the engine\'s own tokenizer and chat template: tokens.models MODEL = "engine"',
)
def miscounted(f: Facts) -> Outcome:
    assert isinstance(f.server, Server)  # noqa: S101 - needed
    if isinstance(f.server.audit, Missing):
        yield Skip(f.server.address, f.server.audit.why)
        return
    for a in f.server.audit:
        if a.outcomes >= 10 and a.miscounted >= a.outcomes / 10:
            evidence = {"outcomes": a.outcomes, "miscounted": a.miscounted}
            what = f"{a.miscounted} of {a.outcomes} prompts had another length there"
            yield Hit(f"{a.worker_id}#{a.dp_rank}", what, evidence)


def _ranks(f: Facts) -> list[Rank]:
    return [] if isinstance(f.ranks, Missing) else list(f.ranks)
