"""What a chat template is given for a request, as vLLM prepares it from the body. Pure."""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec

from kvindexd.tokens.bodies import Body, Request, decode, named


class Unsupported(Exception):
    """A request whose prompt cannot be told from its body alone, such as one with images."""


class Chat(NamedTuple):
    """Messages in OpenAI's form; `extra`: further variables of the template."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    add_generation_prompt: bool
    extra: dict[str, Any]


_TEXT = ("text", "input_text", "output_text")


def chat_of(request: Request) -> Chat:
    """The chat that a request asks to continue. Raises Unsupported, or BadBody."""
    body = request.body
    if body.continue_final_message:
        raise Unsupported("continue_final_message is set")
    if body.previous_response_id:
        raise Unsupported("previous_response_id refers to what only the engine has")
    if _value(body, "chat_template"):
        raise Unsupported("the request brings a chat template of its own")
    messages = {"chat": _chat, "responses": _responses, "messages": _anthropic}[request.kind](body)
    extra = _value(body, "chat_template_kwargs") or {}
    if not isinstance(extra, dict):
        raise Unsupported("chat_template_kwargs is no object")
    if body.reasoning_effort is not None:
        extra = {"reasoning_effort": body.reasoning_effort} | extra
    if documents := _value(body, "documents"):
        extra = {"documents": documents} | extra
    prompt = True if body.add_generation_prompt is None else body.add_generation_prompt
    return Chat([_message(m) for m in messages], _tools(body), prompt, extra)


def _value(body: Body, name: str) -> Any:
    return decode(getattr(body, name), name)


def _listed(body: Body, name: str) -> list[dict[str, Any]]:
    value = _value(body, name)
    if not isinstance(value, list) or not all(isinstance(m, dict) for m in value):
        raise Unsupported(f"{name} is no list of objects")
    return value


def _chat(body: Body) -> list[dict[str, Any]]:
    return _listed(body, "messages")


def _responses(body: Body) -> list[dict[str, Any]]:
    given = _value(body, "input")
    first = _value(body, "instructions")
    messages = [{"role": "system", "content": first}] if first else []
    if isinstance(given, str):
        return [*messages, {"role": "user", "content": given}]
    for item in _listed(body, "input"):
        if item.get("type", "message") != "message" or "role" not in item:
            raise Unsupported(f"input holds an item of type {named(item.get('type'))}")
        messages.append({"role": item["role"], "content": item.get("content")})
    return messages


def _anthropic(body: Body) -> list[dict[str, Any]]:
    system = _value(body, "system")
    if isinstance(system, list):
        system = "".join(_part(p) for p in system)
    messages = [{"role": "system", "content": system}] if system else []
    return messages + [
        {"role": m.get("role"), "content": m.get("content")} for m in _listed(body, "messages")
    ]


def _message(message: dict[str, Any]) -> dict[str, Any]:
    """A message with its text parts as a list, and the arguments of its tool calls as objects."""
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str):
        raise Unsupported("a message has no role")
    if content is None:
        texts = []
    elif isinstance(content, str):
        texts = [content]
    elif isinstance(content, list):
        texts = [_part(p) for p in content]
    else:
        raise Unsupported("a message's content is neither text nor a list of parts")
    out = message | {"content": [{"type": "text", "text": text} for text in texts]}
    if message.get("tool_calls"):
        out["tool_calls"] = [_call(c) for c in message["tool_calls"]]
    return out


def _part(part: Any) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, dict) and part.get("type") in _TEXT and isinstance(part.get("text"), str):
        return str(part["text"])
    kind = part.get("type") if isinstance(part, dict) else type(part).__name__
    raise Unsupported(
        f"a message has a part of type {named(kind)}, of which the tokens are not known"
    )


def _call(call: Any) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = msgspec.json.decode(function["arguments"] or "{}")
    except msgspec.DecodeError:
        raise Unsupported("the arguments of a tool call are not JSON") from None
    return call | {"function": function | {"arguments": arguments}}


def _tools(body: Body) -> list[dict[str, Any]] | None:
    """Tools in the one form and order that vLLM's own models give them, whatever the API."""
    if not _value(body, "tools"):
        return None
    out = []
    for tool in _listed(body, "tools"):
        function = tool.get("function", tool)
        if not isinstance(function, dict) or "name" not in function:
            raise Unsupported("a tool is no function")
        rest = {
            k: v
            for k, v in function.items()
            if k not in ("type", "name", "description", "parameters", "input_schema")
        }
        shape = {
            "name": function["name"],
            "description": function.get("description"),
            "parameters": function.get("parameters", function.get("input_schema")),
        }
        out.append({"type": "function", "function": shape | rest})
    return out
