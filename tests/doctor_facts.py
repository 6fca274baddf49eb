"""Facts of a sound deployment, for tests to break one at a time."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import yaml

from kvindexd.config import load
from kvindexd.doctor.envoy import snake
from kvindexd.doctor.facts import (
    Dial,
    Engine,
    EnvoyFile,
    Facts,
    Heard,
    Host,
    Pages,
    Process,
    Rank,
    Reach,
    Redis,
    RedisServer,
    Replayed,
    Root,
    Server,
    Stored,
    TokenizerTry,
)
from kvindexd.model import Profile
from kvindexd.v1 import index_pb2 as pb

EXAMPLES = Path(__file__).parent.parent / "examples" / "envoy"
INFO = {
    "redis_version": "7.2.4",
    "role": "master",
    "maxmemory_policy": "noeviction",
    "maxmemory": "1000",
    "used_memory": "100",
    "aof_enabled": "1",
    "save": "",
    "rdb_last_bgsave_status": "ok",
    "aof_last_write_status": "ok",
    "connected_clients": "10",
    "maxclients": "10000",
}
CACHE = {
    "enable_prefix_caching": "True",
    "num_gpu_blocks": "1000",
    "prefix_caching_hash_algo": "sha256_cbor",
}


def worker(name: str, port: int, **fields: Any) -> pb.Worker:
    """A sound worker as the server lists it."""
    given: dict[str, Any] = {
        "worker_id": name,
        "model": "m",
        "address": f"127.0.0.1:{port}",
        "kv_events_endpoint": f"tcp://127.0.0.1:{port + 1000}",
        "replay_endpoint": f"tcp://127.0.0.1:{port + 2000}",
        "block_size": 16,
        "engine": "vllm",
        "state": pb.LIVE,
        "epoch": 1,
        "revision": 100,
        "last_seq": 99,
        "blocks": {"device": 500},
        "groups": [pb.Group(idx=0, kind="full_attention", block_size=16, treated_as="main")],
        "counters": {"event:BlockStored": 500, "admitted": 500},
        "owner": "host:7:abc",
        "detail": "connected to tcp://127.0.0.1:9000, last message 0 s ago",
    }
    return pb.Worker(**(given | fields))


def rank(name: str, port: int, **fields: Any) -> Rank:
    """A rank whose probes all went well. `fields`: of its Worker message."""
    after = worker(name, port, **fields)
    return Rank(
        before=worker(name, port, **fields),
        after=after,
        owners=[after.owner],
        events=Dial(f"127.0.0.1:{port + 1000}", "", (f"127.0.0.1:{port + 1000}",)),
        replay_dial=Dial(f"127.0.0.1:{port + 2000}", "", (f"127.0.0.1:{port + 2000}",)),
        address=Dial(after.address, "", (after.address,)),
        heard=Heard(
            3.0, messages=30, registered=30, topics={"": 30}, ranks=[0], skew=0.001,
            roots=[Root("16:aa", "01")],
        ),
        replay=Replayed(
            "complete", "100 batches", 0, 100, 0, 99, digest_seq=99, digest=5,
            roots=[Root("16:bb", "02")],
        ),
        engine=Engine(dict(CACHE), ["m"], ()),
        stored=Stored(99, 5, 0, Profile()),
    )  # fmt: skip


def server(where: str = "127.0.0.1:6379", **info: str) -> RedisServer:
    """A sound Redis."""
    return RedisServer(where, INFO | info, 0.0002, 0.001, 0.0002, {}, "1")


def samples(**values: float) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """`name` or `name__label__value` -> value, without the prefix kvindexd_."""
    found = {}
    for key, value in values.items():
        name, *label = key.split("__")
        labels = ((label[0], label[1]),) if label else ()
        found[f"kvindexd_{name}", labels] = value
    return found


@functools.cache
def _example(name: str) -> str:
    return json.dumps(yaml.safe_load((EXAMPLES / name).read_text()))


def envoy(name: str = "buffered.yaml") -> EnvoyFile:
    """One of the examples, a copy of its own."""
    return EnvoyFile(name, snake(json.loads(_example(name))))


def healthy() -> Facts:
    """Nothing to find, and nothing missing."""
    ranks = [rank("w0", 8000), rank("w1", 8001)]
    keys = frozenset({"/w0/0", "/w1/0"})
    pages = Pages(
        samples(score_requests_total__code__OK=9), samples(score_requests_total__code__OK=9)
    )
    return Facts(
        wait=3.0,
        outage=60.0,
        reach=Reach("127.0.0.1:50051"),
        config=load(env={}, flags={"tokens.models": '{"m": "engine"}'}).config,
        host=Host("1.0", True, True, [Process(7, 65536, 100, 2)]),
        server=Server("127.0.0.1:50051", "SERVING", "1.0", [0, 3, 0]),
        metrics_reach=Reach("127.0.0.1:9400"),
        metrics=pages,
        ranks=ranks,
        redis_reach=Reach("redis://127.0.0.1:6379"),
        redis=Redis("redis://127.0.0.1:6379", [server()], keys),
        tokenizers=[TokenizerTry("m", "engine")],
        envoy=[envoy()],
        candidates=["127.0.0.1:8000"],
    )
