"""Whether a server can hold the index safely, asked once per server at the start."""

from __future__ import annotations

import structlog
from redis.exceptions import ResponseError

from kvindexd.store.connect import Client
from kvindexd.store.errors import StoreDenied, UnfitServer
from kvindexd.store.records import Identity
from kvindexd.store.url import StoreURL

log = structlog.get_logger(__name__)

MINIMUM = (6, 2)
"""Redis 6.2: the first with all we use, and the oldest still found in the field."""


def parse_info(text: str) -> dict[str, str]:
    """The fields of an INFO reply."""
    pairs = (line.partition(":") for line in text.splitlines() if line and line[0] != "#")
    return {name: value for name, _, value in pairs}


def identity_of(info: dict[str, str]) -> Identity:
    """What matters of INFO."""
    valkey = info.get("valkey_version")
    return Identity(
        run_id=info.get("run_id", ""),
        version=valkey or info.get("redis_version", "0"),
        server="valkey" if valkey else "redis",
        master=info.get("role", "master") == "master",
        policy=info.get("maxmemory_policy", ""),
        cluster=info.get("cluster_enabled") == "1",
    )


async def memory(client: Client, slot: int) -> tuple[int, int]:
    """(bytes used, maxmemory; 0 = no limit) of the server of a slot. Raises StoreError."""
    info = parse_info((await client.call("info", slot, "INFO", "memory")).decode(errors="replace"))
    return int(info.get("used_memory", 0)), int(info.get("maxmemory", 0))


async def identify(client: Client, slot: int) -> Identity:
    """Ask the server of a slot who it is. Raises StoreError."""
    reply = await client.call("info", slot, "INFO")
    if isinstance(reply, ResponseError):
        raise StoreDenied(str(reply))
    return identity_of(parse_info(reply.decode(errors="replace")))


def check_fit(identity: Identity, url: StoreURL, shard: int = 0) -> None:
    """Raise UnfitServer, saying what to change, if the index must not live on this server."""
    where = str(url) if url.mode == "single" else f"{url} (server of shard {shard})"
    if identity.cluster and url.mode != "cluster":
        raise UnfitServer(f"{where}: a node of a cluster; write the URL as redis+cluster://")
    version = tuple(int(p) for p in identity.version.split(".")[:2] if p.isdigit())
    if identity.server == "redis" and version < MINIMUM:
        raise UnfitServer(
            f"{where}: Redis {identity.version} is too old; 6.2 or newer, or any Valkey, is needed"
        )
    if not identity.policy:
        log.warning(
            "store_policy_unknown",
            server=where,
            fix="allow CONFIG GET or INFO, or see to maxmemory-policy noeviction yourself",
        )
    elif identity.policy != "noeviction":
        raise UnfitServer(
            f"{where}: maxmemory-policy is {identity.policy}, so this server deletes keys by "
            "itself and the index would silently be wrong; set maxmemory-policy noeviction "
            "(a full server then refuses new blocks, which kvindexd reports)"
        )
    if not identity.master:
        raise UnfitServer(
            f"{where}: this server is a replica and refuses writes; give the master's address, "
            "or redis+sentinel://"
        )
