"""Kubernetes manifests and the Helm chart, rendered by kubectl and helm: schemas, and that each
port, flag, variable, file and label in them exists on the other side."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
from deployed import (
    CHART,
    DEPLOY,
    EVERYTHING,
    container_environment,
    helm,
    image_environment,
    need,
    objects,
    run,
)

from kvindexd.cli.main import app
from kvindexd.cli.serve import _HELP as ROLES
from kvindexd.config import Config, load, parse_listen
from kvindexd.security.exposure import check_exposure

Object = dict[str, Any]
KUBERNETES_VERSION = "1.37"
FIELDS = {"POD_NAME": "pod-0", "POD_UID": "u-0", "POD_IP": "10.1.1.1", "MODEL": "m"}
CRDS = {"monitoring.coreos.com", "gateway.envoyproxy.io"}
CRDS |= {"inference.networking.k8s.io", "gateway.networking.k8s.io"}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Object]]:
    """Name -> objects: each kustomization that users apply, and the chart in two forms."""
    kubectl = need("kubectl")
    copy = tmp_path_factory.mktemp("deploy") / "deploy"
    shutil.copytree(DEPLOY, copy, ignore=shutil.ignore_patterns("secrets"))
    trial = copy / "kubernetes" / "overlays" / "trial"
    subprocess.run([copy / "secrets.sh", trial / "secrets"], check=True)
    gateways = copy / "kubernetes" / "overlays" / "gateways"
    gateways.mkdir()
    (gateways / "kustomization.yaml").write_text(
        "apiVersion: kustomize.config.k8s.io/v1beta1\nkind: Kustomization\n"
        "resources: [../production]\n"
        "components: [../../components/envoy-gateway, ../../components/inference-pool]\n"
    )
    found: dict[str, list[Object]] = {}
    for name, folder in {
        "trial": trial,
        "production": gateways,
        "engine": copy / "kubernetes" / "engine",
    }.items():
        done = run(kubectl, "kustomize", folder)
        assert done.returncode == 0, done.stderr
        found[name] = objects(done.stdout)
    found["chart"] = helm(**EVERYTHING)
    found["chart-trial"] = helm(**{"valkey.enabled": "true", "scorer.autoscaling.enabled": "false"})
    return found


KINDS = ("trial", "production", "engine", "chart", "chart-trial")


def pods(found: list[Object]) -> Iterator[tuple[Object, Object]]:
    """Workloads with the specs of their pods."""
    for o in found:
        if "template" in (o.get("spec") or {}):
            yield o, o["spec"]["template"]


def ours(found: list[Object]) -> Iterator[tuple[Object, Object, Object]]:
    """(workload, pod, container) of each container that runs kvindexd."""
    for workload, pod in pods(found):
        for c in (*pod["spec"].get("initContainers", ()), *pod["spec"]["containers"]):
            if c["name"] == "kvindexd":
                yield workload, pod, c


def settings(found: list[Object], container: Object) -> Config:
    """The configuration that the container's process would have. Raises ConfigError."""
    maps = {o["metadata"]["name"]: o["data"] for o in found if o["kind"] == "ConfigMap"}
    environment = image_environment()
    for source in container["envFrom"]:
        name = source["configMapRef"]["name"]
        # The engines' example uses the one of an overlay.
        environment |= maps[name] if maps else {"KVINDEXD_REDIS__URL": "redis://h:6379"}
    return load(env=environment | container_environment([container], FIELDS)).config


@pytest.mark.parametrize("kind", KINDS)
def test_objects_are_what_kubernetes_takes(built: dict[str, list[Object]], kind: str) -> None:
    assert built[kind]
    for o in built[kind]:
        if o["apiVersion"].partition("/")[0] in CRDS:
            assert set(o) == {"apiVersion", "kind", "metadata", "spec"}
            continue
        kubernetes_validate.validate(o, KUBERNETES_VERSION, strict=True)
    names = [(o["kind"], o["metadata"]["name"]) for o in built[kind]]
    assert len(set(names)) == len(names)


def test_a_schema_would_find_a_wrong_field(built: dict[str, list[Object]]) -> None:
    scorer = next(o for o in built["trial"] if o["metadata"]["name"] == "kvindexd-scorer")
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(scorer | {"spce": {}}, KUBERNETES_VERSION, strict=True)


