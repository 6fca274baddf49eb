"""`kvindexd config`: the settings in force and the schema of the file."""

from __future__ import annotations

import json

import typer

from kvindexd.cli.output import ConfigOption, JsonOption, console, print_json, settings, table
from kvindexd.config import json_schema


def register(app: typer.Typer) -> None:
    """Add the commands to the app."""
    group = typer.Typer(no_args_is_help=True, help="Settings: what is in force, and the schema.")
    group.command("show")(show)
    group.command("schema")(schema)
    app.add_typer(group, name="config")


def show(config: ConfigOption = None, as_json: JsonOption = False) -> None:
    """Print every setting with where it was set; secrets are masked."""
    rows = settings(config).effective()
    if as_json:
        print_json([row._asdict() for row in rows])
        return
    shown = table("KEY, VALUE, SOURCE")
    for row in rows:
        shown.add_row(row.key, json.dumps(row.value, ensure_ascii=False), row.source)
    console().print(shown)


def schema() -> None:
    """Print a JSON Schema of the configuration file."""
    print_json(json_schema())
