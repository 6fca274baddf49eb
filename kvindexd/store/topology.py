"""Which server holds a slot: fixed, or as Sentinel or the cluster says at the moment."""

from __future__ import annotations

import asyncio
import time
from typing import Any, Protocol

import structlog
from redis.exceptions import RedisError, ResponseError

from kvindexd.store.errors import StoreDenied, StoreError, StoreUnavailable, UnfitServer
from kvindexd.store.pool import Connector, pack
from kvindexd.store.replies import raise_if_denied
from kvindexd.store.url import Endpoint, StoreURL

log = structlog.get_logger(__name__)

_RESOLVE_TTL = 2.0
"""Seconds for which a Sentinel's answer is believed without asking again. A partitioned old master
goes on answering its clients: only asking reveals that it was deposed."""

NETWORK_ERRORS = (OSError, RedisError, TimeoutError)


class Topology(Protocol):
    """Maps slots to servers."""

    async def endpoint(self, slot: int) -> Endpoint:
        """The server that takes writes to `slot` now. Raises StoreUnavailable."""

    async def suspect(self, endpoint: Endpoint) -> None:
        """`endpoint` failed, or said that it is no master: ask anew next time."""

    def moved(self, slot: int, to: Endpoint) -> None:
        """A server said that `slot` lives at `to`."""


class Fixed:
    """One server, whatever happens; its name is resolved with every new connection."""

    def __init__(self, url: StoreURL) -> None:
        self._endpoint = url.endpoints[0]

    async def endpoint(self, slot: int) -> Endpoint:
        return self._endpoint

    async def suspect(self, endpoint: Endpoint) -> None:
        return

    def moved(self, slot: int, to: Endpoint) -> None:
        raise UnfitServer(
            f"{self._endpoint} is a node of a cluster: write the URL as redis+cluster://"
        )


class Sentinel:
    """The master of one service, as a sentinel names it and the server itself confirms."""

    def __init__(self, url: StoreURL, connector: Connector, connect_timeout: float) -> None:
        self._url = url
        self._sentinels = list(url.endpoints)
        self._service = url.service
        self._servers = connector
        self._timeout = connect_timeout
        own = url._replace(
            username=url.option("sentinel_username"),
            password=url.option("sentinel_password"),
            db=0,
        )
        self._connector = Connector(own, connect_timeout=connect_timeout)
        self._master: Endpoint | None = None
        self._valid_until = 0.0
        self._lock = asyncio.Lock()

    async def endpoint(self, slot: int) -> Endpoint:
        if self._master is not None and time.monotonic() < self._valid_until:
            return self._master
        async with self._lock:
            if self._master is not None and time.monotonic() < self._valid_until:
                return self._master
            return await self._resolve()

    async def _resolve(self) -> Endpoint:
        problems = []
        unfit: dict[Endpoint, str] = {}
        for sentinel in list(self._sentinels):
            try:
                master = await self._ask(sentinel)
                if master not in unfit:
                    # Not asked twice: an unreachable one costs a timeout.
                    unfit[master] = await self._why_unfit(master)
            except StoreDenied:
                raise
            except (*NETWORK_ERRORS, StoreError) as e:
                problems.append(f"{sentinel}: {e or type(e).__name__}")
                continue
            if unfit[master]:
                problems.append(f"{sentinel}: names {master}, {unfit[master]}")
                continue
            # The one that answered is asked first next time.
            self._sentinels.remove(sentinel)
            self._sentinels.insert(0, sentinel)
            if master != self._master:
                log.info("store_master", service=self._service, master=str(master))
            self._master, self._valid_until = master, time.monotonic() + _RESOLVE_TTL
            return master
        if self._master is not None:
            # Sentinels away, or a failover under way; the known master may still do.
            log.warning(
                "store_sentinels_unusable",
                problems=problems,
                master=str(self._master),
                action="staying with the known master",
                fix="see to the sentinels: a failover goes unnoticed",
            )
            self._valid_until = time.monotonic() + _RESOLVE_TTL
            return self._master
        raise StoreUnavailable(
            f"no master of {self._service!r} to be had from the sentinels: " + "; ".join(problems)
        )

    async def _ask(self, sentinel: Endpoint) -> Endpoint:
        request = pack("SENTINEL", "GET-MASTER-ADDR-BY-NAME", self._service)
        answer = await _one_reply(self._connector, sentinel, request, self._timeout)
        if not answer:
            raise StoreUnavailable(f"does not know a service {self._service!r}")
        return Endpoint(answer[0].decode(), int(answer[1]))

    async def _why_unfit(self, master: Endpoint) -> str:
        """Nothing, or why not to use it. Sentinels name a dead master until they agree on
        another, and the old one for a while after it came back as a replica."""
        try:
            role = await _one_reply(self._servers, master, pack("ROLE"), self._timeout)
        except NETWORK_ERRORS as e:
            raise_if_denied(e, self._url)
            return f"which does not answer ({e or type(e).__name__})"
        return "" if role[0] == b"master" else f"which is a {role[0].decode()}"

    async def suspect(self, endpoint: Endpoint) -> None:
        # Still known: if no sentinel answers, it may be all that there is.
        if endpoint == self._master:
            self._valid_until = 0.0

    def moved(self, slot: int, to: Endpoint) -> None:
        raise UnfitServer("the Sentinel's master is a node of a cluster: use redis+cluster://")


