"""`kvindexd bench`: the benchmark suite of a source checkout."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import typer

import kvindexd


def register(app: typer.Typer) -> None:
    """Add the command."""

    @app.command(
        context_settings={
            "allow_extra_args": True,
            "ignore_unknown_options": True,
            "help_option_names": [],
        }
    )
    def bench(context: typer.Context) -> None:
        """Run the benchmark suite (--quick: under three minutes; --help: all options)."""
        root = Path(kvindexd.__file__).resolve().parent.parent
        if not (root / "benchmarks" / "run.py").is_file():
            typer.echo(
                f"kvindexd bench: no benchmarks/ beside the package in {root}; the suite is not "
                "part of an installation: run it from a source checkout (make bench)",
                err=True,
            )
            raise typer.Exit(1)
        # A suite that was interrupted has cleaned up; its status is ours.
        path = os.pathsep.join(p for p in (str(root), os.environ.get("PYTHONPATH", "")) if p)
        command = [sys.executable, "-m", "benchmarks.run", *context.args]
        done = subprocess.run(  # noqa: S603 - this interpreter, arguments as given
            command, cwd=root, env=os.environ | {"PYTHONPATH": path}, check=False
        )
        raise typer.Exit(done.returncode)
