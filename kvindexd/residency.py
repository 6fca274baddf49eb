"""One worker rank's state machine: decoded events in, what the index must change out.

Pure: no I/O, no clock (time is an argument). The rules are 03-index.md section 2; each is
written once, here or in the piece that it names.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

import msgspec

from kvindexd import chain
from kvindexd.groups import (
    MAIN_KINDS,
    NO_GROUP,
    ABSENT,
    Catalogue,
    Group,
    Treatment,
    tier_of,
)
from kvindexd.holdings import Holdings
from kvindexd.model import BatchDelta, EngineHash, GroupInfo, Profile, Tier
from kvindexd.placing import Place, Placer
from kvindexd.records import UNBOUND, Block, field_of, hash_of, pack, unpack
from kvindexd.waiting import WaitingRoom
from kvindexd.wire.events import AllBlocksCleared, Batch, BlockRemoved, BlockStored, Rejected


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """What an operator may set for one worker rank; times in seconds, limits in entries."""

    treat_as: dict[str, str] = {}
    reports_reuse: bool = False
    unbound_ttl: float = 60.0
    bindings: int = 4_000_000
    parked: int = 10_000
    parked_age: float = 300.0


class SavedState(msgspec.Struct, kw_only=True):
    """What a rank's next process needs besides the profile and the block records."""

    sizes: dict[int, list[int]] = {}
    seen_extras: bool = False
    hash_function: tuple[str, int, bool] | None = None
    sglang: bool = False


