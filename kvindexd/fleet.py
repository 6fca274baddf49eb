"""The fleet as queries see it: models, candidates, states; a thin layer over the replica."""

from __future__ import annotations

import functools
import ipaddress
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from kvindexd.model import WorkerKey
from kvindexd.registration import Registration, RoleName
from kvindexd.scoring.scorer import Candidate, Panel, Table


class Member(NamedTuple):
    """One worker rank that a query may be answered with.

    `state`: a WorkerState name. `staleness_ms`: since the last applied batch or heartbeat.
    `epoch`: the incarnation of its cache. `head`: its part of an answer, serialised (rpc.lines).
    """

    key: WorkerKey
    registration: Registration
    candidate: Candidate
    state: str
    staleness_ms: int
    epoch: int = 0
    head: bytes = b""


class Filter(NamedTuple):
    """What a request asks of its candidates. `names`: worker ids, addresses or aliases."""

    names: Sequence[str] = ()
    role: RoleName | None = None
    labels: Mapping[str, str] = {}
    include_stale: bool = False


NO_FILTER = Filter()


class Scope(NamedTuple):
    """One model of one namespace: its table and its worker ranks, sorted by key.

    `usual`: the ranks that a request without any filter is answered with.
    """

    model: str
    namespace: str
    table: Table
    members: Sequence[Member]
    usual: Chosen


class Chosen:
    """Some of a scope's ranks, in order of their keys, with what scoring wants to know of them.
    `units`: tokens per chain unit, each that occurs. `kinds`: a number per rank, equal where
    geometry, role and registered block size are."""

    __slots__ = ("kinds", "members", "panel", "units")

    def __init__(self, members: Sequence[Member]) -> None:
        self.members = members
        self.panel = Panel([m.candidate for m in members])
        self.units = tuple({m.candidate.geometry.unit for m in members})
        numbers: dict[tuple[int, str, int], int] = {}
        self.kinds = [
            numbers.setdefault(
                (id(m.candidate.geometry), m.registration.role, m.registration.block_size),
                len(numbers),
            )
            for m in members
        ]


def names_of(registration: Registration) -> frozenset[str]:
    """Everything a gateway may call a worker, normalised: its id and aliases; its address and those
    of its aliases, with and without the port."""
    return _names(registration.worker_id, registration.address, registration.aliases)


@functools.lru_cache(maxsize=8192)
def _names(worker_id: str, address: str, aliases: tuple[str, ...]) -> frozenset[str]:
    names = {worker_id}
    _, port = _split(address)
    for text in (address, *aliases):
        host, own_port = _split(text)
        # A pod may be known by an address that was registered without the port it serves on.
        names |= {text.strip(), host, _join(host, own_port or port)}
    return frozenset(names - {""})


def normal(name: str) -> str:
    """One spelling per address: IPv6 in its short form, and in brackets only before a port."""
    return _join(*_split(name))


def _join(host: str, port: str) -> str:
    if not port:
        return host
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _split(text: str) -> tuple[str, str]:
    """(host, port) of an address, the port "" where there is none; any other text as it is."""
    text = text.strip()
    if text.startswith("["):
        inner, closed, rest = text[1:].partition("]")
        if closed and (not rest or (rest[0] == ":" and rest[1:].isdigit())):
            return _short(inner), rest[1:]
    if text.count(":") > 1:
        return _short(text), ""
    host, _, port = text.rpartition(":")
    return (host, port) if host and port.isdigit() else (text, "")


def _short(host: str) -> str:
    try:
        return str(ipaddress.IPv6Address(host))
    except ValueError:
        return host


def select(members: Sequence[Member], wanted: Filter) -> list[Member]:
    """The members that a filter lets through, in their order."""
    names = {text for n in wanted.names for text in (n.strip(), normal(n))}
    return [
        m
        for m in members
        if (wanted.include_stale or m.state not in ("STALE", "UNKNOWN"))
        and (wanted.role is None or m.registration.role == wanted.role)
        and (not names or not names.isdisjoint(names_of(m.registration)))
        and all(m.registration.labels.get(k) == v for k, v in wanted.labels.items())
    ]
