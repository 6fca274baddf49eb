"""The gRPC side of a daemon: which services listen where, from the configuration."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, MutableMapping
from contextlib import AsyncExitStack

import grpc
import structlog

from kvindexd.config import Config
from kvindexd.config.protecting import Listener
from kvindexd.ingest.supervisor import Supervisor
from kvindexd.model import WorkerKey
from kvindexd.registration import Registration
from kvindexd.replica.replica import Replica
from kvindexd.rpc.admin_service import AdminService
from kvindexd.rpc.budget import Admission, Shares
from kvindexd.rpc.ext_proc.choosing import Chooser
from kvindexd.rpc.ext_proc.server import (
    HEALTH_NAMES,
    ExtProcMetrics,
    ExtProcServer,
    ExtProcService,
    token_failures,
)
from kvindexd.rpc.fleet_view import FleetView
from kvindexd.rpc.forwarding import ForwardingAdmin
from kvindexd.rpc.guard import Guard, Refusals
from kvindexd.rpc.pick_service import PickService
from kvindexd.rpc.picking import Picking, request_limits
from kvindexd.rpc.server import ADMIN, INDEX, RpcServer, admin_handlers, index_handlers
from kvindexd.rpc.tailing import Tail
from kvindexd.security.protection import Protection
from kvindexd.store import Store
from kvindexd.telemetry import Metrics
from kvindexd.tokens import Tokens, TokenSettings
from kvindexd.ui import Ui

log = structlog.get_logger(__name__)

RELOADED = ("limits.max_prompt_tokens", "limits.max_candidates", "limits.max_batch", "tokens")
"""Settings that `Serving.reload` puts into force."""
_FIRST_LOAD = 30.0
"""Seconds for which the gRPC port is held back for the first load."""


class Serving:
    """Builds and starts the servers of one process that has a replica."""

    def __init__(
        self,
        config: Config,
        metrics: Metrics,
        store: Store,
        replica: Replica[Registration],
        picking: Picking,
        supervisor: Supervisor | None,
        stopping: Callable[[], bool],
        protection: Protection,
        *,
        private: str = "",
        main: str = "",
        ui: Ui | None = None,
    ) -> None:
        """`supervisor`: of the ranks that this process ingests itself, for TailWorker. `private`:
        where further processes reach this one; `main`: where a further one reaches the first."""
        self._config = config
        self._metrics = metrics
        self._store = store
        self._replica = replica
        self._picking = picking
        self._supervisor = supervisor
        self._stopping = stopping
        self._protection = protection
        self._refusals = Refusals(protection.auth_failed, protection.refused)
        self._streams = Shares(config.limits.streams_per_client)
        self._private = private
        self._main = main
        self._ui = ui
        self._index: PickService | None = None

    async def start(
        self, stack: AsyncExitStack, bound: MutableMapping[str, str]
    ) -> list[RpcServer]:
        """Listen; `bound` gets each server's address, `stack` what is to be closed at the end."""
        c = self._config
        fleet = FleetView(self._replica, hybrid=c.index.hybrid == "exact")
        servers = self._servers()
        index = self._picking.service(fleet, self._protection.refused)
        index.tokens = tokens = self._tokens(fleet)
        self._index = index
        stack.push_async_callback(tokens.close)
        await tokens.start()
        for server in servers.values():
            server.add(INDEX, index_handlers(index))
        if self._ui is not None:
            self._ui.serve(index, fleet.account)
        admin = admin_handlers(self._admin(fleet, stack))
        calls = Admission(c.limits.max_concurrent_calls)
        servers.get("admin", servers["grpc"]).add(ADMIN, admin, calls)
        await self._first_load()
        for name, server in servers.items():
            bound[name] = await server.start()
        picker: ExtProcServer | None = None
        if c.ext_proc.listen:
            picker = self._ext_proc(index, tokens)
            bound["ext_proc"] = await picker.start()
            await picker.set_ready(True, HEALTH_NAMES)
        for server in servers.values():
            await server.set_ready(True)
        return [*servers.values(), *([picker] if picker is not None else ())]

    async def reload(self, config: Config) -> None:
        """Put those of the settings that `RELOADED` names into force."""
        if self._index is not None:
            self._index.limits = request_limits(config)
            if self._index.tokens is not None:
                await self._index.tokens.reload(_token_settings(config))

    def _servers(self) -> dict[str, RpcServer]:
        """The servers of kvindexd's own services, by the names of their addresses: all services
        on one, or administration, and scoring beside it, on one that gateways need not reach."""
        c = self._config.server
        if not c.admin_listen:
            return {"grpc": self._server("server", "server.listen", c.listen, self._private)}
        return {
            "grpc": self._server("server", "server.listen", c.listen),
            "admin": self._server("admin", "server.admin_listen", c.admin_listen, self._private),
        }

    def _server(self, name: Listener, setting: str, listen: str, private: str = "") -> RpcServer:
        c = self._config.server
        return RpcServer(
            listen,
            c.max_message_bytes,
            c.grace_seconds,
            reuse_port=c.processes > 1,
            private=private,
            guard=Guard(
                self._protection.access,
                self._refusals,
                max_message_bytes=c.max_message_bytes,
                streams=self._streams,
            ),
            credentials=self._credentials(name),
            setting=setting,
        )

    def _credentials(self, name: Listener) -> grpc.ServerCredentials | None:
        certificates = self._protection.certificates
        if certificates is None or not certificates.speaks_tls(name):
            return None
        return certificates.grpc_credentials(name)

    def _admin(self, fleet: FleetView, stack: AsyncExitStack) -> AdminService:
        audit = self._picking.picker.drift.audit
        registrar = self._protection.registrar(self._store)
        if not self._main:
            return AdminService(self._store, fleet, self._tail, registrar=registrar, audit=audit)
        admin = ForwardingAdmin(self._store, fleet, self._tail, registrar=registrar, audit=audit)
        admin.main = grpc.aio.insecure_channel(self._main)
        stack.push_async_callback(admin.main.close)
        return admin

    def _tail(self, key: WorkerKey) -> Tail | None:
        rank = self._supervisor.rank(key) if self._supervisor is not None else None
        return Tail(rank.session) if rank is not None and rank.session is not None else None

    def _tokens(self, fleet: FleetView) -> Tokens:
        failures = token_failures(self._metrics)
        for model in self._config.tokens.models:
            failures.labels(model)  # there from the start, so that the first one is an increase
        return Tokens(
            _token_settings(self._config),
            lambda model: fleet.any_address(self._config.ext_proc.namespace, model),
            lambda model: failures.labels(model).inc(),
            self._protection.gate.host,
        )

    def _ext_proc(self, index: PickService, tokens: Tokens) -> ExtProcServer:
        c = self._config
        chooser = Chooser(
            index,
            tokens,
            namespace=c.ext_proc.namespace,
            budget=c.ext_proc.budget,
            fallbacks=c.ext_proc.fallbacks,
            max_concurrent=c.limits.max_concurrent_calls,
        )
        service = ExtProcService(
            chooser,
            ExtProcMetrics(self._metrics),
            c.ext_proc.max_body_bytes,
            c.limits.ext_proc_streams,
            self._protection.refused,
        )
        largest = max(c.server.max_message_bytes, c.ext_proc.max_body_bytes + (1 << 20))
        return ExtProcServer(
            c.ext_proc.listen,
            service,
            largest,
            c.server.grace_seconds,
            reuse_port=c.server.processes > 1,
            guard=Guard(self._protection.access, self._refusals),
            credentials=self._credentials("ext_proc"),
        )

    async def _first_load(self) -> None:
        """Hold the port back until there is something to answer with, but not for ever."""
        deadline = time.monotonic() + _FIRST_LOAD
        while time.monotonic() < deadline:
            if not self._replica.not_ready() or self._stopping():
                break
            await asyncio.sleep(0.02)
        if self._replica.not_ready():
            why = self._replica.not_ready()
            log.warning("not_caught_up", why=why, cost="answers are incomplete")


def _token_settings(config: Config) -> TokenSettings:
    t = config.tokens
    return TokenSettings(t.models, t.loras, t.timeout, t.cache_tokens)
