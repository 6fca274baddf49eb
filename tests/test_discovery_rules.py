"""What discovery decides, without any I/O: templates, pods, addresses, plans and leases."""

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
from kvindexd.discovery.addresses import Address, Addresses
from kvindexd.discovery.forgetting import registers_itself, unowned
from kvindexd.discovery.pods import Condition, Meta, Pod, Pods, PodSpec, PodStatus
from kvindexd.discovery.source import Backoff
from kvindexd.discovery.template import Facts, TemplateError, check_template, registrations
from kvindexd.discovery.wanted import (
    Deregister,
    Drain,
    Known,
    Owner,
    Register,
    Wanted,
    changed,
    leftovers,
    plan,
)
from kvindexd.model import WorkerKey
from kvindexd.registration import Registration

TEMPLATE = {
    "worker_id": "{pod_name}",
    "model": "m",
    "address": "{pod_ip}:8000",
    "kv_events_endpoint": "tcp://{pod_ip}:5557",
}


def _facts(**names: str) -> Facts:
    return Facts({"pod_name": "p", "pod_ip": "10.0.0.1"} | names, {"label": {}}, {}, "uid-1")


# -- templates --------------------------------------------------------------------------------


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


# -- plans ------------------------------------------------------------------------------------

ME = Owner("file:/w")
KEY = WorkerKey("", "w", 0)


def _reg(source: str = ME.source, **fields: Any) -> Registration:
    base = {"worker_id": "w", "model": "m", "kv_events_endpoint": "tcp://h:1", "source": source}
    return Registration(**(base | fields))


def _known(registration: Registration, **fields: Any) -> dict[WorkerKey, Known]:
    return {KEY: Known(registration.encode(), registration, **fields)}


def _view(registration: Registration, **fields: Any) -> dict[WorkerKey, Wanted]:
    return {KEY: Wanted(registration, **fields)}


def _actions(before: Any, after: Any, known: Any, owner: Owner = ME) -> list[Any]:
    return plan(owner, before, after, known, [KEY]).actions


def test_add_update_replace_remove() -> None:
    w = _reg()
    assert _actions({}, _view(w), {}) == [Register(w, False, b"")]
    assert _actions({}, _view(w), _known(w)) == []
    topic = _reg(topic="kv")
    assert _actions(_view(w), _view(topic), _known(w)) == [Register(topic, False, w.encode())]
    moved = _reg(kv_events_endpoint="tcp://h:2")
    assert _actions(_view(w), _view(moved), _known(w)) == [Register(moved, True, w.encode())]
    assert _actions(_view(w), {}, _known(w)) == [Deregister(KEY, w.encode())]
    assert _actions(_view(w), {}, {}) == []


def test_the_same_address_of_another_process_is_another_incarnation() -> None:
    old, new = _reg(instance="uid-1"), _reg(instance="uid-2")
    assert _actions(_view(old), _view(new), _known(old)) == [Register(new, True, old.encode())]


def test_a_source_leaves_alone_what_is_not_its_own() -> None:
    for other, name in (("", "RegisterWorker"), ("dns:h", "dns:h"), ("config", "config")):
        theirs = _reg(other)
        found = plan(ME, {}, _view(_reg()), _known(theirs), [KEY])
        assert (found.actions, found.conflicts) == ([], {KEY: name})
        assert _actions(_view(_reg()), {}, _known(theirs)) == []
    unreadable = {KEY: Known(b"?", None)}
    assert plan(ME, {}, _view(_reg()), unreadable, [KEY]).conflicts == {KEY: "unreadable"}
    assert _actions(_view(_reg()), {}, unreadable) == []


def test_a_configuration_takes_over_what_a_call_registered() -> None:
    config = Owner("config", frozenset({""}), sweeps=False)
    mine, called = _reg("config"), _reg("")
    assert _actions({}, _view(mine), _known(called), config) == [
        Register(mine, False, called.encode())
    ]
    assert plan(config, {}, _view(mine), _known(_reg("dns:h")), [KEY]).conflicts


def test_a_process_that_is_behind_does_not_remove_the_successor() -> None:
    old, new = _reg(instance="uid-1"), _reg(instance="uid-2")
    assert _actions(_view(old), {}, _known(new)) == []
    # The same pod under another template is the same pod.
    assert _actions(_view(old), {}, _known(_reg(instance="uid-1", topic="x"))) != []
    # Without a name for the process, only what was registered by the very same words.
    assert _actions(_view(_reg()), {}, _known(_reg(topic="x"))) == []


