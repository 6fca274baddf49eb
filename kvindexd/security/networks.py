"""Which addresses a registration may lead to. Pure: names are resolved elsewhere (`gate`)."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from typing import NamedTuple
from urllib.parse import urlsplit

IPAddress = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network

_SPECIAL: dict[str, tuple[str, ...]] = {
    "the cloud's metadata service": ("169.254.169.254/32", "fd00:ec2::254/128",
                                     "100.100.100.200/32", "192.0.0.192/32"),
    "link-local": ("169.254.0.0/16", "fe80::/10"),
    "loopback": ("127.0.0.0/8", "::1/128"),
    "unspecified": ("0.0.0.0/8", "::/128"),
    "multicast": ("224.0.0.0/4", "ff00::/8"),
    "broadcast": ("255.255.255.255/32",),
}  # fmt: skip
"""What a wide network such as 10.0.0.0/8 or 0.0.0.0/0 does not cover: these must be named."""

_SPECIALS = [
    (what, ipaddress.ip_network(text)) for what, texts in _SPECIAL.items() for text in texts
]


class Forbidden(ValueError):
    """An address that a registration must not lead to; the text says what and why."""


def parse_network(text: str) -> Network:
    """A network of `registration.allow_networks`. Raises ValueError, saying what is expected."""
    try:
        return ipaddress.ip_network(text)
    except ValueError:
        raise ValueError(
            f"{text!r}: expected a network such as 10.8.0.0/16, fd00:1234::/48 or 10.8.0.7/32"
        ) from None


class NetworkPolicy:
    """Networks that registrations may lead to. Without any, everything is allowed."""

    def __init__(self, allow: Sequence[str] = (), *, allow_ipc: bool = False) -> None:
        """Raises ValueError for what is no network."""
        self._allow = [parse_network(text) for text in allow]
        self._allow_ipc = allow_ipc

    @property
    def active(self) -> bool:
        """Whether anything is restricted."""
        return bool(self._allow)

    def check_address(self, address: IPAddress) -> None:
        """Raise Forbidden unless an address may be connected to."""
        if not self._allow:
            return
        address = _unwrapped(address)
        covering = [n for n in self._allow if n.version == address.version and address in n]
        for what, special in _SPECIALS:
            if special.version != address.version or address not in special:
                continue
            # Only a network inside the special range shows that somebody meant it.
            if not any(_inside(n, special) for n in covering):
                raise Forbidden(
                    f"{address} is {what}, which registration.allow_networks does not name"
                )
        if not covering:
            raise Forbidden(f"{address} is outside registration.allow_networks")

    def check_scheme(self, endpoint: str) -> None:
        """Raise Forbidden unless a ZMQ endpoint has an allowed scheme."""
        if not self._allow or endpoint.startswith("tcp://"):
            return
        if endpoint.startswith("ipc://"):
            if self._allow_ipc:
                return
            raise Forbidden(f"{endpoint!r}: ipc:// needs registration.allow_ipc")
        raise Forbidden(f"{endpoint!r}: only tcp:// is allowed beside registration.allow_networks")


def _inside(inner: Network, outer: Network) -> bool:
    return (
        inner.version == outer.version
        and inner.network_address in outer
        and inner.prefixlen >= outer.prefixlen
    )


def _unwrapped(address: IPAddress) -> IPAddress:
    """The IPv4 address that an IPv6 one stands for, where it does."""
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is not None:
            return address.ipv4_mapped
        if address.sixtofour is not None:
            return address.sixtofour
        if address in ipaddress.ip_network("64:ff9b::/96"):
            return ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
        if address.teredo is not None:
            return address.teredo[1]
    return address


class Place(NamedTuple):
    """Host and port of an endpoint or address; `port` 0 where there is none."""

    host: str
    port: int


def place_of(text: str) -> Place | None:
    """Host and port of `scheme://host:port`, `host:port` or a host; None where there is no host."""
    if literal(text) is not None:
        return Place(text, 0)
    try:
        parts = urlsplit(text if "://" in text else f"tcp://{text}")
        host, port = parts.hostname, parts.port
    except ValueError:
        return None
    return Place(host, port or 0) if host else None


def literal(host: str) -> IPAddress | None:
    """The address that a host is written as, None for a name."""
    try:
        return ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return None
