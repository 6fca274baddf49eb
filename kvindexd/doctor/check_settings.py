"""Checks of the configuration, of this host and installation, and of tokenizers."""

from __future__ import annotations

from kvindexd.config import Config
from kvindexd.doctor.facts import Facts, Missing, Pages
from kvindexd.doctor.report import Book, Hit, Outcome, Severity, Skip
from kvindexd.security.exposure import (
    has_credentials,
    in_clear,
    is_loopback,
    requires_certificate,
)

book = Book()
ERROR, WARNING, INFO = Severity

_FILES_BASE, _FILES_PER_RANK = 64, 12
"""Descriptors of a process, and of a rank: four sockets and their signals, some of them twice
while a connection is made anew."""


def _config(f: Facts) -> Config:
    assert not isinstance(f.config, Missing)  # noqa: S101 - needed
    return f.config


@book.check(
    "config-invalid",
    ERROR,
    provoked="the settings (--config, KVINDEXD_*) cannot be used",
    cost="kvindexd does not start with them",
    fix="correct what is named; `kvindexd config show` prints the result",
)
def config_invalid(f: Facts) -> Outcome:
    if f.config_problem:
        yield Hit("settings", f.config_problem, {"error": f.config_problem})


@book.check(
    "lease-too-short",
    WARNING,
    "config",
    provoked="ingest.lease_ttl is shorter than two heartbeats, or than one Redis timeout",
    cost="one late heartbeat makes ranks STALE, or hands them to another ingester",
    fix="set ingest.lease_ttl to three heartbeats and more, and above redis.timeout",
)
def lease_too_short(f: Facts) -> Outcome:
    c = _config(f)
    least = max(2 * c.ingest.heartbeat, c.redis.timeout)
    if c.ingest.lease_ttl < least:
        evidence = {
            "lease_ttl": c.ingest.lease_ttl,
            "heartbeat": c.ingest.heartbeat,
            "redis_timeout": c.redis.timeout,
        }
        fix = f"KVINDEXD_INGEST__LEASE_TTL={max(least, 3 * c.ingest.heartbeat) + 1:g}"
        yield Hit("ingest.lease_ttl", f"{c.ingest.lease_ttl:g} s is short", evidence, fix)


@book.check(
    "peer-timeout-long",
    WARNING,
    "config",
    provoked="ingest.peer_timeout is longer than ingest.event_grace",
    cost="an engine that vanished without a word is credited for longer than the grace time",
    fix="set ingest.peer_timeout to half of ingest.event_grace and less",
)
def peer_timeout_long(f: Facts) -> Outcome:
    i = _config(f).ingest
    if i.peer_timeout > i.event_grace:
        evidence = {"peer_timeout": i.peer_timeout, "event_grace": i.event_grace}
        yield Hit("ingest.peer_timeout", f"{i.peer_timeout:g} s is long", evidence)


@book.check(
    "replay-timeout-long",
    WARNING,
    "config",
    provoked="ingest.replay_timeout is longer than ingest.lease_ttl",
    cost="a silent replay server holds a rank up for longer than its lease lasts",
    fix="set ingest.replay_timeout below ingest.lease_ttl; 2 s is usual",
)
def replay_timeout_long(f: Facts) -> Outcome:
    i = _config(f).ingest
    if i.replay_timeout > i.lease_ttl:
        evidence = {"replay_timeout": i.replay_timeout, "lease_ttl": i.lease_ttl}
        yield Hit("ingest.replay_timeout", f"{i.replay_timeout:g} s is long", evidence)


@book.check(
    "listens-openly",
    WARNING,
    "config",
    provoked="a listener is on other than loopback addresses and asks for no credentials (info"
    " where it cannot change anything)",
    cost="whoever reaches the port can register workers, or read what is indexed",
    fix="set auth.tokens_file or tls.client_ca_file, listen on 127.0.0.1, or keep strangers out by"
    " a NetworkPolicy",
)
def listens_openly(f: Facts) -> Outcome:
    c = _config(f)
    admin = "admin" if c.server.admin_listen else "server"
    for name, key, listen in _listeners(c):
        asks = requires_certificate(c, name) or (has_credentials(c) and name != "metrics")
        if listen and not is_loopback(listen) and not asks:
            severity = WARNING if name == admin else INFO
            yield Hit(key, f"{key} is {listen}, open to anybody", {key: listen}, severity=severity)


