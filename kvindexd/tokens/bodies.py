"""Bodies of /v1/completions, /v1/chat/completions, /v1/responses and /v1/messages, read lazily."""

from __future__ import annotations

import sys
from array import array
from typing import Any, Literal

import msgspec

Kind = Literal["completions", "chat", "responses", "messages"]

_PATHS: dict[str, Kind] = {
    "/v1/completions": "completions",
    "/v1/chat/completions": "chat",
    "/v1/responses": "responses",
    "/v1/messages": "messages",
}
_NAMES = frozenset(
    """
    text input_text output_text refusal image image_url image_embeds input_image audio audio_url
    input_audio video video_url file input_file document search_result tool_use tool_result
    thinking redacted_thinking reasoning function_call function_call_output item_reference
    custom_tool_call custom_tool_call_output web_search_call file_search_call computer_call
    computer_call_output mcp_call dict list str int float bool NoneType gzip br deflate zstd
    """.split()  # noqa: SIM905 - a list of words reads better than 40 strings
)
"""Parts of messages, items of responses, types of JSON, and encodings of bodies."""
_NONE = msgspec.Raw(b"null")
_CONTENT = {
    "completions": "prompt",
    "chat": "messages",
    "responses": "input",
    "messages": "messages",
}


class BadBody(ValueError):
    """A body that no engine could serve; the text says what is wrong with it."""


class Body(msgspec.Struct, frozen=True):
    """The fields that decide the prompt, undecoded where they may be long."""

    model: str | None = None
    prompt: msgspec.Raw = _NONE
    messages: msgspec.Raw = _NONE
    input: msgspec.Raw = _NONE
    instructions: msgspec.Raw = _NONE
    system: msgspec.Raw = _NONE
    tools: msgspec.Raw = _NONE
    tool_choice: msgspec.Raw = _NONE
    documents: msgspec.Raw = _NONE
    chat_template: msgspec.Raw = _NONE
    chat_template_kwargs: msgspec.Raw = _NONE
    reasoning_effort: str | None = None
    previous_response_id: str | None = None
    cache_salt: str | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None

    def content(self) -> tuple[bytes, ...]:
        """Everything in it that the prompt depends on, for telling bodies apart."""
        return tuple(
            bytes(value) if isinstance(value, msgspec.Raw) else repr(value).encode()
            for name in self.__struct_fields__
            if name not in ("model", "cache_salt")
            for value in [getattr(self, name)]
        )


class Request(msgspec.Struct, frozen=True):
    """One inference request. `model`: as the client named it, "" when it did not."""

    kind: Kind
    body: Body

    @property
    def model(self) -> str:
        return self.body.model or ""

    @property
    def cache_salt(self) -> str:
        return self.body.cache_salt or ""

    def token_ids(self) -> bytes | None:
        """The prompt as packed little-endian uint32 when the client sent tokens, else None.

        Of a batch of prompts, the first. Raises BadBody for a list that is neither.
        """
        if self.kind != "completions" or bytes(memoryview(self.body.prompt)[:1]) != b"[":
            return None
        prompt = decode(self.body.prompt, "prompt")
        if prompt and isinstance(prompt[0], list):
            prompt = prompt[0]
        if prompt and all(isinstance(t, str) for t in prompt):
            return None
        try:
            ids = array("I", prompt)
        except (TypeError, OverflowError):
            raise BadBody(
                "prompt: expected a string, a list of token ids, or a list of either"
            ) from None
        if sys.byteorder != "little":
            ids.byteswap()
        return ids.tobytes()


def is_inference(path: str) -> bool:
    """Whether requests to a path (query string and prefix allowed) carry a prompt we can read."""
    return _kind(path) is not None


def parse(path: str, raw: bytes) -> Request:
    """Read a body. Raises BadBody when it is not JSON, or lacks its prompt."""
    kind = _kind(path)
    if kind is None:
        raise BadBody(f"path {path.partition('?')[0]!r}: expected one of {', '.join(_PATHS)}")
    try:
        body = msgspec.json.decode(raw, type=Body)
    except (msgspec.DecodeError, UnicodeDecodeError) as e:
        raise BadBody(f"the body is not what {_path(kind)} takes: {e}") from None
    name = _CONTENT[kind]
    if bytes(memoryview(getattr(body, name))[:4]) == b"null":
        raise BadBody(f"the body has no {name!r}, which {_path(kind)} needs")
    return Request(kind, body)


def text_request(text: str, model: str) -> Request:
    """A raw prompt, as a completions request would bring it."""
    return Request("completions", Body(model, msgspec.Raw(msgspec.json.encode(text))))


def named(text: object) -> str:
    """A name that a client sent, for a message; "unknown" where it may be anything else, such as
    part of a prompt."""
    return text if isinstance(text, str) and text in _NAMES else "unknown"


def decode(raw: msgspec.Raw, name: str) -> Any:
    """The value of a field that was left undecoded. Raises BadBody."""
    try:
        return msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError) as e:
        raise BadBody(f"{name}: {e}") from None


def _kind(path: str) -> Kind | None:
    bare = path.partition("?")[0].rstrip("/")
    # A gateway may serve these under a prefix of its own.
    for known, kind in _PATHS.items():
        if bare.endswith(known):
            return kind
    return None


def _path(kind: Kind) -> str:
    return next(path for path, k in _PATHS.items() if k == kind)
