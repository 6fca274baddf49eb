"""Dashboard, alerts and docs/metrics.md name only metrics, labels and values that exist."""

from __future__ import annotations

import http.client
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import promql_parser as promql
import pytest
import yaml
from daemon import Daemon, serving
from picks import fresh, hold, request, stored
from prometheus_client.parser import text_string_to_metric_families

from kvindexd.testing.engine import FakeEngine
from kvindexd.v1 import index_pb2 as pb

ROOT = Path(__file__).parent.parent
DASHBOARD = json.loads((ROOT / "deploy" / "grafana" / "kvindexd.json").read_text())
ALERTS = yaml.safe_load((ROOT / "deploy" / "prometheus" / "alerts.yaml").read_text())
RULES = [rule for group in ALERTS["groups"] for rule in group["rules"]]
FROM_PROMETHEUS = {"instance", "job"}
"""Labels that scraping adds."""

PROMISED = {
    "events_total": "worker type",
    "events_filtered_total": "worker kind",
    "events_dropped_total": "worker reason",
    "decode_errors_total": "worker",
    "blocks": "worker tier",
    "seq_gaps_total": "worker",
    "replays_total": "worker outcome",
    "engine_restarts_total": "worker",
    "apply_lag_seconds": "",
    "redis_latency_seconds": "op",
    "redis_errors_total": "op",
    "score_requests_total": "code",
    "score_latency_seconds": "",
    "matched_ratio": "",
    "predicted_vs_actual_tokens": "worker",
    "worker_state": "worker state",
    "replica_revision_lag": "",
    "picks_total": "worker",
}
"""The contract's names, which checks outside the project are written against."""

NOT_CAUSED = {
    "kvindexd_auth_failures_total",  # no credentials are configured
    "kvindexd_credential_reloads_total",
    "kvindexd_requests_refused_total",  # no limit is reached
    "kvindexd_reloads_total",  # no SIGHUP
    "kvindexd_spans_total",  # no tracing
    "kvindexd_discovery_changes_total",  # workers are registered by calls
    "kvindexd_ext_proc_served_total",  # no Envoy tells who served
    "kvindexd_leases_ended_total",  # takes a lease's time
    "kvindexd_leases_lost_total",  # takes a second ingester
    "kvindexd_replica_faults_total",  # takes a broken store
    "kvindexd_worker_silent",  # takes ingest.event_grace
}
"""Exported without a sample in the traffic below, so that their labels cannot be seen."""


class Exported(NamedTuple):
    """What /metrics shows. `types`: by family. `labels`: family -> label names of its samples,
    families without samples left out. `values`: (family, label) -> values."""

    types: dict[str, str]
    labels: dict[str, set[str]]
    values: dict[tuple[str, str], set[str]]


def _get(daemon: Daemon, path: str) -> tuple[int, str]:
    connection = http.client.HTTPConnection(daemon.ready["metrics"], timeout=10)
    connection.request("GET", path)
    response = connection.getresponse()
    found = response.status, response.read().decode()
    connection.close()
    return found


def _metrics(daemon: Daemon) -> str:
    status, text = _get(daemon, "/metrics")
    assert status == 200
    return text


def _exported(text: str) -> Exported:
    types: dict[str, str] = {}
    labels: dict[str, set[str]] = {}
    values: dict[tuple[str, str], set[str]] = {}
    for family in text_string_to_metric_families(text):
        name = family.name + ("_total" if family.type == "counter" else "")
        types[name] = family.type
        for sample in family.samples:
            labels.setdefault(name, set()).update(sample.labels)
            for label, value in sample.labels.items():
                values.setdefault((name, label), set()).add(value)
    return Exported(types, labels, values)


def _complete(daemon: Daemon, picked: pb.PickWorkerResponse, cached: int) -> None:
    done = pb.CompleteRequestRequest(request_id=picked.request_id, cached_tokens=cached)
    daemon.index.CompleteRequest(done, timeout=10)


@pytest.fixture(scope="module")
def busy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """A daemon after some traffic, good and bad."""
    settings = {
        "index.data_dir": str(tmp_path_factory.mktemp("store")),
        "tokens.models": {"m": "http://127.0.0.1:1"},
        "metrics.ui": False,
    }
    with serving(**settings) as daemon, FakeEngine() as good, FakeEngine() as odd:
        daemon.register("w0", good.endpoint())
        daemon.register("w1", odd.endpoint())
        for engine in (good, odd):
            engine.wait_subscribed()
        prompt = fresh(8)
        hold(daemon, good, "w0", prompt, fresh(2))
        strange = {"group_idx": 1, "kv_cache_spec_kind": "encoder_only_attention"}
        odd.publish([stored(fresh(2), **strange)])
        good.garbage("short_seq")
        first = daemon.index.PickWorker(request(prompt), timeout=10)
        _complete(daemon, first, 0)
        daemon.score(prompt)
        text = pb.ScoreWorkersRequest(prompt=pb.Prompt(model="m", text="words"))
        with pytest.raises(grpc.RpcError):
            daemon.index.ScoreWorkers(text, timeout=10)
        seen = (
            'kvindexd_events_filtered_total{kind="encoder_only_attention"',
            "kvindexd_worker_nothing_indexed{",
            "kvindexd_tokenizer_failures_total{",
            "kvindexd_predictions_total{",
            'kvindexd_worker_state{state="live",worker="w1#0"} 1',
            'kvindexd_redis_memory_bytes{shard="0"}',
        )
        daemon.until(
            lambda: all(part in shown for part in seen) if (shown := _metrics(daemon)) else None,
            "everything counted",
        )
        yield daemon


