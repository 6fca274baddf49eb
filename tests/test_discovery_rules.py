"""What discovery decides, without any I/O: pods, addresses, plans and leases."""

from __future__ import annotations

from typing import Any

from kvindexd.discovery.addresses import Address, Addresses
from kvindexd.discovery.forgetting import unowned
from kvindexd.discovery.pods import Condition, Meta, Pod, Pods, PodSpec, PodStatus
from kvindexd.discovery.source import Backoff
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


def test_pauses_grow_to_a_bound_and_are_not_alike() -> None:
    backoff = Backoff(1, 8)
    pauses = [backoff.next() for _ in range(8)]
    tops = [1, 2, 4, 8, 8, 8, 8, 8]
    assert all(top / 2 <= p <= top for p, top in zip(pauses, tops, strict=True))
    assert len(set(pauses)) == 8
    backoff.reset()
    assert backoff.next() <= 1
