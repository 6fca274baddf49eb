"""Gathers the facts: everything at once, each part within its time, none of it fatal."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import grpc
from grpc_health.v1 import health_pb2

from kvindexd.cli.client import Client, explain
from kvindexd.config import parse_listen
from kvindexd.doctor import probe_host, probe_net, probe_redis
from kvindexd.doctor.facts import (
    EnvoyFile,
    Facts,
    Missing,
    Pages,
    Rank,
    Reach,
    Samples,
    Server,
    TokenizerTry,
    is_local,
)
from kvindexd.doctor.probing import Ask, Probes
from kvindexd.store.embedded import EmbeddedServer
from kvindexd.store.url import parse_url
from kvindexd.v1 import index_pb2 as pb

T = TypeVar("T")
_SAMPLE = 0.2
"""Seconds between two looks at who holds the leases."""
_NOT_ASKED = Missing("not asked for: left out by --only")

Advance = Callable[[float, float | None], None]


@dataclass
class _Look:
    """One look at the server."""

    workers: dict[tuple[str, str, int], pb.Worker] = field(default_factory=dict)
    stats: pb.IndexStatsResponse = field(default_factory=pb.IndexStatsResponse)
    samples: Samples | Missing = _NOT_ASKED


async def gather(ask: Ask, client: Client, advance: Advance) -> Facts:
    """All facts that `ask.needs` names. `advance(done, total)` is told of the time that passes."""
    return await _Gathering(ask, client, advance).run()


class _Gathering:
    """One run. gRPC calls go through threads: the stubs, and their credentials, are the CLI's."""

    def __init__(self, ask: Ask, client: Client, advance: Advance) -> None:
        self._ask = ask
        self._client = client
        self._advance = advance
        self._owners: dict[tuple[str, str, int], list[str]] = {}
        self._lags: list[int] = []
        self._sampling = True

    async def run(self) -> Facts:
        ask = self._ask
        reach, server, before = await self._first()
        metrics_at = self._metrics_address()
        metrics_reach: Reach | Missing = _why(metrics_at)
        ready = ""
        if not isinstance(metrics_at, Missing) and self._wants("metrics", "metrics_reach"):
            before.samples = await probe_net.samples(metrics_at, ask.within)
            ready = await probe_net.ready(metrics_at, ask.within)
            bad = before.samples.why if isinstance(before.samples, Missing) else ""
            asks = "401" in bad or "403" in bad  # it answers, though not to us
            metrics_reach = Reach(metrics_at, "" if asks else bad)
        redis = await self._redis()
        ranks, after, owners = await self._ranks(before, server, redis)
        if not isinstance(metrics_at, Missing) and not isinstance(before.samples, Missing):
            after.samples = await probe_net.samples(metrics_at, ask.within)
            ready = ready and await probe_net.ready(metrics_at, ask.within)
        host = await asyncio.to_thread(probe_host.host, owners)
        return Facts(
            wait=ask.wait,
            outage=ask.outage,
            reach=reach,
            config=ask.config,
            config_problem=ask.config_problem,
            host=host,
            server=server,
            metrics_reach=metrics_reach,
            metrics=_pages(before.samples, after.samples, ready, metrics_reach),
            ranks=ranks,
            redis_reach=redis.reach if redis.reach.target else _why(redis.redis),
            redis=redis.redis,
            tokenizers=await self._tokenizers(after),
            envoy=await self._envoy(),
            candidates=list(ask.candidates) or Missing("no names given: --candidate NAME"),
        )

    def _wants(self, *names: str) -> bool:
        return any(n in self._ask.needs for n in names)

    # -- the server ---------------------------------------------------------------------------

    async def _call(self, method: Callable[..., Any], request: Any) -> Any:
        return await asyncio.to_thread(method, request, timeout=self._ask.within)

    async def _first(self) -> tuple[Reach, Server | Missing, _Look]:
        ask, admin = self._ask, self._client.admin
        if not self._wants("server", "ranks", "reach"):
            return Reach(ask.server), _NOT_ASKED, _Look()
        try:
            look = await self._look()
        except grpc.RpcError as e:
            why = explain(ask.server, e)
            return Reach(ask.server, why), Missing(f"the server does not answer: {why}"), _Look()
        audit: Sequence[pb.WorkerAudit] | Missing
        try:
            audit = (await self._call(admin.Audit, pb.AuditRequest())).workers
        except grpc.RpcError as e:  # an older server has none
            audit = Missing(f"Audit: {explain(ask.server, e)}")
        version = look.stats.server_version
        server = Server(ask.server, await self._health(), version, self._lags, audit)
        return Reach(ask.server), server, look

    async def _health(self) -> str:
        try:
            request = health_pb2.HealthCheckRequest(service="readiness")
            answer = await self._call(self._client.health.Check, request)
        except grpc.RpcError as e:
            return explain(self._ask.server, e)
        return str(health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status))

    async def _look(self) -> _Look:
        request = pb.ListWorkersRequest(include_stale=True)
        answer = await self._call(self._client.admin.ListWorkers, request)
        stats = await self._call(self._client.admin.IndexStats, pb.IndexStatsRequest())
        self._lags.append(stats.replica_lag)
        look = _Look({_key(w): w for w in answer.workers}, stats)
        for key, worker in look.workers.items():
            seen = self._owners.setdefault(key, [])
            if not seen or seen[-1] != worker.owner:
                seen.append(worker.owner)
        return look

    async def _keep_looking(self) -> None:
        """Who holds the leases, again and again, until told to stop."""
        while self._sampling:
            with contextlib.suppress(grpc.RpcError):
                await self._look()
            await asyncio.sleep(_SAMPLE)

    def _metrics_address(self) -> str | Missing:
        ask = self._ask
        if ask.metrics:
            return ask.metrics
        if isinstance(ask.config, Missing):
            return ask.config
        listen = ask.config.metrics.listen
        if not listen:
            return Missing('metrics.listen is "": off')
        if ask.config.tls.cert_file and "metrics" in ask.config.tls.listeners:
            return Missing("the metrics port speaks TLS, which this command does not")
        if not is_local(ask.server):
            return Missing("the server is on another host: name its metrics by --metrics HOST:PORT")
        if parse_listen(listen)[1] == 0:
            return Missing("metrics.listen has port 0: name the bound one by --metrics HOST:PORT")
        return listen

    # -- the store ----------------------------------------------------------------------------

    async def _redis(self) -> probe_redis.Look:
        ask = self._ask
        if not self._wants("redis", "redis_reach", "ranks"):
            return probe_redis.Look(Reach(""), _NOT_ASKED, {})
        if isinstance(ask.config, Missing):
            return probe_redis.Look(Reach(""), ask.config, {})
        embedded = ""
        if not ask.config.redis.url:
            own = EmbeddedServer(Path(ask.config.index.data_dir))
            embedded = own.url
            if not await asyncio.to_thread(Path(parse_url(embedded).endpoints[0].path).exists):
                why = (
                    "redis.url is not set (KVINDEXD_REDIS__URL), and no embedded server runs in "
                    f"{ask.config.index.data_dir}"
                )
                return probe_redis.Look(Reach(""), Missing(why), {})
        return await probe_redis.look(ask.config, embedded, ask.within)

    # -- ranks --------------------------------------------------------------------------------

    async def _ranks(
        self, before: _Look, server: Server | Missing, redis: probe_redis.Look
    ) -> tuple[list[Rank] | Missing, _Look, list[str]]:
        if isinstance(server, Missing):
            if not isinstance(before.samples, Missing):
                await asyncio.sleep(self._ask.wait)
            return Missing(server.why), _Look(), []
        probes = Probes(self._ask, redis)
        looking = asyncio.create_task(self._keep_looking())
        try:
            found = await self._probed(before, probes)
        finally:
            self._sampling = False
            await looking
            probes.close()
        try:
            after = await self._look()
        except grpc.RpcError as e:
            return Missing(explain(self._ask.server, e)), _Look(), []
        if not self._wants("ranks"):
            return _NOT_ASKED, after, [w.owner for w in after.workers.values()]
        ranks = []
        for key, rank in found.items():
            if key in after.workers:  # else it was deregistered meanwhile
                rank.after, rank.owners = after.workers[key], self._owners[key]
                ranks.append(rank)
        return ranks, after, [w.owner for w in after.workers.values()]

    async def _probed(self, before: _Look, probes: Probes) -> dict[tuple[str, str, int], Rank]:
        async with asyncio.TaskGroup() as tasks:
            ticking = tasks.create_task(self._tick())
            wanted = before.workers if self._wants("ranks") else {}
            asked = {k: tasks.create_task(probes.rank(w)) for k, w in wanted.items()}
            await asyncio.sleep(self._ask.wait)
            if asked:
                await asyncio.wait(asked.values())
            ticking.cancel()
        return {key: task.result() for key, task in asked.items()}

    async def _tick(self) -> None:
        began = time.monotonic()
        total = max(self._ask.wait, 0.1)
        while True:
            self._advance(min(total, time.monotonic() - began), total)
            await asyncio.sleep(0.1)

    # -- the rest -----------------------------------------------------------------------------

    async def _tokenizers(self, after: _Look) -> list[TokenizerTry] | Missing:
        ask = self._ask
        if not self._wants("tokenizers"):
            return _NOT_ASKED
        if isinstance(ask.config, Missing):
            return ask.config
        if not ask.config.tokens.models:
            return Missing("tokens.models is empty: gateways send token ids")

        def worker_of(model: str) -> str | None:
            live = (w for w in after.workers.values() if w.state == pb.LIVE and w.model == model)
            return next((w.address for w in live), None)

        return await probe_host.tokenizers(ask.config, worker_of, ask.within)

    async def _envoy(self) -> list[EnvoyFile] | Missing:
        files: list[EnvoyFile] = []
        for path in self._ask.envoy:
            found = await asyncio.to_thread(probe_host.envoy_file, path)
            if isinstance(found, Missing):
                return found
            files.append(found)
        return files or Missing("no Envoy configuration given: --envoy FILE")


def _key(w: pb.Worker) -> tuple[str, str, int]:
    return w.namespace, w.worker_id, w.dp_rank


def _why(fact: object) -> Missing:
    return fact if isinstance(fact, Missing) else _NOT_ASKED


def _pages(
    before: Samples | Missing, after: Samples | Missing, ready: str, reach: Reach | Missing
) -> Pages | Missing:
    if isinstance(reach, Missing):
        return reach
    if isinstance(before, Missing):
        return before
    return after if isinstance(after, Missing) else Pages(before, after, ready)
