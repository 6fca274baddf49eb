"""One worker rank's state machine: decoded events in, what the index must change out.

Pure: no I/O, no clock (time is an argument). The rules are 03-index.md section 2; each is
written once, here or in the piece that it names.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from kvindexd import chain
from kvindexd.batches import credited, is_chunk, segments
from kvindexd.groups import CHUNK_KINDS, Treatment, contradicts, tier_of
from kvindexd.model import BatchDelta, EngineHash, Tier
from kvindexd.placing import Place
from kvindexd.rank_state import Options, RankState
from kvindexd.records import UNBOUND, Block
from kvindexd.wire.events import Batch, BlockRemoved, BlockStored, Rejected

__all__ = ["Options", "Residency"]


class Residency(RankState):
    """The rules by which one worker rank's events change its state."""

    def __init__(self, options: Options | None = None) -> None:
        super().__init__(options)
        self._again: set[EngineHash] = set()  # told again in this batch: reused, not stored

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
        self._again.clear()
        cleared = False
        for segment, clear_follows in segments(batch.events):
            for event in self._main_first(segment):
                self._dispatch(event, now)
                yield
            if clear_follows:
                self._clear(first=not cleared)
                cleared = True
        yield from self._trim()

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
            try:
                self._stored(event, now)
            except OverflowError:  # raised before anything is changed
                self.counters["dropped:too_many_groups"] += 1
        elif isinstance(event, BlockRemoved):
            self._removed(event)
        elif isinstance(event, Rejected):
            self.counters[f"dropped:{event.reason}"] += 1
            if event.tag and event.reason == "unknown_tag":
                self.counters[f"tag:{event.tag}"] += 1

    # -- learning -----------------------------------------------------------------------------

    def _learn(self, events: Iterable[object]) -> None:
        """Rule 1: the catalogue learns from the whole batch before any of it is applied."""
        before = self.catalogue.version
        sizes: set[int] = set()
        for event in events:
            if not isinstance(event, BlockStored):
                continue
            if not event.tokens and event.kind is None:
                continue
            group = self.catalogue.learn(event.group_idx, event.kind, event.window)
            group.stores += 1
            if group.treated_as is Treatment.IGNORED or contradicts(group, event.kind):
                continue
            tier = tier_of(event.medium)
            if event.tokens and tier is not Tier.OTHER:
                sizes.add(event.block_size)
                if tier is Tier.DEVICE:
                    self.catalogue.learn_size(group, event.block_size)
        self._fit_unit(sizes)
        if self.catalogue.version != before:
            self._replan()

    def _fit_unit(self, sizes: Iterable[int]) -> None:
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
        if contradicts(group, event.kind):
            self.counters["dropped:kind_conflict"] += 1
            return
        if tier is Tier.OTHER:
            self.counters["dropped:unknown_medium"] += 1
            return
        hashes = event.hashes
        if len(set(hashes)) != len(hashes) or event.parent in hashes:
            self.counters["dropped:cycle"] += 1
            return
        self.counters["admitted"] += 1
        size = event.num_tokens if is_chunk(event, tier) else event.block_size
        slot = self.holdings.slot(tier, group.idx, size)
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
        for engine_hash in credited(event):
            self._credit(engine_hash, slot, event, now)
        if event.parent is None:
            return
        dropped = self.waiting.park(event.parent, event, now)
        if dropped:
            self.counters["dropped:parked_overflow"] += dropped

    def _dense(self, event: BlockStored, place: Place, slot: int) -> None:
        """Rule 4: every block is named by its own hash; the pairing is certain."""
        done = self._dense_fresh(event, place, slot) or self._dense_known(event, place, slot)
        if not done:
            return
        self._arrived(event.hashes)
        self._arrived(self.placer.extend(event, place, self.unit, dense=True))

    def _dense_fresh(self, event: BlockStored, place: Place, slot: int) -> bool:
        """Take in one pass what is most common, blocks that nothing is known of."""
        if (
            event.extra_keys
            or event.lookahead
            or self.holdings.slots[slot].size != event.block_size
        ):
            return False
        keys = chain.extend_packed(place.key, event.tokens, self.unit)
        start = place.key, place.length
        step = event.block_size // self.unit
        return self.holdings.store_fresh(event.hashes, keys, step, start, slot)

    def _dense_known(self, event: BlockStored, place: Place, slot: int) -> bool:
        """Take blocks of which some may be known; False when there is nothing to be done."""
        blocks = self.placer.dense_blocks(event, place, self.unit)
        if blocks is None:
            self.counters["dropped:conflict"] += 1
            return False
        holdings = self.holdings
        if self._told_again(event, slot):
            self.counters["reannounced"] += len(blocks)
            return False
        for engine_hash, block, is_new in blocks[: len(blocks) - len(credited(event))]:
            if is_new:
                holdings.bind(engine_hash, block)
        fresh: list[tuple[EngineHash, Block]] = []
        for engine_hash, block, is_new in blocks[-len(credited(event)) :]:
            if is_new:
                fresh.append((engine_hash, block))
                continue
            holdings.store_all(fresh, slot)
            fresh.clear()
            self._credit_bound(engine_hash, block, slot, event)
        holdings.store_all(fresh, slot)
        return True

    def _told_again(self, event: BlockStored, slot: int) -> bool:
        """Whether a store repeats what the engine already holds, for a request that reuses it
        (02-wire-and-groups.md section 4, report mode "full").

        Such a store begins at the root and lists only resident blocks, up to a boundary at which
        every other group could resume. An engine that computes them anew looks the same, but it
        reuses instead where it can; what remains (a prompt that ends at that boundary) is taken
        for a repeat, because a copy too few under-reports and a copy too many never goes.
        """
        where = self.holdings.slots[slot]
        blocks, hashes = self.holdings.blocks, event.hashes
        if self._again and self._again.issuperset(hashes):
            return bool(hashes) and self._all_held(hashes, slot)
        main = self.catalogue.groups[where.group].treated_as is Treatment.MAIN
        if event.parent is not None or event.group_idx is None or not hashes or not main:
            return False
        if where.tier != Tier.DEVICE or not self._all_held(hashes, slot):
            return False
        for g in self.catalogue.by_treatment(Treatment.AUXILIARY):
            if not g.block_size:
                return False
            window = max(1, -(-(g.window - 1) // g.block_size))
            back = len(hashes) if g.kind in CHUNK_KINDS else window
            tail = hashes[-back:] if g.block_size == event.block_size else hashes[-1:]
            slots = self.holdings.slots_of(Tier.DEVICE, g.idx)
            if not all(any(self.holdings.count(blocks[h], s) for s in slots) for h in tail):
                return False
        self._again.update(hashes)
        return True

    def _all_held(self, hashes: Iterable[EngineHash], slot: int) -> bool:
        found = map(self.holdings.blocks.get, hashes)
        return all(b is not None and self.holdings.count(b, slot) for b in found)

    def _sparse_main(self, event: BlockStored, place: Place, slot: int, now: float) -> None:
        self.counters["sparse"] += 1
        if event.hashes and self._locate(event, place):
            for engine_hash in event.hashes:
                self._credit(engine_hash, slot, event, now)
            return
        if self.seen_extras:
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
        if self._told_again(event, slot):
            self.counters["reannounced"] += len(event.hashes)
            return
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
        sizes = [g.block_size for g in main if g.block_size]
        return not sizes or event.block_size < min(sizes)

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
        main = self.catalogue.by_treatment(Treatment.MAIN)
        if group is None and event.group_idx is None and main:
            group = main[0]
        if group is None or group.treated_as is Treatment.IGNORED:
            kind = group.kind if group is not None else "unknown"
            self.counters[f"filtered:{kind}"] += 1
            return
        if not group.block_size:
            # Nothing has shown yet how many tokens such a block has.
            self.counters["dropped:unknown_size"] += 1
            return
        slot = self.holdings.slot(tier, group.idx, group.block_size)
        for engine_hash in event.hashes:
            self._credit(engine_hash, slot, event, now)

    # -- arrivals -----------------------------------------------------------------------------

    def _arrived(self, hashes: Iterable[EngineHash]) -> None:
        """Newly bound hashes: what waited for them moves in, and so do their children."""
        queue = self.waiting.awaited(hashes)
        while queue:
            engine_hash = queue.pop()
            block = self.holdings.blocks.get(engine_hash)
            if block is None:
                continue
            for where, n in self.waiting.take(engine_hash).items():
                self.holdings.add(engine_hash, block, self.holdings.slot(*where), n)
            for event in self.waiting.children(engine_hash):
                queue += self.waiting.awaited(self._adopt(event))

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
