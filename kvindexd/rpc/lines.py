"""ScoreWorkers answers as bytes, put together from parts that like workers and like answers share.

A protobuf message per worker takes longer than finding out what the worker holds. Fields of one
message may come in any order, and so its parts may be encoded apart: what a worker is (`head`),
what it holds (`tail`), and what it costs.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Iterable

from kvindexd.model import WorkerKey
from kvindexd.rpc import codec
from kvindexd.scoring.scorer import Scored
from kvindexd.v1 import index_pb2 as pb

_SCORES = b"\x0a"  # field 1, length-delimited
_RESPONSES = b"\x0a"
_ACTIVE = b"\x58"  # WorkerScore.active_blocks: 11, varint
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


def _sized(body: bytes) -> bytes:
    n = len(body)
    return (_LENGTHS[n] if n < 2048 else varint(n)) + body


def head(key: WorkerKey, address: str, state: str, staleness_ms: int) -> bytes:
    """The fields of a WorkerScore that depend on the worker alone."""
    return pb.WorkerScore(
        worker_id=key.worker_id,
        dp_rank=key.dp_rank,
        address=address,
        state=pb.WorkerState.Value(state),  # type: ignore[arg-type]  # one of them
        staleness_ms=staleness_ms,
    ).SerializeToString()


@functools.lru_cache(maxsize=1 << 16)
def tail(scored: Scored) -> bytes:
    """The fields of a WorkerScore that say what a worker holds of the prompt."""
    return codec.held_message(scored).SerializeToString()


def line(head: bytes, scored: Scored, cost: float, active_blocks: int) -> bytes:
    """One element of `scores`."""
    body = head + tail(scored)
    if cost:
        body += _COST(b"\x61", cost)
    if active_blocks:
        body += _ACTIVE + varint(active_blocks)
    return _SCORES + _sized(body)


def answer(lines: Iterable[bytes], tokens: int, blocks: int, revision: str) -> bytes:
    """A ScoreWorkersResponse of serialised lines, best first."""
    rest = pb.ScoreWorkersResponse(
        prompt_tokens=tokens, prompt_blocks=blocks, index_revision=revision
    )
    return b"".join(lines) + rest.SerializeToString()


def batch(answers: Iterable[Packed]) -> bytes:
    """A ScoreWorkersBatchResponse."""
    return b"".join(_RESPONSES + _sized(a.body) for a in answers)