def test_only_what_a_source_changed_is_looked_at() -> None:
    w, other = Wanted(_reg()), Wanted(_reg(topic="kv"))
    a, b, c = (WorkerKey("", x, 0) for x in "abc")
    assert changed({a: w, b: w}, {a: w, b: other, c: w}) == {b, c}
    assert changed({a: w}, {}) == {a}


def test_what_an_earlier_process_left_behind_is_swept() -> None:
    assert leftovers(ME, {}, _known(_reg())) == {KEY}
    assert leftovers(ME, _view(_reg()), _known(_reg())) == set()
    assert leftovers(ME, {}, _known(_reg("dns:h"))) == set()
    assert leftovers(ME._replace(sweeps=False), {}, _known(_reg())) == set()
    assert _actions({}, {}, _known(_reg())) == [Deregister(KEY, _reg().encode())]


def test_a_draining_mark_is_lifted_by_who_has_set_it() -> None:
    w = _reg()
    known = _known(w)
    assert _actions(_view(w), _view(w, draining=True), known) == [Drain(KEY, True)]
    ours = _known(w, draining=True, drained_by=ME.source)
    assert _actions(_view(w, draining=True), _view(w), ours) == [Drain(KEY, False)]
    operators = _known(w, draining=True)
    assert _actions(_view(w, draining=True), _view(w), operators) == []
    assert _actions({}, _view(w, draining=True), operators) == []
    assert _actions({}, _view(w, draining=True), {}) == [Register(w, False, b""), Drain(KEY, True)]


def test_what_is_starting_is_not_registered_and_voids_what_was() -> None:
    w = _reg(instance="uid-1")
    assert _actions({}, _view(w, starting=True), {}) == []
    assert _actions({}, _view(w, starting=True), _known(w)) == []
    old = _reg(instance="uid-0")
    assert _actions({}, _view(w, starting=True), _known(old)) == [Deregister(KEY, old.encode())]


# -- pods -------------------------------------------------------------------------------------


def pod(name: str, ip: str = "10.0.0.1", ready: bool = True, **more: Any) -> Pod:
    uid = more.pop("uid", f"uid-{name}")
    phase = more.pop("phase", "Running")
    meta = Meta(name=name, namespace="ns", uid=uid, **more)
    ready_now = [Condition("Ready", "True" if ready else "False")]
    return Pod(meta, PodSpec("node-1"), PodStatus(phase, ip, "192.168.0.1", ready_now))


def _states(pods: Pods, now: float) -> dict[str, str]:
    return {
        w.registration.worker_id: "starting" if w.starting else "draining" if w.draining else "live"
        for w in pods.found(now).wanted
    }


def test_a_pod_from_start_to_end() -> None:
    pods = Pods(TEMPLATE, "kvindexd/", grace=30)
    pods.put(pod("a", ready=False, phase="Pending", ip=""), 0)
    assert _states(pods, 0) == {}
    pods.put(pod("a", ready=False), 1)
    assert _states(pods, 1) == {"a": "starting"}
    pods.put(pod("a"), 2)
    assert _states(pods, 2) == {"a": "live"}
    assert pods.found(2).wanted[0].registration.instance == "uid-a"
    pods.put(pod("a", ready=False), 10)
    pods.put(pod("a", ready=False), 20)  # other changes do not begin the grace time anew
    assert _states(pods, 39.9) == {"a": "live"}
    assert pods.found(39.9).again_at == 40
    assert _states(pods, 40) == {"a": "draining"}
    assert pods.found(40).again_at is None
    pods.put(pod("a"), 50)
    assert _states(pods, 50) == {"a": "live"}
    pods.put(pod("a", deletion_timestamp="2026-01-01T00:00:00Z"), 60)
    assert _states(pods, 60) == {"a": "draining"}
    pods.put(pod("a", phase="Failed"), 61)
    assert _states(pods, 61) == {}
    pods.put(pod("a", uid="uid-next"), 62)
    pods.remove(pod("a"))  # late news of the one before
    assert _states(pods, 62) == {"a": "live"}
    pods.remove(pod("a", uid="uid-next"))
    assert _states(pods, 63) == {}


