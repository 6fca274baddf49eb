"""Settings of discovery: where workers are found."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from kvindexd.config.base import ConfigError, Section
from kvindexd.discovery.template import TemplateError, check_template

POD_NAMES: tuple[str, ...] = (
    "pod_ip",
    "host_ip",
    "pod_name",
    "pod_namespace",
    "pod_uid",
    "node_name",
)
ADDRESS_NAMES: tuple[str, ...] = ("ip", "host")
SERVICE_NAMES: tuple[str, ...] = ("ip", "host", "target", "port")
"""Placeholders that sources fill in: of pods, of A and AAAA records, of SRV records."""

_ACCOUNT = "/var/run/secrets/kubernetes.io/serviceaccount"

Template = Annotated[
    dict[str, Any],
    Meta(description="Fields of each found worker, with placeholders (docs/discovery.md)"),
]


class KubernetesSource(Section, frozen=True, kw_only=True):
    """Pods, by label selector."""

    selector: Annotated[str, Meta(min_length=1, description='Label selector: "app=vllm"')]
    name: Annotated[str, Meta(description='Name of the source; "" = namespace and selectors')] = ""
    namespace: Annotated[str, Meta(description='"" = that of our own pod, "*" = all')] = ""
    field_selector: Annotated[str, Meta(description='Such as "spec.nodeName=node-1"')] = ""
    server: Annotated[str, Meta(description='URL of the API server; "" = from inside a pod')] = ""
    token_file: Annotated[str, Meta(description='Bearer token, read anew; "" = none')] = (
        f"{_ACCOUNT}/token"
    )
    ca_file: Annotated[str, Meta(description="Certificates that the API server is checked by")] = (
        f"{_ACCOUNT}/ca.crt"
    )
    prefix: Annotated[
        str, Meta(description="Pod annotations and labels that start with it set a worker's fields")
    ] = "kvindexd/"
    unready_grace: Annotated[
        float, Meta(ge=0, description="Time that a pod may be unready before it is drained")
    ] = 30.0
    timeout: Annotated[
        float, Meta(gt=0, description="Limit of connecting, and of one page of the list")
    ] = 10.0
    idle_timeout: Annotated[
        float, Meta(gt=0, description="Silence of a watch after which it is begun anew")
    ] = 90.0
    worker: Template = msgspec.field(default_factory=dict)


class DnsSource(Section, frozen=True, kw_only=True):
    """Addresses of a DNS name, such as a headless service's."""

    host: Annotated[str, Meta(min_length=1, description="The name that is looked up")]
    name: Annotated[str, Meta(description='Name of the source; "" = the host')] = ""
    type: Annotated[
        Literal["A", "SRV"], Meta(description="A and AAAA records, or SRV and what they name")
    ] = "A"
    server: Annotated[
        str, Meta(description='host:port of the DNS server; "" = the system\'s resolver')
    ] = ""
    interval: Annotated[float, Meta(gt=0, description="Interval of look-ups")] = 5.0
    timeout: Annotated[float, Meta(gt=0, description="Limit of one look-up")] = 5.0
    grace: Annotated[
        float, Meta(ge=0, description="Time that an address may be missing before it is removed")
    ] = 30.0
    worker: Template = msgspec.field(default_factory=dict)


class DiscoveryConfig(Section, frozen=True, kw_only=True):
    """Finding workers."""

    files: Annotated[
        list[str],
        Meta(description="Files of workers: .toml, .json or .yaml; read as they change"),
    ] = msgspec.field(default_factory=list)
    file_interval: Annotated[float, Meta(gt=0, description="Interval of looking at the files")] = (
        2.0
    )
    kubernetes: Annotated[list[KubernetesSource], Meta(description="Pods")] = msgspec.field(
        default_factory=list
    )
    dns: Annotated[list[DnsSource], Meta(description="Names in DNS")] = msgspec.field(
        default_factory=list
    )
    forget_after: Annotated[
        float,
        Meta(
            ge=0,
            description="Deregister workers of [[workers]] and of sidecars' files that no ingester "
            "has owned for so long; 0 = never",
        ),
    ] = 0.0
    resync: Annotated[
        float, Meta(gt=0, description="Interval of registering again what somebody removed")
    ] = 60.0
    scope: Annotated[
        str,
        Meta(
            description="Part of the sources' names; processes with equal names share what they "
            'found. "" = nothing, except for files in a sidecar, where it is the host\'s name'
        ),
    ] = ""


def source_names(discovery: DiscoveryConfig, host: str = "") -> list[str]:
    """The sources' names, in the order files, pods, DNS; unique where `check_discovery` passes.

    `host`: scope of the files where the settings have none: those of another host are others.
    """
    scope = f"@{discovery.scope}" if discovery.scope else ""
    files = scope or (f"@{host}" if host else "")
    return [
        *(f"file:{path}{files}" for path in discovery.files),
        *(f"kubernetes:{k.name or _pods_name(k)}{scope}" for k in discovery.kubernetes),
        *(f"dns:{d.name or d.host}{scope}" for d in discovery.dns),
    ]


def _pods_name(pods: KubernetesSource) -> str:
    parts = (pods.namespace or ".", pods.selector, pods.field_selector)
    return "/".join(part for part in parts if part)


def check_discovery(discovery: DiscoveryConfig, lease_ttl: float) -> None:
    """Raise ConfigError for what no single value shows to be wrong."""
    names = source_names(discovery)
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"discovery: two sources are {name}; give each a name of its own")
    for path in discovery.files:
        if not path.endswith((".toml", ".json", ".yaml", ".yml")):
            raise ConfigError(f"discovery.files: {path!r} must end in .toml, .json, .yaml or .yml")
    sources: list[tuple[str, dict[str, Any], tuple[str, ...], bool]] = [
        (f"discovery.kubernetes[{i}]", k.worker, POD_NAMES, True)
        for i, k in enumerate(discovery.kubernetes)
    ]
    for i, d in enumerate(discovery.dns):
        places = ADDRESS_NAMES if d.type == "A" else SERVICE_NAMES
        sources.append((f"discovery.dns[{i}]", d.worker, places, False))
    for where, template, places, with_maps in sources:
        try:
            check_template(template, places, with_maps)
        except TemplateError as e:
            raise ConfigError(f"{where}.{e}") from None
    if 0 < discovery.forget_after <= lease_ttl:
        raise ConfigError(
            f"discovery.forget_after ({discovery.forget_after:g} s) must be longer than "
            f"ingest.lease_ttl ({lease_ttl:g} s): a lease lapses whenever an ingester restarts"
        )
