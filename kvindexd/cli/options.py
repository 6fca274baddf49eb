"""Options and arguments that several commands share, and how they are read."""

from __future__ import annotations

import enum
import json
import re
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from kvindexd.v1 import index_pb2 as pb

LabelOption = Annotated[
    list[str] | None, typer.Option("--label", metavar="KEY=VALUE", help="Label; repeatable.")
]
PromptArgument = Annotated[
    str,
    typer.Argument(
        metavar="PROMPT",
        help="Token ids as a JSON list, an OpenAI request body, plain text, or @FILE with one of"
        " these or with token ids apart by blanks (@- = standard input).",
    ),
]

_NUMBERS = re.compile(r"[\s,]*\d+([\s,]+\d+)*[\s,]*")
_TOKEN_LIMIT = 1 << 32


class RoleName(enum.StrEnum):
    """A role as the command line spells it."""

    MIXED = "mixed"
    PREFILL = "prefill"
    DECODE = "decode"


def parse_labels(given: list[str] | None) -> dict[str, str]:
    """`KEY=VALUE` options as a map. Wrong usage (status 2) where there is no `=`."""
    pairs = [text.partition("=") for text in given or []]
    for key, equals, _ in pairs:
        if not key or not equals:
            raise typer.BadParameter(f"{key!r}: expected KEY=VALUE", param_hint="--label")
    return {key: value for key, _, value in pairs}


def parse_hash(text: str) -> int:
    """A 64-bit block hash in hex, with or without 0x. Wrong usage (status 2) otherwise."""
    if not re.fullmatch(r"(0[xX])?[0-9a-fA-F]{1,16}", text):
        raise typer.BadParameter(
            f"{text!r}: expected up to 16 hex digits, such as 0x00c3a5c85c97cb31", param_hint="HASH"
        )
    return int(text, 16)


def parse_prompt(argument: str) -> pb.Prompt:
    """A Prompt with its content set. Wrong usage (status 2) for a file or ids that cannot be."""
    text = _read(argument[1:]) if argument.startswith("@") else argument
    if argument.startswith("@") and _NUMBERS.fullmatch(text):
        return _tokens([int(word) for word in re.split(r"[\s,]+", text) if word])
    # Text may well begin with a bracket ("[INST] ..."): only what parses as JSON is taken as such.
    value = _json(text) if text.lstrip()[:1] in ("[", "{") else None
    if isinstance(value, list):
        return _tokens(value)
    if isinstance(value, dict):
        return pb.Prompt(openai_body=text.encode(), openai_path=_path(value))
    return pb.Prompt(text=text)


def _read(name: str) -> str:
    try:
        return sys.stdin.read() if name == "-" else Path(name).read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise typer.BadParameter(f"{name}: expected text, not bytes", param_hint="PROMPT") from None
    except OSError as error:
        raise typer.BadParameter(f"{name}: {error.strerror}", param_hint="PROMPT") from None


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None


def _tokens(ids: list[Any]) -> pb.Prompt:
    for i, token in enumerate(ids):
        if type(token) is not int or not 0 <= token < _TOKEN_LIMIT:
            raise typer.BadParameter(
                f"token {i} is {token!r}: expected a number from 0 to {_TOKEN_LIMIT - 1}",
                param_hint="PROMPT",
            )
    return pb.Prompt(tokens=pb.TokenIds(ids=ids))


def _path(body: dict[str, Any]) -> str:
    if "messages" in body:
        return "/v1/chat/completions"
    return "/v1/responses" if "input" in body else "/v1/completions"