def test_a_list_replaces_what_was_known() -> None:
    pods = Pods(TEMPLATE, "kvindexd/", grace=30)
    pods.replace([pod("a"), pod("b", "10.0.0.2")], 0)
    pods.replace([pod("b", "10.0.0.2", ready=False), pod("c", "10.0.0.3")], 1)
    assert _states(pods, 2) == {"b": "live", "c": "live"}


def test_of_two_pods_with_one_name_the_living_one_counts() -> None:
    pods = Pods(TEMPLATE | {"worker_id": "{pod_ip}"}, "kvindexd/", grace=30)
    old = pod("a", creation_timestamp="2026-01-01T00:00:00Z")
    new = pod("b", creation_timestamp="2026-01-02T00:00:00Z")
    pods.replace([new, old], 0)
    assert [w.registration.instance for w in pods.found(0).wanted] == ["uid-a", "uid-b"]
    old.metadata.deletion_timestamp = "2026-01-03T00:00:00Z"
    assert [w.registration.instance for w in pods.found(0).wanted] == ["uid-b", "uid-a"]


def test_annotations_and_labels_set_fields_and_bad_ones_spoil_one_pod_alone() -> None:
    pods = Pods(TEMPLATE, "kvindexd/", grace=30)
    labels = {"kvindexd/model": "by-label", "kvindexd/role": "DECODE", "app": "vllm"}
    pods.put(pod("a", labels=labels, annotations={"kvindexd/model": "by-annotation"}), 0)
    pods.put(pod("b", "10.0.0.2", annotations={"kvindexd/colour": "red"}), 0)
    pods.put(pod("c", "10.0.0.3", annotations={"kvindexd/source": "config"}), 0)
    found = pods.found(0)
    (one,) = found.wanted
    assert (one.registration.model, one.registration.role) == ("by-annotation", "DECODE")
    assert set(found.unusable) == {"ns/b", "ns/c"}
    assert "colour: no such field" in found.unusable["ns/b"]


# -- addresses --------------------------------------------------------------------------------

BY_ADDRESS = {"worker_id": "{ip}", "model": "m", "kv_events_endpoint": "tcp://{ip}:5557"}


def test_an_address_that_is_missing_is_drained_then_gone() -> None:
    addresses = Addresses("h", BY_ADDRESS, grace=30)

    def states(now: float) -> dict[str, bool]:
        found = addresses.found(now)
        return {w.registration.worker_id: w.draining for w in found.wanted}

    a, b = Address("10.0.0.1"), Address("fd00::2")
    addresses.answer([a, b], 0)
    assert states(0) == {"10.0.0.1": False, "[fd00::2]": False}
    addresses.answer([a], 10)
    addresses.answer([a], 20)
    assert states(39) == {"10.0.0.1": False, "[fd00::2]": True}
    assert addresses.found(39).again_at == 40
    addresses.answer([a, b], 39)
    assert states(39) == {"10.0.0.1": False, "[fd00::2]": False}
    addresses.answer([b], 50)
    assert states(80) == {"[fd00::2]": False}
    addresses.answer([a, b], 81)
    assert states(81) == {"10.0.0.1": False, "[fd00::2]": False}


# -- leases -----------------------------------------------------------------------------------


def test_since_when_nobody_owns_a_worker() -> None:
    a, b, c = (WorkerKey("", x, 0) for x in "abc")
    released = float("-inf")
    first = unowned({}, {a: 5.0, b: -40.0, c: released}, 100, after=60)
    assert first.since == {b: 100, c: 100}  # lapsed while the store was away, perhaps
    assert first.due == []
    second = unowned(first.since, {a: -1.0, b: -60.0, c: released}, 150, after=60)
    assert (second.since, second.due) == ({a: 150, b: 100, c: 100}, [])
    assert unowned(second.since, {b: -70.0, c: released}, 160, after=60).due == [b, c]
    # An owner in between starts the time anew.
    assert unowned({}, {c: 3.0}, 130, after=60).since == {}
    assert unowned({}, {c: released}, 160, after=60).due == []


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


def test_pauses_grow_to_a_bound_and_are_not_alike() -> None:
    backoff = Backoff(1, 8)
    pauses = [backoff.next() for _ in range(8)]
    tops = [1, 2, 4, 8, 8, 8, 8, 8]
    assert all(top / 2 <= p <= top for p, top in zip(pauses, tops, strict=True))
    assert len(set(pauses)) == 8
    backoff.reset()
    assert backoff.next() <= 1
