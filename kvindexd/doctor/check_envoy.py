"""Checks of an Envoy configuration (`--envoy FILE`) that asks kvindexd through ext_proc."""

from __future__ import annotations

from collections.abc import Iterator

from kvindexd.doctor import envoy
from kvindexd.doctor.envoy import PICK, ExtProc, Node, child
from kvindexd.doctor.facts import Facts, Missing
from kvindexd.doctor.report import Book, Hit, Outcome, Severity, Skip
from kvindexd.fleet import names_of, normal
from kvindexd.rpc.codec import registration_of

book = Book()
ERROR, WARNING, INFO = Severity

_BUFFER = 4 << 20
_DUPLEX = "FULL_DUPLEX_STREAMED"
_RANK = "x-data-parallel-rank"


def _roots(f: Facts) -> Iterator[tuple[str, Node]]:
    assert not isinstance(f.envoy, Missing)  # noqa: S101 - needed
    for file in f.envoy:
        if not file.problem:
            yield file.path, file.root


def _filters(f: Facts) -> Iterator[tuple[str, Node, ExtProc]]:
    for path, root in _roots(f):
        for one in envoy.ext_procs(root):
            yield path, root, one


def _pickers(f: Facts) -> Iterator[tuple[str, str, Node]]:
    """(file, name, cluster) of each cluster that is asked for picks."""
    for path, root, e in _filters(f):
        cluster = envoy.clusters(root).get(e.cluster)
        if cluster is not None:
            yield path, e.cluster, cluster


@book.check(
    "envoy-unreadable",
    ERROR,
    "envoy",
    provoked="the file given with --envoy is no YAML or JSON, or leaves its listeners to a"
    " management server",
    cost="none of the checks below ran on it",
    fix="envoy --mode validate -c FILE",
)
def unreadable(f: Facts) -> Outcome:
    assert not isinstance(f.envoy, Missing)  # noqa: S101 - needed
    for file in f.envoy:
        if file.problem:
            yield Hit(file.path, file.problem, {"error": file.problem})


@book.check(
    "envoy-no-ext-proc",
    ERROR,
    "envoy",
    provoked="no listener has an ext_proc filter",
    cost="kvindexd is never asked",
    fix="see examples/envoy/buffered.yaml: envoy.filters.http.ext_proc before the router",
)
def no_ext_proc(f: Facts) -> Outcome:
    for path, root in _roots(f):
        if not envoy.ext_procs(root):
            yield Hit(path, "no ext_proc filter", {"listeners": len(list(envoy.walk(root)))})


@book.check(
    "envoy-header-kept",
    ERROR,
    "envoy",
    provoked=f"a client's own {PICK} is not dropped early",
    cost="while the picker is away a client chooses its own upstream, on ORIGINAL_DST any address",
    fix="early_header_mutation_extensions: remove x-gateway-destination-endpoint and"
    " x-data-parallel-rank (see examples/envoy/buffered.yaml)",
)
def header_kept(f: Facts) -> Outcome:
    for path, root, e in _filters(f):
        kept = [h for h in (PICK, _RANK) if not e.removes_early(h)]
        if PICK in kept:
            open_to = [n for n, c in envoy.clusters(root).items() if envoy.by_destination_header(c)]
            what = f"clients' {', '.join(kept)} pass"
            yield Hit(path, what, {"kept": kept, "any_address_through": open_to})


@book.check(
    "envoy-fails-closed",
    WARNING,
    "envoy",
    provoked="failure_mode_allow is not set, or the mode is FULL_DUPLEX_STREAMED, where it does not"
    " apply",
    cost="without kvindexd every request fails with 500",
    fix="failure_mode_allow: true with request_body_mode: BUFFERED",
)
def fails_closed(f: Facts) -> Outcome:
    for path, _, e in _filters(f):
        mode = e.mode.get("request_body_mode", "NONE")
        allow = e.filter.get("failure_mode_allow") is True
        if not allow or mode == _DUPLEX:
            evidence = {"failure_mode_allow": allow, "request_body_mode": mode}
            why = f"it does not apply to {mode}" if allow else "failure_mode_allow is not set"
            yield Hit(path, why, evidence, severity=INFO if mode == _DUPLEX else None)


@book.check(
    "envoy-body-mode",
    ERROR,
    "envoy",
    provoked="request_body_mode is neither BUFFERED nor FULL_DUPLEX_STREAMED with trailers, or"
    " request headers are not sent",
    cost="kvindexd does not see the prompt, and picks by load alone",
    fix="processing_mode: request_header_mode: SEND, request_body_mode: BUFFERED",
)
def body_mode(f: Facts) -> Outcome:
    for path, _, e in _filters(f):
        body = e.mode.get("request_body_mode", "NONE")
        headers = e.mode.get("request_header_mode", "SEND")
        trailers = e.mode.get("request_trailer_mode", "SKIP")
        evidence = {"request_header_mode": headers, "request_body_mode": body}
        if headers == "SKIP":
            yield Hit(path, "request headers are not sent", evidence)
        elif body not in ("BUFFERED", "BUFFERED_PARTIAL", _DUPLEX):
            yield Hit(path, f"request_body_mode is {body}", evidence)
        elif body == "BUFFERED_PARTIAL":
            what = "bodies over the buffer are cut off, and those prompts picked by load"
            yield Hit(path, what, evidence, severity=WARNING)
        elif body == _DUPLEX and trailers != "SEND":
            what = f"{_DUPLEX} needs request_trailer_mode: SEND; Envoy refuses the filter without"
            yield Hit(path, what, evidence | {"request_trailer_mode": trailers})