class Residency:
    """State of one worker rank.

    `counters` grows by name for everything that was dropped, filtered or parked. `needs_replay`
    is set when the chain unit fell and all claims had to go: only a replay brings them back.
    """

    def __init__(self, options: Options | None = None) -> None:
        self.options = options or Options()
        self.catalogue = Catalogue(self.options.treat_as)
        self.holdings = Holdings(self._infos)
        self.waiting = WaitingRoom(self.options.parked, self.options.parked_age)
        self.placer = Placer(self.holdings)
        self.counters: Counter[str] = Counter()
        self.unit = chain.UNIT
        self.lookahead = 0
        self.pairs = False
        self.seen_extras = False
        self.needs_replay = False
        self._unbound: dict[EngineHash, float] = {}
        self._listed: dict[EngineHash, list[EngineHash]] = {}
        self._cleared = False
        self._saved: tuple[bytes, bytes] = (b"", b"")

    def _infos(self) -> tuple[GroupInfo, ...]:
        return self.catalogue.infos()

    # -- a batch ------------------------------------------------------------------------------

    def apply(self, batch: Batch, *, seq: int, digest: int, now: float) -> BatchDelta:
        """Apply one batch in order and return all that it changes.

        `digest`: of the raw payload, recorded to recognise a repeat. `now`: seconds, for ages.
        """
        for _ in self.apply_steps(batch, now=now):
            pass
        return self.take_delta(seq=seq, ts=batch.ts, digest=digest)

    def apply_steps(self, batch: Batch, *, now: float) -> Iterator[None]:
        """As `apply`, pausing after every event so that a caller may let others run."""
        self._expire(now)
        self._learn(batch.events)
        cleared = False
        for segment, clear_follows in _segments(batch.events):
            for event in self._main_first(segment):
                self._dispatch(event, now)
                yield
            if clear_follows:
                self._clear(first=not cleared)
                cleared = True
        dropped = self.holdings.trim_idle(self.options.bindings)
        if dropped:
            self.counters["bindings_forgotten"] += dropped

    def _main_first(self, events: list[object]) -> Iterator[object]:
        """A stable partition: sparse groups are often announced before the dense group that
        explains them, and no order is promised."""
        later = []
        for event in events:
            if self._treatment(event) is Treatment.MAIN:
                yield event
            else:
                later.append(event)
        yield from later

    def _treatment(self, event: object) -> Treatment:
        if not isinstance(event, BlockStored | BlockRemoved):
            return Treatment.MAIN
        group = self.catalogue.get(event.group_idx)
        return group.treated_as if group is not None else Treatment.AUXILIARY

    def _dispatch(self, event: object, now: float) -> None:
        if isinstance(event, BlockStored):
            self._stored(event, now)
        elif isinstance(event, BlockRemoved):
            self._removed(event)
        elif isinstance(event, Rejected):
            self.counters[f"dropped:{event.reason}"] += 1
            if event.tag and event.reason == "unknown_tag":
                self.counters[f"tag:{event.tag}"] += 1

    # -- learning -----------------------------------------------------------------------------

    def _learn(self, events: Iterable[object]) -> None:
        """Rule 1: the catalogue learns from the whole batch before any of it is applied."""
        changed, sizes = False, []
        for event in events:
            if not isinstance(event, BlockStored):
                continue
            if not event.tokens and event.kind is None and event.group_idx is not None:
                continue
            before = len(self.catalogue.groups)
            group = self.catalogue.learn(event.group_idx, event.kind, event.window)
            changed |= len(self.catalogue.groups) != before
            group.stores += 1
            if event.tokens and group.treated_as is not Treatment.IGNORED:
                sizes.append(event.block_size)
                changed |= self._learn_size(group, event)
        if sizes:
            self._fit_unit(sizes)
        if changed:
            self.holdings.replan()
            self.placer.wanted = bool(self.catalogue.by_treatment(Treatment.AUXILIARY))

    @staticmethod
    def _learn_size(group: Group, event: BlockStored) -> bool:
        if tier_of(event.medium) is not Tier.DEVICE:
            return False
        group.sizes.add(event.block_size)
        if event.block_size <= group.block_size:
            return False
        group.block_size = event.block_size
        return True

    def _fit_unit(self, sizes: list[int]) -> None:
        unit = chain.unit_for(self.unit, sizes)
        if unit == self.unit:
            return
        if self.holdings.blocks or len(self.waiting):
            self.counters["unit_changes"] += 1
            self.reset()
            self.needs_replay = True
        self.unit = unit

    # -- stores -------------------------------------------------------------------------------

    def _stored(self, event: BlockStored, now: float) -> None:
        if not event.tokens:
            self._tier_change(event, now)
            return
        group = self.catalogue.learn(event.group_idx, event.kind, event.window)
        tier = tier_of(event.medium)
        if group.treated_as is Treatment.IGNORED:
            self.counters[f"filtered:{group.kind}"] += 1
            return
        if tier is Tier.OTHER:
            self.counters["dropped:unknown_medium"] += 1
            return
        hashes = event.hashes
        if len(set(hashes)) != len(hashes) or event.parent in hashes:
            self.counters["dropped:cycle"] += 1
            return
        self.counters["admitted"] += 1
        slot = self.holdings.slot(tier, group.idx, event.block_size)
        if event.pairs or event.lookahead:
            self.pairs = self.pairs or event.pairs
            self.lookahead = max(self.lookahead, *(len(t) // 4 for t in event.lookahead or ()))
        self.seen_extras |= bool(event.extra_keys or event.cache_salt)
        place = self.placer.place_of(event, self.counters)
        if place is None:
            self._arrived(self.placer.learn_parent(event, self.unit))
            place = self.placer.place_of(event, self.counters)
        if place is None:
            self._orphan(event, slot, now)
        elif len(hashes) * event.block_size == event.num_tokens:
            self._dense(event, place, slot)
        elif group.treated_as is Treatment.MAIN:
            self._sparse_main(event, place, slot, now)
        else:
            self._sparse_auxiliary(event, place, slot, now)

    def _orphan(self, event: BlockStored, slot: int, now: float) -> None:
        """The parent is unknown: count copies where the hash is bound, let the rest wait."""
        self.counters["orphans"] += 1
        for engine_hash in event.hashes:
            self._credit(engine_hash, slot, event, now)
        dropped = self.waiting.park(event, now)
        if dropped:
            self.counters["dropped:parked_overflow"] += dropped

    def _dense(self, event: BlockStored, place: Place, slot: int) -> None:
        """Rule 4: every block is named by its own hash; the pairing is certain."""
        blocks = self.placer.dense_blocks(event, place, self.unit)
        if blocks is None:
            self.counters["dropped:conflict"] += 1
            return
        holdings = self.holdings
        for engine_hash, block, is_new in blocks:
            if is_new:
                holdings.bind(engine_hash, block)
            self._credit_bound(engine_hash, block, slot, event)
        finer = self.placer.extend(event, place, self.unit, dense=True)
        self._arrived([*(h for h, _, is_new in blocks if is_new), *finer])

    def _sparse_main(self, event: BlockStored, place: Place, slot: int, now: float) -> None:
        self.counters["sparse"] += 1
        if event.hashes and self._locate(event, place):
            for engine_hash in event.hashes:
                self._credit(engine_hash, slot, event, now)
            return
        if self.seen_extras or place.tainted:
            # Extras of unlisted blocks are invisible, so their keys could be wrong.
            self.counters["dropped:sparse_extras"] += 1
            return
        if not event.hashes or event.lookahead:
            self.counters["dropped:sparse_unplaced"] += 1
            return
        names: list[EngineHash] = []
        for block in self.placer.span_blocks(event, place, self.unit):
            pseudo = UNBOUND + block.name.to_bytes(8, "big")
            names.append(pseudo)
            known = self.holdings.blocks.get(pseudo)
            if known is None:
                self.holdings.bind(pseudo, block)
                known = block
            if not self.holdings.count(known, slot):
                self.holdings.add(pseudo, known, slot)
            self._unbound.pop(pseudo, None)
            self._unbound[pseudo] = now + self.options.unbound_ttl
        for engine_hash in event.hashes:
            self._listed[engine_hash] = names

    def _sparse_auxiliary(self, event: BlockStored, place: Place, slot: int, now: float) -> None:
        if not self._locate(event, place) and event.hashes:
            self.counters["unplaced"] += sum(h not in self.holdings.blocks for h in event.hashes)
        for engine_hash in event.hashes:
            self._credit(engine_hash, slot, event, now)

    def _locate(self, event: BlockStored, place: Place) -> bool:
        """Whether every listed hash is bound, if need be by reproducing the engine's hash."""
        blocks = self.holdings.blocks
        missing = any(h not in blocks for h in event.hashes)
        if missing or self._needs_boundaries(event):
            self._arrived(self.placer.extend(event, place, self.unit, dense=False))
            missing = any(h not in blocks for h in event.hashes)
        return not missing

    def _needs_boundaries(self, event: BlockStored) -> bool:
        """Whether no main group names the boundaries of this group's blocks."""
        main = self.catalogue.by_treatment(Treatment.MAIN)
        return not main or event.block_size < min(g.block_size for g in main)

    def _tier_change(self, event: BlockStored, now: float) -> None:
        """Rule 0: hashes without tokens say where known blocks are, and nothing else."""
        if not event.hashes:
            self.counters["empty_stores"] += 1
            return
        tier = tier_of(event.medium)
        if tier is Tier.OTHER:
            self.counters["dropped:unknown_medium"] += 1
            return
        group = self.catalogue.get(event.group_idx)
        if group is None:
            idx, kind = self.catalogue.classify(event.group_idx, event.kind)
            main = self.catalogue.by_treatment(Treatment.MAIN)
            if idx == NO_GROUP and main:
                group = main[0]
            elif kind == ABSENT or event.kind is not None:
                group = self.catalogue.learn(event.group_idx, event.kind, event.window)
        if group is None or group.treated_as is Treatment.IGNORED:
            kind = group.kind if group is not None else "unknown"
            self.counters[f"filtered:{kind}"] += 1
            return
        slot = self.holdings.slot(tier, group.idx, group.block_size)
        for engine_hash in event.hashes:
            self._credit(engine_hash, slot, event, now)

    # -- copies -------------------------------------------------------------------------------

    def _credit(self, engine_hash: EngineHash, slot: int, event: BlockStored, now: float) -> None:
        """One more copy, where the hash is bound or in the waiting room."""
        block = self.holdings.blocks.get(engine_hash)
        if block is not None:
            self._credit_bound(engine_hash, block, slot, event)
            return
        key = self.holdings.slots[slot]
        if not (self._is_repeat(event) and self.waiting.count(engine_hash, key)):
            self.waiting.add(engine_hash, key, now)

    def _credit_bound(
        self, engine_hash: EngineHash, block: Block, slot: int, event: BlockStored
    ) -> None:
        if self._is_repeat(event) and self.holdings.count(block, slot):
            self.counters["reannounced"] += 1
            return
        self.holdings.add(engine_hash, block, slot)

    def _is_repeat(self, event: BlockStored) -> bool:
        """Rule 5: where an engine announces reused blocks again, a store of a held block cannot
        be told from a second copy; not counting it under-reports at worst."""
        return event.reused or self.options.reports_reuse

    def _arrived(self, hashes: Iterable[EngineHash]) -> None:
        """Newly bound hashes: what waited for them moves in, and so do their children."""
        queue = list(hashes)
        while queue:
            engine_hash = queue.pop()
            block = self.holdings.blocks.get(engine_hash)
            if block is None:
                continue
            for where, n in self.waiting.take(engine_hash).items():
                self.holdings.add(engine_hash, block, self.holdings.slot(*where), n)
            for event in self.waiting.children(engine_hash):
                queue += self._adopt(event)

    def _adopt(self, event: BlockStored) -> list[EngineHash]:
        """Bind a parked event's hashes now that its parent is known; its copies wait by hash."""
        self.counters["orphans_adopted"] += 1
        place = self.placer.place_of(event, self.counters)
        if place is None:
            return []
        if len(event.hashes) * event.block_size != event.num_tokens:
            return self.placer.extend(event, place, self.unit, dense=False)
        blocks = self.placer.dense_blocks(event, place, self.unit)
        if blocks is None:
            self.counters["dropped:conflict"] += 1
            return []
        fresh: list[EngineHash] = [h for h, _, is_new in blocks if is_new]
        for engine_hash, block, is_new in blocks:
            if is_new:
                self.holdings.bind(engine_hash, block)
        return fresh + self.placer.extend(event, place, self.unit, dense=True)

    # -- removals -----------------------------------------------------------------------------

    def _removed(self, event: BlockRemoved) -> None:
        tier = tier_of(event.medium)
        group = self.catalogue.get(event.group_idx)
        if group is None and event.group_idx is None:
            main = self.catalogue.by_treatment(Treatment.MAIN)
            group = main[0] if main else None
        if group is None:
            # Not guessed at: a removal from an unknown group must not take a main block away.
            self.counters["unknown_group"] += len(event.hashes)
            return
        if group.treated_as is Treatment.IGNORED:
            self.counters[f"filtered:{group.kind}"] += 1
            return
        for i, engine_hash in enumerate(event.hashes):
            left = event.remaining[i] if event.remaining is not None else None
            if not self._remove_one(engine_hash, tier, group.idx, left):
                self.counters["unknown_removes"] += 1

    def _remove_one(self, engine_hash: EngineHash, tier: int, group: int, left: int | None) -> bool:
        block = self.holdings.blocks.get(engine_hash)
        if block is not None:
            holdings = self.holdings
            slots = [
                (key.size, i)
                for i, key in enumerate(holdings.slots)
                if key.tier == tier and key.group == group and holdings.count(block, i)
            ]
            if slots:
                slot = max(slots)[1]
                n = 1 if left is None else holdings.count(block, slot) - left
                holdings.drop(engine_hash, block, slot, n)
                return True
        if engine_hash in self._listed:
            for unbound in self._listed.pop(engine_hash):
                self._unbound.pop(unbound, None)
                self.holdings.forget(unbound)
            return True
        return self.waiting.remove(engine_hash, tier, group, left)

    # -- clears -------------------------------------------------------------------------------

    def _clear(self, *, first: bool) -> None:
        """The first clear of a batch empties all; a further one only what an offload tier held
        (02-wire-and-groups.md section 4: it follows new device stores of the same batch)."""
        self.counters["clears"] += 1
        if first:
            self.reset()
            return
        below = {int(t) for t in Tier if t is not Tier.DEVICE}
        self.holdings.drop_tiers(below)
        self.waiting.drop_tiers(below)

    def reset(self, *, incarnation: bool = False) -> None:
        """Forget every claim and binding; with `incarnation`, what the engine has shown too."""
        self.holdings.clear()
        self.waiting.clear()
        self._unbound.clear()
        self._listed.clear()
        self._cleared = True
        if incarnation:
            self.catalogue = Catalogue(self.options.treat_as)
            self.holdings = Holdings(self._infos)
            self.placer = Placer(self.holdings)
            self.unit, self.lookahead, self.pairs = chain.UNIT, 0, False
            self.seen_extras = False

    def _expire(self, now: float) -> None:
        orphans, unplaced = self.waiting.expire(now)
        if orphans:
            self.counters["dropped:parked_expired"] += orphans
        if unplaced:
            self.counters["dropped:unplaced_expired"] += unplaced
        while self._unbound:
            pseudo, until = next(iter(self._unbound.items()))
            if until > now:
                break
            del self._unbound[pseudo]
            self.holdings.forget(pseudo)
            self.counters["unbound_expired"] += 1
        if not self._unbound:
            self._listed.clear()

    # -- what the store keeps -----------------------------------------------------------------

    def profile(self) -> Profile:
        """What scoring must know of this rank."""
        held_back = sum(
            1
            for entry in self.waiting.unplaced.values()
            if any(self._is_auxiliary(slot.group) for slot in entry.copies)
        )
        return Profile(
            unit=self.unit,
            lookahead=self.lookahead,
            pairs=self.pairs,
            groups=self._infos(),
            planes=tuple(self.holdings.planes),
            slots=tuple(self.holdings.slots),
            unlocated=held_back,
        )

    def _is_auxiliary(self, group: int) -> bool:
        known = self.catalogue.groups.get(group)
        return known is not None and known.treated_as is Treatment.AUXILIARY

    def take_delta(self, *, seq: int, ts: float, digest: int) -> BatchDelta:
        """All changes since the last call, ready for one atomic write."""
        blocks, dirty = self.holdings.blocks, self.holdings.dirty
        written = {field_of(h): pack(blocks[h]) if h in blocks else None for h in dirty}
        profile, state = self._encoded()
        delta = BatchDelta(
            seq=seq,
            ts=ts,
            digest=digest,
            clear=self._cleared,
            blocks=written,
            parked=self.waiting.drain_changes(),
            mutations=bytes(self.holdings.mutations),
            profile=profile if profile != self._saved[0] or self._cleared else None,
            state=state if state != self._saved[1] or self._cleared else None,
            counters=dict(self.counters),
            tier_blocks=self.tier_blocks(),
        )
        self._saved = (profile, state)
        self._cleared = False
        self.counters.clear()
        self.holdings.settle()
        return delta

    def tier_blocks(self) -> tuple[int, int, int, int]:
        """Blocks per tier as operators count them: the main groups', each once."""
        return self.holdings.tier_blocks(
            {g.kind for g in self.catalogue.by_treatment(Treatment.MAIN)} or MAIN_KINDS
        )

    def _encoded(self) -> tuple[bytes, bytes]:
        profile = self.profile()
        quiet = tuple(msgspec.structs.replace(g, stores=0) for g in profile.groups)
        saved = SavedState(
            sizes={g.idx: sorted(g.sizes) for g in self.catalogue.groups.values()},
            seen_extras=self.seen_extras,
            hash_function=self.placer.saved(),
            sglang=self.placer.sglang,
        )
        profile = msgspec.structs.replace(profile, groups=quiet)
        return msgspec.msgpack.encode(profile), msgspec.msgpack.encode(saved)

    def restore(
        self,
        profile: Profile,
        state: bytes | None,
        blocks: Iterable[tuple[bytes, bytes]],
        parked: Iterator[tuple[bytes, bytes]],
    ) -> None:
        """Take over what an earlier process had written, on a fresh instance."""
        saved = msgspec.msgpack.decode(state, type=SavedState) if state else SavedState()
        self.catalogue.restore(profile.groups, saved.sizes)
        self.unit, self.lookahead, self.pairs = profile.unit, profile.lookahead, profile.pairs
        self.seen_extras = saved.seen_extras
        self.placer.restore(saved.hash_function, saved.sglang)
        self.holdings.load(profile.slots, profile.planes)
        for field, record in blocks:
            engine_hash = hash_of(field)
            self.holdings.load_block(engine_hash, unpack(record))
            if isinstance(engine_hash, bytes) and engine_hash.startswith(UNBOUND):
                self._unbound[engine_hash] = 0.0
        self.waiting.load(parked)
        self.holdings.settle()
        self._saved = self._encoded()


def _segments(events: Iterable[object]) -> Iterator[tuple[list[object], bool]]:
    """Events between clears; True with each run that a clear follows."""
    run: list[object] = []
    for event in events:
        if isinstance(event, AllBlocksCleared):
            yield run, True
            run = []
        else:
            run.append(event)
    yield run, False


