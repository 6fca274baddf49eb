"""The waiting room of one worker rank: stores whose place in a prompt is not known yet.

Two things wait, both bounded in number and age, orphans in tokens too. *Orphans*: events whose
parent was never announced, kept to bind their hashes should the parent turn up. *Unplaced
copies*: counts per (tier, group, size) under an engine hash that is not bound. A removal takes
from the counts, so that a parked store that is gone cannot come back when its parent arrives.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

import msgspec

from kvindexd.model import EngineHash, Slot
from kvindexd.records import field_of, hash_of
from kvindexd.wire.events import BlockStored

_ORPHAN, _UNPLACED = b"o", b"u"
_event_decoder = msgspec.msgpack.Decoder(BlockStored)


class Orphan(msgspec.Struct):
    """An event that waits for its parent; `at`: seconds, when it came."""

    number: int
    at: float
    parent: EngineHash
    event: BlockStored


class Unplaced(msgspec.Struct):
    """Copies of a hash that is not bound yet; `at`: seconds, when the first came."""

    at: float
    copies: dict[Slot, int]


class WaitingRoom:
    """Orphans by parent and unplaced copies by hash. `changed` names store fields to rewrite."""

    def __init__(self, limit: int, max_age: float, max_tokens: int) -> None:
        self._limit = limit
        self._max_age = max_age
        self._max_tokens = max_tokens
        self._tokens = 0
        self._orphans: dict[int, Orphan] = {}
        self._by_parent: dict[EngineHash, dict[int, None]] = {}
        self._next = 0
        self.unplaced: dict[EngineHash, Unplaced] = {}
        self.per_group: Counter[int] = Counter()
        """Unplaced (hash, slot) pairs by group index."""
        self.changed: set[bytes] = set()

    def __len__(self) -> int:
        return len(self._orphans)

    def awaited(self, hashes: Iterable[EngineHash]) -> list[EngineHash]:
        """Those of `hashes` that something waits for."""
        if not self.unplaced and not self._by_parent:
            return []
        return [h for h in hashes if h in self.unplaced or h in self._by_parent]

    # -- orphans ------------------------------------------------------------------------------

    def park(self, parent: EngineHash, event: BlockStored, now: float) -> int:
        """Keep an event until its parent is bound; returns how many older ones had to go."""
        number = self._next
        self._next += 1
        self._keep(Orphan(number, now, parent, event))
        self.changed.add(_orphan_field(number))
        return self._trim_orphans(now)

    def children(self, parent: EngineHash) -> list[BlockStored]:
        """Take out the events that waited for `parent`, in the order they came."""
        numbers = self._by_parent.pop(parent, None)
        if not numbers:
            return []
        self.changed.update(_orphan_field(n) for n in numbers)
        events = [self._orphans.pop(n).event for n in numbers]
        self._tokens -= sum(e.num_tokens for e in events)
        return events

    def _keep(self, orphan: Orphan) -> None:
        self._orphans[orphan.number] = orphan
        self._by_parent.setdefault(orphan.parent, {})[orphan.number] = None
        self._tokens += orphan.event.num_tokens

    def _trim_orphans(self, now: float) -> int:
        gone = 0
        while self._orphans:
            number, oldest = next(iter(self._orphans.items()))
            full = len(self._orphans) > self._limit or self._tokens > self._max_tokens
            if not full and now - oldest.at <= self._max_age:
                break
            self._drop(number)
            gone += 1
        return gone

    def _drop(self, number: int) -> None:
        orphan = self._orphans.pop(number)
        self._tokens -= orphan.event.num_tokens
        siblings = self._by_parent[orphan.parent]
        del siblings[number]
        if not siblings:
            del self._by_parent[orphan.parent]
        self.changed.add(_orphan_field(number))

    # -- unplaced copies ----------------------------------------------------------------------

    def add(self, engine_hash: EngineHash, slot: Slot, now: float, n: int = 1) -> None:
        """n copies of a hash that is not bound."""
        entry = self.unplaced.get(engine_hash)
        if entry is None:
            entry = self.unplaced[engine_hash] = Unplaced(now, {})
        have = entry.copies.get(slot, 0)
        entry.copies[slot] = have + n
        if not have:
            self.per_group[slot.group] += 1
        self.changed.add(_UNPLACED + field_of(engine_hash))

    def count(self, engine_hash: EngineHash, slot: Slot) -> int:
        """Copies that wait in a slot."""
        entry = self.unplaced.get(engine_hash)
        return entry.copies.get(slot, 0) if entry is not None else 0

    def remove(self, engine_hash: EngineHash, tier: int, group: int, left: int | None) -> bool:
        """One copy fewer in (tier, group), or exactly `left`; False when none waited there."""
        entry = self.unplaced.get(engine_hash)
        if entry is None:
            return False
        slots = sorted((s for s in entry.copies if s[:2] == (tier, group)), key=lambda s: -s.size)
        if not slots:
            return False
        n = entry.copies[slots[0]] - 1 if left is None else left
        if n > 0:
            entry.copies[slots[0]] = n
        else:
            del entry.copies[slots[0]]
            self.per_group[group] -= 1
            if not entry.copies:
                del self.unplaced[engine_hash]
        self.changed.add(_UNPLACED + field_of(engine_hash))
        return True

    def take(self, engine_hash: EngineHash) -> dict[Slot, int]:
        """The copies that waited for a hash that has just been bound."""
        entry = self.unplaced.pop(engine_hash, None)
        if entry is None:
            return {}
        self._uncount(entry)
        self.changed.add(_UNPLACED + field_of(engine_hash))
        return entry.copies

    def _uncount(self, entry: Unplaced) -> None:
        for slot in entry.copies:
            self.per_group[slot.group] -= 1

    def drop_tiers(self, tiers: set[int]) -> None:
        """Forget waiting copies in the given tiers."""
        for engine_hash in list(self.unplaced):
            entry = self.unplaced[engine_hash]
            kept = {s: n for s, n in entry.copies.items() if s.tier not in tiers}
            if len(kept) != len(entry.copies):
                self._uncount(entry)
                entry.copies = kept
                self.per_group.update(s.group for s in kept)
                if not kept:
                    del self.unplaced[engine_hash]
                self.changed.add(_UNPLACED + field_of(engine_hash))

    # -- bounds and persistence ---------------------------------------------------------------

    def expire(self, now: float) -> tuple[int, int]:
        """Drop what is too old or too much: (orphans, unplaced hashes) that went."""
        orphans = self._trim_orphans(now)
        unplaced = 0
        while self.unplaced:
            engine_hash, oldest = next(iter(self.unplaced.items()))
            if len(self.unplaced) <= self._limit and now - oldest.at <= self._max_age:
                break
            del self.unplaced[engine_hash]
            self._uncount(oldest)
            self.changed.add(_UNPLACED + field_of(engine_hash))
            unplaced += 1
        return orphans, unplaced

    def forget_all(self, fields: Iterable[bytes]) -> None:
        """Forget what these store fields hold."""
        for field in fields:
            if field.startswith(_UNPLACED):
                entry = self.unplaced.pop(hash_of(field[1:]), None)
                if entry is not None:
                    self._uncount(entry)
            elif (number := int.from_bytes(field[1:], "big")) in self._orphans:
                self._drop(number)
            self.changed.add(field)

    def retell(self) -> None:
        """Mark everything as changed."""
        self.changed = {_orphan_field(n) for n in self._orphans}
        self.changed |= {_UNPLACED + field_of(h) for h in self.unplaced}

    def clear(self) -> None:
        """Forget everything; the store forgets its copy by the same clear."""
        self._orphans.clear()
        self._by_parent.clear()
        self._tokens = 0
        self.unplaced.clear()
        self.per_group.clear()
        self.changed.clear()

    def drain_changes(self) -> dict[bytes, bytes | None]:
        """Store fields to write (None = delete) since the last call."""
        out = {field: self._record(field) for field in self.changed}
        self.changed.clear()
        return out

    def _record(self, field: bytes) -> bytes | None:
        if field.startswith(_ORPHAN):
            orphan = self._orphans.get(int.from_bytes(field[1:], "big"))
            return None if orphan is None else msgspec.msgpack.encode((orphan.at, orphan.event))
        entry = self.unplaced.get(hash_of(field[1:]))
        if entry is None:
            return None
        return msgspec.msgpack.encode((entry.at, [(*s, n) for s, n in entry.copies.items()]))

    def load(self, records: Iterator[tuple[bytes, bytes]]) -> None:
        """Take over what an earlier process had parked, oldest first."""
        orphans: list[Orphan] = []
        unplaced: list[tuple[float, EngineHash, dict[Slot, int]]] = []
        for field, record in records:
            at, body = msgspec.msgpack.decode(record, type=tuple[float, msgspec.Raw])
            if field.startswith(_ORPHAN):
                number = int.from_bytes(field[1:], "big")
                event = _event_decoder.decode(body)
                if event.parent is not None:
                    orphans.append(Orphan(number, at, event.parent, event))
            else:
                counts = msgspec.msgpack.decode(body, type=list[tuple[int, int, int, int]])
                slots = {Slot(t, g, size): n for t, g, size, n in counts}
                unplaced.append((at, hash_of(field[1:]), slots))
        for orphan in sorted(orphans, key=lambda o: o.number):
            self._keep(orphan)
            self._next = orphan.number + 1
        for at, engine_hash, slots in sorted(unplaced, key=lambda u: u[0]):
            self.unplaced[engine_hash] = Unplaced(at, slots)
            self.per_group.update(s.group for s in slots)


def _orphan_field(number: int) -> bytes:
    return _ORPHAN + number.to_bytes(8, "big")
