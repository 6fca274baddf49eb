"""Token ids by the engine's own `/tokenize`: nobody knows them better."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Callable
from typing import Any

import msgspec

from kvindexd.tokens.bodies import Request
from kvindexd.tokens.chat import chat_of
from kvindexd.tokens.http import HttpClient, HttpError
from kvindexd.tokens.local import TokenizerFailed, text_of


class _Answer(msgspec.Struct):
    tokens: list[int]


class EngineTokenizer:
    """One model's endpoint. `base`: gives the URL without its path, None where there is nobody."""

    def __init__(self, client: HttpClient, base: Callable[[], str | None]) -> None:
        self._client = client
        self._base = base

    async def load(self) -> None:
        """Nothing to read ahead."""

    async def ids(self, request: Request) -> bytes:
        """Packed little-endian uint32. Raises TokenizerFailed, Unsupported or BadBody."""
        base = self._base()
        if base is None:
            raise TokenizerFailed("no live worker of the model is there to ask")
        body = msgspec.json.encode(question(request))
        try:
            raw = await self._client.post(f"{base}/tokenize", body)
            ids = array("I", msgspec.json.decode(raw, type=_Answer).tokens)
        except (HttpError, msgspec.DecodeError, OverflowError, TypeError) as e:
            raise TokenizerFailed(f"the engine's /tokenize does not answer: {e}") from None
        if sys.byteorder != "little":
            ids.byteswap()
        return ids.tobytes()


def question(request: Request) -> dict[str, Any]:
    """What to ask: vLLM's TokenizeCompletionRequest or TokenizeChatRequest.

    Raises Unsupported or BadBody.
    """
    body = request.body
    asked: dict[str, Any] = {"model": request.model} if request.model else {}
    if request.kind == "completions":
        asked["prompt"] = text_of(request)
        asked["add_special_tokens"] = body.add_special_tokens is not False
        return asked
    chat = chat_of(request)
    asked |= {
        "messages": [_plain(m) for m in chat.messages],
        "add_generation_prompt": chat.add_generation_prompt,
        "add_special_tokens": bool(body.add_special_tokens),
    }
    if chat.tools:
        asked["tools"] = chat.tools
    if chat.extra:
        asked["chat_template_kwargs"] = chat.extra
    return asked


def _plain(message: dict[str, Any]) -> dict[str, Any]:
    """A message as the API takes it: the arguments of tool calls are text there."""
    out = dict(message)
    parts = message["content"]
    out["content"] = parts[0]["text"] if len(parts) == 1 else parts or None
    if message.get("tool_calls"):
        out["tool_calls"] = [
            c
            | {"function": c["function"] | {"arguments": _text(c["function"].get("arguments", ""))}}
            if isinstance(c, dict) and isinstance(c.get("function"), dict)
            else c
            for c in message["tool_calls"]
        ]
    return out


def _text(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else msgspec.json.encode(arguments).decode()
