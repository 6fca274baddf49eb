"""Prefill and decode workers that can take a request together (04-scoring.md section 3). Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kvindexd.fleet import Member
from kvindexd.layout import Layout, Side, Verdict, transfer
from kvindexd.scoring.picker import Choice

_ORDER = {"LIVE": 0, "SYNCING": 1, "DRAINING": 2}
"""Which states should get a request, best first; all others come last."""


class Pair(NamedTuple):
    """`cost`: of both sides together, in blocks; lower is better."""

    prefill: Choice
    decode: Choice
    verdict: Verdict
    cost: float


def side_of(member: Member) -> Side:
    """What a worker rank registered, and showed, of its cache."""
    r = member.registration
    layout = Layout.parse(r.kv_layout) if r.kv_layout else None
    size = member.candidate.geometry.block_size or r.block_size
    return Side(layout, r.tp_size, r.num_kv_heads, size)


def pairs(prefill: Sequence[Choice], decode: Sequence[Choice]) -> list[Pair]:
    """All pairs: transferable ones first, those whose workers are live before others, then by
    cost, then in the order in which the sides were given."""
    found = [
        Pair(p, d, _verdict(p.member, d.member), p.cost + d.cost) for p in prefill for d in decode
    ]
    found.sort(key=lambda pair: (not pair.verdict.transferable, _standing(pair), pair.cost))
    return found


def _verdict(prefill: Member, decode: Member) -> Verdict:
    if prefill.key == decode.key:
        return Verdict(True, "one worker does both: nothing is transferred")
    return transfer(side_of(prefill), side_of(decode))


def _standing(pair: Pair) -> int:
    return max(_ORDER.get(side.member.state, 3) for side in (pair.prefill, pair.decode))
