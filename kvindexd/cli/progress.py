"""A line that says how far a command is."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

from rich.console import Console

_SECONDS = 0.2


@contextmanager
def progress() -> Iterator[Callable[[str], None]]:
    """Gives what shows a text on standard error: kept up to date on a terminal, nothing else."""
    out = Console(stderr=True, markup=False, highlight=False, emoji=False)
    shown_at = 0.0
    with out.status("starting") if out.is_terminal else nullcontext() as line:

        def show(text: str) -> None:
            nonlocal shown_at
            if line is not None and time.monotonic() - shown_at >= _SECONDS:
                shown_at = time.monotonic()
                line.update(text)

        yield show
