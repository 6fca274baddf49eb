"""Where a command reads from: a daemon, or the store itself; see offline.py for the latter."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, NamedTuple

import typer

RedisOption = Annotated[
    str | None,
    typer.Option(
        "--redis",
        metavar="URL",
        help="Read the store itself, not the daemon. Where no daemon answers, the store of the "
        "settings (--config, KVINDEXD_REDIS__URL, or the embedded one) is read without being told.",
    ),
]


class Where(NamedTuple):
    """Where to look: a server, and the store to read in its place. `redis`: "" = as configured."""

    server: str
    redis: str | None
    config: Path | None