def _listeners(c: Config) -> tuple[tuple[str, str, str], ...]:
    return (
        ("server", "server.listen", c.server.listen),
        ("admin", "server.admin_listen", c.server.admin_listen),
        ("ext_proc", "ext_proc.listen", c.ext_proc.listen),
        ("metrics", "metrics.listen", c.metrics.listen),
    )


@book.check(
    "tokens-in-clear",
    WARNING,
    "config",
    provoked="tokens are asked for on a listener beyond loopback that does not speak TLS",
    cost="whoever listens on the network reads the tokens",
    fix="set tls.cert_file and tls.key_file, or put a proxy that speaks TLS on the same host",
)
def tokens_in_clear(f: Facts) -> Outcome:
    names = in_clear(_config(f))
    if names:
        what = f"tokens travel unencrypted to {', '.join(names)}"
        yield Hit("auth", what, {"listeners": names})


@book.check(
    "files-limit",
    WARNING,
    "host",
    provoked="a kvindexd on this host may open too few files for its ranks",
    cost="the ranks beyond it are not followed, and clients are refused",
    fix="LimitNOFILE=65536 in the systemd unit, or ulimit -n 65536 before it starts",
)
def files_limit(f: Facts) -> Outcome:
    assert not isinstance(f.host, Missing)  # noqa: S101 - needed
    if isinstance(f.host.processes, Missing):
        yield Skip("", f.host.processes.why)
        return
    for p in f.host.processes:
        need = max(_FILES_BASE + _FILES_PER_RANK * p.ranks, int(1.2 * p.open_files))
        if p.nofile < need:
            evidence = {"limit": p.nofile, "open": p.open_files, "ranks": p.ranks, "need": need}
            what = f"pid {p.pid} may open {p.nofile} files and needs about {need}"
            yield Hit(f"pid {p.pid}", what, evidence)


@book.check(
    "no-uvloop",
    INFO,
    "host",
    provoked="uvloop cannot be imported here",
    cost="a sixth more CPU per call",
    fix="pip install uvloop",
)
def no_uvloop(f: Facts) -> Outcome:
    assert not isinstance(f.host, Missing)  # noqa: S101 - needed
    if not f.host.uvloop:
        yield Hit("installation", "uvloop is absent", {"uvloop": False})


@book.check(
    "no-native-hash",
    WARNING,
    "host",
    provoked="the C extension kvindexd._chain was not built here",
    cost="hashing a prompt takes ten times as long",
    fix="install gcc and the Python headers, then pip install --force-reinstall --no-deps kvindexd",
)
def no_native_hash(f: Facts) -> Outcome:
    assert not isinstance(f.host, Missing)  # noqa: S101 - needed
    if not f.host.native:
        yield Hit("installation", "the C extension is absent", {"kvindexd._chain": False})


@book.check(
    "tokenizer-missing",
    WARNING,
    "config",
    "ranks",
    provoked="Envoy asks for picks, or other models have a tokenizer, and a registered model has"
    " none in tokens.models",
    cost="text prompts of that model are picked by load alone, or refused",
    fix='set tokens.models in the configuration: MODEL = "/path/of/tokenizer", or "engine"',
)
def tokenizer_missing(f: Facts) -> Outcome:
    c = _config(f)
    assert not isinstance(f.ranks, Missing)  # noqa: S101 - needed
    asked = not isinstance(f.envoy, Missing) or (
        isinstance(f.metrics, Pages) and f.metrics.total("kvindexd_ext_proc_requests_total") > 0
    )
    if not (asked or c.tokens.models):
        return
    for model in sorted({r.after.model for r in f.ranks} - set(c.tokens.models)):
        fix = f'[tokens]\nmodels = {{ "{model}" = "engine" }}'
        evidence = {"model": model, "configured": sorted(c.tokens.models)}
        yield Hit(model, "no tokenizer for text prompts", evidence, fix)


