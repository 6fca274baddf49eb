"""Connections to one server: made by redis-py, lent to one command at a time, waited for when all
are out, and never used again after a command that was not answered in full."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import hiredis
from redis.asyncio import Connection, SSLConnection, UnixDomainSocketConnection
from redis.exceptions import ResponseError

from kvindexd.store.url import Endpoint, StoreURL

_TLS_AGE = 60.0
"""Seconds for which connections share one TLS context."""


class Link:
    """One connection. Commands on it are strictly one at a time, by its borrower."""

    __slots__ = ("_conn", "alive", "endpoint", "generation")

    def __init__(self, conn: Any, endpoint: Endpoint, generation: int = 0) -> None:
        self._conn = conn
        self.endpoint = endpoint
        self.generation = generation
        self.alive = True

    async def call(self, packed: bytes, replies: int, within: float) -> list[Any]:
        """Send packed commands and read as many replies; errors among them are returned.

        Raises OSError, redis.exceptions.RedisError or TimeoutError (`within` seconds). After
        any exception, a cancellation too, the connection is dead: a late reply on it would
        otherwise be taken for the answer to the next command.
        """
        self.alive = False
        try:
            async with asyncio.timeout(within):
                await self._conn.send_packed_command(packed, check_health=False)
                out = [await self._read() for _ in range(replies)]
        except BaseException:
            await self.drop()
            raise
        self.alive = True
        return out

    async def _read(self) -> Any:
        try:
            return await self._conn.read_response(disable_decoding=True)
        except ResponseError as e:
            return e

    async def drop(self) -> None:
        """Close at once, without waiting for the peer."""
        self.alive = False
        await self._conn.disconnect(nowait=True)


def pack(*args: str | bytes | int | float) -> bytes:
    """One command in wire form."""
    packed: bytes = hiredis.pack_command(args)  # type: ignore[arg-type]  # takes numbers too
    return packed


class Connector:
    """Opens connections with one URL's credentials and TLS settings."""

    def __init__(
        self,
        url: StoreURL,
        *,
        connect_timeout: float,
        name: str = "kvindexd",
        observe: Callable[[str, float, str], None] = lambda op, seconds, error: None,
    ) -> None:
        """`observe`: told of each attempt, as operation "connect"; see connect.Observer."""
        self._timeout = connect_timeout
        self._observe = observe
        self._auth: dict[str, Any] = {"username": url.username, "password": url.password}
        self._db = url.db
        self._common: dict[str, Any] = {"client_name": name, "protocol": 2, "socket_timeout": None}
        self._tls = _tls_options(url) if url.tls else None
        self._context: Any = None  # of TLS, shared: making one takes tens of milliseconds
        self._context_until = 0.0

    async def open(self, endpoint: Endpoint, *, generation: int = 0) -> Link:
        """A new authenticated connection; raises as `Link.call` does."""
        kwargs = {**self._common, **self._auth, "db": self._db}
        # Our own timeout covers connect and handshake; redis-py's covers the socket only.
        kwargs["socket_connect_timeout"] = self._timeout
        make: Callable[..., Any]
        if endpoint.path:
            make = UnixDomainSocketConnection
            kwargs["path"] = endpoint.path
        else:
            make = Connection if self._tls is None else SSLConnection
            kwargs |= {"host": endpoint.host, "port": endpoint.port, **(self._tls or {})}
        conn: Any = make(**kwargs)
        start, error = time.perf_counter(), ""
        try:
            async with asyncio.timeout(self._timeout):
                if make is SSLConnection:
                    conn.ssl_context = await self._tls_context(conn.ssl_context)
                await conn.connect()
        except BaseException as e:
            error = "cancelled" if isinstance(e, asyncio.CancelledError) else type(e).__name__
            await conn.disconnect(nowait=True)
            raise
        finally:
            self._observe("connect", time.perf_counter() - start, error)
        return Link(conn, endpoint, generation)

    async def _tls_context(self, fresh: Any) -> Any:
        """What redis-py makes a context with: `fresh`, once in a while, else the last one. Files
        are read anew by then, since certificates are renewed."""
        if self._context is None or time.monotonic() >= self._context_until:
            await asyncio.to_thread(fresh.get)
            self._context, self._context_until = fresh, time.monotonic() + _TLS_AGE
        return self._context


def _tls_options(url: StoreURL) -> dict[str, Any]:
    options: dict[str, Any] = {k: v for k, v in url.options if k.startswith("ssl_")}
    check = options.pop("ssl_check_hostname", "true").lower()
    # Without a certificate there is no name to check; older versions of redis-py refuse to try.
    unchecked = options.get("ssl_cert_reqs") == "none" or check in ("false", "no", "0", "off")
    options["ssl_check_hostname"] = not unchecked
    return options


class Pool:
    """At most `size` connections to one server; further borrowers wait their turn."""

    def __init__(self, connector: Connector, endpoint: Endpoint, size: int) -> None:
        self._connector = connector
        self.endpoint = endpoint
        self._free: list[Link] = []
        self._turns = asyncio.Semaphore(size)
        self._generation = 0

    async def borrow(self) -> Link:
        """A connection, idle or new. Give it back with `give_back`, whatever happened to it."""
        await self._turns.acquire()
        try:
            if self._free:
                return self._free.pop()
            return await self._connector.open(self.endpoint, generation=self._generation)
        except BaseException:
            self._turns.release()
            raise

    async def give_back(self, link: Link) -> None:
        """Return a borrowed connection; a dead or outdated one is closed."""
        self._turns.release()
        if link.alive and link.generation == self._generation:
            self._free.append(link)
        elif link.alive:
            await link.drop()

    async def reset(self) -> None:
        """Close idle connections now and the lent ones when they return: the server behind them
        is gone, or is not the master any more."""
        self._generation += 1
        free, self._free = self._free, []
        for link in free:
            await link.drop()
