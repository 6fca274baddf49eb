"""Counted copies of one worker rank's blocks, and the presence bits that follow from them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence

from kvindexd.model import ADD, REMOVE, EngineHash, GroupInfo, Plane, Slot
from kvindexd.native import dense as _native
from kvindexd.planes import COUNT_BITS, COUNT_MASK, Membership, memberships
from kvindexd.records import Block, counts, pack_mutation

MAX_SLOTS = 255
MAX_PLANES = 255


class Holdings:
    """Blocks by engine hash, packed copy counts, and the plane bits of each name.

    A name is held in a plane while, for every group of the plane's spec, some engine hash bound
    to it has a copy there. Bits that change are appended to `mutations` (packed
    model.MUTATION); blocks that change are collected in `dirty`. A binding without copies stays
    (`idle`, oldest first) until it is forgotten: children of an evicted block still arrive.
    """

    def __init__(self, groups: Callable[[], Iterable[GroupInfo]]) -> None:
        self._groups = groups
        self.blocks: dict[EngineHash, Block] = {}
        self.slots: list[Slot] = []
        self.planes: list[Plane] = []
        self.plane_counts: list[int] = []
        self.idle: dict[EngineHash, None] = {}
        self.dirty: set[EngineHash] = set()
        self.mutations = bytearray()
        self._held: dict[int, int] = {}
        self._slot_ids: dict[Slot, int] = {}
        self._members: list[Membership | None] = []
        self._plane_ids: list[int] = []
        self._lone: list[int] = []  # per slot: its plane where that depends on this slot alone
        self._by_group: dict[tuple[int, int], list[int]] = {}

    # -- slots and planes ---------------------------------------------------------------------

    def slot(self, tier: int, group: int, size: int) -> int:
        """The slot's number, made on first use."""
        key = Slot(tier, group, size)
        found = self._slot_ids.get(key)
        if found is None:
            if len(self.slots) >= MAX_SLOTS:
                raise OverflowError(f"more than {MAX_SLOTS} (tier, group, size) combinations")
            found = self._slot_ids[key] = len(self.slots)
            self.slots.append(key)
            self.replan()
        return found

    def slots_of(self, tier: int, group: int) -> list[int]:
        """Numbers of a group's slots in a tier, the largest entries first."""
        return self._by_group.get((tier, group), [])

    def replan(self) -> None:
        """Recompute which copies make which bit, after the catalogue or the slots changed."""
        old = list(zip(self._members, self._plane_ids, strict=True))
        self._members = memberships(tuple(self._groups()), self.slots)
        self._plane_ids = [self._plane_id(m) for m in self._members]
        new = list(zip(self._members, self._plane_ids, strict=True))
        self._lone = [
            plane if member is not None and member.complete and len(member.shifts) == 1 else -1
            for member, plane in new
        ]
        self._by_group.clear()
        for i, slot in sorted(enumerate(self.slots), key=lambda s: -s[1].size):
            self._by_group.setdefault((slot.tier, slot.group), []).append(i)
        if not self._held or new[: len(old)] == old:
            return
        seen: set[int] = set()
        for block in self.blocks.values():
            if block.copies and block.name not in seen:
                seen.add(block.name)
                packed = self._held[block.name]
                before, after = _bits(old, packed), _bits(new, packed)
                for plane in before - after:
                    self._emit(block, plane, REMOVE)
                for plane in after - before:
                    self._emit(block, plane, ADD)

    def _plane_id(self, member: Membership | None) -> int:
        if member is None:
            return -1
        if member.plane not in self.planes:
            if len(self.planes) >= MAX_PLANES:
                raise OverflowError(f"more than {MAX_PLANES} group specs")
            self.planes.append(member.plane)
            self.plane_counts.append(0)
        return self.planes.index(member.plane)

    def tier_blocks(self, main: Iterable[str]) -> tuple[int, int, int, int]:
        """Held blocks per tier, counted once: in the fullest plane of a main kind, or of any."""
        wanted = set(main)
        tiers = [0, 0, 0, 0]
        for plane, n in zip(self.planes, self.plane_counts, strict=True):
            if plane.kind in wanted or not wanted:
                tiers[plane.tier] = max(tiers[plane.tier], n)
        return tiers[0], tiers[1], tiers[2], tiers[3]

    # -- blocks and copies --------------------------------------------------------------------

    def bind(self, engine_hash: EngineHash, block: Block) -> None:
        """Bind a hash that is unbound, or bound without copies."""
        self.blocks.pop(engine_hash, None)
        self.blocks[engine_hash] = block
        self.idle.pop(engine_hash, None)
        self.idle[engine_hash] = None
        self.dirty.add(engine_hash)

    def store(self, engine_hash: EngineHash, block: Block, slot: int) -> None:
        """`bind` a fresh block and `add` its first copy, in one step."""
        shift = slot * COUNT_BITS
        if self.blocks.pop(engine_hash, None) is not None:
            self.idle.pop(engine_hash, None)
        block.copies = 1 << shift
        self.blocks[engine_hash] = block
        self.dirty.add(engine_hash)
        self._shift_held(block, slot, shift, 1)

    def store_all(self, fresh: Iterable[tuple[EngineHash, Block]], slot: int) -> None:
        """`store` for many blocks, without a call for each of those that nothing is known of."""
        lone, one = self._lone[slot], 1 << (slot * COUNT_BITS)
        blocks, held = self.blocks, self._held
        told: list[bytes] = []
        for engine_hash, block in fresh:
            name = block.name
            if lone < 0 or engine_hash in blocks or name in held:
                self._tell(told, lone)
                told = []
                self.store(engine_hash, block, slot)
                continue
            block.copies = held[name] = one
            blocks[engine_hash] = block
            self.dirty.add(engine_hash)
            told.append(pack_mutation(name, block.parent, block.length, lone, ADD))
        self._tell(told, lone)

    def store_fresh(
        self, hashes: list[EngineHash], keys: bytes, step: int, start: tuple[int, int], slot: int
    ) -> bool:
        """`store_all` for consecutive blocks, if nothing is known of any: whether it was done.

        `keys`: packed uint64 of every unit, of which each `step`-th ends a block. `start`: key
        and tokens before the first one. Without the C module, never.
        """
        lone = self._lone[slot]
        if _native is None or lone < 0:
            return False
        one, size = 1 << (slot * COUNT_BITS), self.slots[slot].size
        told = _native.store(
            *(self.blocks, self._held, self.dirty, hashes, keys, step, start, size),
            *((one, lone), ADD, Block),
        )
        if told is None:
            return False
        self.plane_counts[lone] += len(hashes)
        self.mutations += told
        return True

    def _tell(self, added: Sequence[bytes], plane: int) -> None:
        if added:
            self.plane_counts[plane] += len(added)
            self.mutations += b"".join(added)

    def touch(self, engine_hash: EngineHash) -> None:
        """The engine spoke of this block again: it is the youngest of the claims."""
        self.blocks[engine_hash] = self.blocks.pop(engine_hash)

    def count(self, block: Block, slot: int) -> int:
        """Copies of a block in a slot."""
        return (block.copies >> (slot * COUNT_BITS)) & COUNT_MASK

    def add(self, engine_hash: EngineHash, block: Block, slot: int, n: int = 1) -> None:
        """n further physical copies."""
        shift = slot * COUNT_BITS
        copies = block.copies
        have = (copies >> shift) & COUNT_MASK
        n = min(n, COUNT_MASK - have)
        if n <= 0:
            return
        if not copies:
            self.idle.pop(engine_hash, None)
        block.copies = copies + (n << shift)
        self.dirty.add(engine_hash)
        if not have:
            self._shift_held(block, slot, shift, 1)

    def drop(self, engine_hash: EngineHash, block: Block, slot: int, n: int = 1) -> None:
        """n copies fewer (never below none)."""
        shift = slot * COUNT_BITS
        have = (block.copies >> shift) & COUNT_MASK
        n = min(n, have)
        if n <= 0:
            return
        block.copies -= n << shift
        self.dirty.add(engine_hash)
        if n == have:
            self._shift_held(block, slot, shift, -1)
        if not block.copies:
            self.idle[engine_hash] = None

    def _shift_held(self, block: Block, slot: int, shift: int, step: int) -> None:
        name = block.name
        before = self._held.get(name, 0)
        after = before + (step << shift)
        if after:
            self._held[name] = after
        else:
            del self._held[name]
        lone = self._lone[slot]
        if lone >= 0:
            had, has = (before >> shift) & COUNT_MASK > 0, (after >> shift) & COUNT_MASK > 0
        else:
            member = self._members[slot]
            if member is None:
                return
            lone = self._plane_ids[slot]
            had, has = member.holds(before), member.holds(after)
        if had != has:
            self._emit(block, lone, ADD if has else REMOVE)
        elif has:
            # Several hashes share the name: say again what holds, so that a replica that read
            # their records at different moments still ends up right.
            self.mutations += pack_mutation(name, block.parent, block.length, lone, ADD)

    def _emit(self, block: Block, plane: int, op: int) -> None:
        self.plane_counts[plane] += 1 if op == ADD else -1
        self.mutations += pack_mutation(block.name, block.parent, block.length, plane, op)

    def forget(self, engine_hash: EngineHash) -> None:
        """Forget a hash altogether: its copies first, then its binding."""
        block = self.blocks.get(engine_hash)
        if block is None:
            return
        self.expire(engine_hash)
        del self.blocks[engine_hash]
        self.idle.pop(engine_hash, None)
        self.dirty.add(engine_hash)

    def surplus_idle(self, limit: int) -> list[EngineHash]:
        """The bindings longest without copies, to be forgotten when all exceed `limit`.

        A few more than needed, so that the search is not made for every batch.
        """
        surplus = len(self.blocks) - limit
        if surplus <= 0:
            return []
        return list(itertools.islice(self.idle, surplus + _slack(limit)))

    def surplus_claims(self, limit: int) -> list[EngineHash]:
        """The held blocks longest unconfirmed, to be expired when the held exceed `limit`."""
        surplus = len(self.blocks) - len(self.idle) - limit
        if surplus <= 0:
            return []
        surplus += _slack(limit)
        oldest: list[EngineHash] = []
        passed: list[EngineHash] = []
        for engine_hash, block in self.blocks.items():
            (oldest if block.copies else passed).append(engine_hash)
            if len(oldest) == surplus:
                break
        for engine_hash in passed:  # the next search need not pass idle ones again
            self.touch(engine_hash)
        return oldest

    def expire(self, engine_hash: EngineHash) -> None:
        """Drop every copy of a block; its binding stays."""
        block = self.blocks[engine_hash]
        for slot, n in counts(block.copies):
            self.drop(engine_hash, block, slot, n)

    def drop_tiers(self, tiers: Iterable[int]) -> None:
        """Drop every copy in the given tiers; bindings stay."""
        gone = [i for i, slot in enumerate(self.slots) if slot.tier in set(tiers)]
        if not gone:
            return
        for engine_hash, block in self.blocks.items():
            if block.copies:
                for slot in gone:
                    self.drop(engine_hash, block, slot, COUNT_MASK)

    def clear(self) -> None:
        """Forget everything, what this batch changed so far included."""
        self.blocks.clear()
        self.idle.clear()
        self.dirty.clear()
        self.mutations.clear()
        self._held.clear()
        self.plane_counts = [0] * len(self.planes)

    def retell(self) -> None:
        """Mark every block as dirty and give every bit again."""
        self.dirty = set(self.blocks)
        self.mutations.clear()
        assignment = list(zip(self._members, self._plane_ids, strict=True))
        seen: set[int] = set()
        for block in self.blocks.values():
            if block.copies and block.name not in seen:
                seen.add(block.name)
                for plane in _bits(assignment, self._held[block.name]):
                    self.mutations += pack_mutation(
                        block.name, block.parent, block.length, plane, ADD
                    )

    def load(self, slots: Iterable[Slot], planes: Iterable[Plane]) -> None:
        """Take over the numbering of an earlier process, before its blocks."""
        self.slots = list(slots)
        self._slot_ids = {slot: i for i, slot in enumerate(self.slots)}
        self.planes = list(planes)
        self.plane_counts = [0] * len(self.planes)
        self.replan()

    def load_block(self, engine_hash: EngineHash, block: Block) -> None:
        """Take over one block of an earlier process; emits nothing."""
        copies, block.copies = block.copies, 0
        self.blocks[engine_hash] = block
        self.idle[engine_hash] = None
        for slot, n in counts(copies):
            self.add(engine_hash, block, slot, n)

    def settle(self) -> None:
        """After the last `load_block`: nothing is dirty, nothing is to be told."""
        self.dirty.clear()
        self.mutations.clear()


def _slack(limit: int) -> int:
    return min(limit // 64, 4096)


def _bits(assignment: list[tuple[Membership | None, int]], packed: int) -> set[int]:
    return {plane for member, plane in assignment if member is not None and member.holds(packed)}