@book.check(
    "tokenizer-fails",
    ERROR,
    "tokenizers",
    provoked="a configured tokenizer cannot be loaded, or does not answer",
    cost="text prompts of that model are picked by load alone, or refused",
    fix="correct tokens.models; a folder needs a tokenizer.json and kvindexd[tokenizers] installed",
)
def tokenizer_fails(f: Facts) -> Outcome:
    assert not isinstance(f.tokenizers, Missing)  # noqa: S101 - needed
    for t in f.tokenizers:
        if t.problem:
            yield Hit(t.model, t.problem, {"setting": t.setting, "error": t.problem})


@book.check(
    "tokenizer-differs",
    WARNING,
    "tokenizers",
    provoked="a local tokenizer and the engine's own /tokenize turn a sample into other ids",
    cost="prompts of that model can hardly match",
    fix='point tokens.models at the files that the engine was started with, or set "engine"',
)
def tokenizer_differs(f: Facts) -> Outcome:
    assert not isinstance(f.tokenizers, Missing)  # noqa: S101 - needed
    for t in f.tokenizers:
        if isinstance(t.differs, Missing):
            yield Skip(t.model, t.differs.why)
        elif t.differs:
            yield Hit(t.model, t.differs, {"setting": t.setting, "differs": t.differs})


@book.check(
    "tokenizer-failed-before",
    INFO,
    "metrics",
    provoked="kvindexd_tokenizer_failures_total is not 0",
    cost="so many prompts were picked by load alone, or refused",
    fix="see `tokenizer_failed` in the log",
)
def tokenizer_failed_before(f: Facts) -> Outcome:
    assert isinstance(f.metrics, Pages)  # noqa: S101 - needed
    for model, n in f.metrics.by("kvindexd_tokenizer_failures_total", "model").items():
        if n:
            yield Hit(model, f"its tokenizer failed {n:.0f} times", {"failures": int(n)})


@book.check(
    "token-cache-small",
    WARNING,
    "config",
    provoked="tokens.cache_tokens is below limits.max_prompt_tokens, with tokenizers configured",
    cost="the longest prompts are tokenized anew each time, and miss ext_proc.budget each time",
    fix="raise tokens.cache_tokens to several times limits.max_prompt_tokens (4 bytes per token)",
)
def token_cache_small(f: Facts) -> Outcome:
    c = _config(f)
    if c.tokens.models and c.tokens.cache_tokens < c.limits.max_prompt_tokens:
        evidence = {
            "cache_tokens": c.tokens.cache_tokens,
            "max_prompt_tokens": c.limits.max_prompt_tokens,
        }
        what = f"room for {c.tokens.cache_tokens} token ids"
        yield Hit("tokens.cache_tokens", what, evidence)


@book.check(
    "feed-short",
    WARNING,
    "config",
    "ranks",
    provoked="at the rate of now, limits.feed_maxlen covers less than 30 s",
    cost="a scorer that pauses for longer loads every rank anew",
    fix="raise limits.feed_maxlen",
)
def feed_short(f: Facts) -> Outcome:
    c = _config(f)
    assert not isinstance(f.ranks, Missing)  # noqa: S101 - needed
    if not f.wait:
        yield Skip("", "needs two looks: give --wait SECONDS")
        return
    revisions = (r.after.revision - r.before.revision for r in f.ranks)
    rate = sum(max(0, n) for n in revisions) / f.wait / c.redis.shards
    if rate and c.limits.feed_maxlen / rate < 30:
        what = f"{rate:.0f} batches per second and shard"
        evidence = {"batches_per_second": round(rate, 1), "feed_maxlen": c.limits.feed_maxlen}
        yield Hit("limits.feed_maxlen", what, evidence, f"set it to {int(60 * rate)}")
