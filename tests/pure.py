"""One worker rank driven by payload bytes, for tests: the whole pure core without any I/O."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
import xxhash

from kvindexd import chain
from kvindexd.model import BatchDelta, Plane, Profile, Tier
from kvindexd.records import counts
from kvindexd.residency import Options, Residency
from kvindexd.scoring.geometry import Geometry, WorkerOptions, geometry
from kvindexd.scoring.match import Match, match
from kvindexd.scoring.query import Query
from kvindexd.testing.conformance import SetPresence
from kvindexd.wire import decode_batch

BS = 16
FULL, MLA, WINDOW, MAMBA, CHUNKED = (
    "full_attention",
    "mla_attention",
    "sliding_window",
    "mamba",
    "chunked_local_attention",
)


def chunk(number: int, size: int = BS) -> list[int]:
    """`size` tokens that no other number's chunk shares."""
    return [number * 100_000 + i for i in range(size)]


A, B, C, D = (chunk(n) for n in (1, 2, 3, 4))
HA, HB, HC, HD = 0xA, 0xB, 0xC, 0xD


def stored(
    hashes: Sequence[Any],
    tokens: Sequence[Any],
    parent: Any = None,
    *,
    group: int | None = 0,
    kind: str | None = FULL,
    bs: int | None = BS,
    medium: str | None = "GPU",
    window: int | None = None,
    **more: Any,
) -> dict[str, Any]:
    """A BlockStored map as vLLM writes it; keys that are None are left out."""
    event = {
        "type": "BlockStored",
        "block_hashes": list(hashes),
        "parent_block_hash": parent,
        "token_ids": list(tokens),
        "block_size": bs,
        "lora_id": None,
        "medium": medium,
        "lora_name": None,
    }
    optional = {
        "group_idx": group,
        "kv_cache_spec_kind": kind,
        "kv_cache_spec_sliding_window": window,
    }
    event.update({k: v for k, v in optional.items() if v is not None})
    event.update(more)
    return event


def legacy(hashes: Sequence[Any], tokens: Sequence[Any], parent: Any = None, bs: int = BS) -> Any:
    """A BlockStored array as SGLang and older vLLM write it: no group, no medium."""
    return ["BlockStored", list(hashes), parent, list(tokens), bs, None]


def removed(
    hashes: Sequence[Any], *, group: int | None = 0, medium: str | None = "GPU", **more: Any
) -> dict[str, Any]:
    """A BlockRemoved map."""
    event: dict[str, Any] = {"type": "BlockRemoved", "block_hashes": list(hashes), "medium": medium}
    if group is not None:
        event["group_idx"] = group
    return event | more


def state(
    hashes: Sequence[Any], tokens: Sequence[Any], parent: Any = None, **more: Any
) -> dict[str, Any]:
    """A Mamba group's BlockStored, as group 1."""
    return stored(hashes, tokens, parent, group=1, kind=MAMBA, **more)


CLEARED = {"type": "AllBlocksCleared"}


def payload(*events: Any, ts: float = 1.0, rank: int | None = 0) -> bytes:
    """A batch as bytes."""
    return msgspec.msgpack.encode([ts, list(events), rank])


