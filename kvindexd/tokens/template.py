"""Chat templates, rendered as Transformers does: sandboxed Jinja with its few additions."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from kvindexd.tokens.chat import Chat, Unsupported


class _Generation(Extension):
    """`{% generation %}`, which marks the assistant's words for training and prints them."""

    tags = {"generation"}  # noqa: RUF012 - as the base class declares it

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        """The block's own content."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Refused(jinja2.TemplateError):
    """The template's own `raise_exception`."""


def _raise(message: str) -> NoReturn:
    raise _Refused(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own escapes characters that matter in HTML.
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _now(format: str) -> str:
    return datetime.now().strftime(format)


class ChatTemplate:
    """The template or templates of one tokenizer. `variables`: its special tokens."""

    def __init__(self, sources: Mapping[str, str], variables: Mapping[str, str]) -> None:
        """`sources`: name -> text; `default` must be there. Raises jinja2.TemplateError."""
        env = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
        )
        env.filters["tojson"] = _to_json
        env.globals["raise_exception"] = _raise
        env.globals["strftime_now"] = _now
        self._templates = {name: env.from_string(text) for name, text in sources.items()}
        self._wants_parts = {
            name: _iterates_content(env.parse(text)) for name, text in sources.items()
        }
        self._constants = {
            node.value
            for text in sources.values()
            for node in env.parse(text).find_all(nodes.Const)
            if isinstance(node.value, str)
        }
        self._variables = dict(variables)

    def render(self, chat: Chat) -> str:
        """The prompt's text. Raises Unsupported when the template refuses the chat."""
        named = "tool_use" if chat.tools and "tool_use" in self._templates else "default"
        messages = [
            m if self._wants_parts[named] else m | {"content": _joined(m["content"])}
            for m in chat.messages
        ]
        try:
            return self._templates[named].render(
                **self._variables
                | {
                    "messages": messages,
                    "tools": chat.tools,
                    "documents": None,
                    "add_generation_prompt": chat.add_generation_prompt,
                }
                | chat.extra
            )
        except (jinja2.TemplateError, TypeError, ValueError, KeyError, AttributeError) as e:
            raise Unsupported(f"the chat template refuses the request: {self._why(e)}") from None

    def _why(self, error: Exception) -> str:
        """What may be repeated of an error: what the template itself says, not what the request
        brought into it."""
        if isinstance(error, _Refused) and (text := str(error)) in self._constants:
            return text
        if isinstance(error, SecurityError):
            return "it does what is unsafe"
        return type(error).__name__.lstrip("_")


def _joined(parts: list[dict[str, str]]) -> str:
    return "\n".join(p["text"] for p in parts)


def _iterates_content(tree: nodes.Template) -> bool:
    """Whether a template goes through a message's content part by part, rather than taking it for
    text. Decides in which form the engine hands it over."""
    names = {
        node.target.name
        for node in tree.find_all(nodes.Assign)
        if isinstance(node.target, nodes.Name) and _is_content(node.node)
    }
    for loop in tree.find_all(nodes.For):
        source = loop.iter
        while isinstance(source, nodes.Filter) and source.node is not None:
            source = source.node
        if _is_content(source) or (isinstance(source, nodes.Name) and source.name in names):
            return True
    return False


def _is_content(node: nodes.Node) -> bool:
    if isinstance(node, nodes.Getattr):
        return node.attr == "content"
    return (
        isinstance(node, nodes.Getitem)
        and isinstance(node.arg, nodes.Const)
        and node.arg.value == "content"
    )
