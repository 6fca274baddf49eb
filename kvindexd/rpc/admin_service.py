"""The KVIndexAdmin service: registering, inspecting and steering worker ranks."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import TypeVar

import grpc
import structlog

from kvindexd._version import __version__
from kvindexd.ingest.session import RESYNC
from kvindexd.model import WorkerKey
from kvindexd.registering import Registrar, TooManyWorkers
from kvindexd.registration import InvalidRegistration, Registration
from kvindexd.rpc import codec
from kvindexd.rpc.errors import Context, NotFound, RequestError, TooLarge, Unavailable, refuse
from kvindexd.rpc.fleet_view import FleetView
from kvindexd.rpc.tailing import Tail
from kvindexd.scoring.outcomes import Audit
from kvindexd.security.networks import Forbidden
from kvindexd.store import Store
from kvindexd.store.errors import NotRegistered, StoreError
from kvindexd.v1 import index_pb2 as pb
from kvindexd.v1 import index_pb2_grpc

log = structlog.get_logger(__name__)
T = TypeVar("T")
_VISIBLE_WITHIN = 2.0
_OWNED_WITHIN = 0.5
"""Seconds that RegisterWorker waits for the replica, and for an ingester to take the rank."""
_WATCH_INTERVAL = 0.25
_TAIL_LOOK = 0.5
"""Seconds without an event after which TailWorker looks whether any can come."""
FOLLOWING = "kvindexd-following"
"""Initial metadata of TailWorker, once it listens: the rank's name."""
MAX_WALK = 1_000_000


