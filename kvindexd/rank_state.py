"""One worker rank's state, and what of it the store keeps: counts, waiting room, saved form."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

import msgspec

from kvindexd import chain
from kvindexd.groups import MAIN_KINDS, Catalogue, Treatment
from kvindexd.holdings import Holdings
from kvindexd.model import BatchDelta, EngineHash, GroupInfo, Profile
from kvindexd.placing import Placer
from kvindexd.records import UNBOUND, Block, hash_of, pack_all, unpack
from kvindexd.waiting import WaitingRoom
from kvindexd.wire.events import BlockStored

_PAUSE = 256
"""Blocks to trim between two pauses."""


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """What an operator may set for one worker rank; times in seconds, limits in entries."""

    treat_as: dict[str, str] = {}
    reports_reuse: bool = False
    unbound_ttl: float = 60.0
    bindings: int = 4_000_000
    blocks: int = 4_000_000
    parked: int = 10_000
    parked_tokens: int = 4_000_000
    parked_age: float = 300.0


class SavedState(msgspec.Struct, kw_only=True):
    """What a rank's next process needs besides the profile and the block records."""

    sizes: dict[int, list[int]] = {}
    seen_extras: bool = False
    hash_function: tuple[str, int, bool] | None = None
    sglang: bool = False


class RankState:
    """State of one worker rank, without the rules that change it (see residency.Residency).

    `counters` grows by name for everything that was dropped, filtered or parked. `needs_replay`
    is set when the chain unit fell and all claims had to go: only a replay brings them back.
    """

    def __init__(self, options: Options | None = None) -> None:
        self.options = options or Options()
        self.catalogue = Catalogue(self.options.treat_as)
        self.holdings = Holdings(self._infos)
        self.waiting = WaitingRoom(
            self.options.parked, self.options.parked_age, self.options.parked_tokens
        )
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
        self._saved_shape: tuple[object, ...] = ()

    def _infos(self) -> tuple[GroupInfo, ...]:
        return self.catalogue.infos()

    def _replan(self) -> None:
        """After a change of the catalogue: what copies make which bit, and what hashes are for."""
        self.holdings.replan()
        self.placer.wanted = bool(self.catalogue.by_treatment(Treatment.AUXILIARY))

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
        self.holdings.touch(engine_hash)
        if self._is_repeat(event) and self.holdings.count(block, slot):
            self.counters["reannounced"] += 1
            return
        self.holdings.add(engine_hash, block, slot)

    def _is_repeat(self, event: BlockStored) -> bool:
        """Rule 5: where an engine announces reused blocks again, a store of a held block cannot
        be told from a second copy; not counting it under-reports at worst."""
        return event.reused or self.options.reports_reuse

    def _remove_one(self, engine_hash: EngineHash, tier: int, group: int, left: int | None) -> bool:
        block = self.holdings.blocks.get(engine_hash)
        if block is not None:
            holdings = self.holdings
            for slot in holdings.slots_of(tier, group):
                have = holdings.count(block, slot)
                if not have:
                    continue
                if left is None:
                    holdings.drop(engine_hash, block, slot)
                elif left > have:
                    holdings.add(engine_hash, block, slot, left - have)
                else:
                    holdings.drop(engine_hash, block, slot, have - left)
                return True
        if engine_hash in self._listed:
            for unbound in self._listed.pop(engine_hash):
                self._unbound.pop(unbound, None)
                self.holdings.forget(unbound)
            return True
        return self.waiting.remove(engine_hash, tier, group, left)

    def reset(self, *, incarnation: bool = False) -> None:
        """Forget every claim and binding; with `incarnation`, what the engine has shown too."""
        self.holdings.clear()
        self.waiting.clear()
        self._unbound.clear()
        self._listed.clear()
        self._cleared = True
        if incarnation:
            self.catalogue = Catalogue(self.options.treat_as)
            self._saved_shape = ()
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

    def _trim(self) -> Iterator[None]:
        """Keep to the limits, pausing now and then; engines that never say a removal, or lose
        one, would otherwise be believed for ever."""
        for i, engine_hash in enumerate(self.holdings.surplus_claims(self.options.blocks)):
            self.holdings.expire(engine_hash)
            self.counters["claims_expired"] += 1
            if i % _PAUSE == 0:
                yield
        for i, engine_hash in enumerate(self.holdings.surplus_idle(self.options.bindings)):
            self.holdings.forget(engine_hash)
            self.counters["bindings_forgotten"] += 1
            if i % _PAUSE == 0:
                yield

    # -- what the store keeps -----------------------------------------------------------------

    def profile(self) -> Profile:
        """What scoring must know of this rank."""
        return Profile(
            unit=self.unit,
            lookahead=self.lookahead,
            pairs=self.pairs,
            groups=self._infos(),
            planes=tuple(self.holdings.planes),
            slots=tuple(self.holdings.slots),
            unlocated=self._unlocated(),
        )

    def _unlocated(self) -> int:
        """Blocks of auxiliary groups that are held and could not be placed."""
        auxiliary = self.catalogue.by_treatment(Treatment.AUXILIARY)
        return sum(self.waiting.per_group[g.idx] for g in auxiliary)

    def take_delta(self, *, seq: int, ts: float, digest: int) -> BatchDelta:
        """All changes since the last call, ready for one atomic write."""
        written = pack_all(self.holdings.dirty, self.holdings.blocks)
        shape = self._shape()
        encoded = self._encoded() if shape != self._saved_shape else self._saved
        delta = BatchDelta(
            seq=seq,
            ts=ts,
            digest=digest,
            clear=self._cleared,
            blocks=written,
            parked=self.waiting.drain_changes(),
            mutations=bytes(self.holdings.mutations),
            profile=encoded[0] if encoded[0] != self._saved[0] or self._cleared else None,
            state=encoded[1] if encoded[1] != self._saved[1] or self._cleared else None,
            counters=dict(self.counters),
            tier_blocks=self.tier_blocks(),
        )
        self._saved, self._saved_shape = encoded, shape
        self._cleared = False
        self.counters.clear()
        self.holdings.settle()
        return delta

    @property
    def cleared(self) -> bool:
        """Whether the next delta clears what was told before."""
        return self._cleared

    @property
    def has_changes(self) -> bool:
        """Whether `take_delta` would have something to say besides counters."""
        return self._cleared or bool(self.holdings.dirty or self.waiting.changed)

    def forget_saved(self) -> None:
        """Give the profile and the state again with the next delta: they were not written."""
        self._saved, self._saved_shape = (b"", b""), ()

    def shed(self, deltas: Iterable[BatchDelta]) -> int:
        """Forget every block and waiting store that these deltas would have written; how many."""
        lost = 0
        for delta in deltas:
            for field, record in delta.blocks.items():
                if record is not None:
                    lost += 1
                    self.holdings.forget(hash_of(field))
                    self.holdings.dirty.add(hash_of(field))
            lost += sum(record is not None for record in delta.parked.values())
        self.waiting.forget_all(f for d in deltas for f, r in d.parked.items() if r is not None)
        return lost

    def rewrite(self) -> None:
        """Give everything again with the next delta, behind a clear: the store lost some of it."""
        self.forget_saved()
        self._cleared = True
        self.holdings.retell()
        self.waiting.retell()

    def main_block_size(self) -> int:
        """The block size that the lowest main group has shown, in tokens; 0 = none yet."""
        main = self.catalogue.by_treatment(Treatment.MAIN)
        return main[0].block_size if main else 0

    def tier_blocks(self) -> tuple[int, int, int, int]:
        """Blocks per tier as operators count them: the main groups', each once."""
        return self.holdings.tier_blocks(
            {g.kind for g in self.catalogue.by_treatment(Treatment.MAIN)} or MAIN_KINDS
        )

    def _shape(self) -> tuple[object, ...]:
        """Equal while `_encoded` would say the same: cheaper than saying it for every batch."""
        return (
            self.catalogue.version,
            len(self.holdings.slots),
            len(self.holdings.planes),
            self.unit,
            self.lookahead,
            self.pairs,
            self._unlocated(),
            self.seen_extras,
            self.placer.saved(),
            self.placer.sglang,
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
        self._replan()
        for field, record in blocks:
            engine_hash = hash_of(field)
            self.holdings.load_block(engine_hash, unpack(record))
            if isinstance(engine_hash, bytes) and engine_hash.startswith(UNBOUND):
                self._unbound[engine_hash] = 0.0
        self.waiting.load(parked)
        self.holdings.settle()
        self._saved, self._saved_shape = self._encoded(), self._shape()
