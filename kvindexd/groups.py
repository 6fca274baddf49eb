"""Which KV-cache groups are indexed, and how; what each group of a worker rank has shown."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping

from kvindexd.model import GroupInfo, Tier


class Treatment(enum.StrEnum):
    """What becomes of a group's events (02-wire-and-groups.md section 3)."""

    MAIN = "main"
    AUXILIARY = "auxiliary"
    IGNORED = "ignored"


MAIN_KINDS = frozenset({"full_attention", "mla_attention", "sink_full_attention"})
WINDOW_KINDS = frozenset({"sliding_window", "sliding_window_mla"})
CHUNK_KINDS = frozenset({"chunked_local_attention"})
STATE_KINDS = frozenset({"mamba"})
NO_REUSE_KINDS = frozenset({"encoder_only_attention", "cross_attention"})
"""Ignored kinds that have no say in what prefix is reused."""
AUXILIARY_KINDS = WINDOW_KINDS | CHUNK_KINDS | STATE_KINDS

ABSENT = ""
"""The kind of a group whose events carry none (SGLang, older vLLM): fail open, main."""
NO_GROUP = -1
"""The group index of events that carry none."""

_TIERS = {
    "GPU": Tier.DEVICE,
    "CPU": Tier.HOST,
    "CPU_PINNED": Tier.HOST,
    "CPU_TIER1": Tier.HOST,
    "CPU_TIER2": Tier.HOST,
    "HOST": Tier.HOST,
    "DISK": Tier.STORAGE,
    "SSD": Tier.STORAGE,
    "NVME": Tier.STORAGE,
    "FS": Tier.STORAGE,
    "OBJ": Tier.STORAGE,
    "STORAGE": Tier.STORAGE,
    "EXTERNAL": Tier.STORAGE,
    "REMOTE": Tier.STORAGE,
}


def tier_of(medium: str | None) -> Tier:
    """The tier that a `medium` names, whatever its case; absent is the device, unknown never."""
    if medium is None:
        return Tier.DEVICE
    found = _TIERS.get(medium)
    return found if found is not None else _TIERS.get(medium.upper(), Tier.OTHER)


def treatment(kind: str, overrides: Mapping[str, str] | None = None) -> Treatment:
    """How a kind is treated; `overrides` is the operator's `groups.treat_as`."""
    if overrides and kind in overrides:
        return Treatment(overrides[kind])
    if kind in MAIN_KINDS or kind == ABSENT:
        return Treatment.MAIN
    return Treatment.AUXILIARY if kind in AUXILIARY_KINDS else Treatment.IGNORED


class Group:
    """What one group has shown: kind, block size (tokens), window (tokens), stores seen."""

    __slots__ = ("block_size", "idx", "kind", "sizes", "stores", "treated_as", "window")

    def __init__(self, idx: int, kind: str, treated_as: Treatment) -> None:
        self.idx = idx
        self.kind = kind
        self.treated_as = treated_as
        self.block_size = 0
        self.window = 0
        self.stores = 0
        self.sizes: set[int] = set()

    @property
    def info(self) -> GroupInfo:
        """The group as scoring and the API see it."""
        return GroupInfo(
            self.idx, self.kind, self.block_size, self.window, str(self.treated_as), self.stores
        )


def contradicts(group: Group, kind: str | None) -> bool:
    """Whether an event of `kind` cannot be of this group, whatever index it names."""
    return bool(kind) and kind != group.kind


class Catalogue:
    """The groups of one worker rank, learned from its stores, the filtered ones included.

    A removal names its group and never a kind, so the catalogue is what tells them apart
    (02-wire-and-groups.md section 4). It lives as long as the engine's incarnation.
    """

    def __init__(self, overrides: Mapping[str, str] | None = None) -> None:
        self._overrides = dict(overrides or {})
        self.groups: dict[int, Group] = {}
        self.version = 0
        """Rises whenever a group appears or shows another kind, block size or window."""

    def classify(self, group_idx: int | None, kind: str | None) -> tuple[int, str]:
        """The (index, kind) that an event speaks of, filling in what it leaves out.

        A group without any kind is main when it is group 0 (or names no group at all): one
        group is all that a legacy engine has; a further group without a kind could be anything
        and is left out until a kind is learned.
        """
        idx = NO_GROUP if group_idx is None else group_idx
        if kind:
            return idx, kind
        known = self.groups.get(idx)
        if known is not None:
            return idx, known.kind
        return idx, ABSENT if idx <= 0 else "unknown"

    def treat(self, kind: str) -> Treatment:
        """How a kind is treated here."""
        return treatment(kind, self._overrides)

    def learn(self, group_idx: int | None, kind: str | None, window: int | None) -> Group:
        """The group of a store event, created or completed by what the event shows.

        A kind, once shown, stays: an event of another kind contradicts it (see `contradicts`).
        """
        idx, resolved = self.classify(group_idx, kind)
        group = self.groups.get(idx)
        if group is None:
            group = Group(idx, resolved, treatment(resolved, self._overrides))
            self.groups[idx] = group
            self.version += 1
        elif kind and group.kind != kind and group.kind in (ABSENT, "unknown"):
            group.kind, group.treated_as = kind, treatment(kind, self._overrides)
            self.version += 1
        if window and not group.window and not contradicts(group, kind):
            group.window = window
            self.version += 1
        return group

    def learn_size(self, group: Group, block_size: int) -> None:
        """A device store of `block_size` tokens: the largest one is the group's own size."""
        if block_size in group.sizes:
            return
        group.sizes.add(block_size)
        group.block_size = max(group.block_size, block_size)
        self.version += 1

    def get(self, group_idx: int | None) -> Group | None:
        """The group of a removal or a tier change; None when nothing is known of it."""
        return self.groups.get(NO_GROUP if group_idx is None else group_idx)

    def by_treatment(self, treated_as: Treatment) -> list[Group]:
        """Groups so treated, by index."""
        found = (g for g in self.groups.values() if g.treated_as is treated_as)
        return sorted(found, key=lambda g: g.idx)

    def infos(self) -> tuple[GroupInfo, ...]:
        """All groups by index."""
        return tuple(self.groups[i].info for i in sorted(self.groups))

    def restore(self, infos: Iterable[GroupInfo], sizes: Mapping[int, Iterable[int]]) -> None:
        """Take over what an earlier process had learned."""
        for info in infos:
            group = Group(info.idx, info.kind, treatment(info.kind, self._overrides))
            group.block_size, group.window, group.stores = info.block_size, info.window, info.stores
            group.sizes = set(sizes.get(info.idx, ()))
            self.groups[info.idx] = group