@pytest.mark.parametrize("kind", KINDS)
def test_commands_settings_ports_and_files_exist(built: dict[str, list[Object]], kind: str) -> None:
    seen = set()
    for workload, pod, container in ours(built[kind]):
        (role,) = container["args"]
        seen.add(role)
        assert role in ROLES
        assert role in {c.name for c in app.registered_commands}
        config = settings(built[kind], container)
        if role == "scorer":
            check_exposure(config)
        assert config.redis.url, "a part needs the shared Redis"
        listens = {
            "grpc": config.server.listen,
            "ext-proc": config.ext_proc.listen,
            "metrics": config.metrics.listen,
            "kvx-metrics": config.metrics.listen,
        }
        for port in container["ports"]:
            host, number = parse_listen(listens[port["name"]])
            assert (host, number) == ("0.0.0.0", port["containerPort"]), port["name"]
        _probes(container, role, config)
        _files(pod, container, config, workload)
    assert seen == {"engine": {"sidecar"}}.get(kind, {"sidecar", "scorer"})


def _probes(container: Object, role: str, config: Config) -> None:
    """Probes ask for a named port and a health page, and come without TLS."""
    ports = {p["name"] for p in container["ports"]}
    assert "metrics" not in config.tls.listeners or not config.tls.cert_file
    for name in ("startupProbe", "readinessProbe", "livenessProbe"):
        if name not in container:
            assert container.get("restartPolicy") == "Always", "only a native sidecar may lack one"
            continue
        get = container[name]["httpGet"]
        assert get["port"] in ports
        assert get["path"] == ("/readyz" if name == "readinessProbe" else "/healthz")


def _files(pod: Object, container: Object, config: Config, workload: Object) -> None:
    """Files that settings name lie in a mounted volume; only those folders and no others are
    written to."""
    volumes = {v["name"]: v for v in pod["spec"]["volumes"]}
    volumes |= {v["metadata"]["name"]: v for v in workload["spec"].get("volumeClaimTemplates", ())}
    mounts = {m["mountPath"]: m for m in container["volumeMounts"]}
    assert all(m["name"] in volumes for m in mounts.values())
    files = [config.redis.password_file, config.tls.cert_file, config.tls.key_file]
    files += [config.auth.tokens_file, config.redis.url.partition("ssl_ca_certs=")[2]]
    for file in filter(None, files):
        assert str(Path(file).parent) in mounts, file
    writable = [m for m in mounts.values() if not m.get("readOnly")]
    assert [m["mountPath"] for m in writable] == ["/tmp"]
    assert "emptyDir" in volumes[writable[0]["name"]]


@pytest.mark.parametrize("kind", KINDS)
def test_pods_are_restricted(built: dict[str, list[Object]], kind: str) -> None:
    for workload, pod in pods(built[kind]):
        spec = pod["spec"]
        name = workload["metadata"]["name"]
        assert spec.get("automountServiceAccountToken") is name.endswith("-ingester")
        for c in (*spec.get("initContainers", ()), *spec["containers"]):
            if c["name"] == "vllm":
                continue
            both = spec.get("securityContext", {}) | c["securityContext"]
            assert both["runAsNonRoot"] is True
            assert both["runAsUser"] == 65532
            assert both["seccompProfile"] == {"type": "RuntimeDefault"}
            assert c["securityContext"]["readOnlyRootFilesystem"] is True
            assert c["securityContext"]["allowPrivilegeEscalation"] is False
            assert c["securityContext"]["capabilities"] == {"drop": ["ALL"]}
            assert {"cpu", "memory"} <= set(c["resources"]["requests"])
            assert "memory" in c["resources"]["limits"]
    for role in (o for o in built[kind] if o["kind"] in ("Role", "ClusterRole")):
        assert role["kind"] == "Role"
        assert role["rules"] == [
            {"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list", "watch"]}
        ]


