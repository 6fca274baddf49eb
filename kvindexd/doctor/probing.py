"""What every rank's engine is asked: each address and socket once, many at a time."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from kvindexd.config import Config
from kvindexd.doctor import probe_net, probe_redis, probe_zmq
from kvindexd.doctor.facts import Dial, Missing, Rank, Stored, host_of, is_local
from kvindexd.ingest.sockets import new_context
from kvindexd.v1 import index_pb2 as pb

T = TypeVar("T")


@dataclass
class Ask:
    """What to gather. `needs`: names of Facts that the chosen checks need. `within`: seconds for
    each probe. `config`: Missing with `config_problem` where the settings cannot be used."""

    server: str
    metrics: str
    config: Config | Missing
    config_problem: str
    needs: Collection[str]
    wait: float
    within: float
    outage: float
    replay: bool = True
    envoy: Sequence[Path] = ()
    candidates: Sequence[str] = ()


class Probes:
    """What is asked of the engines, each address and socket once."""

    def __init__(self, ask: Ask, redis: probe_redis.Look) -> None:
        self._ask = ask
        self._redis = redis
        self._context = new_context()
        self._once: dict[tuple[str, str], asyncio.Task[Any]] = {}
        self._dials = asyncio.Semaphore(256)
        self._replays = asyncio.Semaphore(32)

    def close(self) -> None:
        self._context.destroy(linger=0)

    async def rank(self, w: pb.Worker) -> Rank:
        """Everything about one rank but its second look."""
        ask = self._ask
        bound = Missing("kvindexd binds this endpoint: nobody else can listen there")
        events_away = bound if w.bind_events else _away(w.kv_events_endpoint, w.owner)
        replay_away = self._no_replay(w)
        address_away = _away(w.address, w.owner)
        events, replay_dial, address, heard, replay, engine = await asyncio.gather(
            _unless(events_away, lambda: self._dial(w.kv_events_endpoint)),
            _unless(_away(w.replay_endpoint, w.owner), lambda: self._dial(w.replay_endpoint)),
            _unless(address_away, lambda: self._dial(w.address)),
            _unless(events_away, lambda: self._listen(w)),
            _unless(replay_away, lambda: self._replay(w)),
            _unless(
                address_away,
                lambda: self._shared(
                    "engine", w.address, lambda: probe_net.engine(w.address, ask.within)
                ),
            ),
        )
        return Rank(
            before=w,
            after=w,
            owners=(),
            events=events,
            replay_dial=replay_dial,
            address=address,
            heard=heard,
            replay=replay,
            engine=engine,
            stored=self._stored(w),
        )

    def _no_replay(self, w: pb.Worker) -> Missing | None:
        if not w.replay_endpoint:
            return Missing("no replay_endpoint")
        if not self._ask.replay:
            return Missing("replay sockets are not asked: --no-replay")
        return _away(w.replay_endpoint, w.owner)

    async def _shared(self, kind: str, name: str, start: Callable[[], Awaitable[T]]) -> T | Missing:
        async def guarded() -> T | Missing:
            try:
                return await start()
            except Exception as e:  # a fault of a probe costs that probe, and is told
                return Missing(f"the probe failed: {e!r}")

        task = self._once.get((kind, name))
        if task is None:
            task = self._once[kind, name] = asyncio.create_task(guarded())
        result: T | Missing = await task
        return result

    async def _dial(self, target: str) -> Any:
        async def run() -> Any:
            async with self._dials:
                return await probe_net.dial(target, self._ask.within)

        return await self._shared("dial", target, run)

    async def _listen(self, w: pb.Worker) -> Any:
        if not self._ask.wait:
            return Missing("not listened: give --wait SECONDS")
        topic, endpoint = w.topic, w.kv_events_endpoint
        return await self._shared(
            f"listen {topic}",
            endpoint,
            lambda: probe_zmq.listen(endpoint, topic, self._ask.wait, self._context),
        )

    async def _replay(self, w: pb.Worker) -> Any:
        ask = self._ask
        dialled = await self._dial(w.replay_endpoint)
        if isinstance(dialled, Dial) and dialled.problem:
            return Missing(f"{dialled.target}: {dialled.problem}")
        stored = self._stored(w)
        known = w.last_seq if isinstance(stored, Missing) else stored.last_seq

        async def run() -> Any:
            async with self._replays:
                return await probe_zmq.replay(
                    w.replay_endpoint, known, bool(ask.wait), ask.within, self._context
                )

        return await self._shared(f"replay {known}", w.replay_endpoint, run)

    def _stored(self, w: pb.Worker) -> Stored | Missing:
        if isinstance(self._redis.redis, Missing):
            return self._redis.redis
        if isinstance(self._redis.redis.ranks, Missing):
            return self._redis.redis.ranks
        name = probe_redis.key_name(w.namespace, w.worker_id, w.dp_rank)
        return self._redis.stored.get(name, Missing("not registered in the store that was asked"))


def _away(endpoint: str, owner: str) -> Missing | None:
    """Why an endpoint cannot be probed from here, although its ingester may well reach it."""
    if not endpoint:
        return Missing("no endpoint is registered")
    host = host_of(owner)
    if owner and is_local(endpoint) and host != socket.gethostname():
        return Missing(f"{endpoint} is on {host} itself: run this command there too")
    return None


async def _unless(why_not: Missing | None, start: Callable[[], Awaitable[T]]) -> T | Missing:
    return await start() if why_not is None else why_not
