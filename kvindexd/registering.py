"""The one way into the registry: look at what is registered, judge, and register."""

from __future__ import annotations

import enum
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple, Protocol

import msgspec
import structlog

from kvindexd import registration as registrations
from kvindexd.model import WorkerKey
from kvindexd.registration import InvalidRegistration, Registration
from kvindexd.security.gate import Gate
from kvindexd.security.networks import Forbidden
from kvindexd.store.errors import Changed, NotRegistered, StoreError
from kvindexd.store.records import Registered, WorkerRecord

log = structlog.get_logger(__name__)

_TRIES = 8
"""Looks at a record that somebody else changes all the time."""


class Registry(Protocol):
    """What is asked of the store."""

    async def get_worker(self, key: WorkerKey) -> WorkerRecord:
        """One worker rank. Raises NotRegistered."""
        ...

    async def register(
        self,
        key: WorkerKey,
        registration: bytes,
        incarnation_changed: bool,
        now: float,
        instead_of: bytes | None = None,
    ) -> Registered:
        """Add or update a worker rank. Raises Changed."""
        ...


class LostRegistry(Registry, Protocol):
    """A store that may have lost its data."""

    @property
    def birth(self) -> str:
        """A name for the data."""
        ...

    async def verify(self) -> object:
        """Look whose data it is."""
        ...

    async def leases(self) -> Mapping[WorkerKey, float]:
        """The worker ranks that it knows of."""
        ...


class Outcome(enum.Enum):
    """What became of a registration."""

    ADDED = "added"
    UNCHANGED = "unchanged"
    UPDATED = "updated"
    REPLACED = "replaced"  # another engine: what the old one held is void
    KEPT = "kept"  # there is one, and only a missing one was to be restored


async def register(store: Registry, wanted: Registration, *, restoring: bool = False) -> Outcome:
    """Make `wanted` what is registered, in one step against any other writer.

    `restoring`: only where nothing is registered; what somebody registered meanwhile is newer.
    Raises what the store raises.
    """
    for _ in range(_TRIES):
        try:
            known = (await store.get_worker(wanted.key)).registration
        except NotRegistered:
            known = b""
        outcome = _judge(known, wanted, restoring)
        if outcome not in (Outcome.UNCHANGED, Outcome.KEPT):
            replaced = outcome is Outcome.REPLACED
            try:
                await store.register(wanted.key, wanted.encode(), replaced, time.time(), known)
            except Changed:
                continue
        return outcome
    raise StoreError(f"worker {wanted.key}: its registration changes all the time")


def _judge(known: bytes, wanted: Registration, restoring: bool) -> Outcome:
    if not known:
        return Outcome.ADDED
    if restoring:
        return Outcome.KEPT
    try:
        old = registrations.decode(known)
    except msgspec.MsgspecError:
        log.warning("registration_unreadable", worker=str(wanted.key), cost="its blocks are void")
        return Outcome.REPLACED
    if old == wanted:
        return Outcome.UNCHANGED
    return Outcome.REPLACED if wanted.replaces_cache(old) else Outcome.UPDATED


async def register_again(
    store: LostRegistry, registration: Registration, birth: str, why: NotRegistered
) -> str:
    """Register a rank anew if the servers lost their data since `birth`, or its record; the birth.

    Raises `why` where they did not: then the rank was deregistered on purpose.
    """
    await store.verify()
    reason = "the store is empty"
    if store.birth == birth:
        # Deregistering takes it off the list too; who deletes keys does not know of the list.
        if registration.key not in await store.leases():
            raise why
        reason = "its record was deleted behind our back"
    outcome = await register(store, registration, restoring=True)
    log.warning(
        "registered_again",
        worker=str(registration.key),
        reason=reason,
        outcome=outcome.value,
        fix="see why the store lost its data",
    )
    return store.birth


class Sizes(NamedTuple):
    """Bounds on what registrations may bring."""

    workers: int = 10_000
    labels: int = 64
    name_bytes: int = 1024


class TooManyWorkers(Exception):
    """`limits.max_workers` ranks are registered."""


class Registrar:
    """Registers on behalf of others: administration and configuration."""

    def __init__(
        self,
        store: Registry,
        gate: Gate | None = None,
        sizes: Sizes | None = None,
        *,
        refused: Callable[[str], None] = lambda _: None,
    ) -> None:
        """`refused`: told the reason of each refusal."""
        self._store = store
        self._gate = gate or Gate()
        self._sizes = sizes or Sizes()
        self._refused = refused

    async def admit(self, wanted: Registration, others: int = 0) -> None:
        """Check. `others`: ranks registered so far without this one.

        Raises InvalidRegistration, Forbidden or TooManyWorkers.
        """
        wanted.check()
        try:
            check_sizes(wanted, self._sizes)
        except InvalidRegistration:
            self._refused("registration_size")
            raise
        if others >= self._sizes.workers:
            self._refused("workers")
            raise TooManyWorkers(
                f"{others} worker ranks are registered, as many as limits.max_workers allows; "
                "remove some, or raise it"
            )
        try:
            await self._gate.check(wanted)
        except Forbidden as e:
            self._refused("forbidden_endpoint")
            log.warning(
                "registration_forbidden",
                worker=str(wanted.key),
                why=str(e),
                fix="register an endpoint that [registration] allows, or allow this one",
            )
            raise

    async def register(self, wanted: Registration, others: int = 0) -> Outcome:
        """Check as `admit` does, and register. Raises what that, and what the store raises."""
        await self.admit(wanted, others)
        outcome = await register(self._store, wanted)
        if outcome is not Outcome.UNCHANGED:
            log.info(
                "worker_registered",
                worker=str(wanted.key),
                endpoint=wanted.kv_events_endpoint,
                new_incarnation=outcome is Outcome.REPLACED,
            )
        return outcome


def check_sizes(r: Registration, sizes: Sizes) -> None:
    """Raise InvalidRegistration for a registration with too much in it."""
    for field, count in (("labels", len(r.labels)), ("aliases", len(r.aliases))):
        if count > sizes.labels:
            raise InvalidRegistration(
                f"{field}: {count} of them, at most limits.max_labels = {sizes.labels}"
            )
    for field, value in msgspec.structs.asdict(r).items():
        for text in _texts(value):
            if len(text.encode()) > sizes.name_bytes:
                raise InvalidRegistration(
                    f"{field}: a text of {len(text.encode())} bytes, at most "
                    f"limits.max_name_bytes = {sizes.name_bytes}"
                )


def _texts(value: object) -> list[str]:
    if isinstance(value, str):
        return [value]
    if isinstance(value, dict):
        return [text for pair in value.items() for text in pair]
    return list(value) if isinstance(value, tuple) else []