@pytest.fixture(scope="module")
def exported(busy: Daemon) -> Exported:
    return _exported(_metrics(busy))


class Row(NamedTuple):
    """A line of a table in docs/metrics.md."""

    type: str
    labels: set[str]


def documented() -> dict[str, Row]:
    """The tables of docs/metrics.md."""
    rows = {}
    for line in (ROOT / "docs" / "metrics.md").read_text().splitlines():
        found = re.match(r"\| `(\w+)` \| (\w+) \| ([^|]*) \| [^|]+ \|$", line)
        if found:
            assert found[1] not in rows, f"{found[1]} twice"
            rows[found[1]] = Row(found[2], set(re.findall(r"`(\w+)`", found[3])))
    return rows


def test_the_document_lists_exactly_what_is_exported(exported: Exported) -> None:
    rows = documented()
    assert rows.keys() == exported.types.keys()
    wrong = {
        name: (row, exported.types[name], exported.labels.get(name))
        for name, row in rows.items()
        if row.type != exported.types[name]
        or (name in exported.labels and row.labels | {"le"} != exported.labels[name] | {"le"})
    }
    assert not wrong
    assert exported.types.keys() - exported.labels.keys() == NOT_CAUSED


def test_the_page_is_off_by_configuration(busy: Daemon) -> None:
    for path in ("/ui", "/ui/", "/ui/app.js", "/ui/api/fleet", "/ui/api/explain"):
        assert _get(busy, path) == (404, "see /metrics, /healthz and /readyz\n"), path


def test_the_contract_is_kept(exported: Exported) -> None:
    for name, labels in PROMISED.items():
        found = exported.labels[f"kvindexd_{name}"] - {"le"}
        assert found == set(labels.split()), name


# -- expressions ----------------------------------------------------------------------------------


def expressions() -> list[tuple[str, str]]:
    """(where, expression) of all panels, variables and rules."""
    found = [
        (f"panel {panel['title']}", target["expr"])
        for panel in DASHBOARD["panels"]
        for target in panel.get("targets", ())
    ]
    return found + [(f"rule {rule['alert']}", rule["expr"]) for rule in RULES]


def parsed(expression: str) -> Any:
    """The syntax tree, Grafana's interval variable filled in. Raises ValueError."""
    return promql.parse(expression.replace("$__rate_interval", "5m"))


def selectors(node: Any) -> Iterator[Any]:
    """All vector selectors of a tree."""
    if isinstance(node, promql.VectorSelector):
        yield node
    for name in ("expr", "lhs", "rhs", "vector_selector", "param"):
        child = getattr(node, name, None)
        if child is not None and not isinstance(child, str | float):
            yield from selectors(child)
    for child in getattr(node, "args", None) or ():
        yield from selectors(child)


def grouped(node: Any) -> Iterator[str]:
    """All label names in by, without, on, ignoring and group_left clauses of a tree."""
    modifier = getattr(node, "modifier", None)
    if modifier is not None:
        yield from getattr(modifier, "labels", None) or ()
        matching = getattr(modifier, "matching", None)
        yield from (matching.labels if matching is not None else ())
        yield from getattr(modifier, "group_labels", None) or ()
    for name in ("expr", "lhs", "rhs"):
        child = getattr(node, name, None)
        if child is not None and not isinstance(child, str | float):
            yield from grouped(child)
    for child in getattr(node, "args", None) or ():
        yield from grouped(child)


def family_of(name: str, exported: Exported) -> str:
    """The exported family of a series' name. Raises LookupError."""
    if name in exported.types and exported.types[name] != "histogram":
        return name
    base = re.sub(r"_(bucket|count|sum)$", "", name)
    if base != name and exported.types.get(base) == "histogram":
        return base
    raise LookupError(f"{name} is not exported")