@book.check(
    "envoy-response-trailers",
    WARNING,
    "envoy",
    provoked="response_trailer_mode is not SEND",
    cost="the stream ends with the response headers, and a request stops to count as load before"
    " its first token",
    fix="processing_mode: response_header_mode: SEND, response_trailer_mode: SEND",
)
def response_trailers(f: Facts) -> Outcome:
    for path, _, e in _filters(f):
        mode = e.mode.get("response_trailer_mode", "SKIP")
        if mode != "SEND":
            yield Hit(path, f"response_trailer_mode is {mode}", {"response_trailer_mode": mode})


@book.check(
    "envoy-metadata",
    WARNING,
    "envoy",
    provoked="override_host reads the pick from metadata `envoy.lb`, which ext_proc may not write",
    cost="the pick is lost, and requests go where the fallback policy sends them",
    fix="metadata_options: receiving_namespaces: {untyped: [envoy.lb, kvindexd]}",
)
def metadata(f: Facts) -> Outcome:
    for path, root, e in _filters(f):
        options = child(e.filter, "metadata_options")
        received = child(child(options, "receiving_namespaces"), "untyped") or []
        for name, cluster in envoy.worker_clusters(root).items():
            sources = [
                s
                for policy in envoy.overrides(cluster)
                for s in child(policy, "override_host_sources") or []
            ]
            by_metadata = any("metadata" in s for s in sources)
            if (
                by_metadata
                and not any("header" in s for s in sources)
                and ("envoy.lb" not in received)
            ):
                evidence = {"cluster": name, "receiving_namespaces": list(received)}
                yield Hit(path, f"{name} reads metadata that is not received", evidence)


@book.check(
    "envoy-pick-unused",
    ERROR,
    "envoy",
    provoked="no cluster obeys the pick: no override_host, no route by header, no ORIGINAL_DST",
    cost="kvindexd is asked, and what it says is ignored",
    fix="load_balancing_policy: override_host, as in examples/envoy/buffered.yaml",
)
def pick_unused(f: Facts) -> Outcome:
    for path, root, e in _filters(f):
        found = envoy.worker_clusters(root)
        if envoy.routed_by_header(e):
            continue
        if not any(envoy.overrides(c) or envoy.by_destination_header(c) for c in found.values()):
            yield Hit(path, "nothing obeys the pick", {"clusters": sorted(found)})


@book.check(
    "envoy-no-fallback",
    WARNING,
    "envoy",
    provoked="an override_host policy has no fallback_policy",
    cost="a request without a pick fails",
    fix="fallback_policy: least_request, as in examples/envoy/buffered.yaml",
)
def no_fallback(f: Facts) -> Outcome:
    for path, root in _roots(f):
        for name, cluster in envoy.worker_clusters(root).items():
            if any(not child(p, "fallback_policy") for p in envoy.overrides(cluster)):
                yield Hit(path, f"{name} has no fallback_policy", {"cluster": name})


@book.check(
    "envoy-buffer-limit",
    WARNING,
    "envoy",
    provoked=f"bodies are BUFFERED and the listener's buffer is below {_BUFFER >> 20} MiB (1 MiB by"
    " default)",
    cost="longer prompts are refused with 413",
    fix="per_connection_buffer_limit_bytes: 67108864 on the listener",
)
def buffer_limit(f: Facts) -> Outcome:
    for path, _, e in _filters(f):
        limit = int(e.listener.get("per_connection_buffer_limit_bytes", 1 << 20))
        mode = e.mode.get("request_body_mode", "NONE")
        if mode == "BUFFERED" and limit < _BUFFER:
            evidence = {"per_connection_buffer_limit_bytes": limit}
            yield Hit(path, f"bodies over {limit} bytes get 413", evidence)


@book.check(
    "envoy-timeout",
    WARNING,
    "envoy",
    "config",
    provoked="message_timeout (0.2 s by default) is not longer than ext_proc.budget",
    cost="Envoy gives up just before the pick comes",
    fix="raise message_timeout, or lower ext_proc.budget",
)
def timeout(f: Facts) -> Outcome:
    assert not isinstance(f.config, Missing)  # noqa: S101 - needed
    budget = f.config.ext_proc.budget
    for path, _, e in _filters(f):
        limit = envoy.seconds(e.filter.get("message_timeout"), 0.2)
        if limit <= budget and e.mode.get("request_body_mode") != _DUPLEX:
            evidence = {"message_timeout": limit, "ext_proc_budget": budget}
            yield Hit(path, f"message_timeout is {limit:g} s", evidence)


