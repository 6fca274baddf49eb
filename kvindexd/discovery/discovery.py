"""Runs the sources that the configuration names, and changes them while they run."""

from __future__ import annotations

import asyncio
import importlib.util
import socket
from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec
import structlog

from kvindexd.config import Config, ConfigError
from kvindexd.config.discovering import DiscoveryConfig, source_names
from kvindexd.discovery.dns import DnsAddresses
from kvindexd.discovery.files import FileSource
from kvindexd.discovery.forgetting import CONFIG, Forgetting
from kvindexd.discovery.kubeapi import KubeError, own_namespace
from kvindexd.discovery.kubernetes import KubernetesPods
from kvindexd.discovery.metrics import DiscoveryMetrics
from kvindexd.discovery.reconciler import Admit, Reconciler
from kvindexd.discovery.source import Backoff, Report, Source
from kvindexd.discovery.wanted import Owner, Wanted
from kvindexd.registration import Registration
from kvindexd.store import Store
from kvindexd.telemetry import Metrics

log = structlog.get_logger(__name__)


class _Running(NamedTuple):
    settings: Any
    source: Source
    task: asyncio.Task[None]


class Discovery:
    """`start`, then `run`; `reload` at any time between."""

    def __init__(
        self,
        config: Config,
        role: str,
        store: Store,
        metrics: Metrics,
        *,
        admit: Admit,
    ) -> None:
        """`role`: "serve", "sidecar" or "scorer". Set `on_change` to be told when `owned` may
        have changed.

        Raises ConfigError when what a source needs is not installed.
        """
        self._config = config
        self._role = role
        resync = config.discovery.resync
        shown = DiscoveryMetrics(metrics)
        self.on_change: Callable[[], None] = lambda: None
        self._reconciler = Reconciler(
            store, shown, resync, admit=admit, on_change=lambda: self.on_change()
        )
        # What a call had registered is taken over: a configuration goes before it. Other processes
        # have [[workers]] of their own under this name, so nothing is swept. What an operator has
        # removed stays so, except that a sidecar is its engine's only voice.
        owner = Owner(CONFIG, frozenset({""}), sweeps=False, insists=role == "sidecar")
        self._configured = self._reconciler.member(owner)
        self._forgetting = Forgetting(store, shown)
        self._wanted = self._sources(config)
        self._running: dict[str, _Running] = {}
        self._tasks: asyncio.TaskGroup | None = None

    def owned(self) -> list[Registration]:
        """What this process has found, and what is not somebody else's."""
        return self._reconciler.owned()

    async def start(self) -> None:
        """Register the configured workers. Raises StoreError."""
        self._publish_configured()
        await self._reconciler.step()

    async def run(self) -> None:
        """Look for workers until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            self._tasks = tasks
            self._forgetting.set(self._config.discovery.forget_after)
            tasks.create_task(self._forgetting.run(), name="forgetting")
            for name, (settings, source) in self._wanted.items():
                self._begin(name, settings, source)
            await self._reconciler.run()

    async def reload(self, config: Config) -> None:
        """Take new settings: workers, sources, and files that are to be read now. Raises
        ConfigError, and changes nothing, when what a source needs is not installed."""
        wanted = self._sources(config)
        self._config, self._wanted = config, wanted
        self._publish_configured()
        self._reconciler.resync = config.discovery.resync
        self._forgetting.set(config.discovery.forget_after)
        if self._tasks is None:
            return
        for name, running in list(self._running.items()):
            if name not in wanted or wanted[name][0] != running.settings:
                await self._stop(name, gone=name not in wanted)
        for name, (settings, source) in wanted.items():
            if name in self._running:
                self._running[name].source.look()
            else:
                self._begin(name, settings, source)
        self._reconciler.sweep()

    def _publish_configured(self) -> None:
        self._configured.publish(Wanted(w.registration()) for w in self._config.workers)

    def _sources(self, config: Config) -> dict[str, tuple[Any, Source]]:
        """Name -> (its settings, the source, not running)."""
        d = _resolved(config.discovery)
        names = iter(source_names(d, socket.gethostname() if self._role == "sidecar" else ""))
        bind, every = config.ingest.bind_events, d.file_interval
        made: dict[str, tuple[Any, Source]] = {}
        for path in d.files:
            name = next(names)
            made[name] = (path, every, bind), FileSource(name, path, every, bind)
        if d.kubernetes and importlib.util.find_spec("aiohttp") is None:
            raise ConfigError(
                "discovery.kubernetes needs aiohttp: pip install 'kvindexd[discovery]'"
            )
        for pods in d.kubernetes:
            name = next(names)
            made[name] = pods, KubernetesPods(name, pods)
        for dns in d.dns:
            name = next(names)
            made[name] = dns, DnsAddresses(name, dns)
        return made

    def _begin(self, name: str, settings: Any, source: Source) -> None:
        assert self._tasks is not None  # noqa: S101 - set by run
        member = self._reconciler.member(Owner(name))
        task = self._tasks.create_task(_guarded(source, member), name=name)
        self._running[name] = _Running(settings, source, task)
        log.info("discovery_source", source=name)

    async def _stop(self, name: str, gone: bool) -> None:
        task = self._running.pop(name).task
        task.cancel()
        await asyncio.wait((task,))
        if gone:
            log.info("discovery_source_removed", source=name)
            self._reconciler.end(name)


def _resolved(discovery: DiscoveryConfig) -> DiscoveryConfig:
    """With our own namespace by its name, which is part of the source's: the same selector in
    another namespace finds other pods."""
    try:
        own = own_namespace() if any(not k.namespace for k in discovery.kubernetes) else ""
    except KubeError:
        return discovery  # the source will say so
    pods = [
        k if k.namespace else msgspec.structs.replace(k, namespace=own)
        for k in discovery.kubernetes
    ]
    return msgspec.structs.replace(discovery, kubernetes=pods)


async def _guarded(source: Source, report: Report) -> None:
    """A fault of ours in one source costs that source a pause, and nothing else."""
    backoff = Backoff(1.0, 60.0)
    while True:
        try:
            await source.run(report)
        except Exception as e:
            log.exception(
                "discovery_source_failed",
                source=source.name,
                error=repr(e),
                action="starting it again",
                fix="report this",
            )
            report.failed(f"internal error: {e!r}")
            await asyncio.sleep(backoff.next())