class AdminService(index_pb2_grpc.KVIndexAdminServicer):
    """Writes go to the store and come back through the feed; reads come from the replica."""

    def __init__(
        self,
        store: Store,
        fleet: FleetView,
        tail: Callable[[WorkerKey], Tail | None],
        *,
        registrar: Registrar | None = None,
        audit: Callable[[], Sequence[Audit]] = tuple,
    ) -> None:
        """`tail`: the local ingester's event stream of a rank, None where it is elsewhere.
        `audit`: how this server's picks turned out, by rank."""
        self._store = store
        self._fleet = fleet
        self._tail = tail
        self._registrar = registrar or Registrar(store)
        self._audit = audit

    # -- writing ------------------------------------------------------------------------------

    async def RegisterWorker(
        self, request: pb.RegisterWorkerRequest, context: Context
    ) -> pb.RegisterWorkerResponse:
        """Add a rank, or update it."""

        async def work() -> pb.RegisterWorkerResponse:
            registration = codec.registration_of(request.worker)
            await self._register(registration)
            return pb.RegisterWorkerResponse(worker=await self._visible(registration))

        return await answered(context, work)

    async def _register(self, registration: Registration) -> None:
        others = sum(view.key != registration.key for view in self._fleet.views())
        try:
            await self._registrar.register(registration, others)
        except (InvalidRegistration, Forbidden) as e:
            raise RequestError(f"worker.{e}") from None
        except TooManyWorkers as e:
            raise TooLarge(str(e)) from None

    async def _visible(self, registration: Registration) -> pb.Worker:
        """The rank once the replica shows it, so that the caller's next call finds it."""
        begun = time.monotonic()
        message = codec.worker_message(registration)
        while time.monotonic() < begun + _VISIBLE_WITHIN:
            view = self._fleet.view(registration.key)
            if view is not None and view.registration == registration:
                message = self._fleet.message(view)
                if view.owner or time.monotonic() > begun + _OWNED_WITHIN:
                    break
            await asyncio.sleep(0.005)
        return message

    async def DeregisterWorker(
        self, request: pb.DeregisterWorkerRequest, context: Context
    ) -> pb.DeregisterWorkerResponse:
        """Remove one rank, or all of a worker's."""

        async def work() -> pb.DeregisterWorkerResponse:
            for key in self._keys(request):
                await self._store.deregister(key)
                log.info("worker_deregistered", worker=str(key))
                await self._gone(key)
            return pb.DeregisterWorkerResponse()

        return await answered(context, work)

    async def _gone(self, key: WorkerKey) -> None:
        deadline = time.monotonic() + _VISIBLE_WITHIN
        while time.monotonic() < deadline:
            if self._fleet.view(key) is None:
                return
            await asyncio.sleep(0.005)

    def _keys(
        self,
        request: (
            pb.DeregisterWorkerRequest
            | pb.DrainWorkerRequest
            | pb.PurgeWorkerRequest
            | pb.ResyncWorkerRequest
        ),
    ) -> list[WorkerKey]:
        found = self._fleet.ranks(request.namespace, request.worker_id)
        if request.HasField("dp_rank"):
            found = [k for k in found if k.dp_rank == request.dp_rank]
        if not found:
            rank = f" rank {request.dp_rank}" if request.HasField("dp_rank") else ""
            raise NotFound(f"worker {request.worker_id!r}{rank} is not registered")
        return found

    async def DrainWorker(
        self, request: pb.DrainWorkerRequest, context: Context
    ) -> pb.DrainWorkerResponse:
        """Keep it in answers, and out of picks."""

        async def drain(key: WorkerKey) -> None:
            await self._store.set_draining(key, True)

        async def work() -> pb.DrainWorkerResponse:
            return pb.DrainWorkerResponse(worker=await self._each(request, drain))

        return await answered(context, work)

    async def PurgeWorker(
        self, request: pb.PurgeWorkerRequest, context: Context
    ) -> pb.PurgeWorkerResponse:
        """Forget what it holds, without asking the engine."""

        async def purge(key: WorkerKey) -> None:
            await self._store.reset(key)

        async def work() -> pb.PurgeWorkerResponse:
            return pb.PurgeWorkerResponse(worker=await self._each(request, purge))

        return await answered(context, work)

    async def ResyncWorker(
        self, request: pb.ResyncWorkerRequest, context: Context
    ) -> pb.ResyncWorkerResponse:
        """Forget what it holds and read the engine's replay buffer from its beginning."""

        async def resync(key: WorkerKey) -> None:
            await self._store.ask(key, RESYNC)

        async def work() -> pb.ResyncWorkerResponse:
            return pb.ResyncWorkerResponse(worker=await self._each(request, resync))

        return await answered(context, work)

    async def _each(
        self,
        request: pb.DrainWorkerRequest | pb.PurgeWorkerRequest | pb.ResyncWorkerRequest,
        act: Callable[[WorkerKey], Awaitable[None]],
    ) -> pb.Worker:
        keys = self._keys(request)
        for key in keys:
            await act(key)
            log.info("worker_steered", worker=str(key), by=type(request).__name__)
        view = self._fleet.view(keys[0])
        return self._fleet.message(view) if view is not None else pb.Worker()

    # -- reading ------------------------------------------------------------------------------

    async def ListWorkers(
        self, request: pb.ListWorkersRequest, context: Context
    ) -> pb.ListWorkersResponse:
        """Ranks of one namespace or all, of one model or all; stale ones when asked for."""

        async def work() -> pb.ListWorkersResponse:
            messages = [
                self._fleet.listed(v)
                for v in self._fleet.views()
                if request.namespace in ("", v.key.namespace)
                and (not request.model or v.registration.model == request.model)
            ]
            if not request.include_stale:
                messages = [m for m in messages if m.state != pb.STALE]
            return pb.ListWorkersResponse(workers=messages)

        return await answered(context, work)

    async def GetWorker(
        self, request: pb.GetWorkerRequest, context: Context
    ) -> pb.GetWorkerResponse:
        """One rank, with the counters as the store has them now."""

        async def work() -> pb.GetWorkerResponse:
            key = WorkerKey(request.namespace, request.worker_id, request.dp_rank)
            view = self._fleet.view(key)
            if view is None:
                raise NotFound(f"worker {key} is not registered")
            message = self._fleet.listed(view)
            try:
                async with asyncio.timeout(1.0):
                    counters = (await self._store.get_worker(key)).counters
                for name, n in counters.items():
                    message.counters[name] = max(0, n)
            except (StoreError, TimeoutError):
                message.detail += "; counters are those last read: the store does not answer"
            return pb.GetWorkerResponse(worker=message)

        return await answered(context, work)

    async def GetBlock(self, request: pb.GetBlockRequest, context: Context) -> pb.GetBlockResponse:
        """Who holds a block."""

        async def work() -> pb.GetBlockResponse:
            found = self._fleet.block(request.hash, request.model)
            if found is None:
                raise NotFound(f"block {request.hash:016x} is held by no worker")
            return found

        return await answered(context, work)

    async def WalkChain(
        self, request: pb.WalkChainRequest, context: Context
    ) -> AsyncIterator[pb.GetBlockResponse]:
        """From a block to its root, as far as anybody holds the blocks between."""
        found = self._fleet.block(request.hash, request.model)
        if found is None:
            await context.abort(
                grpc.StatusCode.NOT_FOUND, f"block {request.hash:016x} is held by no worker"
            )
        for _ in range(MAX_WALK):
            if found is None:
                return
            yield found
            if not found.parent:
                return
            found = self._fleet.block(found.parent, request.model)

    async def IndexStats(
        self, request: pb.IndexStatsRequest, context: Context
    ) -> pb.IndexStatsResponse:
        """Sizes of the index."""

        async def work() -> pb.IndexStatsResponse:
            stats = self._fleet.stats()
            stats.server_version = __version__
            return stats

        return await answered(context, work)

    async def WatchWorkers(
        self, request: pb.WatchWorkersRequest, context: Context
    ) -> AsyncIterator[pb.WatchWorkersResponse]:
        """Every rank now, then each again when anything but its ages changes."""
        seen: dict[WorkerKey, bytes] = {}
        while True:
            for view in self._fleet.views():
                message = self._fleet.message(view)
                age, message.last_event_ms_ago = message.last_event_ms_ago, 0
                known = message.SerializeToString(deterministic=True)
                if seen.get(view.key) != known:
                    seen[view.key] = known
                    message.last_event_ms_ago = age
                    yield pb.WatchWorkersResponse(worker=message)
            await asyncio.sleep(_WATCH_INTERVAL)

    async def Audit(self, request: pb.AuditRequest, context: Context) -> pb.AuditResponse:
        """Promises against outcomes of the picks made here."""
        return pb.AuditResponse(
            workers=[
                codec.audit_message(row)
                for row in self._audit()
                if request.worker_id in ("", row.worker.worker_id)
                and request.namespace in ("", row.worker.namespace)
            ]
        )

    async def TailWorker(
        self, request: pb.TailWorkerRequest, context: Context
    ) -> AsyncIterator[pb.TailWorkerResponse]:
        """Decoded events of a rank that this process ingests, as they come."""
        key = WorkerKey(request.namespace, request.worker_id, request.dp_rank)
        tail = self._tail(key)
        view = self._fleet.view(key)
        if view is None:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"worker {key} is not registered")
        elif tail is None:
            where = f"ask its ingester, {view.owner!r}"
            await context.abort(
                grpc.StatusCode.UNAVAILABLE, f"worker {key} is not ingested here; {where}"
            )
        else:
            with tail:
                # Tells the caller that from here on it misses nothing.
                await context.send_initial_metadata(((FOLLOWING, str(key)),))
                while True:
                    event = await tail.next(_TAIL_LOOK)
                    if event is not None:
                        yield event
                    elif ended := self._ended(key, tail):
                        await context.abort(*ended)

    def _ended(self, key: WorkerKey, tail: Tail) -> tuple[grpc.StatusCode, str] | None:
        """Why a tail will hear nothing any more; None while it may."""
        if self._fleet.view(key) is None:
            return grpc.StatusCode.NOT_FOUND, f"worker {key} was removed"
        now = self._tail(key)
        if now is not None and now.session is tail.session:
            return None
        why = "registered anew" if now is not None else "its lease went elsewhere, or was lost"
        return grpc.StatusCode.UNAVAILABLE, f"worker {key} is followed anew: {why}; call again"


async def answered(context: Context, work: Callable[[], Awaitable[T]]) -> T:
    """Run a call, turning what it raises into its gRPC status."""
    try:
        return await work()
    except (RequestError, StoreError) as e:
        await refuse(context, _as_request_error(e))


def _as_request_error(error: RequestError | StoreError) -> RequestError:
    if isinstance(error, RequestError):
        return error
    if isinstance(error, NotRegistered):
        return NotFound(str(error))
    return Unavailable(f"the store cannot be written: {error}")
