"""The daemon: ingest, index and gRPC in one event loop; `sidecar` and `scorer` are parts of it."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import socket
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path

import structlog

from kvindexd import registration as registrations
from kvindexd import telemetry, tracing
from kvindexd._version import __version__
from kvindexd.config import Config, Role, parse_listen
from kvindexd.discovery.discovery import Discovery
from kvindexd.following import follow
from kvindexd.gauges import Gauges, observe_store
from kvindexd.ingest.engine_metrics import EngineMetrics, MetricsSettings
from kvindexd.ingest.settings import IngestSettings
from kvindexd.ingest.supervisor import Supervisor
from kvindexd.processes import Part, Processes, orphaned, part_config, private_address
from kvindexd.rank_state import Options
from kvindexd.records import decode_records
from kvindexd.registration import InvalidRegistration, Registration
from kvindexd.reloading import Part as ReloadPart
from kvindexd.reloading import Reloads
from kvindexd.replica.replica import Replica
from kvindexd.rpc.picking import Picking
from kvindexd.rpc.server import RpcServer
from kvindexd.security.networks import Forbidden
from kvindexd.security.protection import Protection
from kvindexd.serving import RELOADED, Serving
from kvindexd.store import Store, StoreOptions
from kvindexd.store.embedded import EmbeddedServer
from kvindexd.store.url import with_credentials
from kvindexd.telemetry import Metrics, MetricsServer, set_log_level
from kvindexd.ui import Ui

log = structlog.get_logger(__name__)

_ATTEMPTS = 5
"""How many timeouts of the store one operation may outlast, with all its retries."""


class Daemon:
    """Everything that one process runs. `run` returns after SIGTERM or SIGINT."""

    def __init__(
        self,
        config: Config,
        role: Role = "serve",
        part: Part | None = None,
        load: Callable[[], Config] | None = None,
    ) -> None:
        """`part`: this is a further process of another one, see kvindexd.processes. `load`: reads
        the configuration again at SIGHUP, raises ConfigError."""
        self._config = config
        self._role = role
        self._part = part
        self._store_url = ""
        self.started = False
        """Whether it has got as far as to serve."""
        self._metrics = Metrics()
        self._reloads = Reloads(config, self._metrics, load)
        self.on_reload(lambda c: set_log_level(c.log.level), "log.level")
        self._protection = Protection(config, self._metrics)
        self._picking: Picking | None = None
        self._ui: Ui | None = None
        self._stopping = asyncio.Event()
        self._signals = 0
        self._hurry = asyncio.Event()
        self._bound: dict[str, str] = {}

    async def run(self) -> None:
        """Serve until told to stop. Raises StoreError or OSError when it cannot start."""
        self._catch_signals()
        async with AsyncExitStack() as stack:
            spans = self._metrics.count_spans
            await stack.enter_async_context(tracing.running(self._config.tracing, spans))
            store = await stack.enter_async_context(self._open_store())
            replica: Replica[Registration] | None = None
            if self._role != "sidecar":
                replica = self._replica(store)
                self._picking = Picking(self._config, self._metrics, store, replica)
                if self._config.metrics.ui and self._config.metrics.listen:
                    self._ui = Ui(replica, self._metrics, self._role)
            supervisor: Supervisor | None = None
            gate = self._protection.gate
            if self._role != "scorer":
                supervisor = Supervisor(store, self._ingest_settings(), self._metrics, gate)
            discovery = await self._discover(store, supervisor)
            await stack.enter_async_context(self._metrics_server(replica))
            private = ""
            if self._leads:
                private = stack.enter_context(private_address())
            async with asyncio.TaskGroup() as tasks:
                background = [
                    tasks.create_task(work, name=name)
                    for name, work in self._background(store, replica, supervisor)
                ]
                if discovery is not None:
                    background.append(tasks.create_task(discovery.run(), name="discovery"))
                servers = await self._start_rpc(store, replica, supervisor, stack, private)
                further = tasks.create_task(self._further(private), name="processes")
                self._log_ready()
                await self._stopping.wait()
                log.info("stopping", grace_seconds=self._config.server.grace_seconds)
                await self._stop_rpc(servers, further)
                for task in background:
                    task.cancel()
        telemetry.tell_rest()
        log.info("stopped")

    def on_reload(self, part: ReloadPart, *keys: str) -> None:
        """Have `part` called with the settings in force at every SIGHUP, `keys` being those that
        it puts into force without a restart; see kvindexd.reloading."""
        self._reloads.on_reload(part, *keys)

    # -- signals ------------------------------------------------------------------------------

    def _catch_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._signalled)
        self._reloads.catch_signal()

    def _signalled(self) -> None:
        """The first one asks for an orderly end, a second one not to wait for calls."""
        self._signals += 1  # a further process is told in another way too, see processes.orphaned
        if self._signals > 1:
            self._hurry.set()
        self._stopping.set()

    @property
    def _leads(self) -> bool:
        """Whether further processes answer behind this one's ports."""
        return self._config.server.processes > 1 and self._role != "sidecar" and self._part is None

    async def _further(self, private: str) -> None:
        if not self._leads:
            return
        count, grace = self._config.server.processes, self._config.server.grace_seconds

        def parts(config: Config) -> list[Part]:
            return [
                Part(part_config(config, self._bound, self._store_url, i), i, private)
                for i in range(1, count)
            ]

        processes = Processes(parts(self._reloads.config), grace)
        self.on_reload(lambda config: processes.reload(parts(config)))
        await processes.run(self._stopping)

    async def _stop_rpc(self, servers: Sequence[RpcServer], further: asyncio.Task[None]) -> None:
        ending = asyncio.gather(further, *(server.stop() for server in servers))
        hurrying = asyncio.create_task(self._hurry.wait())
        await asyncio.wait((ending, hurrying), return_when=asyncio.FIRST_COMPLETED)
        hurrying.cancel()
        if not ending.done():
            log.warning("stopping_at_once", cost="calls in flight are cut off")
            ending.cancel()
        await asyncio.gather(ending, return_exceptions=True)

    # -- the store ----------------------------------------------------------------------------

    @asynccontextmanager
    async def _open_store(self) -> AsyncIterator[Store]:
        redis = self._config.redis
        async with AsyncExitStack() as stack:
            url = with_credentials(redis.url, redis.username, redis.password())
            if not url:
                embedded = EmbeddedServer(Path(self._config.index.data_dir))
                await embedded.start()
                stack.push_async_callback(embedded.stop)
                url = embedded.url
            options = StoreOptions(
                shards=redis.shards,
                feed_maxlen=self._config.limits.feed_maxlen,
                connections=redis.pool_size,
                connect_timeout=redis.timeout,
                timeout=redis.timeout,
                deadline=_ATTEMPTS * redis.timeout,
            )
            self._store_url = url
            store = Store(url, options, partial(observe_store, self._metrics))
            stack.push_async_callback(store.close)
            await store.open()
            yield store

    async def _discover(self, store: Store, supervisor: Supervisor | None) -> Discovery | None:
        """Registers the configured workers, and finds others from then on."""
        if self._part is not None:
            return None
        registrar = self._protection.registrar(store)
        for worker in self._config.workers:
            try:
                await registrar.admit(worker.registration())
            except Forbidden as e:
                raise InvalidRegistration(f"worker {worker.worker_id!r}: {e}") from None
        found = Discovery(self._config, self._role, store, self._metrics, admit=registrar.admit)
        if supervisor is not None and self._role == "sidecar":
            found.on_change = lambda: supervisor.set_all(found.owned())
        await found.start()
        self.on_reload(found.reload, "workers", "discovery")
        return found

    # -- the parts ----------------------------------------------------------------------------

    def _ingest_settings(self) -> IngestSettings:
        c = self._config
        return IngestSettings(
            owner=f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(3)}",
            on_lost_events=c.ingest.on_lost_events,
            replay_timeout=c.ingest.replay_timeout,
            buffer_batches=c.ingest.buffer_batches,
            receive_hwm=c.ingest.rcvhwm,
            max_event_bytes=c.ingest.max_event_bytes,
            lease_ttl=c.ingest.lease_ttl,
            heartbeat=c.ingest.heartbeat,
            event_grace=c.ingest.event_grace,
            peer_timeout=c.ingest.peer_timeout,
            options=Options(
                treat_as=dict(c.groups.treat_as),
                unbound_ttl=c.index.unbound_ttl,
                bindings=c.limits.bindings_per_rank,
                blocks=c.limits.blocks_per_rank,
                parked=c.limits.parked_per_rank,
                parked_age=c.limits.parked_age,
            ),
        )

    def _replica(self, store: Store) -> Replica[Registration]:
        lag = self._metrics.apply_lag_seconds
        return Replica(
            store,
            registrations.decode,
            decode_records,
            on_applied=lambda _, ts: lag.observe(max(0.0, time.time() - ts)),
        )

    def _background(
        self,
        store: Store,
        replica: Replica[Registration] | None,
        supervisor: Supervisor | None,
    ) -> Iterable[tuple[str, Coroutine[None, None, None]]]:
        not_ready = partial(self._not_ready, replica)
        yield "reloads", self._reloads.run()
        yield "gauges", Gauges(self._metrics, store, replica, supervisor, not_ready).run()
        if replica is not None:
            yield "replica", replica.run()
        if self._part is not None:
            yield "main process", orphaned(self._stopping, self._reloads.give)
        yield "log", telemetry.tell_repeats()
        if self._picking is not None:
            yield "picking", self._picking.run()
        if self._ui is not None:
            yield "ui", self._ui.run()
        if supervisor is not None:
            yield "ingest", supervisor.run()
            e = self._config.engine_metrics
            if e.interval:
                settings = MetricsSettings(e.interval, e.timeout, e.path)
                engines = EngineMetrics(
                    store, supervisor.registrations, settings, self._protection.gate
                )
                yield "engine-metrics", engines.run()
            if replica is not None:
                yield "follow", follow(store, replica, supervisor)

    def _not_ready(self, replica: Replica[Registration] | None) -> str:
        """Why queries should not be sent here, "" when they may."""
        if self._stopping.is_set():
            return "stopping"
        return replica.not_ready() if replica is not None else ""

    @asynccontextmanager
    async def _metrics_server(self, replica: Replica[Registration] | None) -> AsyncIterator[None]:
        if not self._config.metrics.listen:
            yield
            return
        host, port = parse_listen(self._config.metrics.listen)
        not_ready = partial(self._not_ready, replica)
        server = MetricsServer(
            self._metrics.registry,
            not_ready,
            host,
            port,
            self._ui,
            protected=self._protection.http("metrics"),
        )
        bound_host, bound_port = await server.start()
        self._bound["metrics"] = f"{bound_host}:{bound_port}"
        try:
            yield
        finally:
            await server.close()

    async def _start_rpc(
        self,
        store: Store,
        replica: Replica[Registration] | None,
        supervisor: Supervisor | None,
        stack: AsyncExitStack,
        private: str,
    ) -> list[RpcServer]:
        if replica is None or self._picking is None:
            return []
        stopping = self._stopping.is_set
        serving = Serving(
            self._config,
            self._metrics,
            store,
            replica,
            self._picking,
            supervisor,
            stopping,
            self._protection,
            private=private,
            main=self._part.tail if self._part is not None else "",
            ui=self._ui,
        )
        servers = await serving.start(stack, self._bound)
        self.on_reload(serving.reload, *RELOADED)
        return servers

    def _log_ready(self) -> None:
        self.started = True
        if self._part is not None:
            log.info("process_ready", index=self._part.index, pid=os.getpid(), **self._bound)
            return
        log.info("ready", role=self._role, version=__version__, pid=os.getpid(), **self._bound)