class Rank:
    """A rank's state machine, the presence that its mutations build, and the store it would fill.

    `presence` knows only what the deltas say, so it is a replica; `fields` is what Redis would
    hold. `reloaded` continues from `fields` alone.
    """

    def __init__(self, options: Options | None = None, worker: WorkerOptions | None = None) -> None:
        self.options = options or Options()
        self.worker = worker or WorkerOptions()
        self.residency = Residency(self.options)
        self.presence = SetPresence()
        self.counters: Counter[str] = Counter()
        self.fields: dict[bytes, bytes] = {}
        self.parked: dict[bytes, bytes] = {}
        self.profile = Profile()
        self.state: bytes | None = None
        self.seq = 0
        self.now = 0.0

    # -- events in ----------------------------------------------------------------------------

    def send(self, *events: Any, now: float | None = None) -> BatchDelta:
        """One batch of raw events through the real decoder."""
        return self.send_raw(payload(*events, ts=float(self.seq)), now=now)

    def send_raw(self, raw: bytes, *, now: float | None = None) -> BatchDelta:
        """One batch as bytes."""
        self.now = self.now if now is None else now
        batch = decode_batch(raw)
        digest = xxhash.xxh3_64_intdigest(raw)
        delta = self.residency.apply(batch, seq=self.seq, digest=digest, now=self.now)
        self.seq += 1
        self.take(delta)
        return delta

    def restart_engine(self) -> None:
        """The engine came up anew: its sequence went backwards."""
        self.residency.reset(incarnation=True)
        self.seq = 0

    def take(self, delta: BatchDelta) -> None:
        """Do to the stand-in store and replica what one delta asks for."""
        self.presence.apply(delta)
        self.counters.update(delta.counters)
        if delta.clear:
            self.fields.clear()
            self.parked.clear()
        write_fields(self.fields, delta.blocks.items())
        write_fields(self.parked, delta.parked.items())
        if delta.profile is not None:
            self.profile = msgspec.msgpack.decode(delta.profile, type=Profile)
        if delta.state is not None:
            self.state = delta.state

    def reloaded(self) -> Rank:
        """A new process that knows only what the store holds."""
        other = Rank(self.options, self.worker)
        other.residency.restore(
            self.profile, self.state, iter(self.fields.items()), iter(self.parked.items())
        )
        other.presence.profile = self.profile
        other.presence.names = {p: set(n) for p, n in self.presence.names.items()}
        other.fields, other.parked = dict(self.fields), dict(self.parked)
        other.profile, other.state = self.profile, self.state
        other.seq, other.now, other.counters = self.seq, self.now, self.counters.copy()
        return other

    # -- answers out --------------------------------------------------------------------------

    def geometry(self, *, hybrid: bool = True) -> Geometry:
        """What matching needs of this rank now."""
        return geometry(self.presence.profile, self.worker, hybrid)

    def ask(
        self,
        tokens: Iterable[int],
        *,
        lora: str = "",
        salt: str = "",
        items: Sequence[tuple[str, int]] = (),
        hybrid: bool = True,
        device_only: bool = False,
    ) -> Match:
        """The match of one prompt."""
        query = Query(
            chain.pack_tokens(list(tokens)),
            lora_name=lora,
            cache_salt=salt,
            items=[chain.Item(*i) for i in items],
        )
        return match(
            self.presence.ask(query),
            self.geometry(hybrid=hybrid),
            query.tokens,
            device_only=device_only,
        )

    def matched(self, tokens: Iterable[int], **more: Any) -> int:
        """matched_blocks."""
        found = int(self.ask(tokens, **more).matched[0])
        return found // max(1, self.geometry().block_size)

    def reusable(self, tokens: Iterable[int], **more: Any) -> int:
        """reusable_tokens."""
        return int(self.ask(tokens, **more).reusable[0])

    def tiers(self, tokens: Iterable[int], **more: Any) -> tuple[int, int, int]:
        """Tokens per tier: device, host, storage."""
        device, host, storage = self.ask(tokens, **more).tiers
        return int(device[0]), int(host[0]), int(storage[0])

    def held(self, tier: Tier = Tier.DEVICE) -> int:
        """Blocks that operators see in a tier."""
        return self.residency.tier_blocks()[tier]


def write_fields(store: dict[bytes, bytes], changes: Iterable[tuple[bytes, bytes | None]]) -> None:
    for field, record in changes:
        if record is None:
            store.pop(field, None)
        else:
            store[field] = record


def holdings_by_plane(residency: Residency) -> dict[Plane, set[int]]:
    """What should be held, worked out from the copies alone, the slow way.

    A name is held in a (tier, spec, entry) while every group of that spec has a copy of some
    hash bound to the name.
    """
    holdings = residency.holdings
    groups = {g.idx: g for g in residency.catalogue.infos() if g.treated_as != "ignored"}
    per_group: dict[tuple[int, int, int], set[int]] = {}
    for block in holdings.blocks.values():
        for number, _ in counts(block.copies):
            per_group.setdefault(tuple(holdings.slots[number]), set()).add(block.name)
    out: dict[Plane, set[int]] = {}
    for tier, idx, size in per_group:
        group = groups.get(idx)
        if group is None:
            continue
        spec = (group.kind, group.block_size, group.window)
        mates = [i for i, g in groups.items() if (g.kind, g.block_size, g.window) == spec]
        names = set.intersection(*(per_group.get((tier, i, size), set()) for i in mates))
        if names:
            out[Plane(tier, *spec, size)] = names
    return out


def presence_by_plane(presence: SetPresence) -> dict[Plane, set[int]]:
    """The replica's view, empty planes left out."""
    return {plane: names for plane, names in presence.names.items() if names}


def planes(rank: Rank, kind: str = FULL, tier: Tier = Tier.DEVICE) -> int:
    """Names held in all planes of a kind and tier, as the replica sees them."""
    held = presence_by_plane(rank.presence)
    return sum(len(n) for p, n in held.items() if p.kind == kind and p.tier == tier)


def dump(residency: Residency) -> tuple[Any, ...]:
    """All state that matters, comparable; the order of bindings and idle time are left out."""
    holdings, waiting = residency.holdings, residency.waiting
    blocks = {
        h: (b.key, b.length, b.name, b.parent, b.digest, b.copies)
        for h, b in holdings.blocks.items()
    }
    groups = [msgspec.structs.replace(g, stores=0) for g in residency.catalogue.infos()]
    sizes = {g.idx: g.sizes for g in residency.catalogue.groups.values()}
    orphans = [(o.at, o.parent, o.event) for o in waiting._orphans.values()]
    unplaced = {h: (u.at, u.copies) for h, u in waiting.unplaced.items()}
    return (
        blocks,
        set(holdings.idle),
        holdings.slots,
        holdings.planes,
        holdings.plane_counts,
        groups,
        sizes,
        orphans,
        unplaced,
        residency.unit,
        residency.lookahead,
        residency.pairs,
        residency.seen_extras,
        residency.placer.saved(),
    )
