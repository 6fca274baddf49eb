"""Writes docs/reference/ from the code: settings, gRPC, command line. `--check` only compares.

python docs/generate.py [--check]
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from typer.main import get_command

from kvindexd.cli.main import app
from kvindexd.config.load import json_schema
from kvindexd.config.schema import SECTIONS, WorkerConfig

ROOT = Path(__file__).parents[1]
OUT = ROOT / "docs" / "reference"
PROTO = ROOT / "proto" / "kvindexd" / "v1" / "index.proto"
HEAD = "<!-- Written by docs/generate.py: do not edit. -->\n\n"


def settings() -> str:
    """Every key of the configuration with type, default and meaning."""
    out = [
        HEAD + "# Configuration\n",
        "One TOML file, `--config` or `KVINDEXD_CONFIG`. Every key is also an environment",
        "variable: `server.listen` is `KVINDEXD_SERVER__LISTEN`. Flags beat environment beats",
        "file. Times are in seconds, sizes in bytes. `kvindexd config show` prints what is in",
        "force and where it was set; `kvindexd config schema` prints a JSON Schema.\n",
    ]
    schema = json_schema()["$defs"]
    for name, kind in SECTIONS.items():
        out += [
            f"## `[{name}]`\n",
            f"{_first(kind.__doc__)}\n",
            *_keys(schema[kind.__name__]),
        ]
        for key, about in schema[kind.__name__]["properties"].items():
            if item := about.get("items", {}).get("$ref"):
                inner = schema[item.rsplit("/", 1)[-1]]
                out += [f"### `[[{name}.{key}]]`\n", f"{inner['description']}\n", *_keys(inner)]
    out += ["## `[[workers]]`\n", f"{_first(WorkerConfig.__doc__)}\n"]
    out += _keys(schema[WorkerConfig.__name__])
    return "\n".join(out)


def _keys(section: dict[str, Any]) -> Iterator[str]:
    yield "| key | type | default | meaning |"
    yield "|---|---|---|---|"
    required = set(section.get("required", ()))
    for key, about in section["properties"].items():
        default = "required" if key in required else _code(about.get("default"))
        yield f"| `{key}` | {_type(about)} | {default} | {_cell(about.get('description', ''))} |"
    yield ""


def _type(about: dict[str, Any]) -> str:
    if "enum" in about:
        return ", ".join(_code(v) for v in about["enum"])
    if "anyOf" in about:
        return " or ".join(_type(a) for a in about["anyOf"])
    if about.get("type") == "array":
        return f"list of {_type(about.get('items', {})) or 'values'}"
    if about.get("type") == "object":
        return f"table of {_type(about.get('additionalProperties') or {}) or 'values'}"
    if "$ref" in about:
        return str(about["$ref"]).rsplit("/", 1)[-1]
    limits = [
        f"{sign} {about[key]:g}"
        for key, sign in (
            ("minimum", ">="),
            ("exclusiveMinimum", ">"),
            ("maximum", "<="),
            ("exclusiveMaximum", "<"),
        )
        if key in about
    ]
    return " ".join([about.get("type", ""), ", ".join(limits)]).strip()


def _code(value: object) -> str:
    return "" if value is None else f"`{json.dumps(value)}`"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def _first(text: str | None) -> str:
    return (text or "").strip().partition("\n\n")[0].replace("\n    ", " ")


BLOCK = re.compile(
    r"((?:^ *//[^\n]*\n)+)^ *(?:(message|enum|service) (\w+) \{"
    r"|(rpc) (\w+)\((.*?)\) returns \((.*?)\)"
    r"|(?:(optional|repeated) )?([\w.]+|map<[^>]+>) (\w+) = (\d+)|(\w+) = (\d+))",
    re.MULTILINE,
)


def grpc() -> str:
    """Services, messages and enums with the comments of the proto file."""
    text = re.sub(r"^// -{20,}\n// [^\n]*\n", "", PROTO.read_text(), flags=re.MULTILINE)
    out = [
        HEAD + "# gRPC\n",
        "Package `kvindexd.v1`, `proto/kvindexd/v1/index.proto`. Names and numbers",
    ]
    out += ["never change; fields are added. Also served: `grpc.health.v1.Health` and reflection."]
    kind = ""
    for match in BLOCK.finditer(text):
        about = " ".join(line.strip(" /") for line in match[1].strip().splitlines())
        if match[2]:
            kind = match[2]
            out += [f"\n## {kind} `{match[3]}`\n", _cell(about), ""]
            out += {
                "service": ["| rpc | request | response | meaning |", "|---|---|---|---|"],
                "message": ["| # | field | type | meaning |", "|---|---|---|---|"],
                "enum": ["| # | value | meaning |", "|---|---|---|"],
            }[kind]
        elif match[4]:
            out.append(f"| `{match[5]}` | {match[6]} | {match[7]} | {_cell(about)} |")
        elif match[9]:
            label = f"{match[8]} " if match[8] else ""
            out.append(f"| {match[11]} | `{match[10]}` | {label}{match[9]} | {_cell(about)} |")
        elif kind == "enum":
            out.append(f"| {match[13]} | `{match[12]}` | {_cell(about)} |")
    return "\n".join([*out, ""])


def commands() -> str:
    """Every command with its arguments and options."""
    out = [HEAD + "# Command line\n"]
    out += ["Exit status 0 on success, 1 on a finding or failure, 2 on wrong usage.\n"]
    _command(get_command(app), "kvindexd", out)
    return "\n".join(out)


def _command(command: Any, name: str, out: list[str]) -> None:
    if command.hidden:
        return
    children = getattr(command, "commands", None)
    if children:
        if name != "kvindexd":
            out += [f"## `{name}`\n", f"{_first(command.help)}\n"]
        for child, sub in sorted(children.items()):
            _command(sub, f"{name} {child}", out)
        return
    out += [f"## `{name}`\n", f"{_first(command.help)}\n"]
    rows = [_parameter(p) for p in command.params if not getattr(p, "hidden", False)]
    if rows:
        out += ["| option | meaning |", "|---|---|", *rows, ""]


def _parameter(p: Any) -> str:
    names = (
        ", ".join([*p.opts, *p.secondary_opts]) if p.param_type_name == "option" else p.name.upper()
    )
    return f"| `{names}` | {_cell(getattr(p, 'help', '') or '')} |"


PAGES = {"configuration.md": settings, "grpc.md": grpc, "cli.md": commands}


def main() -> int:
    """Write the pages, or with `--check` say which are out of date; the exit status."""
    stale = []
    for name, make in PAGES.items():
        path, text = OUT / name, make()
        if "--check" in sys.argv[1:]:
            stale += [name] if not path.exists() or path.read_text() != text else []
        else:
            OUT.mkdir(exist_ok=True)
            path.write_text(text)
    if stale:
        print(f"docs/reference: out of date: {', '.join(stale)}; run: make docs", file=sys.stderr)
    return int(bool(stale))


if __name__ == "__main__":
    sys.exit(main())
