"""How the ranks of one process are ingested."""

from __future__ import annotations

from typing import Literal

import msgspec

from kvindexd.rank_state import Options


class IngestSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How every rank of this process is ingested. Times in seconds."""

    owner: str
    on_lost_events: Literal["reset", "keep"] = "reset"
    replay_timeout: float = 2.0
    buffer_batches: int = 10_000
    receive_hwm: int = 100_000
    max_event_bytes: int = 32 << 20
    lease_ttl: float = 10.0
    heartbeat: float = 2.0
    event_grace: float = 30.0
    peer_timeout: float = 15.0
    options: Options = Options()