@book.check(
    "envoy-no-picker",
    ERROR,
    "envoy",
    provoked="the ext_proc filter names a cluster that the file lacks, or one without HTTP/2",
    cost="every call of the picker fails",
    fix="add the cluster, with explicit_http_config: {http2_protocol_options: {}}",
)
def no_picker(f: Facts) -> Outcome:
    for path, root, e in _filters(f):
        cluster = envoy.clusters(root).get(e.cluster)
        if cluster is None:
            known = sorted(envoy.clusters(root))
            what = f"no cluster {e.cluster!r}"
            yield Hit(path, what, {"cluster_name": e.cluster, "clusters": known})
        elif not any("http2_protocol_options" in n for n in envoy.walk(cluster)):
            yield Hit(path, f"cluster {e.cluster} speaks HTTP/1.1", {"cluster": e.cluster})


@book.check(
    "envoy-no-health-check",
    WARNING,
    "envoy",
    provoked="the picker's cluster has no gRPC health check",
    cost="while kvindexd hangs every request waits for message_timeout",
    fix="health_checks with grpc_health_check: {service_name:"
    " envoy.service.ext_proc.v3.ExternalProcessor}",
)
def no_health_check(f: Facts) -> Outcome:
    for path, name, cluster in _pickers(f):
        checks = child(cluster, "health_checks") or []
        if not any("grpc_health_check" in c for c in checks):
            yield Hit(path, f"cluster {name} is not health-checked", {"health_checks": len(checks)})


@book.check(
    "envoy-no-traffic-interval",
    WARNING,
    "envoy",
    provoked="the picker's health check has no no_traffic_interval (60 s by default), or one over"
    " 10 s",
    cost="a picker that nobody has asked yet is looked at once a minute",
    fix="no_traffic_interval: 1s",
)
def no_traffic_interval(f: Facts) -> Outcome:
    for path, name, cluster in _pickers(f):
        for check in child(cluster, "health_checks") or []:
            interval = envoy.seconds(check.get("no_traffic_interval"), 60.0)
            if interval > 10:
                evidence = {"cluster": name, "no_traffic_interval": interval}
                yield Hit(path, f"no_traffic_interval is {interval:g} s", evidence)


@book.check(
    "envoy-panic",
    WARNING,
    "envoy",
    provoked="the picker's cluster is health-checked and panic mode is on (by default below 50%)",
    cost="Envoy goes on asking a picker that it knows to be down",
    fix="common_lb_config: {healthy_panic_threshold: {value: 0}}",
)
def panic(f: Facts) -> Outcome:
    for path, name, cluster in _pickers(f):
        common = child(cluster, "common_lb_config")
        # Envoy leaves a value of 0 out when it shows what it runs.
        given = "healthy_panic_threshold" in common
        value = float(child(common["healthy_panic_threshold"], "value") or 0) if given else 50.0
        if child(cluster, "health_checks") and value > 0:
            evidence = {"cluster": name, "healthy_panic_threshold": value}
            yield Hit(path, f"cluster {name} panics below {value:g}% healthy", evidence)


@book.check(
    "envoy-workers-unknown",
    WARNING,
    "envoy",
    "ranks",
    provoked="an endpoint of Envoy's worker clusters is no registered worker, or the other way"
    " round",
    cost="that worker is never picked by its cache, or its picks cannot be followed",
    fix="register workers by the IP:port that Envoy has, or add it as --alias",
)
def workers_unknown(f: Facts) -> Outcome:
    assert not isinstance(f.ranks, Missing)  # noqa: S101 - needed
    names = [(r, names_of(registration_of(r.after))) for r in f.ranks]
    for path, root in _roots(f):
        clusters = envoy.worker_clusters(root).values()
        have = {normal(e) for c in clusters for e in envoy.endpoints(c)}
        if not have:
            yield Skip(path, "its worker clusters name no endpoints: they come by discovery")
            continue
        strange = sorted(e for e in have if not any(e in n for _, n in names))
        absent = sorted({r.after.address for r, n in names if not n & have})
        if strange or absent:
            parts = []
            if strange:
                parts.append(f"not registered: {', '.join(strange)}")
            if absent:
                parts.append(f"not in Envoy: {', '.join(absent)}")
            evidence = {"not_registered": strange, "not_in_envoy": absent}
            yield Hit(path, "; ".join(parts), evidence)


@book.check(
    "envoy-admin-open",
    WARNING,
    "envoy",
    provoked="Envoy's admin listens on other than loopback addresses",
    cost="whoever reaches it can stop Envoy and read its secrets",
    fix="admin: address: 127.0.0.1",
)
def admin_open(f: Facts) -> Outcome:
    for path, root in _roots(f):
        address = child(child(root, "admin"), "address")
        if address and envoy.is_open(address):
            host = child(address, "socket_address").get("address")
            yield Hit(path, f"admin listens on {host}", {"address": host})