def problems(expression: str, exported: Exported) -> Iterator[str]:
    """What is wrong with an expression, in words."""
    tree, rows = parsed(expression), documented()
    known = set(FROM_PROMETHEUS)
    found = list(selectors(tree))
    if not found and "vector(" not in expression:
        yield "no metric at all"
    for selector in found:
        try:
            family = family_of(selector.name, exported)
        except LookupError as e:
            yield str(e)
            continue
        labels = exported.labels.get(family, rows[family].labels) | FROM_PROMETHEUS
        if selector.name.endswith("_sum") and "_tokens" in selector.name:
            yield f"{selector.name}: no sum where observations are negative"
        known |= labels
        for matcher in selector.matchers.matchers:
            if matcher.name not in labels:
                yield f"{selector.name} has no label {matcher.name}"
            elif not _matches(matcher, exported.values.get((family, matcher.name))):
                yield f"{selector.name}: {matcher.name} is never {matcher.value}"
    for label in grouped(tree):
        if label not in known:
            yield f"grouped by {label}, which none of its metrics has"


def _matches(matcher: Any, seen: set[str] | None) -> bool:
    """Whether a matcher names values that occur, as far as that was seen; $variables do."""
    if seen is None or matcher.value.startswith("$"):
        return True
    if matcher.op in (promql.MatchOp.Equal, promql.MatchOp.NotEqual):
        return matcher.value in seen
    # Of a list such as OK|NOT_FOUND one value is enough.
    return any(re.fullmatch(matcher.value, value) for value in seen)


def test_expressions_are_sound(exported: Exported) -> None:
    found = {
        f"{where}: {expression}": list(problems(expression, exported))
        for where, expression in expressions()
    }
    assert len(found) > 90
    assert not {where: wrong for where, wrong in found.items() if wrong}


def test_unsound_expressions_are_told(exported: Exported) -> None:
    for expression, words in [
        ("sum(rate(kvindexd_event_total[5m]))", "not exported"),
        ("kvindexd_apply_lag_seconds", "not exported"),
        ("kvindexd_picks_total{model='m'}", "no label model"),
        ("kvindexd_worker_state{state='Stale'}", "never Stale"),
        ("sum by (rank) (kvindexd_picks_total)", "grouped by rank"),
        ("sum(rate(kvindexd_predicted_vs_actual_tokens_sum[5m]))", "no sum"),
    ]:
        assert any(words in p for p in problems(expression, exported)), expression
    with pytest.raises(ValueError, match="expected type matrix"):
        parsed("rate(kvindexd_picks_total)")


# -- dashboard and rules --------------------------------------------------------------------------


def test_panels_are_complete_and_do_not_overlap() -> None:
    taken: set[tuple[int, int]] = set()
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(ids)) == len(ids)
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        taken |= cells
        if panel["type"] == "row":
            continue
        assert panel["description"]
        assert panel["fieldConfig"]["defaults"]["unit"]
        assert panel["datasource"]["uid"] == "${datasource}"
        for target in panel["targets"]:
            named = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
            assert named <= set(grouped(parsed(target["expr"]))) | FROM_PROMETHEUS, panel["title"]


def test_variables_ask_for_series_that_exist(exported: Exported) -> None:
    for variable in DASHBOARD["templating"]["list"]:
        if variable["type"] != "query":
            continue
        found = re.fullmatch(r"label_values\((\w+), (\w+)\)", variable["definition"])
        assert found
        assert found[2] in exported.labels[found[1]] | FROM_PROMETHEUS
    used = set(re.findall(r"\$(\w+)", " ".join(e for _, e in expressions())))
    assert used - {"__rate_interval"} == {"instance", "worker"}


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["alert"])
def test_rule_says_what_it_means_and_what_to_do(rule: dict[str, Any]) -> None:
    assert set(rule) == {"alert", "expr", "for", "labels", "annotations"}
    assert rule["labels"]["severity"] in ("critical", "warning")
    assert re.fullmatch(r"\d+m", rule["for"])
    notes = rule["annotations"]
    assert set(notes) == {"summary", "description", "runbook_url"}
    labels = set(re.findall(r"\$labels\.(\w+)", notes["summary"] + notes["description"]))
    kept = set(grouped(parsed(rule["expr"])))
    # Without an aggregation all labels are kept.
    assert labels <= (kept | FROM_PROMETHEUS)
    page, _, anchor = notes["runbook_url"].partition("#")
    headings = re.findall(r"^#+ (.+)$", (ROOT / page).read_text(), re.M)
    assert anchor in {re.sub(r"[^\w -]", "", h.lower()).replace(" ", "-") for h in headings}


def test_alert_names_are_unique_and_tested_ones_exist() -> None:
    names = [rule["alert"] for rule in RULES]
    assert len(set(names)) == len(names)
    trial = yaml.safe_load((ROOT / "deploy" / "prometheus" / "alerts_test.yaml").read_text())
    fired = {
        re.sub(r'.*"(\w+)".*', r"\1", sample["labels"])
        for case in trial["tests"]
        for check in case["promql_expr_test"]
        for sample in check["exp_samples"]
    }
    assert fired <= set(names)
