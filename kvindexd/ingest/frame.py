"""One numbered batch as it came off a socket, with what is needed to judge its place in the stream.

Pure: bytes in, values out. Live frames are `[topic, seq, payload]`; replayed ones come as
`[b"", topic, seq, payload]` or, from older engines, `[b"", seq, payload]`.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from typing import Any

import msgspec
import xxhash

SEQ_BYTES = 8
END_SEQ = b"\xff" * SEQ_BYTES
"""The sequence field of a replay's end marker; its payload is empty. Never data."""

MAX_SEQ = 2**63 - 1
"""Sequence numbers are kept as signed 64-bit integers in the store and in the API."""

_FLOAT64 = struct.Struct(">d").unpack_from
_ARRAY_OF_2_TO_15 = range(0x92, 0xA0)


class FrameError(ValueError):
    """A message that is no numbered batch; `reason` is a counter label."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason


class Frame(msgspec.Struct, frozen=True, gc=False):
    """One numbered batch.

    `ts`: the engine's own clock in seconds, None where the payload shows none (a payload that
    does not decode still takes up its sequence number). `digest`: XXH3-64 of the payload.
    `received_at`: Unix seconds on this host.
    """

    topic: bytes
    seq: int
    payload: bytes
    ts: float | None
    digest: int
    received_at: float

    @classmethod
    def of(cls, topic: bytes, seq: int, payload: bytes, received_at: float) -> Frame:
        """Stamp a payload with its digest and the engine's time."""
        digest = xxhash.xxh3_64_intdigest(payload)
        return cls(topic, seq, payload, batch_ts(payload), digest, received_at)


class _TsArray(msgspec.Struct, array_like=True):
    ts: Any


class _TsMap(msgspec.Struct):
    ts: Any


_as_array = msgspec.msgpack.Decoder(_TsArray)
_as_map = msgspec.msgpack.Decoder(_TsMap)


def batch_ts(payload: bytes) -> float | None:
    """The engine's clock (seconds) of a msgpack batch, without decoding its events.

    A batch is `[ts, events, ...]` or a map with `ts`; None when neither shape gives a finite
    number.
    """
    if len(payload) > 10 and payload[0] in _ARRAY_OF_2_TO_15 and payload[1] == 0xCB:
        value = _FLOAT64(payload, 2)[0]
        return value if math.isfinite(value) else None
    for decoder in (_as_array, _as_map):
        try:
            ts = decoder.decode(payload).ts
        except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
            continue
        if isinstance(ts, int | float) and not isinstance(ts, bool) and math.isfinite(ts):
            return float(ts)
    return None


def parse_live(parts: Sequence[bytes], max_bytes: int, received_at: float) -> Frame:
    """A SUB socket's message as a frame.

    Raises FrameError with reason `bad_parts`, `bad_seq` or `too_large`.
    """
    if len(parts) != 3:
        raise FrameError("bad_parts", f"{len(parts)} parts, expected [topic, seq, payload]")
    topic, seq, payload = parts
    return _frame(topic, seq, payload, max_bytes, received_at)


def parse_replayed(parts: Sequence[bytes], max_bytes: int, received_at: float) -> Frame | None:
    """A DEALER socket's message as a frame, read from the tail; None is the end marker.

    Raises FrameError with reason `bad_parts`, `bad_seq` or `too_large`.
    """
    if not 2 <= len(parts) <= 4:
        raise FrameError("bad_parts", f"{len(parts)} parts, expected ['', topic, seq, payload]")
    seq, payload = parts[-2:]
    if seq == END_SEQ and not payload:
        return None
    topic = parts[1] if len(parts) == 4 else b""
    return _frame(topic, seq, payload, max_bytes, received_at)


def _frame(topic: bytes, seq: bytes, payload: bytes, max_bytes: int, received_at: float) -> Frame:
    if len(seq) != SEQ_BYTES:
        raise FrameError("bad_seq", f"sequence field of {len(seq)} bytes, expected {SEQ_BYTES}")
    number = int.from_bytes(seq, "big")
    if number > MAX_SEQ:
        raise FrameError("bad_seq", f"sequence {number} exceeds {MAX_SEQ}")
    if len(payload) > max_bytes:
        raise FrameError("too_large", f"payload of {len(payload)} bytes, limit {max_bytes}")
    return Frame.of(topic, number, payload, received_at)


def looks_shifted(parts: Sequence[bytes]) -> bool:
    """Whether a message looks like the tail or a rotation of a frame: framing out of step.

    A publisher with another protocol looks different: a sequence in its place with more parts
    behind it, or no 8-byte field at all.
    """
    if len(parts) > 3 or (len(parts) == 3 and len(parts[1]) == SEQ_BYTES):
        return False
    return any(len(part) == SEQ_BYTES for part in parts)
