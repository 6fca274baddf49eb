"""What a source wants registered, what is registered, and the difference; pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from kvindexd.model import WorkerKey
from kvindexd.registration import Registration


class Wanted(NamedTuple):
    """One worker rank as a source sees it. `draining`: it is to get no new requests. `starting`:
    it is not to be registered yet, though it may stay if it is."""

    registration: Registration
    draining: bool = False
    starting: bool = False


View = Mapping[WorkerKey, Wanted]
"""Everything that one source wants registered."""


class Known(NamedTuple):
    """One worker rank as the store has it. `raw`: the stored registration, whatever it is;
    `registration`: the same, None where it cannot be read. `drained_by`: "" = an operator."""

    raw: bytes
    registration: Registration | None
    draining: bool = False
    drained_by: str = ""


class Owner(NamedTuple):
    """A source as the owner of registrations, known by its name in every process.

    `takes_over`: further sources whose registrations it may replace. `sweeps`: what bears its name
    and it does not want when it starts is left over from an earlier process, and is removed.
    `insists`: registers again what somebody else has removed.
    """

    source: str
    takes_over: frozenset[str] = frozenset()
    sweeps: bool = True
    insists: bool = True


class Register(NamedTuple):
    """Register, if the store still has `instead_of` (b"" = nothing). `replaced`: the process
    behind it is another one: what the old one held is void."""

    registration: Registration
    replaced: bool
    instead_of: bytes


class Deregister(NamedTuple):
    """Remove, if the registration still is `only`."""

    key: WorkerKey
    only: bytes


class Drain(NamedTuple):
    """Set or lift the draining mark."""

    key: WorkerKey
    draining: bool


Action = Register | Deregister | Drain


class Plan(NamedTuple):
    """Actions in order. `conflicts`: worker ranks that belong to somebody else, and to whom."""

    actions: list[Action]
    conflicts: dict[WorkerKey, str]


def changed(before: View, after: View) -> set[WorkerKey]:
    """Worker ranks that a source has added, removed or changed.

    Only these are acted on: another process with the same source may see a change earlier or
    later, and must not be undone because of it.
    """
    return {key for key in before.keys() | after.keys() if before.get(key) != after.get(key)}


def plan(
    owner: Owner,
    before: View,
    after: View,
    known: Mapping[WorkerKey, Known],
    keys: Iterable[WorkerKey],
) -> Plan:
    """How to get from `known` to what `owner` wants, for `keys` alone. `before`: its earlier view,
    which tells what it has added itself from what has come in its place since."""
    result = Plan([], {})
    for key in sorted(keys):
        wanted, there = after.get(key), known.get(key)
        if wanted is None:
            if there is not None and _is_ours(owner, before.get(key), there):
                result.actions.append(Deregister(key, there.raw))
        elif there is None:
            if not wanted.starting:
                result.actions.append(Register(wanted.registration, False, b""))
                if wanted.draining:
                    result.actions.append(Drain(key, True))
        elif there.registration is None or not _may_write(owner, there.registration.source):
            who = there.registration.source if there.registration is not None else "unreadable"
            result.conflicts[key] = who or "RegisterWorker"
        else:
            _update(owner, key, wanted, there, there.registration, result)
    return result


def leftovers(owner: Owner, after: View, known: Mapping[WorkerKey, Known]) -> set[WorkerKey]:
    """Worker ranks that bear the owner's name and are not wanted."""
    return {
        key
        for key, there in known.items()
        if owner.sweeps
        and key not in after
        and there.registration is not None
        and there.registration.source == owner.source
    }


def _may_write(owner: Owner, source: str) -> bool:
    return source == owner.source or source in owner.takes_over


def _is_ours(owner: Owner, before: Wanted | None, there: Known) -> bool:
    """Whether what is registered is what the owner had added, and not its successor."""
    registered = there.registration
    if registered is None or registered.source != owner.source:
        return False
    if before is None:
        return owner.sweeps
    mine = before.registration
    return registered == mine or bool(mine.instance and mine.instance == registered.instance)


def _update(
    owner: Owner, key: WorkerKey, wanted: Wanted, there: Known, old: Registration, result: Plan
) -> None:
    """Another process behind the name voids what the old one held, also before it is ready."""
    if wanted.starting and old.instance != wanted.registration.instance:
        result.actions.append(Deregister(key, there.raw))
        return
    if old != wanted.registration:
        replaced = wanted.registration.replaces_cache(old)
        result.actions.append(Register(wanted.registration, replaced, there.raw))
    lifts = there.draining and not wanted.draining and there.drained_by == owner.source
    if lifts or (wanted.draining and not there.draining):
        result.actions.append(Drain(key, wanted.draining))
