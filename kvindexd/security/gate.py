"""Where registrations lead, checked and pinned: names are resolved here, and nowhere later.

A name that is checked and then handed to a socket is resolved a second time, and may answer with
another address then. So whoever connects asks here for an address, and connects to that.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from typing import NamedTuple

from kvindexd.registration import Registration
from kvindexd.security.networks import Forbidden, NetworkPolicy, Place, literal, place_of

Lookup = Callable[[str], Awaitable[list[str]]]


class Unresolved(OSError):
    """A name has no address now."""


class Endpoints(NamedTuple):
    """ZMQ endpoints of one rank; `replay` "" = none."""

    events: str
    replay: str


def endpoints_of(registration: Registration) -> Endpoints:
    """The endpoints as they are registered."""
    return Endpoints(registration.kv_events_endpoint, registration.replay_endpoint)


class Gate:
    """Applies a NetworkPolicy. Without networks it lets everything through, untouched."""

    def __init__(
        self,
        policy: NetworkPolicy | None = None,
        *,
        timeout: float = 5.0,
        refused: Callable[[str], None] = lambda _: None,
        lookup: Lookup | None = None,
    ) -> None:
        """`timeout`: seconds for resolving a name. `refused`: told where something was refused:
        `events`, `replay`, `address`, `alias`. `lookup`: gives a name's addresses or raises
        OSError; None = as the system does."""
        self._policy = policy or NetworkPolicy()
        self._timeout = timeout
        self._refused = refused
        self._lookup = lookup or _getaddrinfo

    @property
    def active(self) -> bool:
        """Whether anything is restricted."""
        return self._policy.active

    async def host(self, host: str, what: str = "address") -> str:
        """An allowed address of a host to connect to, or the host itself without a policy.

        Raises Forbidden, or Unresolved when the name has no address now.
        """
        if not self._policy.active:
            return host
        written = literal(host) is not None
        addresses = [host] if written else await self._resolve(host)
        why = Forbidden(f"{host!r} has no address")
        for text in addresses:
            address = literal(text)
            try:
                if address is not None:
                    self._policy.check_address(address)
                    return text
            except Forbidden as e:
                why = e
        self._refused(what)
        raise why if written else Forbidden(f"{host!r}: {why}")

    async def _resolve(self, host: str) -> list[str]:
        try:
            async with asyncio.timeout(self._timeout):
                return await self._lookup(host)
        except TimeoutError:
            raise Unresolved(f"{host!r} is not resolved within {self._timeout:g} s") from None
        except (OSError, UnicodeError) as e:
            raise Unresolved(f"{host!r} is not resolved: {e}") from None

    async def endpoint(self, endpoint: str, what: str, *, bind: bool = False) -> str:
        """A ZMQ endpoint with its name replaced by an allowed address. One that is to be bound is
        an address of this host and left as it is. Raises Forbidden or Unresolved."""
        if not self._policy.active or not endpoint:
            return endpoint
        place = place_of(endpoint)
        try:
            self._policy.check_scheme(endpoint)
            if place is None and endpoint.startswith("tcp://"):
                raise Forbidden(f"{endpoint!r}: expected tcp://HOST:PORT")
        except Forbidden:
            self._refused(what)
            raise
        if place is None or bind or not endpoint.startswith("tcp://"):
            return endpoint
        return _endpoint(place._replace(host=await self.host(place.host, what)))

    async def endpoints(self, registration: Registration) -> Endpoints:
        """What to connect to for a rank. Raises Forbidden, also for an address to which nobody must
        be sent, or Unresolved."""
        if self.active:
            await self._check_addresses(registration)
        events, replay = endpoints_of(registration)
        return Endpoints(
            await self.endpoint(events, "events", bind=registration.bind_events),
            await self.endpoint(replay, "replay"),
        )

    async def check(self, registration: Registration) -> None:
        """Raise Forbidden, naming the field, for a registration that leads where it must not.

        Names without an address pass: they are checked again before anything connects.
        """
        if not self._policy.active:
            return
        r = registration
        for field, endpoint, bind in (
            ("kv_events_endpoint", r.kv_events_endpoint, r.bind_events),
            ("replay_endpoint", r.replay_endpoint, False),
        ):
            what = "replay" if field[0] == "r" else "events"
            try:
                await self.endpoint(endpoint, what, bind=bind)
            except Forbidden as e:
                raise Forbidden(f"{field}: {e}") from None
            except Unresolved:
                pass
        await self._check_addresses(r)

    async def _check_addresses(self, r: Registration) -> None:
        place = place_of(r.address)
        if place is None and r.address:
            self._refused("address")
            raise Forbidden(f"address: {r.address!r}: expected HOST:PORT")
        if place is not None:
            try:
                await self.host(place.host)
            except Forbidden as e:
                raise Forbidden(f"address: {e}") from None
            except Unresolved:
                pass
        for alias in r.aliases:
            # Gateways may be sent to an alias that is an address; other names lead nowhere.
            place = place_of(alias)
            if place is not None and literal(place.host) is not None:
                try:
                    await self.host(place.host, "alias")
                except Forbidden as e:
                    raise Forbidden(f"aliases: {e}") from None


async def _getaddrinfo(host: str) -> list[str]:
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    return [str(entry[4][0]) for entry in found]


def _endpoint(place: Place) -> str:
    host = f"[{place.host}]" if ":" in place.host else place.host
    return f"tcp://{host}:{place.port}"
