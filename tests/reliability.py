"""What the reliability tests share: short times, events, and questions to a daemon."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from daemon import Daemon

from kvindexd.v1 import index_pb2 as pb

QUICK: dict[str, Any] = {
    "ingest.lease_ttl": 1.5,
    "ingest.heartbeat": 0.25,
    "ingest.replay_timeout": 0.5,
    "redis.timeout": 1.0,
    "ext_proc.listen": "",
}


def stored(first: int, count: int = 1, parent: int | None = None) -> dict[str, Any]:
    """Blocks `first`, `first + 1`, ...; block n holds tokens 16n .. 16n + 15 and has hash n + 1."""
    return {
        "type": "BlockStored",
        "block_hashes": [n + 1 for n in range(first, first + count)],
        "parent_block_hash": first if parent is None and first else parent,
        "token_ids": list(range(16 * first, 16 * (first + count))),
        "block_size": 16,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        "group_idx": 0,
        "kv_cache_spec_kind": "full_attention",
    }


def twice(n: int) -> list[dict[str, Any]]:
    """Block n in two copies; block 0 in one, since a second store that begins at the root is taken
    for a repeat of what the engine holds."""
    return [stored(n)] * (2 if n else 1)


def removed(*blocks: int) -> dict[str, Any]:
    """Removal of one copy of each block."""
    hashes = [n + 1 for n in blocks]
    return {"type": "BlockRemoved", "block_hashes": hashes, "medium": "GPU", "group_idx": 0}


def other(first_token: int, hash_: int) -> dict[str, Any]:
    """A root block with tokens of its own, as another life of an engine would store it."""
    tokens = list(range(first_token, first_token + 16))
    return stored(0) | {"token_ids": tokens, "block_hashes": [hash_]}


def prompt(blocks: int, first_token: int = 0) -> list[int]:
    """The prompt that covers blocks 0 .. blocks - 1 and one token more."""
    return [*range(first_token, first_token + 16 * blocks), 7]


def matched(daemon: Daemon, blocks: int, worker: str = "w", first_token: int = 0) -> int:
    """How many of these blocks a worker is credited with; -1 = it is not in the answer."""
    score = daemon.score(prompt(blocks, first_token)).get(worker)
    return -1 if score is None else score.matched_tokens // 16


def counter(daemon: Daemon, name: str, worker: str = "w") -> int:
    """A counter of a worker, 0 if it was never counted."""
    return int(daemon.worker(worker).counters.get(name, 0))


def state(daemon: Daemon, worker: str = "w") -> str:
    """State of a worker by name."""
    return pb.WorkerState.Name(daemon.worker(worker).state)


def owns(daemon: Daemon, asked: Daemon | None = None, worker: str = "w") -> bool:
    """Whether this process holds the lease, as `asked` (itself by default) sees it."""
    assert daemon.process is not None
    return f":{daemon.process.pid}:" in (asked or daemon).worker(worker).owner


@contextlib.contextmanager
def running(*daemons: Daemon) -> Iterator[None]:
    """Start daemons side by side; kill what still runs at the end."""
    try:
        for daemon in daemons:
            daemon.start(wait=False)
        for daemon in daemons:
            daemon.until(lambda d=daemon: d.ready, "ready")
        yield
    finally:
        for daemon in daemons:
            if daemon.process is not None:
                daemon.resume()
                daemon.kill()
