"""An Envoy configuration as the checks see it: pure, from parsed YAML or JSON to its parts."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, cast

PICK = "x-gateway-destination-endpoint"
"""The header and metadata key of the pick."""
_CAMEL = re.compile(r"(?<=[a-z0-9])([A-Z])")
_DURATION = re.compile(r"(\d+(?:\.\d+)?)s")

Node = Mapping[str, Any]


class ExtProc(NamedTuple):
    """One ext_proc filter and the connection manager and listener that it is in."""

    filter: Node
    manager: Node
    listener: Node

    @property
    def mode(self) -> Node:
        """Its processing_mode."""
        found: Node = child(self.filter, "processing_mode")
        return found

    @property
    def cluster(self) -> str:
        """Name of the cluster that it asks, "" where it is not asked through one."""
        service = child(self.filter, "grpc_service")
        return str(child(service, "envoy_grpc").get("cluster_name", ""))

    def removes_early(self, header: str) -> bool:
        """Whether clients' own copies of a header are dropped before anything reads them."""
        extensions = child(self.manager, "early_header_mutation_extensions")
        return any(str(n.get("remove", "")).lower() == header for n in walk(extensions))


def snake(value: Any) -> Any:
    """The same with all keys in snake_case: Envoy takes both spellings."""
    if isinstance(value, Mapping):
        return {_snake(str(k)): snake(v) for k, v in value.items()}
    return [snake(v) for v in value] if isinstance(value, list) else value


def _snake(key: str) -> str:
    if key.startswith("@") or "." in key:
        return key
    return _CAMEL.sub(lambda m: "_" + m[1].lower(), key)


def child(node: Any, name: str) -> Any:
    """A part of a node, an empty one where there is none."""
    found = node.get(name) if isinstance(node, Mapping) else None
    return {} if found is None else found


def walk(node: Any) -> Iterator[Node]:
    """Every mapping inside a node, itself included."""
    if isinstance(node, Mapping):
        yield node
        for value in node.values():
            yield from walk(value)
    elif isinstance(node, list):
        for value in node:
            yield from walk(value)


def typed(node: Any, kind: str) -> Iterator[Node]:
    """Every message of a type, by the end of its type URL."""
    for found in walk(node):
        if str(found.get("@type", "")).endswith(kind):
            yield found


def whole(root: Node) -> Node:
    """A configuration in its static form: what /config_dump tells in pieces is put together."""
    if not isinstance(root.get("configs"), list):
        return root
    routes = {str(r.get("name", "")): r for r in typed(root, "route.v3.RouteConfiguration")}
    endpoints = {
        str(e.get("cluster_name", "")): e for e in typed(root, "endpoint.v3.ClusterLoadAssignment")
    }
    bootstrap: Node = next((child(c, "bootstrap") for c in root["configs"] if "bootstrap" in c), {})
    listeners = list(typed(root, "listener.v3.Listener"))
    for manager in typed(listeners, "HttpConnectionManager"):
        name = child(manager, "rds").get("route_config_name")
        if name in routes:
            cast(dict[str, Any], manager)["route_config"] = routes[name]
    clusters_ = [
        {"load_assignment": endpoints.get(str(c.get("name", "")), {}), **c}
        for c in typed(root, "cluster.v3.Cluster")
    ]
    return {
        "admin": child(bootstrap, "admin"),
        "static_resources": {"listeners": listeners, "clusters": clusters_},
    }


def is_dynamic(root: Node) -> bool:
    """Whether the listeners come from a management server, so that the file says little."""
    return bool(child(child(root, "dynamic_resources"), "lds_config"))


def ext_procs(root: Node) -> list[ExtProc]:
    """All ext_proc filters, in order."""
    return [
        ExtProc(one, manager, listener)
        for listener in _list(child(child(root, "static_resources"), "listeners"))
        for manager in typed(listener, "HttpConnectionManager")
        for one in typed(child(manager, "http_filters"), "ext_proc.v3.ExternalProcessor")
    ]


def clusters(root: Node) -> dict[str, Node]:
    """Clusters by name."""
    found = _list(child(child(root, "static_resources"), "clusters"))
    return {str(c.get("name", "")): c for c in found}


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def worker_clusters(root: Node) -> dict[str, Node]:
    """Clusters that an ext_proc route can lead to: all but those that ext_proc itself asks."""
    asked = {e.cluster for e in ext_procs(root)}
    routed = {
        str(name)
        for e in ext_procs(root)
        for node in walk(child(e.manager, "route_config"))
        for name in (node.get("cluster"), node.get("name") if "weight" in node else None)
        if isinstance(name, str)
    }
    return {n: c for n, c in clusters(root).items() if n in routed and n not in asked}


def endpoints(cluster: Node) -> list[str]:
    """host:port of a cluster's endpoints."""
    found = []
    for node in walk(child(cluster, "load_assignment")):
        address = child(node, "socket_address")
        if address:
            host, port = str(address.get("address", "")), address.get("port_value", "")
            found.append(f"[{host}]:{port}" if ":" in host else f"{host}:{port}")
    return found


def overrides(cluster: Node) -> list[Node]:
    """Its override_host policies."""
    return list(typed(child(cluster, "load_balancing_policy"), "override_host.v3.OverrideHost"))


def by_destination_header(cluster: Node) -> bool:
    """Whether a header of the request may name any address at all."""
    lb = child(cluster, "original_dst_lb_config")
    return cluster.get("type") == "ORIGINAL_DST" and bool(lb.get("use_http_header"))


def routed_by_header(e: ExtProc) -> bool:
    """Whether some route is matched by the pick's header."""
    config = child(e.manager, "route_config")
    return any(str(n.get("name", "")).lower() == PICK for n in walk(config))


def seconds(value: Any, default: float) -> float:
    """A duration such as 0.25s."""
    found = _DURATION.fullmatch(str(value))
    return float(found[1]) if found else default


def is_open(address: Any) -> bool:
    """Whether a socket address can be reached from other hosts."""
    host = str(child(address, "socket_address").get("address", "127.0.0.1"))
    try:
        return not ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host != "localhost"
