"""Reads the engines' own metrics pages: requests running and waiting, and how full the cache is."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, Protocol

import msgspec
import structlog

from kvindexd.model import WorkerKey
from kvindexd.registration import Registration
from kvindexd.security.gate import Gate
from kvindexd.security.networks import Forbidden
from kvindexd.store import NotRegistered, StoreError

log = structlog.get_logger(__name__)

SOURCE = "engine"
"""The name under which an engine's report is published beside the scorers'."""

_RUNNING = ("vllm:num_requests_running", "sglang:num_running_reqs")
_WAITING = ("vllm:num_requests_waiting", "sglang:num_queue_reqs")
_USAGE = ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc", "sglang:token_usage")
_LINE = re.compile(r"^([a-zA-Z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)(?:\s+\S+)?$")
_RANK = re.compile(r'(?:^|,)\s*(?:engine|dp_rank)="(\d+)"')
_MAX_PAGE = 4 << 20
_AT_ONCE = 16


class EngineLoad(msgspec.Struct, frozen=True, array_like=True):
    """What an engine says of itself. `usage`: part of the KV cache in use, 0 to 1."""

    running: int
    waiting: int
    usage: float


class EngineMetricsError(Exception):
    """A page that could not be read; the message says what was wrong with it."""


class MetricsSettings(NamedTuple):
    """Times in seconds. `path`: of the page, on the address that serves requests."""

    interval: float
    timeout: float = 2.0
    path: str = "/metrics"


class LoadStore(Protocol):
    """What is asked of the store."""

    async def report_load(self, key: WorkerKey, source: str, payload: bytes) -> None:
        """Publish a report of a worker rank."""
        ...


def parse_page(text: str, dp_rank: int = 0) -> EngineLoad:
    """The load on a Prometheus page. Lines that name a data-parallel rank count for that rank only.

    Raises EngineMetricsError where the page has none of the known names.
    """
    values: dict[str, float] = {}
    wanted = {*_RUNNING, *_WAITING, *_USAGE}
    for line in text.splitlines():
        found = _LINE.match(line)
        if found is None or found[1] not in wanted:
            continue
        rank = _RANK.search(found[2] or "")
        if rank is not None and int(rank[1]) != dp_rank:
            continue
        try:
            number = float(found[3])
        except ValueError:
            continue
        if number >= 0:  # NaN is not
            values[found[1]] = values.get(found[1], 0.0) + number
    running, waiting, usage = (
        next((values[n] for n in names if n in values), None)
        for names in (_RUNNING, _WAITING, _USAGE)
    )
    if running is None and waiting is None and usage is None:
        raise EngineMetricsError(f"none of {', '.join((*_RUNNING, *_WAITING))} is on the page")
    return EngineLoad(int(running or 0), int(waiting or 0), min(1.0, usage or 0.0))


async def get(
    address: str, path: str, within: float, gate: Gate | None = None
) -> tuple[bytes, bytes]:
    """Head and body of whatever http://address/path answers. Raises TimeoutError, within so many
    seconds, OSError, Forbidden, ValueError for a port that is none, EngineMetricsError for a page
    that is too large."""
    host, _, port = address.rpartition(":")
    async with asyncio.timeout(within):
        where = await (gate or Gate()).host(host.strip("[]"))
        reader, writer = await asyncio.open_connection(where, int(port))
        try:
            writer.write(
                f"GET {path} HTTP/1.0\r\nHost: {address}\r\nAccept: text/plain\r\n\r\n".encode()
            )
            await writer.drain()
            raw = await _all_of(reader)
        finally:
            writer.close()
    head, _, body = raw.partition(b"\r\n\r\n")
    return head, body


async def read_page(address: str, path: str, within: float, gate: Gate | None = None) -> str:
    """The page at http://address/path. Raises EngineMetricsError, within so many seconds; also for
    an address that `gate` forbids."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise EngineMetricsError(f"address {address!r} has no port")
    try:
        head, body = await get(address, path, within, gate)
    except TimeoutError:
        raise EngineMetricsError(f"no answer within {within:g} s") from None
    except Forbidden as e:
        raise EngineMetricsError(str(e)) from None
    except OSError as e:
        raise EngineMetricsError(f"cannot connect to {address}: {e}") from None
    status = head.split(b"\r\n")[0].split(b" ")
    if len(status) < 2 or status[1] != b"200":
        said = head.split(b"\r\n")[0][:80].decode("latin-1")
        raise EngineMetricsError(f"http://{address}{path} answered {said!r}")
    return body.decode("utf-8", "replace")


async def _all_of(reader: asyncio.StreamReader) -> bytes:
    parts, size = [], 0
    while part := await reader.read(65_536):
        parts.append(part)
        size += len(part)
        if size > _MAX_PAGE:
            raise EngineMetricsError(f"the page is larger than {_MAX_PAGE} bytes")
    return b"".join(parts)


class EngineMetrics:
    """Publishes the load of every rank that this process ingests; `run` is its one task."""

    def __init__(
        self,
        store: LoadStore,
        registrations: Callable[[], Iterable[Registration]],
        settings: MetricsSettings,
        gate: Gate | None = None,
    ) -> None:
        self._gate = gate
        self._store = store
        self._registrations = registrations
        self._settings = settings
        self._failing: dict[WorkerKey, str] = {}

    async def run(self) -> None:
        """Read all pages every interval, until cancelled."""
        while True:
            began = time.monotonic()
            ranks = list(self._registrations())
            for start in range(0, len(ranks), _AT_ONCE):
                await self._read_some(ranks[start : start + _AT_ONCE])
            known = {r.key for r in ranks}
            self._failing = {k: why for k, why in self._failing.items() if k in known}
            spent = time.monotonic() - began
            await asyncio.sleep(max(self._settings.interval - spent, 0.05))

    async def _read_some(self, ranks: Sequence[Registration]) -> None:
        async with asyncio.TaskGroup() as tasks:
            for registration in ranks:
                tasks.create_task(self._read(registration))

    async def _read(self, registration: Registration) -> None:
        key, s = registration.key, self._settings
        try:
            page = await read_page(registration.address, s.path, s.timeout, self._gate)
            load = parse_page(page, registration.dp_rank)
            async with asyncio.timeout(s.timeout):
                await self._store.report_load(key, SOURCE, msgspec.msgpack.encode(load))
        except EngineMetricsError as e:
            self._failed(key, str(e))
        except (StoreError, TimeoutError, NotRegistered):
            pass  # the store's own tasks say so; the report ages, and stops counting
        else:
            if self._failing.pop(key, None) is not None:
                log.info("engine_metrics_back", worker=str(key))

    def _failed(self, key: WorkerKey, why: str) -> None:
        if key not in self._failing:
            log.warning(
                "engine_metrics_unreadable",
                worker=str(key),
                error=why,
                cost="what waits in the engine's queue is not known",
            )
        self._failing[key] = why
