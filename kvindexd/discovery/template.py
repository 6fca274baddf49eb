"""From a found address to worker registrations: the `worker` table of a source; pure.

The table has the fields of a `[[workers]]` entry. Texts may hold `{name}`, `{label[KEY]}` or
`{annotation[KEY]}`, each with a default after a bar: `{label[model]|llama}`. Three more fields tell
of data-parallel ranks behind one address: `local_ranks`, `first_rank` and `port_step`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec

from kvindexd.registration import InvalidRegistration, Registration

_PLACE = re.compile(r"\{([a-z_]+)(?:\[([^\[\]{}|]+)\])?(?:\|([^{}]*))?\}")
_PORT = re.compile(r"^(tcp://.+:)(\d+)$")
_MAPS = ("label", "annotation")
_RANKS = {"local_ranks": 0, "first_rank": 0, "port_step": 1}
_FIELDS = tuple(f for f in Registration.__struct_fields__ if f != "source")
FIELDS = (*_FIELDS, *_RANKS)
"""Keys that a `worker` table may have."""


class TemplateError(ValueError):
    """A template that cannot be used, or one thing that it cannot be used for; says which field."""


class Facts(NamedTuple):
    """What is known of one found address. `names`: placeholder -> text. `overrides`: fields that
    it sets itself, which go before the template's. `instance`: names the process behind it."""

    names: Mapping[str, str]
    maps: Mapping[str, Mapping[str, str]]
    overrides: Mapping[str, str]
    instance: str = ""


def check_template(template: Mapping[str, Any], names: tuple[str, ...], with_maps: bool) -> None:
    """Raise TemplateError for a field or a placeholder that does not exist. `names`: those that
    the source fills in; `with_maps`: whether it knows labels and annotations."""
    for field, value in template.items():
        if field not in FIELDS:
            raise TemplateError(f"worker.{field}: no such field; there are {', '.join(FIELDS)}")
        for text in _texts(value):
            _check_text(f"worker.{field}", text, (*names, "dp_rank"), with_maps)
    if "kv_events_endpoint" not in template and not with_maps:
        raise TemplateError(
            'worker.kv_events_endpoint is missing; expected for example "tcp://{ip}:5557"'
        )


def _texts(value: object) -> list[str]:
    if isinstance(value, str):
        return [value]
    if isinstance(value, dict):
        return [t for pair in value.items() for part in pair for t in _texts(part)]
    if isinstance(value, list):
        return [t for part in value for t in _texts(part)]
    return []


def _check_text(where: str, text: str, names: tuple[str, ...], with_maps: bool) -> None:
    rest = text
    for match in _PLACE.finditer(text):
        name, key = match[1], match[2]
        known = (with_maps and name in _MAPS) if key else name in names
        if not known:
            listed = ", ".join(names) + (", label[KEY], annotation[KEY]" if with_maps else "")
            raise TemplateError(f"{where}: {match[0]} is unknown; there are {listed}")
        rest = rest.replace(match[0], "")
    if "{" in rest or "}" in rest:
        raise TemplateError(f"{where}: {text!r} has a brace that belongs to no placeholder")


def host_text(address: str) -> str:
    """An IP address as it stands before a port: IPv6 in brackets."""
    return f"[{address}]" if ":" in address else address


def registrations(template: Mapping[str, Any], facts: Facts) -> list[Registration]:
    """The worker ranks behind one found address: one, or `local_ranks` from `first_rank` on (all of
    `dp_size` unless the template names a `dp_rank`). The ports of their endpoints differ by
    `port_step`. Raises TemplateError."""
    fields = {**template, **facts.overrides}
    fields.setdefault("instance", facts.instance)
    unknown = [f for f in fields if f not in FIELDS]
    if unknown:
        raise TemplateError(f"{unknown[0]}: no such field; there are {', '.join(FIELDS)}")
    ranks = {k: _number(k, _fill(k, fields.pop(k, n), facts, {})) for k, n in _RANKS.items()}
    if "dp_rank" in fields:
        return [_registration(fields, facts, {"dp_rank": _text("dp_rank", fields, facts)}, 0)]
    size = _number("dp_size", _fill("dp_size", fields.get("dp_size", 0), facts, {}))
    count = ranks["local_ranks"] or max(1, size)
    if not 0 < count <= 4096:
        raise TemplateError(f"local_ranks is {count}; expected 1 to 4096")
    return [
        _registration({**fields, "dp_rank": n}, facts, {"dp_rank": str(n)}, n * ranks["port_step"])
        for n in range(ranks["first_rank"], ranks["first_rank"] + count)
    ]


def _registration(
    fields: Mapping[str, Any], facts: Facts, more: Mapping[str, str], port_offset: int
) -> Registration:
    filled = {k: _fill(k, v, facts, more) for k, v in fields.items()}
    for name in ("kv_events_endpoint", "replay_endpoint"):
        if name in filled and "{dp_rank" not in str(fields[name]):
            filled[name] = _shifted(filled[name], port_offset)
    try:
        made = msgspec.convert(filled, Registration, strict=False)
        made.check()
    except (msgspec.ValidationError, InvalidRegistration) as e:
        raise TemplateError(str(e)) from None
    if not made.model:
        raise TemplateError("model: empty; set it in the source's worker table")
    return made


def _shifted(endpoint: str, offset: int) -> str:
    match = _PORT.match(endpoint)
    if not offset or match is None:
        return endpoint
    port = int(match[2]) + offset
    if port > 65535:
        raise TemplateError(f"{endpoint!r}: its port plus {offset} for this rank is above 65535")
    return f"{match[1]}{port}"


def _fill(field: str, value: Any, facts: Facts, more: Mapping[str, str]) -> Any:
    if isinstance(value, str):
        return _PLACE.sub(lambda match: _place(field, match, facts, more), value)
    if isinstance(value, dict):
        return {
            _fill(field, k, facts, more): _fill(field, v, facts, more) for k, v in value.items()
        }
    if isinstance(value, list):
        return [_fill(field, v, facts, more) for v in value]
    return value


def _place(field: str, match: re.Match[str], facts: Facts, more: Mapping[str, str]) -> str:
    name, key, default = match[1], match[2], match[3]
    source = facts.maps.get(name, {}) if key else {**facts.names, **more}
    found = source.get(key or name, default)
    if found is None:
        raise TemplateError(f"{field}: {match[0]} is not set, and the template has no default")
    return str(found)


def _text(field: str, fields: Mapping[str, Any], facts: Facts) -> str:
    return str(_fill(field, fields[field], facts, {}))


def _number(field: str, value: object) -> int:
    try:
        return int(str(value))
    except ValueError:
        raise TemplateError(f"{field} is {value!r}; expected a whole number") from None
