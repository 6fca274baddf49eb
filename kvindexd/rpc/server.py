"""The gRPC server: services, health, reflection, and options that gateways need."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import grpc
import structlog
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from kvindexd import tracing
from kvindexd.config import parse_listen
from kvindexd.rpc.budget import Admission
from kvindexd.rpc.guard import Guard, Handler
from kvindexd.rpc.index_service import IndexService
from kvindexd.rpc.traced import TracedCalls
from kvindexd.v1 import index_pb2 as pb
from kvindexd.v1 import index_pb2_grpc

log = structlog.get_logger(__name__)

INDEX, ADMIN = "kvindexd.v1.KVIndex", "kvindexd.v1.KVIndexAdmin"
SERVICES = (INDEX, ADMIN)
HEALTH_NAMES = ("", "liveness", "readiness", *SERVICES)
"""Names that grpc.health.v1 knows here; any other is NOT_FOUND."""
_MOVING_ON = 0.5
"""Seconds that calls are still taken for after NOT_SERVING, where a client watches: a call that
crosses the end of its connection is answered CANCELLED, which no retry policy repeats."""


def options(max_message_bytes: int, reuse_port: bool = False) -> list[tuple[str, int]]:
    """Channel arguments. Go clients ping every 10 s, also without calls: gRPC's default allows
    one ping in 5 minutes and answers more with GOAWAY too_many_pings."""
    return [
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_send_message_length", max_message_bytes),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", 5_000),
        ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_ping_strikes", 0),
        ("grpc.so_reuseport", int(reuse_port)),
        # Prompts are tens of kilobytes; 8 at a time, as by default, costs a fifth of a call.
        ("grpc.experimental.tcp_read_chunk_size", 1 << 18),
        ("grpc.experimental.tcp_min_read_chunk_size", 1 << 17),
    ]


class _Health(health.aio.HealthServicer):
    """A watch has no end of its own: without this, one of them holds a stopping server up for the
    whole grace time."""

    def __init__(self) -> None:
        super().__init__()
        self.ending = asyncio.Event()
        self.watches = 0

    async def Watch(
        self,
        request: health_pb2.HealthCheckRequest,
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> None:
        """Tell every change, and at the end that it is the end."""
        watching = asyncio.create_task(super().Watch(request, context))
        ending = asyncio.create_task(self.ending.wait())
        self.watches += 1
        try:
            await asyncio.wait((watching, ending), return_when=asyncio.FIRST_COMPLETED)
        finally:
            self.watches -= 1
            for task in (watching, ending):
                task.cancel()
            await asyncio.wait((watching, ending))
        await context.write(
            health_pb2.HealthCheckResponse(status=health_pb2.HealthCheckResponse.NOT_SERVING)
        )


class RpcServer:
    """Owns the listening socket. `start`, then `set_ready`, then `stop`."""

    def __init__(
        self,
        listen: str,
        max_message_bytes: int,
        grace_seconds: float,
        services: Sequence[str] = SERVICES,
        *,
        reuse_port: bool = False,
        private: str = "",
        guard: Guard | None = None,
        credentials: grpc.ServerCredentials | None = None,
        setting: str = "server.listen",
    ) -> None:
        """`services`: names that reflection lists. `reuse_port`: other processes listen there too.
        `private`: a further address (unix:PATH), for them. `guard`: stands before every call but
        those of health and reflection. `credentials`: for TLS. `setting`: that names `listen`."""
        host, number = parse_listen(listen)
        self._host = f"[{host}]" if ":" in host else host
        self._listen = f"{self._host}:{number}"
        self._guard = guard or Guard()
        self._credentials = credentials
        self._setting = setting
        self._grace = grace_seconds
        self._private = private
        self._server = grpc.aio.server(
            interceptors=[TracedCalls()] if tracing.on() else [],
            options=options(self._guard.transport_bytes(max_message_bytes), reuse_port),
        )
        self._health = _Health()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        reflection.enable_server_reflection(
            (*services, health.SERVICE_NAME, reflection.SERVICE_NAME), self._server
        )

    def add(
        self, service: str, handlers: Mapping[str, Handler], calls: Admission | None = None
    ) -> None:
        """Add a service's handlers, by method, before `start`. `calls`: see Guard.wrap."""
        guarded = self._guard.wrap(service, handlers, calls)
        self._server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(service, guarded),)
        )
        if hasattr(self._server, "add_registered_method_handlers"):
            self._server.add_registered_method_handlers(service, guarded)

    async def start(self) -> str:
        """Bind and serve; the address really bound. Raises OSError, naming the address."""
        try:
            if self._credentials is not None:
                port = self._server.add_secure_port(self._listen, self._credentials)
            else:
                port = self._server.add_insecure_port(self._listen)
        except RuntimeError as e:
            raise OSError(
                f"{self._setting}: cannot bind {self._listen}: {e}; is another process using it?"
            ) from None
        if self._private:
            self._server.add_insecure_port(self._private)
        await self.set_ready(False)
        await self._server.start()
        return f"{self._host}:{port}"

    async def set_ready(self, ready: bool, names: Sequence[str] = HEALTH_NAMES) -> None:
        """Tell health checks whether calls can be answered; liveness is always serving."""
        status = health_pb2.HealthCheckResponse.SERVING
        for name in names:
            off = not ready and name != "liveness"
            await self._health.set(
                name, health_pb2.HealthCheckResponse.NOT_SERVING if off else status
            )

    async def stop(self) -> None:
        """NOT_SERVING first, and time for those who watch it to go elsewhere; then calls in flight
        get the grace time, and new ones are refused."""
        await self._health.enter_graceful_shutdown()
        if self._health.watches:
            await asyncio.sleep(min(_MOVING_ON, self._grace))
        self._health.ending.set()
        await self._server.stop(self._grace)
        await self._server.wait_for_termination(self._grace)


def index_handlers(servicer: index_pb2_grpc.KVIndexServicer) -> dict[str, Handler]:
    """The scoring service's; IndexService's hot calls serialise their own answers."""
    generated = _Generated()
    index_pb2_grpc.add_KVIndexServicer_to_server(servicer, generated)
    handlers = generated.handlers
    if isinstance(servicer, IndexService):
        handlers["ScoreWorkers"] = grpc.unary_unary_rpc_method_handler(
            servicer.score_packed, pb.ScoreWorkersRequest.FromString, None
        )
        handlers["ScoreWorkersBatch"] = grpc.unary_unary_rpc_method_handler(
            servicer.score_batch_packed, pb.ScoreWorkersBatchRequest.FromString, None
        )
    return handlers


def admin_handlers(servicer: index_pb2_grpc.KVIndexAdminServicer) -> dict[str, Handler]:
    """The administration service's."""
    generated = _Generated()
    index_pb2_grpc.add_KVIndexAdminServicer_to_server(servicer, generated)
    return generated.handlers


class _Generated:
    """Takes from the generated code what it would register."""

    def __init__(self) -> None:
        self.handlers: dict[str, Handler] = {}

    def add_generic_rpc_handlers(self, _handlers: object) -> None:
        """Wraps the same handlers."""

    def add_registered_method_handlers(self, _name: str, handlers: dict[str, Handler]) -> None:
        """All methods of the service by name."""
        self.handlers = dict(handlers)
