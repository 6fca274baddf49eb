"""What every store operation shares: a worker's keys and slot, and the call of its scripts."""

from __future__ import annotations

from typing import Any

from kvindexd.model import WorkerKey
from kvindexd.store.connect import Client
from kvindexd.store.errors import Changed, Fenced, NotRegistered
from kvindexd.store.keys import WorkerKeys, shard_of, slot_of_shard, worker_keys
from kvindexd.store.scripts import Script


class Core:
    """A client, and the agreed number of shards."""

    def __init__(self, client: Client, shards: int, feed_maxlen: int) -> None:
        self.client = client
        self.shards = shards
        self.feed_maxlen = feed_maxlen
        self._where: dict[WorkerKey, tuple[int, WorkerKeys, str]] = {}

    def where(self, key: WorkerKey) -> tuple[int, WorkerKeys]:
        """(slot, keys) of a worker rank."""
        slot, keys, _ = self._place(key)
        return slot, keys

    def _place(self, key: WorkerKey) -> tuple[int, WorkerKeys, str]:
        """Slot, keys and store id, remembered: quoting a name costs as much as a hash."""
        found = self._where.get(key)
        if found is None:
            shard = shard_of(key, self.shards)
            found = slot_of_shard(shard), worker_keys(shard, key.store_id), key.store_id
            if len(self._where) >= 10_000:
                self._where.clear()
            self._where[key] = found
        return found

    async def run(self, script: Script, key: WorkerKey, *args: Any) -> Any:
        """Run a worker's script; its first argument, the store id, is added here.

        Raises StoreError; NotRegistered and Fenced are recognised here for all scripts.
        """
        slot, keys, name = self._place(key)
        reply = await self.client.eval(script.name, slot, script, keys, (name, *args))
        if isinstance(reply, list):
            if reply[0] == b"NOTREG":
                raise NotRegistered(f"worker {key} is not registered; register it first")
            if reply[0] == b"OTHER":
                raise Changed(f"worker {key} has been registered by somebody else meanwhile")
            if reply[0] == b"FENCED":
                raise Fenced(str(key), reply[1].decode())
        return reply
