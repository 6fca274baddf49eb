"""KV-cache layouts: which one a connector and backends resolve to, and what can be transferred.

A layout is a permutation of the logical dimensions L (layers), B (blocks), H (KV heads), N
(tokens in a block), C (content); its value lists them in physical order. The rules are
04-scoring.md section 3.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import NamedTuple

L, B, H, N, C = range(5)
"""The logical dimensions, as a layout's value names them."""


class Layout(enum.Enum):
    """The six layouts that engines use today."""

    LBHNC = (L, B, H, N, C)
    LBNHC = (L, B, N, H, C)
    LHBNC = (L, H, B, N, C)
    BLHNC = (B, L, H, N, C)
    BLNHC = (B, L, N, H, C)
    BHLNC = (B, H, L, N, C)

    @classmethod
    def parse(cls, name: str) -> Layout:
        """A layout by name, whatever its case. Raises ValueError listing the known ones."""
        try:
            return cls[name.strip().upper()]
        except KeyError:
            known = ", ".join(layout.name for layout in cls)
            raise ValueError(f"unknown KV layout {name!r}; known: {known}") from None


Order = tuple[int, ...]


def head_major(order: Order) -> bool:
    """Whether H lies outside N: by the *positions* of the two dimensions in the value.

    Comparing the entries at their indices agrees on today's six layouts and is wrong, for
    example, for LHNBC = (0, 2, 3, 1, 4).
    """
    return order.index(H) < order.index(N)


def resolve(
    candidates: Sequence[Layout], *, requested: Layout | None = None, explicit: Layout | None = None
) -> Layout:
    """The layout that an engine will use.

    `candidates`: what its backends support, in their order of preference. `explicit`: the
    operator's setting; must be among them. `requested`: what the connector asks for: taken where
    supported, else the first candidate with the same head/token order, else the first choice.
    Raises ValueError when nothing is supported or the explicit setting is not.
    """
    if not candidates:
        raise ValueError("no KV layout is supported by the backends")
    if explicit is not None:
        if explicit not in candidates:
            names = ", ".join(c.name for c in candidates)
            raise ValueError(
                f"KV layout {explicit.name} is set but not supported; these are: {names}"
            )
        return explicit
    if requested is None:
        return candidates[0]
    if requested in candidates:
        return requested
    wanted = head_major(requested.value)
    return next((c for c in candidates if head_major(c.value) == wanted), candidates[0])


class Side(NamedTuple):
    """What a worker registered of its cache; None or 0 where it did not say."""

    layout: Layout | None
    tp_size: int
    num_kv_heads: int
    block_size: int

    def describe(self) -> str:
        """The page as it is registered for transfer, for a reason text."""
        if self.layout is None:
            return "unknown layout"
        page = "slices per KV head" if head_major(self.layout.value) else "one row per page"
        return (
            f"{self.layout.name} ({page}), TP {self.tp_size or 1}, "
            f"{self.num_kv_heads or '?'} KV heads, blocks of {self.block_size or '?'}"
        )


class Verdict(NamedTuple):
    """Whether KV pages can move from one worker to another; `reason` says what decided."""

    transferable: bool
    reason: str


def transfer(prefill: Side, decode: Side) -> Verdict:
    """Whether a prefill worker's pages can be read by a decode worker.

    With equal TP any common layout moves whole pages. With different TP a page must be cut by KV
    head: head-major on both sides, KV heads divisible by both TP sizes, equal block sizes.
    """
    both = f"prefill: {prefill.describe()}; decode: {decode.describe()}"
    if prefill.layout is None or decode.layout is None:
        return Verdict(False, f"a KV layout is not registered; {both}")
    sizes = (prefill.block_size, decode.block_size)
    tp = (prefill.tp_size or 1, decode.tp_size or 1)
    # Whole pages can be moved without being understood; to cut one, its size must be known.
    if (all(sizes) or tp[0] != tp[1]) and (not all(sizes) or sizes[0] != sizes[1]):
        return Verdict(False, f"block sizes differ or are not known; {both}")
    if tp[0] == tp[1]:
        if prefill.layout is decode.layout:
            return Verdict(True, f"whole pages move; {both}")
        return Verdict(False, f"with equal TP both sides need the same layout; {both}")
    for side, name in ((prefill, "prefill"), (decode, "decode")):
        layout = side.layout
        if layout is not None and not head_major(layout.value):
            return Verdict(
                False,
                f"TP {tp[0]} to TP {tp[1]} cuts pages by KV head, which needs a head-major "
                f"layout; {name} has {layout.name}; {both}",
            )
    heads = prefill.num_kv_heads
    if not heads or heads != decode.num_kv_heads:
        return Verdict(False, f"KV heads differ or are not known; {both}")
    if any(heads % n for n in tp):
        return Verdict(False, f"{heads} KV heads do not divide by TP {tp[0]} and {tp[1]}; {both}")
    return Verdict(True, f"pages are cut by KV head; {both}")
