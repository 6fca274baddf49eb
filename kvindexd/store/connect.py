"""Commands to the server that holds a slot: retried, redirected, re-resolved, within a deadline."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import structlog
from redis.exceptions import AskError, MovedError, NoScriptError, ResponseError

from kvindexd.store.errors import StoreError, StoreUnavailable
from kvindexd.store.pool import Connector, Link, Pool, pack
from kvindexd.store.replies import (
    LATER,
    NOT_MASTER,
    has_code,
    raise_if_denied,
    raise_reply,
    redirection,
)
from kvindexd.store.scripts import Script
from kvindexd.store.topology import NETWORK_ERRORS, topology_for
from kvindexd.store.url import Endpoint, StoreURL

log = structlog.get_logger(__name__)

Observer = Callable[[str, float, str], None]
"""Told of every command: operation, seconds, and "" or the name of what went wrong."""

_BACKOFF, _BACKOFF_CAP = 0.02, 1.0


class Limits(NamedTuple):
    """Bounds on what one process asks of the servers; times in seconds.

    `deadline` covers one operation with its retries, and must outlast a failover to hide it.
    """

    connections: int = 16
    connect_timeout: float = 2.0
    timeout: float = 3.0
    deadline: float = 15.0


class Client:
    """Runs commands by slot. Safe for any number of concurrent callers."""

    def __init__(
        self, url: StoreURL, limits: Limits | None = None, observe: Observer | None = None
    ) -> None:
        self.url = url
        self.limits = limits or Limits()
        self._observe = observe or (lambda op, seconds, error: None)
        timeout = self.limits.connect_timeout
        self._connector = Connector(url, connect_timeout=timeout, observe=self._observe)
        self._topology = topology_for(url, self._connector, self.limits.connect_timeout)
        self._pools: dict[Endpoint, Pool] = {}
        self._unavailable = False

    async def aclose(self) -> None:
        """Close every connection; those in use close when they are given back."""
        for pool in self._pools.values():
            await pool.reset()

    async def call(self, op: str, slot: int, *args: str | bytes | int | float) -> Any:
        """One command and its reply. Raises StoreError, in the kinds of store/errors.py."""
        return (await self.call_many(op, slot, [args]))[0]

    async def call_many(
        self, op: str, slot: int, commands: Sequence[tuple[str | bytes | int | float, ...]]
    ) -> list[Any]:
        """Several commands in one round trip; the first error reply among them is raised.

        All are repeated after a lost reply: pass only commands for which that is harmless.
        """
        packed = b"".join(pack(*c) for c in commands)
        return await self._run(op, slot, packed, len(commands), None)

    async def eval(
        self, op: str, slot: int, script: Script, keys: Sequence[bytes], args: Sequence[Any]
    ) -> Any:
        """Run a script by its hash, or by its text where the server does not know it."""
        packed = pack("EVALSHA", script.sha, len(keys), *keys, *args)

        def by_text() -> bytes:
            return pack("EVAL", script.text, len(keys), *keys, *args)

        return (await self._run(op, slot, packed, 1, by_text))[0]

    async def _run(
        self, op: str, slot: int, packed: bytes, replies: int, by_text: Callable[[], bytes] | None
    ) -> list[Any]:
        start = time.perf_counter()
        error = ""
        attempt = _Attempt(self, op, slot, packed, replies, by_text)
        try:
            async with asyncio.timeout(self.limits.deadline):
                return await attempt.until_done()
        except TimeoutError:
            error = "unavailable"
            raise self._gave_up(op, attempt.last) from None
        except StoreError as e:
            error = type(e).__name__
            raise
        except asyncio.CancelledError:
            error = "cancelled"
            raise
        finally:
            self._observe(op, time.perf_counter() - start, error)

    def _gave_up(self, op: str, last: BaseException | None) -> StoreUnavailable:
        why = f"{last or 'all connections were busy'}"
        if not self._unavailable:
            self._unavailable = True
            log.error(
                "store_unavailable",
                url=str(self.url),
                op=op,
                reason=why,
                cost="nothing is written; answers go on from memory and go stale",
            )
        return StoreUnavailable(
            f"{self.url}: no answer to {op!r} within {self.limits.deadline:g} s; last: {why}"
        )

    def answered(self) -> None:
        """Called for every command that was answered."""
        if self._unavailable:
            self._unavailable = False
            log.info("store_available", url=str(self.url))

    # -- servers ------------------------------------------------------------------------------

    async def endpoint(self, slot: int) -> Endpoint:
        """The server that holds a slot now."""
        return await self._topology.endpoint(slot)

    def pool(self, endpoint: Endpoint) -> Pool:
        """The pool of one server."""
        pool = self._pools.get(endpoint)
        if pool is None:
            pool = Pool(self._connector, endpoint, self.limits.connections)
            self._pools[endpoint] = pool
        return pool

    async def dedicated(self, slot: int) -> Link:
        """A connection of the caller's own to the server of a slot, for commands that block.

        Raises OSError, RedisError, TimeoutError or StoreError.
        """
        return await self._connector.open(await self.endpoint(slot))

    async def suspect(self, endpoint: Endpoint) -> None:
        """Use no old connection to `endpoint` again, and look up anew where its slots are."""
        await self._topology.suspect(endpoint)
        pool = self._pools.get(endpoint)
        if pool is not None:
            await pool.reset()

    def moved(self, slot: int, to: Endpoint) -> None:
        """A redirection said where a slot is."""
        self._topology.moved(slot, to)


class _Attempt:
    """The retries of one operation."""

    def __init__(
        self,
        client: Client,
        op: str,
        slot: int,
        packed: bytes,
        replies: int,
        by_text: Callable[[], bytes] | None,
    ) -> None:
        self.client, self.op, self.slot = client, op, slot
        self.packed, self.replies, self.by_text = packed, replies, by_text
        self.last: BaseException | None = None
        self.failures = 0
        self.ask: Endpoint | None = None

    async def until_done(self) -> list[Any]:
        while True:
            try:
                replies = await self._once()
            except StoreUnavailable as e:
                self.last = e
                await self._pause()
                continue
            except NETWORK_ERRORS as e:
                raise_if_denied(e, self.client.url)
                self.last = e
                await self._pause()
                continue
            error = next((r for r in replies if isinstance(r, ResponseError)), None)
            if error is None:
                self.client.answered()
                return replies
            await self._judge(error)

    async def _once(self) -> list[Any]:
        """One try on the server of the slot; a network failure makes that server suspect."""
        ask, self.ask = self.ask, None
        self.endpoint = ask or await self.client.endpoint(self.slot)
        pool = self.client.pool(self.endpoint)
        try:
            link = await pool.borrow()
            try:
                packed = pack("ASKING") + self.packed if ask else self.packed
                count = self.replies + (ask is not None)
                replies = await link.call(packed, count, self.client.limits.timeout)
            finally:
                await pool.give_back(link)
        except NETWORK_ERRORS as e:
            if isinstance(e, TimeoutError):
                e = TimeoutError(f"no answer from {self.endpoint}")
            await self.client.suspect(self.endpoint)
            raise e from None
        return replies[1:] if ask else replies

    async def _judge(self, error: ResponseError) -> None:
        """Return to try again, or raise what the error reply means."""
        self.last = error
        if isinstance(error, NoScriptError) and self.by_text is not None:
            self.packed = self.by_text()
        elif isinstance(error, MovedError):
            self.client.moved(self.slot, redirection(error, self.endpoint))
            await self._pause_unless_first()
        elif isinstance(error, AskError):
            self.ask = redirection(error, self.endpoint)
            await self._pause_unless_first()
        elif has_code(error, NOT_MASTER):
            await self.client.suspect(self.endpoint)
            await self._pause()
        elif has_code(error, LATER):
            if has_code(error, ("CLUSTERDOWN",)):
                await self.client.suspect(self.endpoint)
            await self._pause()
        else:
            raise_reply(error, self.op, self.client.url)

    async def _pause_unless_first(self) -> None:
        # The first redirection is followed at once; two nodes that point at each other are not.
        if self.failures:
            await self._pause()
        self.failures += 1

    async def _pause(self) -> None:
        """Exponential backoff with full jitter, so that a fleet does not return in step."""
        limit = min(_BACKOFF_CAP, _BACKOFF * 2**self.failures)
        self.failures += 1
        await asyncio.sleep(random.uniform(limit / 4, limit))  # noqa: S311
