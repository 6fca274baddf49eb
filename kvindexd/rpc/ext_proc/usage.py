"""What the engine says it reused, read off response bodies as they pass. Pure."""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec

MAX_BYTES = 4 * 1024 * 1024
"""Largest body, or line of a stream, that is looked into."""


class Usage(NamedTuple):
    """Tokens. None: not told."""

    prompt: int | None = None
    cached: int | None = None


class UsageReader:
    """Fed with a response body piece by piece; `usage` is the last that it told."""

    def __init__(self, content_type: str, encoding: str = "") -> None:
        """`encoding`: the content-encoding; a compressed body is not looked into."""
        kind = content_type.partition(";")[0].strip().lower()
        self._stream = kind == "text/event-stream"
        self._off = bool(encoding and encoding != "identity") or not (
            self._stream or kind.endswith("json")
        )
        self._rest = bytearray()
        self.usage = Usage()

    def feed(self, piece: bytes, end: bool = False) -> None:
        """The next piece of the body."""
        if self._off:
            return
        self._rest += piece
        if len(self._rest) > MAX_BYTES:
            self._off = True
            self._rest.clear()
        elif self._stream:
            *lines, rest = bytes(self._rest).split(b"\n")
            self._rest[:] = rest
            for text in lines:
                self._line(text)
            if end:
                self._line(rest)
        elif end:
            self._look(bytes(self._rest))

    def _line(self, text: bytes) -> None:
        # Almost every line is a token or two and has no usage, or has it as null.
        if text.startswith(b"data:") and b'"usage"' in text:
            self._look(text[5:].strip())

    def _look(self, text: bytes) -> None:
        try:
            found = msgspec.json.decode(text)
        except (msgspec.DecodeError, UnicodeDecodeError):
            return
        if not isinstance(found, dict):
            return
        for holder in (found, found.get("response"), found.get("message")):
            usage = holder.get("usage") if isinstance(holder, dict) else None
            if isinstance(usage, dict):
                read = usage_of(usage)
                self.usage = Usage(
                    self.usage.prompt if read.prompt is None else read.prompt,
                    self.usage.cached if read.cached is None else read.cached,
                )


def usage_of(usage: dict[str, Any]) -> Usage:
    """A `usage` object of OpenAI's chat, completions or responses API, or of Anthropic's."""
    prompt = _count(usage.get("prompt_tokens"))
    details = usage.get("prompt_tokens_details")
    if prompt is None:
        prompt = _count(usage.get("input_tokens"))
        details = usage.get("input_tokens_details")
    cached = _count(details.get("cached_tokens")) if isinstance(details, dict) else None
    if cached is None:
        cached = _count(usage.get("cache_read_input_tokens"))
        if cached is not None and prompt is not None:
            # Anthropic's API counts what was read from or written to the cache apart.
            prompt += cached + (_count(usage.get("cache_creation_input_tokens")) or 0)
    return Usage(prompt, cached)


def _count(value: object) -> int | None:
    sensible = isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 32
    return value if sensible else None  # type: ignore[return-value]  # an int when sensible
