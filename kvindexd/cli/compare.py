"""Where two prompts part: a plain comparison of what the user has of both. Pure."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

from kvindexd.v1 import index_pb2 as pb

UNIT = 16
"""Tokens per chain unit, as a rule."""


class Incomparable(ValueError):
    """The prompts are of different forms; the text says what would do."""


class Difference(NamedTuple):
    """Where a second prompt first differs. `form`: tokens, characters or fields.

    `at`: position of the first token or character that differs, which is the length of the
    shorter one where it is the other's beginning; None = equal, or bodies. `lengths`: of both.
    `where`: for bodies the way to the first field that differs, "" = equal.
    """

    form: str
    at: int | None
    lengths: tuple[int, int] = (0, 0)
    where: str = ""

    @property
    def equal(self) -> bool:
        """Whether nothing differs."""
        return self.at is None and not self.where

    def block(self, size: int) -> tuple[int, int, int]:
        """(number, first token, last token) of the block of `size` tokens in which they part."""
        number = (self.at or 0) // size
        return number, number * size, number * size + size - 1


def compare(one: pb.Prompt, other: pb.Prompt) -> Difference:
    """Compare two prompts of one form. Raises Incomparable."""
    forms = one.WhichOneof("content"), other.WhichOneof("content")
    if forms == ("tokens", "tokens"):
        return _sequence("tokens", one.tokens.ids, other.tokens.ids)
    if forms == ("text", "text"):
        return _sequence("characters", one.text, other.text)
    if forms == ("openai_body", "openai_body"):
        where = _field("", json.loads(one.openai_body), json.loads(other.openai_body))
        return Difference("fields", None, where=where or "")
    raise Incomparable(
        f"{_form(one)} cannot be compared with {_form(other)}: give both as token ids (or both as "
        "text, or as bodies)"
    )


def _form(prompt: pb.Prompt) -> str:
    return {"tokens": "token ids", "text": "text", "openai_body": "a request body"}.get(
        prompt.WhichOneof("content") or "", "nothing"
    )


def _sequence(form: str, one: Sequence[Any], other: Sequence[Any]) -> Difference:
    lengths = len(one), len(other)
    at = common(one, other)
    return Difference(form, None if lengths == (at, at) else at, lengths)


def common(one: Sequence[Any], other: Sequence[Any]) -> int:
    """How many leading elements are equal."""
    for i, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return i
    return min(len(one), len(other))


def _field(path: str, one: Any, other: Any) -> str | None:
    """The way to the first difference of two JSON values, depth first; None where there is none."""
    if isinstance(one, dict) and isinstance(other, dict):
        for key in [*one, *(k for k in other if k not in one)]:
            here = f"{path}.{key}" if path else str(key)
            if key not in one or key not in other:
                return f"{here} (only in {'the first' if key in one else 'the second'})"
            if found := _field(here, one[key], other[key]):
                return found
        return None
    if isinstance(one, list) and isinstance(other, list):
        for i, (a, b) in enumerate(zip(one, other, strict=False)):
            if found := _field(f"{path}[{i}]", a, b):
                return found
        if len(one) == len(other):
            return None
        return f"{path} ({len(one)} elements in the first, {len(other)} in the second)"
    if isinstance(one, str) and isinstance(other, str) and one != other:
        return f"{path}, character {common(one, other)}"
    return path if one != other or type(one) is not type(other) else None


def nearest(differences: Sequence[Difference]) -> int:
    """The place of the one that goes along furthest."""
    return max(
        range(len(differences)),
        key=lambda i: (differences[i].equal, differences[i].at or 0, -i),
    )


def as_json(name: str, d: Difference, sizes: Sequence[int]) -> dict[str, Any]:
    """A difference as plain data; `sizes`: tokens per block, of the workers that were asked."""
    data: dict[str, Any] = {
        "against": name,
        "form": d.form,
        "equal": d.equal,
        "first_difference": d.at,
        "lengths": list(d.lengths),
        "field": d.where,
    }
    if d.form == "tokens" and d.at is not None:
        data["unit"] = {"size": UNIT, "index": d.block(UNIT)[0]}
        data["blocks"] = [{"size": s, "index": d.block(s)[0]} for s in sizes]
    return data


def sentence(name: str, d: Difference) -> str:
    """A difference in words."""
    if d.equal:
        return f"equal to {name}"
    if d.form == "fields":
        return f"differs from {name} first in {d.where}; token positions need token ids"
    first, second = d.lengths
    head = f"differs from {name} first at {d.form.removesuffix('s')} {d.at:,}"
    head += f" (of {first:,} here, {second:,} there)"
    if d.at in d.lengths:
        shorter = "the prompt" if d.at == first else name
        head += f": {shorter} is the beginning of the other"
    if d.form != "tokens":
        return f"{head}; token positions need token ids"
    return f"{head}, in {block(d, UNIT, 'unit')}"


def block(d: Difference, size: int, what: str = "block") -> str:
    """In which block of `size` tokens two prompts part, in words."""
    number, begin, end = d.block(size)
    return f"{what} {number:,} of {size} tokens ({begin:,} to {end:,})"
