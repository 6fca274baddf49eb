"""What a capture file holds: a header, then one record per line (docs/capture-format.md)."""

from __future__ import annotations

from typing import Annotated

import msgspec

from kvindexd.capturing.lines import CaptureError
from kvindexd.registration import Registration

FORMAT = "kvindexd-capture"
VERSION = 1

_Count = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
_Positive = Annotated[int, msgspec.Meta(ge=1, le=2**63 - 1)]


class _Record(msgspec.Struct, omit_defaults=True, tag_field="type"):
    pass


class Header(_Record, tag="header", kw_only=True):
    """The first record. Times are Unix seconds.

    `sources`: publisher name -> what it was registered with. `masked`: token ids, names and block
    hashes were replaced, so that no engine hash can be reproduced from the tokens.
    `includes_replay`: the engine's replay buffer was read too.
    """

    format: str = ""
    version: int = 0
    kvindexd: str = ""
    started: float = 0.0
    sources: dict[str, Registration] = {}
    masked: bool = False
    includes_replay: bool = False
    note: str = ""


class FrameRecord(_Record, tag="frame", kw_only=True):
    """One numbered batch, byte for byte. `at`: when it was received, 0 = not known.

    `replayed`: it came from the replay socket. The sequence was sent as 8 bytes, big-endian.
    """

    src: str
    at: float = 0.0
    topic: bytes = b""
    seq: _Count
    payload: bytes
    replayed: bool = False


class MessageRecord(_Record, tag="message", kw_only=True):
    """A message that is no numbered batch, part by part."""

    src: str
    at: float = 0.0
    parts: list[bytes]


class LinkRecord(_Record, tag="link", kw_only=True):
    """What happened to the connection: `connected`, `disconnected`, `connect_failed`, ..."""

    src: str
    at: float = 0.0
    event: str
    detail: str = ""


class ReplayRecord(_Record, tag="replay", kw_only=True):
    """The end of a replay request for everything from `start`: `complete`, `timeout`, `failed`."""

    src: str
    at: float = 0.0
    start: _Count = 0
    outcome: str
    batches: _Count = 0
    detail: str = ""


class PromptRecord(_Record, tag="prompt", kw_only=True):
    """A prompt that probes ask about.

    `tokens`: ids as packed little-endian uint32. `items`: (identifier, offset, length) in tokens.
    """

    name: str
    tokens: bytes
    lora_name: str = ""
    cache_salt: str = ""
    items: list[tuple[str, int, int]] = []


class ProbeRecord(_Record, tag="probe", kw_only=True):
    """The engine's own answer, at this place of the stream. Counts are of tokens.

    `reusable`: what it would skip for the prompt. `device_only`: of its device tier alone.
    `matched`: what the main attention group alone would allow, a multiple of `alignment`; None =
    not known. `upper_bound`: the wire cannot tell it all, an answer may only be higher.
    """

    src: str
    prompt: str
    reusable: _Count
    device_only: bool = False
    matched: _Count | None = None
    alignment: _Positive = 1
    upper_bound: bool = False


class NoteRecord(_Record, tag="note", kw_only=True):
    """A remark for people."""

    src: str = ""
    at: float = 0.0
    text: str


class EndRecord(_Record, tag="end", kw_only=True):
    """The last record of a capture that was closed in order. `reason`: why it ended."""

    at: float = 0.0
    frames: int
    messages: int = 0
    payload_bytes: int = 0
    reason: str = ""


Record = (
    Header
    | FrameRecord
    | MessageRecord
    | LinkRecord
    | ReplayRecord
    | PromptRecord
    | ProbeRecord
    | NoteRecord
    | EndRecord
)

TYPES = frozenset(
    ("header", "frame", "message", "link", "replay", "prompt", "probe", "note", "end")
)


class _Type(msgspec.Struct):
    type: str


class _Version(msgspec.Struct):
    type: str
    format: str = ""
    version: int = 0
    kvindexd: str = ""


_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(Record)
_type = msgspec.json.Decoder(_Type)
_version = msgspec.json.Decoder(_Version)


def encode(record: Record) -> bytes:
    """One record as a line, newline included."""
    return _encoder.encode(record) + b"\n"


def decode(line: bytes) -> Record | None:
    """The record of a line; None for a type that this version does not know.

    Raises CaptureError for a line that is no record.
    """
    try:
        return _decoder.decode(line)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as e:
        if _kind(line) not in TYPES:
            return None
        raise CaptureError(str(e)) from None


def _kind(line: bytes) -> str:
    try:
        return _type.decode(line).type
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as e:
        raise CaptureError(f"expected a JSON object with a type ({e})") from None


def decode_header(line: bytes) -> Header:
    """The header of a file's first line. Raises CaptureError, also for a version unknown here."""
    try:
        seen = _version.decode(line)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        seen = _Version("")
    if seen.type != "header" or seen.format != FORMAT:
        raise CaptureError(
            "not a capture: it does not begin with the header that `kvindexd capture` writes"
        )
    if seen.version != VERSION:
        raise CaptureError(
            f"format version {seen.version}, written by kvindexd {seen.kvindexd or '?'}; this "
            f"kvindexd reads version {VERSION}: use a kvindexd at least as new as the writer"
        )
    header = decode(line)
    assert isinstance(header, Header)  # noqa: S101 - its type says so
    return header
