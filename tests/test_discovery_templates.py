"""Templates of workers and settings of discovery: what is made of them, and what is refused."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from kvindexd.config import ConfigError, load
from kvindexd.config.discovering import (
    DiscoveryConfig,
    DnsSource,
    KubernetesSource,
    source_names,
)
from kvindexd.discovery.forgetting import registers_itself
from kvindexd.discovery.template import Facts, TemplateError, check_template, registrations
from kvindexd.registration import Registration

TEMPLATE = {
    "worker_id": "{pod_name}",
    "model": "m",
    "address": "{pod_ip}:8000",
    "kv_events_endpoint": "tcp://{pod_ip}:5557",
}


def _facts(**names: str) -> Facts:
    return Facts({"pod_name": "p", "pod_ip": "10.0.0.1"} | names, {"label": {}}, {}, "uid-1")


def test_a_template_is_filled_in() -> None:
    facts = Facts(
        {"pod_name": "p", "pod_ip": "[fd00::1]"},
        {"label": {"app.kubernetes.io/name": "llama", "tp": "4"}, "annotation": {}},
        {},
        "uid-1",
    )
    more = {
        "model": "{label[app.kubernetes.io/name]}",
        "tp_size": "{label[tp]}",
        "role": "{label[role]|PREFILL}",
        "labels": {"zone": "{annotation[zone]|none}"},
        "aliases": ["{pod_ip}"],
    }
    (made,) = registrations(TEMPLATE | more, facts)
    assert made == Registration(
        worker_id="p",
        model="llama",
        address="[fd00::1]:8000",
        kv_events_endpoint="tcp://[fd00::1]:5557",
        tp_size=4,
        role="PREFILL",
        labels={"zone": "none"},
        aliases=("[fd00::1]",),
        instance="uid-1",
    )


def test_what_a_pod_says_goes_before_the_template() -> None:
    facts = _facts()._replace(overrides={"model": "own-{pod_name}", "dp_size": "2"})
    first, second = registrations(TEMPLATE, facts)
    assert (first.model, first.dp_rank, second.dp_rank) == ("own-p", 0, 1)
    assert second.dp_size == 2


def test_ranks_of_one_pod_have_ports_of_their_own() -> None:
    more: dict[str, Any] = {"dp_size": 4, "replay_endpoint": "tcp://{pod_ip}:6000"}
    ranks = registrations(TEMPLATE | more, _facts())
    ports = [int(r.kv_events_endpoint.rpartition(":")[2]) for r in ranks]
    assert ports == [5557, 5558, 5559, 5560]
    assert [r.replay_endpoint[-4:] for r in ranks] == ["6000", "6001", "6002", "6003"]
    # A node that has the upper half of the ranks: its ports are those of its ranks.
    upper = registrations(TEMPLATE | more | {"local_ranks": 2, "first_rank": 2}, _facts())
    assert [(r.dp_rank, r.kv_events_endpoint[-4:]) for r in upper] == [(2, "5559"), (3, "5560")]
    wide = registrations(TEMPLATE | more | {"port_step": 10}, _facts())
    assert [r.kv_events_endpoint[-4:] for r in wide] == ["5557", "5567", "5577", "5587"]
    # Where the template says the rank itself, or its port, nothing is added.
    (one,) = registrations(TEMPLATE | more | {"dp_rank": "3"}, _facts())
    assert (one.dp_rank, one.kv_events_endpoint[-4:]) == (3, "5557")
    own = registrations(TEMPLATE | more | {"kv_events_endpoint": "ipc:///r{dp_rank}"}, _facts())
    assert [r.kv_events_endpoint for r in own] == [f"ipc:///r{n}" for n in range(4)]


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"modle": "m"}, r"worker\.modle: no such field"),
        ({"model": "{pod_nam}"}, r"worker\.model: \{pod_nam\} is unknown; there are pod_ip"),
        ({"model": "{pod_ip.__class__}"}, "brace that belongs to no placeholder"),
        ({"labels": {"a": "{x}"}}, r"worker\.labels: \{x\} is unknown"),
        ({"source": "kubernetes:x"}, r"worker\.source: no such field"),
    ],
)
def test_templates_are_checked_when_they_are_read(more: dict[str, Any], said: str) -> None:
    with pytest.raises(TemplateError, match=said):
        check_template(TEMPLATE | more, ("pod_ip", "pod_name"), True)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"model": "{label[x]}"}, r"model: \{label\[x\]\} is not set, and the template has no"),
        ({"model": "{label[x]|}"}, "model: empty"),
        ({"dp_size": "many"}, "dp_size is 'many'; expected a whole number"),
        ({"role": "COOK"}, "role"),
        ({"kv_events_endpoint": "tcp://{pod_ip}"}, "is no ZMQ endpoint"),
        ({"kv_events_endpoint": "tcp://{pod_ip}:65535", "dp_size": 2}, "above 65535"),
        ({"local_ranks": 5000}, "expected 1 to 4096"),
    ],
)
def test_one_pod_that_a_template_does_not_fit(more: dict[str, Any], said: str) -> None:
    with pytest.raises(TemplateError, match=said):
        registrations(TEMPLATE | more, _facts())


def test_settings_of_discovery_are_checked_together() -> None:
    def said(**discovery: Any) -> str:
        env = {f"KVINDEXD_DISCOVERY__{k.upper()}": json.dumps(v) for k, v in discovery.items()}
        with pytest.raises(ConfigError) as e:
            load(env=env)
        return str(e.value)

    pods = {"selector": "app=vllm", "worker": TEMPLATE}
    assert "two sources are kubernetes:./app=vllm" in said(kubernetes=[pods, pods])
    assert "missing required field `selector` - at `$[0]`" in said(kubernetes=[{}])
    bad = pods | {"worker": {"modle": "m"}}
    assert "discovery.kubernetes[0].worker.modle: no such field" in said(kubernetes=[bad])
    srv = {"host": "h", "worker": TEMPLATE}
    assert "discovery.dns[0].worker.worker_id: {pod_name} is unknown" in said(dns=[srv])
    assert "must end in .toml, .json" in said(files=["workers.conf"])
    assert "must be longer than ingest.lease_ttl" in said(forget_after=5)


def test_names_of_sources() -> None:
    pods = [
        KubernetesSource(selector="app=vllm", namespace="ns"),
        KubernetesSource(selector="app=vllm", field_selector="spec.nodeName=n1"),
        KubernetesSource(selector="app=vllm", name="mine"),
    ]
    discovery = DiscoveryConfig(files=["/w.toml"], kubernetes=pods, dns=[DnsSource(host="h")])
    names = ["kubernetes:ns/app=vllm", "kubernetes:./app=vllm/spec.nodeName=n1", "kubernetes:mine"]
    assert source_names(discovery) == ["file:/w.toml", *names, "dns:h"]
    # A file of a sidecar is its host's; pods and names are the same for all who look.
    assert source_names(discovery, "host-1") == ["file:/w.toml@host-1", *names, "dns:h"]
    scoped = msgspec.structs.replace(discovery, scope="blue")
    assert source_names(scoped, "host-1")[0] == "file:/w.toml@blue"
    assert source_names(scoped)[-1] == "dns:h@blue"
    assert registers_itself("config")
    assert registers_itself("file:/w.toml@host-1")
    assert not registers_itself("file:/w.toml")
    assert not registers_itself("")
