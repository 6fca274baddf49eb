"""ScoreWorkers answers as bytes, put together from parts that like workers and like answers share.

A protobuf message per worker takes longer than finding out what the worker holds. Fields of one
message may come in any order, and so its parts may be encoded apart: what a worker is (`head`),
what it holds (`tail`), and what it costs.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Iterable, Sequence

from kvindexd.fleet import Member
from kvindexd.model import WorkerKey
from kvindexd.rpc import codec
from kvindexd.scoring.quickrank import Place
from kvindexd.scoring.scorer import Scored
from kvindexd.v1 import index_pb2 as pb

_SCORES = b"\x0a"  # field 1, length-delimited
_RESPONSES = b"\x0a"
_ACTIVE = b"\x58"  # WorkerScore.active_blocks: 11, varint
_STATES = {name: b"\x68" + bytes((n,)) for name, n in pb.WorkerState.items()}  # 13, varint
_STALENESS = b"\x70"  # 14, varint
_COST = struct.Struct("<cd").pack  # WorkerScore.cost: 12, 64-bit


class Packed:
    """A serialised ScoreWorkersResponse. `ratio`: reusable part of the prompt on the worker that
    has most, None for an empty prompt."""

    __slots__ = ("body", "ratio")

    def __init__(self, body: bytes, ratio: float | None) -> None:
        self.body = body
        self.ratio = ratio


def varint(value: int) -> bytes:
    """A non-negative integer as protobuf writes it."""
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


_LENGTHS = [varint(n) for n in range(2048)]


def _size(body: bytes) -> bytes:
    n = len(body)
    return _LENGTHS[n] if n < 2048 else varint(n)


def identity(key: WorkerKey, address: str) -> bytes:
    """The fields of a WorkerScore that a worker keeps for good."""
    return pb.WorkerScore(
        worker_id=key.worker_id, dp_rank=key.dp_rank, address=address
    ).SerializeToString()


def head(identity: bytes, state: str, staleness_ms: int) -> bytes:
    """The fields of a WorkerScore that depend on the worker alone."""
    return identity + _STATES[state] + _STALENESS + varint(staleness_ms)


@functools.lru_cache(maxsize=1 << 16)
def tail(scored: Scored) -> bytes:
    """The fields of a WorkerScore that say what a worker holds of the prompt."""
    return codec.held_message(scored).SerializeToString()


def answer(
    order: Sequence[Place],
    members: Sequence[Member],
    scored: Sequence[Scored],
    rest: pb.ScoreWorkersResponse,
) -> bytes:
    """A ScoreWorkersResponse; `order`: the lines wanted, best first; `rest`: its other fields."""
    shared: dict[tuple[int, float, int], bytes] = {}
    parts: list[bytes] = []
    for cost, place, active in order:
        s = scored[place]
        key = (id(s), cost, active)
        body = shared.get(key)
        if body is None:
            body = tail(s)
            if cost:
                body += _COST(b"\x61", cost)
            if active:
                body += _ACTIVE + varint(active)
            shared[key] = body
        body = members[place].head + body
        parts += (_SCORES, _size(body), body)
    parts.append(rest.SerializeToString())
    return b"".join(parts)


def batch(answers: Iterable[Packed]) -> bytes:
    """A ScoreWorkersBatchResponse."""
    return b"".join(part for a in answers for part in (_RESPONSES, _size(a.body), a.body))
