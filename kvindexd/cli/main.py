"""The console script. Exit status: 0 success, 1 a finding or failure, 2 wrong usage."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from kvindexd._version import __version__
from kvindexd.cli import (
    audit,
    bench,
    blocks,
    capture,
    config_commands,
    conformance,
    credentials,
    doctor,
    examples,
    layout,
    prompts,
    replay,
    serve,
    tail,
    top,
    workers,
)

# Each module offers `register(app)`; a new command is added here, and nowhere else.
COMMANDS = (
    serve,
    workers,
    prompts,
    blocks,
    tail,
    top,
    layout,
    audit,
    doctor,
    capture,
    replay,
    conformance,
    bench,
    config_commands,
)

app = typer.Typer(
    name="kvindexd",
    no_args_is_help=True,
    help="Which worker already holds how much of a prompt's KV cache.",
    # Locals may hold secrets and prompts.
    pretty_exceptions_show_locals=False,
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"kvindexd {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_version, is_eager=True, help="Print the version."),
    ] = False,
) -> None:
    """Which worker already holds how much of a prompt's KV cache."""


for _module in COMMANDS:
    _module.register(app)
examples.install(app)
credentials.install(app)


def main() -> None:
    """Run the command line, and exit."""
    try:
        app(prog_name="kvindexd")
    except BrokenPipeError:
        # The reader went away (`| head`): nothing to say, and nobody to say it to.
        sys.stderr.close()
        sys.exit(1)


if __name__ == "__main__":
    main()