@pytest.mark.parametrize("kind", KINDS)
def test_objects_find_each_other(built: dict[str, list[Object]], kind: str) -> None:
    found = built[kind]
    labels = {w["metadata"]["name"]: p["metadata"]["labels"] for w, p in pods(found)}
    for workload, pod in pods(found):
        wanted = workload["spec"]["selector"]["matchLabels"]
        assert wanted.items() <= pod["metadata"]["labels"].items()
    for o in found:
        spec, name = o.get("spec", {}), o["metadata"]["name"]
        if o["kind"] == "Service":
            (workload,) = [w for w, p in pods(found) if _matches(spec["selector"], p)]
            (main,) = workload["spec"]["template"]["spec"]["containers"]
            named = {p["name"]: p["containerPort"] for p in main["ports"]}
            assert all(named[p["targetPort"]] == p["port"] for p in spec["ports"])
        elif o["kind"] in ("PodDisruptionBudget", "NetworkPolicy"):
            selector = spec.get("podSelector") or spec.get("selector")
            assert any(_matches(selector["matchLabels"], p) for _, p in pods(found)), name
        elif o["kind"] == "HorizontalPodAutoscaler":
            assert spec["scaleTargetRef"]["name"] in labels
        elif o["kind"] == "RoleBinding":
            accounts = {a["metadata"]["name"] for a in found if a["kind"] == "ServiceAccount"}
            assert {s["name"] for s in o["subjects"]} <= accounts
        elif o["kind"] == "EnvoyExtensionPolicy":
            (ref,) = spec["extProc"][0]["backendRefs"]
            assert _serves(found, ref["name"], ref["port"], "ext-proc")
        elif o["kind"] == "InferencePool":
            ref = spec["endpointPickerRef"]
            assert _serves(found, ref["name"], ref["port"]["number"], "ext-proc")


# What docs/deploy.md has users make.
MADE_BY_HAND = {"kvindexd-redis", "kvindexd-tls", "kvindexd-tokens", "kvindexd-valkey"}


def test_what_pods_refer_to_is_made(built: dict[str, list[Object]]) -> None:
    """ConfigMaps and Secrets by name; the engines' are those of the overlay that they join."""
    documented = (DEPLOY.parent / "docs" / "deploy.md").read_text()
    documented += (CHART / "values.yaml").read_text()
    assert all(name in documented for name in MADE_BY_HAND)
    for kind in KINDS:
        found = built[kind] + (built["trial"] if kind == "engine" else [])
        there = {(o["kind"], o["metadata"]["name"]) for o in found}
        if kind != "trial":
            there |= {("Secret", name) for name in MADE_BY_HAND}
        for _, pod in pods(built[kind]):
            for volume in pod["spec"].get("volumes", ()):
                if secret := volume.get("secret"):
                    assert ("Secret", secret["secretName"]) in there
        for _, _, container in ours(built[kind]):
            for source in container["envFrom"]:
                assert ("ConfigMap", source["configMapRef"]["name"]) in there


def _matches(selector: dict[str, str], pod: Object) -> bool:
    return selector.items() <= pod["metadata"]["labels"].items()


def _serves(found: list[Object], name: str, port: int, as_: str) -> bool:
    (service,) = [o for o in found if o["kind"] == "Service" and o["metadata"]["name"] == name]
    return {"name": as_, "port": port}.items() <= next(
        p.items() for p in service["spec"]["ports"] if p["port"] == port
    )


def test_network_policies_allow_what_is_needed(built: dict[str, list[Object]]) -> None:
    """Each port that a container serves has somebody who may reach it, and each address that a
    worker has may be reached from where it is followed."""
    for kind in ("trial", "production", "chart", "chart-trial"):
        policies = {
            o["metadata"]["name"]: o["spec"] for o in built[kind] if o["kind"] == "NetworkPolicy"
        }
        scorer, ingester = policies["kvindexd-scorer"], policies["kvindexd-ingester"]
        assert _ports(scorer["ingress"]) == {50051, 9002, 9400}
        assert _ports(scorer["egress"]) == {53, 6379, 8000}
        assert _ports(ingester["ingress"]) == {9400}
        assert _ports(ingester["egress"]) == {53, 443, 6443, 6379, 5557, 5558}
        (container,) = [c for w, _, c in ours(built[kind]) if c["args"] == ["sidecar"]]
        worker = settings(built[kind], container).discovery.kubernetes[0].worker
        followed = {int(worker[k].rpartition(":")[2]) for k in worker if k.endswith("endpoint")}
        assert followed == {5557, 5558} <= _ports(ingester["egress"])
    (engine,) = [o["spec"] for o in built["engine"] if o["kind"] == "NetworkPolicy"]
    assert _ports(engine["ingress"]) == {8000, 5557, 5558, 9400}


def _ports(rules: list[Object]) -> set[int]:
    return {p["port"] for rule in rules for p in rule["ports"]}


