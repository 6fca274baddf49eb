"""Flags of engines, in the words of the engine at hand."""

from __future__ import annotations

import json

from kvindexd.v1 import index_pb2 as pb


def events_flag(worker: pb.Worker, **fields: str | int) -> str:
    """The flag that makes its engine publish, with these fields of its configuration."""
    config: dict[str, object] = {"publisher": "zmq"}
    if not _is_sglang(worker):
        config = {"enable_kv_cache_events": True, **config}
    if worker.topic:
        config["topic"] = worker.topic
    return f"--kv-events-config '{json.dumps(config | fields)}'"


def start(worker: pb.Worker, flags: str) -> str:
    """The advice to start its engine with some flags."""
    if _is_sglang(worker):
        return f"start SGLang with {flags}"
    return (
        f"start {'the engine' if worker.engine and not _is_vllm(worker) else 'vLLM'} with {flags}"
    )


def bound(endpoint: str) -> str:
    """An endpoint as the engine must spell it to listen there."""
    return f"tcp://*:{endpoint.rpartition(':')[2]}" if endpoint.startswith("tcp://") else endpoint


def _is_sglang(worker: pb.Worker) -> bool:
    return worker.engine.lower() == "sglang"


def _is_vllm(worker: pb.Worker) -> bool:
    return worker.engine.lower() == "vllm"
