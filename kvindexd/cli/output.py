"""What commands print: tables for people, JSON for programs, one line for a failure."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvindexd.config import ConfigError, Settings, load

JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
ConfigOption = Annotated[
    Path | None,
    typer.Option("--config", envvar="KVINDEXD_CONFIG", help="TOML file with settings."),
]

# A pipe has no width of its own; this one keeps rows on a line.
_PIPE_WIDTH = 240
_STATE_STYLES = {
    "LIVE": "green",
    "SYNCING": "yellow",
    "DRAINING": "cyan",
    "STALE": "red",
    "UNKNOWN": "red",
}


def fail(message: str) -> NoReturn:
    """Print one line on standard error and exit with status 1."""
    typer.echo(f"error: {message}", err=True)
    raise typer.Exit(1)


def settings(path: Path | None, flags: dict[str, object] | None = None) -> Settings:
    """Load the settings for a command; a setting that cannot be used ends it with status 1.

    `flags`: dotted key (`server.listen`) -> value of the command's own option, None = not given.
    """
    try:
        return load(path, flags=flags)
    except ConfigError as error:
        fail(str(error))


def console() -> Console:
    """Standard output for tables. Names off the wire are never read as markup."""
    width = None if sys.stdout.isatty() else _PIPE_WIDTH
    return Console(width=width, markup=False, highlight=False, emoji=False)


def table(columns: str, *, right: str = "") -> Table:
    """An empty table; `columns` and `right` (those aligned to the right) are split at commas."""
    aligned = {name.strip() for name in right.split(",")}
    made = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for name in (c.strip() for c in columns.split(",")):
        made.add_column(name, justify="right" if name in aligned else "left", overflow="fold")
    return made


def state_text(name: str) -> Text:
    """A worker state in its colour."""
    return Text(name, _STATE_STYLES.get(name, ""))


def print_json(value: object) -> None:
    """Print plain data, or a message by `plain`, as indented JSON."""
    data = plain(value) if isinstance(value, Message) else value
    typer.echo(json.dumps(data, indent=2, ensure_ascii=False))


def hex64(value: int) -> str:
    """A block hash as people and JSON see it: 0x and 16 digits."""
    return f"0x{value:016x}"


def plain(message: Message) -> dict[str, Any]:
    """A message as plain data: all fields, enum names, 64-bit hashes as hex, bytes as numbers."""
    return {
        field.name: _field(field, getattr(message, field.name))
        for field in message.DESCRIPTOR.fields
        if not field.has_presence or message.HasField(field.name)
    }


def _field(field: Any, value: Any) -> Any:
    if field.message_type and field.message_type.GetOptions().map_entry:
        return dict(sorted(value.items()))
    if field.is_repeated:
        return [_single(field, v) for v in value]
    return _single(field, value)


def _single(field: Any, value: Any) -> Any:
    if field.message_type:
        return plain(value)
    if field.enum_type:
        known = field.enum_type.values_by_number.get(value)
        return known.name if known else value
    if field.type == FieldDescriptor.TYPE_FIXED64:
        return hex64(value)
    return list(value) if isinstance(value, bytes) else value
