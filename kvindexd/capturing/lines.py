"""Files with a JSON object per line; imports nothing heavy, for the engine stand-in's process."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

FRAMES = "frames.jsonl"


class CaptureError(ValueError):
    """A file that is no capture we can read; the message names it and says what to do."""


class CapturedFrame(NamedTuple):
    """One recorded message. `src`: the publisher it came from; `seq_bytes`: as it was sent."""

    line: int
    src: str
    topic: bytes
    seq: int
    seq_bytes: bytes
    payload: bytes


def read_lines(path: Path) -> Iterator[tuple[int, Any]]:
    """(line number, object) of a file with one JSON object per line. Raises CaptureError."""
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            try:
                yield number, json.loads(line)
            except ValueError as e:
                raise CaptureError(f"{path}:{number}: expected a JSON object ({e})") from None


def load_capture(folder: str | Path, src: str | None = None) -> list[CapturedFrame]:
    """The frames of `folder/frames.jsonl` in order, of one publisher if `src` is given.

    Raises CaptureError (a ValueError), naming the line, for a file in another format.
    """
    path = Path(folder) / FRAMES
    frames = []
    for number, row in read_lines(path):
        try:
            frames.append(_captured(row))
        except (KeyError, TypeError, ValueError) as e:
            raise CaptureError(
                f"{path}:{number}: expected a JSON object with i, src, topic, seq, seq_hex "
                f"and a base64 payload ({e})"
            ) from e
    return [f for f in frames if src is None or f.src == src]


def _captured(row: Mapping[str, Any]) -> CapturedFrame:
    seq = int(row["seq"])
    seq_bytes = bytes.fromhex(row["seq_hex"]) if "seq_hex" in row else seq.to_bytes(8, "big")
    payload = base64.b64decode(row["payload"], validate=True)
    return CapturedFrame(
        int(row["i"]), str(row["src"]), str(row["topic"]).encode(), seq, seq_bytes, payload
    )
