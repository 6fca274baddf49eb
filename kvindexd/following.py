"""Whoever ingests follows what is registered: one rank's ingester per record in the store."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import structlog

from kvindexd.ingest.supervisor import Supervisor
from kvindexd.model import WorkerKey
from kvindexd.registering import register
from kvindexd.registration import Registration
from kvindexd.replica.replica import Replica
from kvindexd.store import Store, StoreError

log = structlog.get_logger(__name__)


async def follow(store: Store, replica: Replica[Registration], supervisor: Supervisor) -> None:
    """Ingest whatever is registered, by whomever."""
    changed = asyncio.Event()
    unwatch = replica.watch(lambda _: changed.set())
    birth = store.birth
    known: dict[WorkerKey, Registration] = {}
    try:
        while True:
            changed.clear()
            now = {v.key: v.registration for v in replica.workers()}
            gone = [known[key] for key in known if key not in now]
            if gone and await _was_lost(store, birth, gone):
                birth = store.birth
            else:
                known = now
                supervisor.set_all(now.values())
            await changed.wait()
    finally:
        unwatch()


async def _was_lost(store: Store, birth: str, gone: Sequence[Registration]) -> bool:
    """Whether ranks are gone because the servers lost their data; then they are registered
    again, and their ingesters, which go on, write what they hold. Waits for the store."""
    while True:
        try:
            await store.verify()
            if store.birth == birth:
                return False
            for registration in gone:
                await register(store, registration, restoring=True)
        except StoreError as e:
            log.warning("store_not_verified", error=str(e), action="trying again")
            await asyncio.sleep(1.0)
        else:
            log.warning(
                "workers_registered_again",
                count=len(gone),
                why="the store is empty",
                fix="see why the store lost its data",
            )
            return True
