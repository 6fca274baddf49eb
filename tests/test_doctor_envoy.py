"""Checks of Envoy configurations: the examples, each spoilt in one way."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from doctor_facts import envoy, healthy
from typer.testing import CliRunner

from kvindexd.cli.main import app
from kvindexd.config import load
from kvindexd.doctor.catalogue import CHECKS
from kvindexd.doctor.envoy import clusters, ext_procs, snake
from kvindexd.doctor.facts import EnvoyFile, Facts
from kvindexd.doctor.probe_host import envoy_file
from kvindexd.doctor.report import Severity, judge

Break = Callable[[Any], None]
CASES: dict[str, list[Break]] = {}


def breaks(id: str) -> Callable[[Break], Break]:
    def add(fault: Break) -> Break:
        CASES.setdefault(id, []).append(fault)
        return fault

    return add


def flt(root: Any) -> Any:
    return ext_procs(root)[0].filter


def mode(root: Any) -> Any:
    return flt(root)["processing_mode"]


def picker(root: Any) -> Any:
    return clusters(root)["kvindexd"]


def policy(root: Any) -> Any:
    lb = clusters(root)["workers"]["load_balancing_policy"]
    return lb["policies"][0]["typed_extension_config"]["typed_config"]


def found(*files: EnvoyFile) -> list[tuple[str, Severity]]:
    facts = healthy()
    facts.envoy = list(files)
    return [(f.id, f.severity) for f in judge(CHECKS, facts).findings]


@breaks("envoy-no-ext-proc")
def _(root: Any) -> None:
    ext_procs(root)[0].manager["http_filters"].pop(0)


@breaks("envoy-header-kept")
def _(root: Any) -> None:
    del ext_procs(root)[0].manager["early_header_mutation_extensions"]


@breaks("envoy-header-kept")
def _(root: Any) -> None:
    (extension,) = ext_procs(root)[0].manager["early_header_mutation_extensions"]
    extension["typed_config"]["mutations"].pop(0)


@breaks("envoy-fails-closed")
def _(root: Any) -> None:
    flt(root)["failure_mode_allow"] = False


@breaks("envoy-fails-closed")
def _(root: Any) -> None:
    del flt(root)["failure_mode_allow"]


@breaks("envoy-body-mode")
def _(root: Any) -> None:
    del mode(root)["request_body_mode"]


@breaks("envoy-body-mode")
def _(root: Any) -> None:
    mode(root)["request_body_mode"] = "STREAMED"


@breaks("envoy-body-mode")
def _(root: Any) -> None:
    mode(root)["request_body_mode"] = "BUFFERED_PARTIAL"


@breaks("envoy-body-mode")
def _(root: Any) -> None:
    mode(root)["request_header_mode"] = "SKIP"


@breaks("envoy-response-trailers")
def _(root: Any) -> None:
    mode(root)["response_trailer_mode"] = "SKIP"


@breaks("envoy-metadata")
def _(root: Any) -> None:
    policy(root)["override_host_sources"].pop(1)
    flt(root)["metadata_options"]["receiving_namespaces"]["untyped"] = ["kvindexd"]


@breaks("envoy-pick-unused")
def _(root: Any) -> None:
    del clusters(root)["workers"]["load_balancing_policy"]


@breaks("envoy-no-fallback")
def _(root: Any) -> None:
    del policy(root)["fallback_policy"]


@breaks("envoy-buffer-limit")
def _(root: Any) -> None:
    del root["static_resources"]["listeners"][0]["per_connection_buffer_limit_bytes"]


@breaks("envoy-timeout")
def _(root: Any) -> None:
    flt(root)["message_timeout"] = "0.05s"


@breaks("envoy-no-picker")
def _(root: Any) -> None:
    flt(root)["grpc_service"]["envoy_grpc"]["cluster_name"] = "kvindex"


@breaks("envoy-no-picker")
def _(root: Any) -> None:
    del picker(root)["typed_extension_protocol_options"]


@breaks("envoy-no-health-check")
def _(root: Any) -> None:
    del picker(root)["health_checks"]


@breaks("envoy-no-health-check")
def _(root: Any) -> None:
    (check,) = picker(root)["health_checks"]
    del check["grpc_health_check"]
    check["tcp_health_check"] = {}


@breaks("envoy-no-traffic-interval")
def _(root: Any) -> None:
    del picker(root)["health_checks"][0]["no_traffic_interval"]


@breaks("envoy-panic")
def _(root: Any) -> None:
    del picker(root)["common_lb_config"]


@breaks("envoy-workers-unknown")
def _(root: Any) -> None:
    endpoints = clusters(root)["workers"]["load_assignment"]["endpoints"][0]["lb_endpoints"]
    endpoints.pop()


@breaks("envoy-workers-unknown")
def _(root: Any) -> None:
    endpoints = clusters(root)["workers"]["load_assignment"]["endpoints"][0]["lb_endpoints"]
    endpoints[0]["endpoint"]["address"]["socket_address"]["port_value"] = 8005


@breaks("envoy-admin-open")
def _(root: Any) -> None:
    root["admin"]["address"]["socket_address"]["address"] = "0.0.0.0"


@pytest.mark.parametrize("id", list(CASES))
def test_a_spoilt_example_is_found_by_its_check_alone(id: str) -> None:
    for fault in CASES[id]:
        file = envoy()
        fault(file.root)
        assert {i for i, _ in found(file)} == {id}


def test_the_examples_are_sound() -> None:
    assert found(envoy("buffered.yaml")) == []
    assert found(envoy("header_routed.yaml")) == []
    # That failures are not allowed for is in the nature of the mode.
    assert found(envoy("full_duplex.yaml")) == [("envoy-fails-closed", Severity.INFO)]


def test_full_duplex_needs_trailers() -> None:
    file = envoy("full_duplex.yaml")
    del mode(file.root)["request_trailer_mode"]
    assert ("envoy-body-mode", Severity.ERROR) in found(file)


def test_a_client_that_may_name_any_address_is_told_of() -> None:
    file = envoy()
    workers = clusters(file.root)["workers"]
    workers["type"] = "ORIGINAL_DST"
    workers["original_dst_lb_config"] = {"use_http_header": True}
    del ext_procs(file.root)[0].manager["early_header_mutation_extensions"]
    facts = healthy()
    facts.envoy = [file]
    (hit,) = [f for f in judge(CHECKS, facts).findings if f.id == "envoy-header-kept"]
    assert hit.evidence["any_address_through"] == ["workers"]


@pytest.fixture
def unreadable(tmp_path: Path) -> list[Path]:
    broken, text = tmp_path / "broken.yaml", tmp_path / "text.yaml"
    broken.write_text("static_resources: [")
    text.write_text("just words")
    return [broken, text, tmp_path / "absent.yaml"]


CASES["envoy-unreadable"] = []


def test_files_that_are_none_are_told_of(unreadable: list[Path]) -> None:
    for path in unreadable:
        done = CliRunner().invoke(app, ["doctor", "--only", "envoy-*", "--envoy", str(path)])
        assert done.exit_code == 1
        assert "ERROR envoy-unreadable" in done.output


def test_json_in_camel_case_is_read_too(tmp_path: Path) -> None:
    def camel(value: Any) -> Any:
        if isinstance(value, dict):
            return {_camel(k): camel(v) for k, v in value.items()}
        return [camel(v) for v in value] if isinstance(value, list) else value

    root = envoy().root
    assert snake(camel(root)) == root
    path = tmp_path / "envoy.json"
    path.write_text(json.dumps(camel(root)))
    done = CliRunner().invoke(app, ["doctor", "--only", "envoy-*", "--envoy", str(path)])
    assert done.exit_code == 0, done.output


def _camel(key: str) -> str:
    if "." in key or key.startswith("@"):
        return key
    head, *rest = key.split("_")
    return head + "".join(p.capitalize() for p in rest)


def test_a_dump_of_a_running_envoy_is_put_together(tmp_path: Path) -> None:
    """As an Envoy that is driven by a management server shows itself."""
    path = tmp_path / "dump.json"
    path.write_text(json.dumps(dump(envoy().root)))
    file = envoy_file(path)
    assert isinstance(file, EnvoyFile)
    picker(file.root)["common_lb_config"]["healthy_panic_threshold"] = {}
    assert found(file) == []
    del picker(file.root)["health_checks"]
    assert found(file) == [("envoy-no-health-check", Severity.WARNING)]


def dump(root: Any) -> Any:
    """The same in the form of /config_dump?include_eds, routes and endpoints apart."""
    prefix = "type.googleapis.com/envoy.config."
    (listener,) = root["static_resources"]["listeners"]
    manager = ext_procs(root)[0].manager
    routes = {"@type": prefix + "route.v3.RouteConfiguration", "name": "r"}
    routes |= manager.pop("route_config")
    manager["rds"] = {"route_config_name": "r"}
    listener["@type"] = prefix + "listener.v3.Listener"
    endpoints = []
    for cluster in root["static_resources"]["clusters"]:
        cluster["@type"] = prefix + "cluster.v3.Cluster"
        given = cluster.pop("load_assignment")
        endpoints.append({"@type": prefix + "endpoint.v3.ClusterLoadAssignment"} | given)
    clusters_ = root["static_resources"]["clusters"]
    return {
        "configs": [
            {"bootstrap": {"admin": root["admin"]}},
            {"dynamic_active_clusters": [{"cluster": c} for c in clusters_]},
            {"dynamic_endpoint_configs": [{"endpoint_config": e} for e in endpoints]},
            {"dynamic_listeners": [{"active_state": {"listener": listener}}]},
            {"dynamic_route_configs": [{"route_config": routes}]},
        ]
    }


def test_a_file_that_leaves_all_to_a_management_server_is_told_of(tmp_path: Path) -> None:
    path = tmp_path / "envoy.yaml"
    path.write_text("dynamic_resources: {lds_config: {ads: {}}, cds_config: {ads: {}}}")
    file = envoy_file(path)
    assert isinstance(file, EnvoyFile)
    assert "config_dump" in file.problem


def test_endpoints_that_come_by_discovery_are_not_checked() -> None:
    file = envoy()
    del clusters(file.root)["workers"]["load_assignment"]
    facts = healthy()
    facts.envoy = [file]
    report = judge(CHECKS, facts)
    assert report.findings == []
    assert [n.id for n in report.not_checked] == ["envoy-workers-unknown"]


def test_the_budget_of_the_settings_counts() -> None:
    facts: Facts = healthy()
    flags = {"ext_proc.budget": 0.5, "tokens.models": '{"m": "engine"}'}
    facts.config = load(env={}, flags=flags).config
    assert {f.id for f in judge(CHECKS, facts).findings} == {"envoy-timeout"}
