"""The gRPC side of a daemon: which services listen where, from the configuration."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, MutableMapping
from contextlib import AsyncExitStack

import grpc
import structlog

from kvindexd.config import Config
from kvindexd.ingest.supervisor import Supervisor
from kvindexd.model import WorkerKey
from kvindexd.registration import Registration
from kvindexd.replica.replica import Replica
from kvindexd.rpc.admin_service import AdminService
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
from kvindexd.rpc.pick_service import PickService
from kvindexd.rpc.picking import Picking
from kvindexd.rpc.server import RpcServer, add_admin, add_index
from kvindexd.rpc.tailing import Tail
from kvindexd.store import Store
from kvindexd.telemetry import Metrics
from kvindexd.tokens import Tokens, TokenSettings

log = structlog.get_logger(__name__)

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
        *,
        private: str = "",
        main: str = "",
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
        self._private = private
        self._main = main

    async def start(
        self, stack: AsyncExitStack, bound: MutableMapping[str, str]
    ) -> list[RpcServer]:
        """Listen; `bound` gets each server's address, `stack` what is to be closed at the end."""
        c = self._config
        fleet = FleetView(self._replica, hybrid=c.index.hybrid == "exact")
        server = RpcServer(
            c.server.listen,
            c.server.max_message_bytes,
            c.server.grace_seconds,
            reuse_port=c.server.processes > 1,
            private=self._private,
        )
        index = self._picking.service(fleet)
        index.tokens = tokens = self._tokens(fleet)
        stack.push_async_callback(tokens.close)
        await tokens.start()
        server.add(lambda s: add_index(s, index))
        admin = self._admin(fleet, stack)
        server.add(lambda s: add_admin(s, admin))
        await self._first_load()
        bound["grpc"] = await server.start()
        servers = [server]
        if c.ext_proc.listen:
            picker = self._ext_proc(index, tokens)
            servers.append(picker)
            bound["ext_proc"] = await picker.start()
            await picker.set_ready(True, HEALTH_NAMES)
        await server.set_ready(True)
        return servers

    def _admin(self, fleet: FleetView, stack: AsyncExitStack) -> AdminService:
        audit = self._picking.picker.drift.audit
        if not self._main:
            return AdminService(self._store, fleet, self._tail, audit=audit)
        admin = ForwardingAdmin(self._store, fleet, self._tail, audit=audit)
        admin.main = grpc.aio.insecure_channel(self._main)
        stack.push_async_callback(admin.main.close)
        return admin

    def _tail(self, key: WorkerKey) -> Tail | None:
        rank = self._supervisor.rank(key) if self._supervisor is not None else None
        return Tail(rank.session) if rank is not None and rank.session is not None else None

    def _tokens(self, fleet: FleetView) -> Tokens:
        t = self._config.tokens
        failures = token_failures(self._metrics)
        return Tokens(
            TokenSettings(t.models, t.loras, t.timeout, t.cache_tokens),
            lambda model: fleet.any_address(self._config.ext_proc.namespace, model),
            lambda model: failures.labels(model).inc(),
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
        service = ExtProcService(chooser, ExtProcMetrics(self._metrics), c.ext_proc.max_body_bytes)
        largest = max(c.server.max_message_bytes, c.ext_proc.max_body_bytes + (1 << 20))
        return ExtProcServer(
            c.ext_proc.listen,
            service,
            largest,
            c.server.grace_seconds,
            reuse_port=c.server.processes > 1,
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