def test_the_sidecar_is_native_and_knows_its_engine(built: dict[str, list[Object]]) -> None:
    ((_, pod, container),) = ours(built["engine"])
    assert container["restartPolicy"] == "Always"
    assert container in pod["spec"]["initContainers"]
    (worker,) = settings(built["engine"], container).workers
    assert (worker.worker_id, worker.instance, worker.model) == ("pod-0", "u-0", "m")
    assert worker.address == "10.1.1.1:8000"
    (vllm,) = pod["spec"]["containers"]
    served = {p["containerPort"] for p in vllm["ports"]}
    (events,) = [a for a in vllm["args"] if a.startswith("--kv-events-config=")]
    published = json.loads(events.partition("=")[2])
    for key, endpoint in (
        ("endpoint", worker.kv_events_endpoint),
        ("replay_endpoint", worker.replay_endpoint),
    ):
        assert published[key].replace("*", "127.0.0.1") == endpoint
        assert int(endpoint.rpartition(":")[2]) in served
    assert "model" in pod["metadata"]["labels"]
    # The engine's own end, and then kvindexd's, fit into what the kubelet waits.
    sleep = vllm["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert pod["spec"]["terminationGracePeriodSeconds"] > sleep + 20


def test_the_chart_makes_what_the_manifests_say(built: dict[str, list[Object]]) -> None:
    """Containers, policies and CRD objects differ in names, labels and the chart's own options."""
    plain = {c["args"][0]: c for _, _, c in ours(built["production"])}
    for _, _, container in ours(built["chart"]):
        other = plain[container["args"][0]]
        for key in (
            "args",
            "ports",
            "resources",
            "securityContext",
            "startupProbe",
            "readinessProbe",
            "livenessProbe",
            "lifecycle",
        ):
            assert container.get(key) == other.get(key), key
        by_name = [{m["name"]: m for m in c["volumeMounts"]} for c in (container, other)]
        assert by_name[0] == by_name[1]
        mine = settings(built["chart"], container)
        assert mine.limits.max_batch == 5
        assert mine.log.repeat_seconds == 2.5
        for section in ("server", "tls", "auth", "registration", "redis", "discovery", "ext_proc"):
            assert getattr(mine, section) == getattr(
                settings(built["production"], other), section
            ), section
    specs = {
        (o["kind"], o["metadata"]["name"].replace("kvindexd-pool", "inference-pool")): o["spec"]
        for o in built["chart"]
        if o["apiVersion"].partition("/")[0] in CRDS
    }
    for o in built["production"]:
        if o["apiVersion"].partition("/")[0] in CRDS - {"monitoring.coreos.com"}:
            assert specs[o["kind"], o["metadata"]["name"]] == o["spec"]
    services = [
        next(o["spec"]["ports"] for o in built[k] if o["kind"] == "Service")
        for k in ("production", "chart")
    ]
    assert services[0] == services[1]
    valkey = [
        next(p["spec"]["containers"][0] for w, p in pods(built[k]) if w["kind"] == "StatefulSet")
        for k in ("trial", "chart-trial")
    ]
    assert valkey[0]["args"] == valkey[1]["args"]
    assert valkey[0]["readinessProbe"] == valkey[1]["readinessProbe"]


def test_the_sidecar_of_the_chart_is_that_of_the_manifests(
    built: dict[str, list[Object]], tmp_path: Path
) -> None:
    """For charts of engines that depend on this one."""
    helm_ = need("helm")
    parent = tmp_path / "engine"
    shutil.copytree(CHART, parent / "charts" / "kvindexd")
    (parent / "templates").mkdir()
    (parent / "Chart.yaml").write_text("apiVersion: v2\nname: engine\nversion: 0.1.0\n")
    (parent / "values.yaml").write_text("kvindexd: {redis: {url: 'redis://h:6379'}}\n")
    (parent / "templates" / "pod.yaml").write_text(
        "{{- $sub := .Subcharts.kvindexd }}\n"
        'kind: Sidecar\nspec: {{- include "kvindexd.sidecar" $sub | nindent 2 }}\n'
        'volumes: {{- include "kvindexd.sidecarVolumes" $sub | nindent 2 }}\n'
    )
    done = run(helm_, "template", "kvindexd", parent, "--show-only=templates/pod.yaml")
    assert done.returncode == 0, done.stderr
    (made,) = objects(done.stdout)
    ((_, pod, container),) = ours(built["engine"])
    (sidecar,) = made["spec"]
    for key in container.keys() - {"image", "env"}:
        assert sidecar[key] == container[key], key
    assert container_environment([sidecar], FIELDS) == container_environment([container], FIELDS)
    assert all(v in pod["spec"]["volumes"] for v in made["volumes"])
