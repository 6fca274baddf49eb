"""Which addresses of a name are workers; pure. Time is an argument, in seconds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from kvindexd.discovery.template import Facts, TemplateError, host_text, registrations
from kvindexd.discovery.wanted import Wanted


class Address(NamedTuple):
    """One answer. `ip` has no brackets; `target`, `port`: of an SRV record, else "" and 0."""

    ip: str
    target: str = ""
    port: int = 0


class Found(NamedTuple):
    """What the addresses come to. `again_at`: when time alone changes it."""

    wanted: list[Wanted]
    unusable: dict[str, str]
    again_at: float | None


class Addresses:
    """The addresses of one name. One that is missing from an answer is drained, and is no worker
    any more after `grace` seconds: answers may leave out what is there, or what is unready."""

    def __init__(self, host: str, template: Mapping[str, Any], grace: float) -> None:
        self._host = host
        self._template = template
        self._grace = grace
        self._missing_since: dict[Address, float | None] = {}

    def answer(self, addresses: Iterable[Address], now: float) -> None:
        """Take a complete answer."""
        there = set(addresses)
        for address in there:
            self._missing_since[address] = None
        for address, since in self._missing_since.items():
            if address not in there and since is None:
                self._missing_since[address] = now

    def found(self, now: float) -> Found:
        """The workers as of now; forgets the addresses whose grace time is over."""
        result = Found([], {}, None)
        again: list[float] = []
        for address, since in sorted(self._missing_since.items()):
            if since is not None and now - since >= self._grace:
                del self._missing_since[address]
                continue
            if since is not None:
                again.append(since + self._grace)
            try:
                made = registrations(self._template, self._facts(address))
            except TemplateError as e:
                result.unusable[f"{address.target or address.ip}"] = str(e)
                continue
            result.wanted.extend(Wanted(r, since is not None) for r in made)
        return result._replace(again_at=min(again, default=None))

    def _facts(self, address: Address) -> Facts:
        names = {
            "ip": host_text(address.ip),
            "host": self._host,
            "target": address.target,
            "port": str(address.port),
        }
        return Facts(names, {}, {})
