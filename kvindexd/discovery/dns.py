"""Workers from DNS: a name's addresses, or an SRV record's targets, asked again and again."""

from __future__ import annotations

import asyncio
import importlib.util
import random
import socket
import time
from collections.abc import Iterable
from typing import Any, Protocol

from kvindexd.config import ConfigError, parse_listen
from kvindexd.config.discovering import DnsSource
from kvindexd.discovery.addresses import Address, Addresses
from kvindexd.discovery.source import Report


class LookupFailed(Exception):
    """No answer, or none with an address; the text says which."""


class Resolver(Protocol):
    """Looks a name up. Callers set the time limit, by cancelling."""

    async def look_up(self, host: str) -> Iterable[Address]:
        """All addresses. Raises LookupFailed."""
        ...


class DnsAddresses:
    """One name. A look-up that fails, and one without any address, keep what was found last: a
    broken DNS must not empty a fleet."""

    def __init__(self, name: str, settings: DnsSource, resolver: Resolver | None = None) -> None:
        """Raises ConfigError when what the settings need is not installed."""
        self.name = name
        self._settings = settings
        self._resolver = resolver or resolver_for(settings)
        self._addresses = Addresses(settings.host, _template(settings), settings.grace)
        self._asked = asyncio.Event()

    def look(self) -> None:
        """Ask now."""
        self._asked.set()

    async def run(self, report: Report) -> None:
        """Ask for ever."""
        answered = False
        while True:
            self._asked.clear()
            try:
                self._addresses.answer(await self._look_up(), time.monotonic())
                answered = True
            except LookupFailed as e:
                report.failed(str(e))
            if answered:
                found = self._addresses.found(time.monotonic())
                report.publish(found.wanted, found.unusable)
            await self._wait(found.again_at if answered else None)

    async def _look_up(self) -> list[Address]:
        limit = self._settings.timeout
        try:
            async with asyncio.timeout(limit):
                return list(await self._resolver.look_up(self._settings.host))
        except TimeoutError:
            raise LookupFailed(
                f"{self._settings.host}: no answer within timeout = {limit:g} s"
            ) from None

    async def _wait(self, again_at: float | None) -> None:
        pause = self._settings.interval * random.uniform(0.9, 1.1)  # noqa: S311 - jitter
        if again_at is not None:
            pause = min(pause, max(0.01, again_at - time.monotonic()))
        try:
            async with asyncio.timeout(pause):
                await self._asked.wait()
        except TimeoutError:
            pass


class SystemResolver:
    """A and AAAA records, as the system's resolver sees them (hosts file and search list too)."""

    async def look_up(self, host: str) -> list[Address]:
        """All addresses. Raises LookupFailed."""
        loop = asyncio.get_running_loop()
        try:
            rows = await loop.getaddrinfo(host, None, type=socket.SOCK_STREAM)
        except OSError as e:
            raise LookupFailed(f"{host}: {e}") from None
        return sorted({Address(str(row[4][0])) for row in rows})


class DnsPythonResolver:
    """A and AAAA records, or SRV records and the addresses of their targets, by dnspython."""

    def __init__(self, kind: str, server: str, timeout: float) -> None:
        """`server`: host:port, "" = those of the system."""
        import dns.asyncresolver

        self._kind = kind
        self._resolver = dns.asyncresolver.Resolver(configure=not server)
        self._resolver.lifetime = timeout
        if server:
            host, port = parse_listen(server)
            self._resolver.nameservers = [host]
            self._resolver.port = port

    async def look_up(self, host: str) -> list[Address]:
        """All addresses. Raises LookupFailed."""
        import dns.exception

        try:
            if self._kind == "A":
                found = [Address(ip) for ip in await self._ips(host)]
            else:
                found = await self._services(host)
        except (dns.exception.DNSException, OSError) as e:
            raise LookupFailed(f"{host}: {e or type(e).__name__}") from None
        if not found:
            raise LookupFailed(f"{host}: the answer has no address")
        return sorted(set(found))

    async def _ips(self, host: str) -> list[str]:
        answers = await self._resolver.resolve_name(host)
        return list(answers.addresses())

    async def _services(self, host: str) -> list[Address]:
        answer: Any = await self._resolver.resolve(host, "SRV")
        found = []
        for record in answer:
            target = record.target.to_text(omit_final_dot=True)
            found += [Address(ip, target, record.port) for ip in await self._ips(target)]
        return found


def resolver_for(settings: DnsSource) -> Resolver:
    """The resolver that the settings need. Raises ConfigError when it is not installed."""
    if settings.type == "A" and not settings.server:
        return SystemResolver()
    if importlib.util.find_spec("dns") is None:
        raise ConfigError(
            'discovery.dns: type = "SRV" and server need dnspython: '
            "pip install 'kvindexd[discovery]'"
        )
    return DnsPythonResolver(settings.type, settings.server, settings.timeout)


def _template(settings: DnsSource) -> dict[str, Any]:
    if settings.type == "A":
        return {"worker_id": "{ip}"} | settings.worker
    return {"worker_id": "{target}:{port}", "address": "{ip}:{port}"} | settings.worker
