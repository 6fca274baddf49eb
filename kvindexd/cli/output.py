"""What commands print: tables for people, JSON for programs, one line for a failure."""

from __future__ import annotations

import contextlib
import json
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn
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
_PATIENCE = 1.0
"""Seconds after which a wait is shown."""
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


@contextlib.contextmanager
def progress(what: str) -> Iterator[Callable[[float, float | None], None]]:
    """A bar on standard error for what lasts over a second; nothing where that is no terminal.

    Yields `advance(done, total)`, which may be called or not; total None = not known.
    """
    screen = Console(stderr=True, markup=False, highlight=False)
    if not screen.is_terminal:
        yield lambda _done, _total: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn())
    bar = Progress(*columns, TimeElapsedColumn(), console=screen, transient=True)
    task = bar.add_task(what, total=None)
    timer = threading.Timer(_PATIENCE, bar.start)
    timer.daemon = True
    timer.start()
    try:
        yield lambda done, total: bar.update(task, completed=done, total=total)
    finally:
        timer.cancel()
        timer.join()
        bar.stop()


def note(message: str) -> None:
    """Print one line on standard error: what is going on, not a result."""
    typer.echo(message, err=True)


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


def print_json(value: object, *, line: bool = False) -> None:
    """Print plain data, or a message by `plain`, as indented JSON; with `line` on one line."""
    data = plain(value) if isinstance(value, Message) else value
    typer.echo(json.dumps(data, indent=None if line else 2, ensure_ascii=False))


def ago(milliseconds: float) -> str:
    """An age for people: 0.4 s, 12.0 s, 3 min, 2 h, 5 d."""
    seconds = milliseconds / 1000
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.1f} s"


def worker_name(namespace: str, worker_id: str) -> str:
    """A worker id as tables show it: with its namespace where that is not the default one."""
    return f"{namespace}/{worker_id}" if namespace else worker_id


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
