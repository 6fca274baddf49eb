"""Which pods are workers, and in what state; pure. Time is an argument, in seconds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec

from kvindexd.discovery.template import Facts, TemplateError, host_text, registrations
from kvindexd.discovery.wanted import Wanted
from kvindexd.registration import Registration


class Meta(msgspec.Struct, rename="camel"):
    """What is read of an object's metadata."""

    name: str = ""
    namespace: str = ""
    uid: str = ""
    resource_version: str = ""
    creation_timestamp: str = ""
    deletion_timestamp: str | None = None
    labels: dict[str, str] | None = None
    annotations: dict[str, str] | None = None


class Condition(msgspec.Struct):
    """One condition of a pod."""

    type: str
    status: str = ""


class PodSpec(msgspec.Struct, rename="camel"):
    """What is read of a pod's spec."""

    node_name: str = ""


class PodStatus(msgspec.Struct):
    """What is read of a pod's status."""

    phase: str = ""
    ip: str = msgspec.field(default="", name="podIP")
    host_ip: str = msgspec.field(default="", name="hostIP")
    conditions: list[Condition] | None = None


class Pod(msgspec.Struct):
    """What is read of a pod."""

    metadata: Meta = msgspec.field(default_factory=Meta)
    spec: PodSpec = msgspec.field(default_factory=PodSpec)
    status: PodStatus = msgspec.field(default_factory=PodStatus)

    @property
    def runs(self) -> bool:
        """Whether it has an address of its own now: an ended pod's may be another's already."""
        return self.status.phase == "Running" and bool(self.status.ip)

    @property
    def deleting(self) -> bool:
        """Whether it has been told to end."""
        return self.metadata.deletion_timestamp is not None

    @property
    def ready(self) -> bool:
        """Whether it may get requests."""
        conditions = self.status.conditions or ()
        return not self.deleting and any(
            c.type == "Ready" and c.status == "True" for c in conditions
        )


class Found(NamedTuple):
    """What the pods come to. `unusable`: pod -> why. `again_at`: when time alone changes it."""

    wanted: list[Wanted]
    unusable: dict[str, str]
    again_at: float | None


@dataclass
class _Seen:
    """`made`: what the template makes of the pod, once per change of it, or why it makes none."""

    pod: Pod
    admitted: bool = False
    unready_since: float | None = None
    made: list[Registration] | str | None = None


class Pods:
    """The pods that a selector matches, by name: another uid is another pod in its place.

    A pod becomes a worker when it is ready first; it stays one while it is unready, drained after
    `grace` seconds, until it ends.
    """

    def __init__(self, template: Mapping[str, Any], prefix: str, grace: float) -> None:
        """`prefix`: of the annotations and labels that set a worker's fields."""
        self._template = template
        self._prefix = prefix
        self._grace = grace
        self._seen: dict[tuple[str, str], _Seen] = {}

    def replace(self, pods_now: Iterable[Pod], now: float) -> None:
        """These are all there are."""
        pods = {_name(pod): pod for pod in pods_now}
        for name in [name for name in self._seen if name not in pods]:
            del self._seen[name]
        for pod in pods.values():
            self.put(pod, now)

    def put(self, pod: Pod, now: float) -> None:
        """A pod is new or has changed."""
        seen = self._seen.get(_name(pod))
        if seen is None or seen.pod.metadata.uid != pod.metadata.uid:
            seen = self._seen[_name(pod)] = _Seen(pod)
        if _facts(seen.pod, self._prefix) != _facts(pod, self._prefix):
            seen.made = None
        seen.pod = pod
        if pod.ready and pod.runs:
            seen.admitted, seen.unready_since = True, None
        elif seen.unready_since is None:
            seen.unready_since = now

    def remove(self, pod: Pod) -> None:
        """A pod is gone."""
        seen = self._seen.get(_name(pod))
        if seen is not None and seen.pod.metadata.uid == pod.metadata.uid:
            del self._seen[_name(pod)]

    def found(self, now: float) -> Found:
        """The workers as of now. Of two pods that claim one worker, the one that is not ending and
        is ready comes first, then the older one."""
        result = Found([], {}, None)
        again: list[float] = []
        for seen in sorted(self._seen.values(), key=_precedence):
            if not seen.pod.runs:
                continue
            since = seen.unready_since
            late = since is not None and now - since >= self._grace
            if since is not None and not late and not seen.pod.deleting:
                again.append(since + self._grace)
            made = self._made(seen)
            if isinstance(made, str):
                meta = seen.pod.metadata
                result.unusable[f"{meta.namespace}/{meta.name}"] = made
                continue
            draining = late or seen.pod.deleting
            result.wanted.extend(Wanted(r, draining, not seen.admitted) for r in made)
        return result._replace(again_at=min(again, default=None))

    def _made(self, seen: _Seen) -> list[Registration] | str:
        if seen.made is None:
            try:
                seen.made = registrations(self._template, _facts(seen.pod, self._prefix))
            except TemplateError as e:
                seen.made = str(e)
        return seen.made


def _name(pod: Pod) -> tuple[str, str]:
    return pod.metadata.namespace, pod.metadata.name


def _precedence(seen: _Seen) -> tuple[bool, bool, str, str]:
    meta = seen.pod.metadata
    return seen.pod.deleting, not seen.pod.ready, meta.creation_timestamp, meta.uid


def _facts(pod: Pod, prefix: str) -> Facts:
    meta, status = pod.metadata, pod.status
    labels, annotations = meta.labels or {}, meta.annotations or {}
    names = {
        "pod_ip": host_text(status.ip),
        "host_ip": host_text(status.host_ip),
        "pod_name": meta.name,
        "pod_namespace": meta.namespace,
        "pod_uid": meta.uid,
        "node_name": pod.spec.node_name,
    }
    own = {
        key.removeprefix(prefix): value
        for source in (labels, annotations)
        for key, value in source.items()
        if prefix and key.startswith(prefix)
    }
    return Facts(names, {"label": labels, "annotation": annotations}, own, meta.uid)
