"""A worker rank in full, as tables."""

from __future__ import annotations

from typing import Any

from rich.console import RenderableType

from kvindexd.cli.output import plain, state_text, table
from kvindexd.v1 import index_pb2 as pb

_ALWAYS = ("dp_rank", "epoch", "revision", "last_seq")


def worker_tables(worker: pb.Worker, *, counters: bool = True) -> list[RenderableType]:
    """Its fields, and its groups if any are known. Without `counters` those are left out."""
    shown = table("FIELD, VALUE")
    for name, value in plain(worker).items():
        if name == "groups" or (name == "counters" and not counters):
            continue
        if isinstance(value, dict):
            value = ", ".join(f"{k}={v}" for k, v in value.items())
        text = state_text(value) if name == "state" else str(value)
        if value not in ("", [], 0, False) or name in _ALWAYS:
            shown.add_row(name, text)
    return [shown, _groups(worker)] if worker.groups else [shown]


def _groups(worker: pb.Worker) -> Any:
    right = "GROUP, BLOCK SIZE, WINDOW, STORES"
    shown = table("GROUP, KIND, BLOCK SIZE, WINDOW, TREATED AS, STORES", right=right)
    for g in worker.groups:
        window = str(g.sliding_window or "-")
        numbers = (str(g.block_size), window, g.treated_as, f"{g.stores:,}")
        shown.add_row(str(g.idx), g.kind or "(not on the wire)", *numbers)
    return shown
