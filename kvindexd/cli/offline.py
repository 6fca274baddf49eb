"""Answers read from the store itself, where no daemon answers."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TypeVar
from urllib.parse import unquote, urlsplit

import grpc
import msgspec
import structlog
import typer

from kvindexd import registration as registrations
from kvindexd.cli.client import DEFAULT_SERVER, Client, channel, explain, unreachable
from kvindexd.cli.output import fail, note, progress, settings
from kvindexd.cli.reading import Where
from kvindexd.config import Config, ConfigError
from kvindexd.model import Profile, WorkerKey
from kvindexd.records import decode_records
from kvindexd.registration import Registration
from kvindexd.replica import Replica
from kvindexd.replica.state import NEVER, Facts, judge
from kvindexd.replica.view import Phase
from kvindexd.rpc import codec
from kvindexd.rpc.fleet_view import FleetView
from kvindexd.store import Store, StoreError, StoreOptions, WorkerRecord
from kvindexd.store.connect import Client as StoreClient
from kvindexd.store.connect import Limits
from kvindexd.store.embedded import EmbeddedServer
from kvindexd.store.keys import META, META_SLOT
from kvindexd.store.url import parse_url, with_credentials
from kvindexd.telemetry.logs import mask_secrets
from kvindexd.v1 import index_pb2 as pb

T = TypeVar("T")
Advance = Callable[[float, float | None], None]

_WITHIN = 5.0
"""Seconds that one operation of the store may take."""


def ask(
    where: Where,
    live: Callable[[Client], T],
    stored: Callable[[Store, Advance], Awaitable[T]],
) -> T:
    """What the daemon answers, or else what the store holds, which is said on standard error.

    Ends the command with status 1 where neither answers.
    """
    if where.redis is not None:
        return _from_store(where.redis, stored)
    try:
        with channel(where.server) as client, progress(f"asking kvindexd at {where.server}"):
            return live(client)
    except grpc.RpcError as error:
        url = _configured(settings(where.config).config, where) if unreachable(error) else ""
        if not url:
            fail(explain(where.server, error))
    store = mask_secrets(url)
    note(f"kvindexd at {where.server} does not answer; this is read from the store {store}")
    return _from_store(url, stored)


def _configured(config: Config, where: Where) -> str:
    """The URL of the store that the daemon asked uses, by its settings; "" where there is none.

    The embedded store of this machine is not the store of whatever server somebody names.
    """
    r = config.redis
    if r.url:
        try:
            return with_credentials(r.url, r.username, r.password())
        except ConfigError as e:
            fail(str(e))
    if where.config is None and where.server != DEFAULT_SERVER:
        return ""
    url = EmbeddedServer(Path(config.index.data_dir)).url
    return url if Path(unquote(urlsplit(url).path)).is_socket() else ""


def _from_store(url: str, stored: Callable[[Store, Advance], Awaitable[T]]) -> T:
    # What the parts that read would log is no part of the answer.
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))

    async def read() -> T:
        with progress("reading the store") as advance:
            async with _opened(url) as store:
                return await stored(store, advance)

    try:
        return asyncio.run(read())
    except ValueError as e:
        raise typer.BadParameter(str(e), param_hint="--redis") from None
    except (StoreError, OSError) as e:
        fail(f"the store cannot be read: {e}")


@asynccontextmanager
async def _opened(url: str) -> AsyncIterator[Store]:
    """A store that is there; opening one that is not would make it."""
    probe = StoreClient(parse_url(url), Limits(1, _WITHIN, _WITHIN, _WITHIN))
    try:
        if not await probe.call("exists", META_SLOT, "EXISTS", META):
            raise StoreError(f"{parse_url(url)}: no kvindexd has written to this store")
    finally:
        await probe.aclose()
    options = StoreOptions(connect_timeout=_WITHIN, timeout=_WITHIN, deadline=2 * _WITHIN)
    async with Store(url, options) as store:
        yield store


# -- workers ----------------------------------------------------------------------------------


async def list_workers(store: Store, request: pb.ListWorkersRequest) -> pb.ListWorkersResponse:
    """ListWorkers as the store alone can answer it."""
    messages = [worker_message(r) for r in await store.list_workers()]
    wanted = [
        m
        for m in sorted(messages, key=lambda m: (m.namespace, m.worker_id, m.dp_rank))
        if request.model in ("", m.model)
        and request.namespace in ("", m.namespace)
        and (request.include_stale or m.state != pb.STALE)
    ]
    return pb.ListWorkersResponse(workers=wanted)


async def get_worker(store: Store, key: WorkerKey) -> pb.GetWorkerResponse:
    """GetWorker as the store alone can answer it. Raises NotRegistered."""
    return pb.GetWorkerResponse(worker=worker_message(await store.get_worker(key)))


def worker_message(record: WorkerRecord) -> pb.Worker:
    """A stored rank as message Worker; its state is what a daemon would make of the record."""
    message = codec.worker_message(registrations.decode(record.registration))
    evidence = record.evidence
    left = record.expires_in_ms
    facts = Facts(
        NEVER if left is None else left / 1000,
        record.owner,
        True,
        record.draining,
        str(evidence.get("state", "")),
        str(evidence.get("detail", "")),
        record.last_seq,
    )
    judged = judge(facts, 0.0)
    message.state = getattr(pb, judged.state)
    message.detail = judged.detail
    message.epoch, message.revision = record.epoch, record.revision
    message.last_seq, message.owner = record.last_seq, record.owner
    last = evidence.get("last_event_ms")
    if isinstance(last, int) and last > 0:
        message.last_event_ms_ago = max(0, codec.unix_ms() - last)
    for name, n in zip(codec.TIER_NAMES, record.tier_blocks, strict=True):
        if n:
            message.blocks[name] = n
    if record.profile is not None:
        profile = msgspec.msgpack.decode(record.profile, type=Profile)
        message.groups.extend(codec.group_message(g) for g in profile.groups)
    for name, n in record.counters.items():
        message.counters[name] = max(0, n)
    if record.heartbeat_ms is not None:
        message.counters["evidence_age_ms"] = record.heartbeat_ms
    return message


# -- blocks -----------------------------------------------------------------------------------


async def get_block(store: Store, name: int, model: str, advance: Advance) -> pb.GetBlockResponse:
    """GetBlock as the store alone can answer it. Raises StoreError where nobody holds it."""
    async with _loaded(store, advance) as fleet:
        return _block(fleet, name, model)


async def walk_chain(
    store: Store, name: int, model: str, advance: Advance
) -> list[pb.GetBlockResponse]:
    """WalkChain as the store alone can answer it. Raises StoreError where nobody holds it."""
    async with _loaded(store, advance) as fleet:
        found: pb.GetBlockResponse | None = _block(fleet, name, model)
        out = []
        while found is not None:
            out.append(found)
            found = fleet.block(found.parent, model) if found.parent else None
        return out


def _block(fleet: FleetView, name: int, model: str) -> pb.GetBlockResponse:
    found = fleet.block(name, model)
    if found is None:
        raise StoreError(f"block {name:016x} is held by no worker")
    return found


@asynccontextmanager
async def _loaded(store: Store, advance: Advance) -> AsyncIterator[FleetView]:
    """The whole index, read as a scorer reads it: blocks are stored by worker, not by name."""
    replica: Replica[Registration] = Replica(store, registrations.decode, decode_records)
    reading = asyncio.create_task(replica.run())
    try:
        while True:
            workers = replica.workers()
            done = sum(w.phase is Phase.FOLLOWED for w in workers)
            advance(done, len(workers) or None)
            if not replica.not_ready() and done == len(workers):
                break
            if reading.done():
                reading.result()
            await asyncio.sleep(0.01)
        yield FleetView(replica, hybrid=True)
    finally:
        reading.cancel()
        await asyncio.wait([reading])
