"""Probes by TCP and HTTP: dialling, engines' pages, kvindexd's own metrics page."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Mapping
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from kvindexd.doctor.facts import Dial, Engine, Missing, Samples
from kvindexd.ingest.engine_metrics import EngineMetricsError, get, read_page

_CACHE_CONFIG = "vllm:cache_config_info"


async def dial(target: str, within: float) -> Dial | Missing:
    """Resolve and connect to `host:port`, `[v6]:port` or a ZMQ endpoint, within seconds."""
    if target.startswith(("ipc://", "inproc://")):
        return Missing(f"{target} is not a TCP endpoint")
    text = target.removeprefix("tcp://")
    host, _, port = text.rpartition(":")
    host = host.strip("[]")
    if not host or not port.isdigit():
        return Dial(text, f"no host:port: {text!r}")
    try:
        async with asyncio.timeout(within):
            return await _dial(text, host, int(port))
    except TimeoutError:
        return Dial(text, "timeout")


async def _dial(text: str, host: str, port: int) -> Dial:
    loop = asyncio.get_running_loop()
    try:
        infos = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except socket.gaierror:
        return Dial(text, "unresolvable")
    resolved = tuple(sorted({_joined(str(i[4][0]), port) for i in infos}))
    try:
        _, writer = await asyncio.open_connection(host, port)
    except ConnectionRefusedError:
        return Dial(text, "refused", resolved)
    except OSError as e:
        return Dial(text, e.strerror or str(e), resolved)
    writer.close()
    return Dial(text, "", resolved)


def _joined(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


async def engine(address: str, within: float) -> Engine:
    """What an engine's /metrics and /v1/models say."""
    config, models = await asyncio.gather(
        _page(address, "/metrics", within), _page(address, "/v1/models", within)
    )
    listed: list[Mapping[str, Any]] | Missing = (
        models if isinstance(models, Missing) else _models(models)
    )
    return Engine(
        config=config if isinstance(config, Missing) else cache_config(config),
        models=listed if isinstance(listed, Missing) else [str(m.get("id")) for m in listed],
        adapters=()
        if isinstance(listed, Missing)
        else [str(m.get("id")) for m in listed if m.get("parent")],
    )


async def _page(address: str, path: str, within: float) -> str | Missing:
    try:
        return await read_page(address, path, within)
    except EngineMetricsError as e:
        return Missing(str(e))


def cache_config(page: str) -> Mapping[str, str] | Missing:
    """Labels of vLLM's cache_config_info on a metrics page."""
    lines = "\n".join(line for line in page.splitlines() if line.startswith(_CACHE_CONFIG))
    for (name, labels), _ in parse_samples(lines + "\n").items():
        if name == _CACHE_CONFIG:
            return dict(labels)
    return Missing(f"the engine's metrics page has no {_CACHE_CONFIG}")


def _models(page: str) -> list[Mapping[str, Any]] | Missing:
    try:
        data = json.loads(page)["data"]
        return [m for m in data if isinstance(m, dict)]
    except (ValueError, KeyError, TypeError):
        return Missing("the engine's /v1/models is no OpenAI list of models")


def parse_samples(page: str) -> Samples:
    """All samples of a Prometheus page. Raises ValueError for a page that is none."""
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
    }


async def samples(address: str, within: float) -> Samples | Missing:
    """All samples of kvindexd's metrics page."""
    try:
        return parse_samples(await read_page(address, "/metrics", within))
    except (EngineMetricsError, ValueError) as e:
        return Missing(str(e))


async def ready(address: str, within: float) -> str:
    """ "" or what /readyz complains of, in its own words."""
    try:
        head, body = await get(address, "/readyz", within)
    except TimeoutError:
        return f"no answer within {within:g} s"
    except (OSError, ValueError, EngineMetricsError) as e:
        return str(e)
    status = head.partition(b"\r\n")[0].decode("utf-8", "replace")
    said = body.decode("utf-8", "replace").strip()
    return "" if " 200 " in f"{status} " else said or status or "an empty answer"