class Cluster:
    """Slots to masters, learned from any node, corrected by redirections."""

    def __init__(self, url: StoreURL, connector: Connector, connect_timeout: float) -> None:
        self._seeds = url.endpoints
        self._connector = connector
        self._timeout = connect_timeout
        self._ranges: list[tuple[int, int, Endpoint]] = []
        self._known: dict[Endpoint, None] = {}
        self._moved: dict[int, Endpoint] = {}
        self._stale = True
        self._lock = asyncio.Lock()

    async def endpoint(self, slot: int) -> Endpoint:
        if self._stale:
            async with self._lock:
                if self._stale:
                    await self._refresh()
        found = self._moved.get(slot) or self._look_up(slot)
        if found is None:
            self._stale = True
            raise StoreUnavailable(f"no node of the cluster serves slot {slot}")
        return found

    def _look_up(self, slot: int) -> Endpoint | None:
        return next((e for low, high, e in self._ranges if low <= slot <= high), None)

    async def _refresh(self) -> None:
        problems = []
        for node in [*self._known, *(s for s in self._seeds if s not in self._known)]:
            try:
                rows = await _one_reply(
                    self._connector, node, pack("CLUSTER", "SLOTS"), self._timeout
                )
            except ResponseError as e:
                raise UnfitServer(f"{node} is no node of a cluster: {e}") from None
            except NETWORK_ERRORS as e:
                problems.append(f"{node}: {e or type(e).__name__}")
                continue
            if not rows:
                problems.append(f"{node}: knows no slots")
                continue
            self._ranges = [(r[0], r[1], _node(r[2], node)) for r in rows]
            self._known = {_node(n, node): None for r in rows for n in r[2:]}
            self._moved.clear()
            self._stale = False
            return
        raise StoreUnavailable("no node of the cluster answers: " + "; ".join(problems))

    async def suspect(self, endpoint: Endpoint) -> None:
        self._stale = True
        # Ask the others first: the failed one costs a timeout.
        if endpoint in self._known:
            del self._known[endpoint]
            self._known[endpoint] = None

    def moved(self, slot: int, to: Endpoint) -> None:
        self._moved[slot] = to
        self._known.setdefault(to)


def _node(row: list[Any], asked: Endpoint) -> Endpoint:
    # A node that does not know its own address yet leaves it empty: it is the one we asked.
    host = (row[0] or b"").decode()
    return Endpoint(host if host not in ("", "?") else asked.host, row[1])


async def _one_reply(connector: Connector, endpoint: Endpoint, packed: bytes, within: float) -> Any:
    link = await connector.open(endpoint)
    try:
        (reply,) = await link.call(packed, 1, within)
    finally:
        await link.drop()
    if isinstance(reply, Exception):
        raise reply
    return reply


def topology_for(url: StoreURL, connector: Connector, connect_timeout: float) -> Topology:
    """The topology that a URL's scheme asks for."""
    if url.mode == "sentinel":
        return Sentinel(url, connector, connect_timeout)
    if url.mode == "cluster":
        return Cluster(url, connector, connect_timeout)
    return Fixed(url)
