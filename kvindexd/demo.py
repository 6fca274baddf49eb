"""`make demo`: a recorded hybrid model's stream, two workers, and what each answer would cost.

Starts `kvindexd serve` with the embedded store, publishes what a real vLLM emitted (24 MLA and 69
linear-attention layers make four KV-cache groups) over real ZMQ sockets as two workers, scores a
few prompts over gRPC, and prints what kvindexd answers beside the attention-only answer, the
naive (unfiltered) one, and what the engine itself would reuse.
"""

from __future__ import annotations

import base64
import struct
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import grpc
import zmq
from rich.console import Console
from rich.table import Table

from kvindexd import chain
from kvindexd.testing.conformance import Capture
from kvindexd.testing.serving import TIMEOUT, serving, wait_for
from kvindexd.v1 import index_pb2 as pb
from kvindexd.v1 import index_pb2_grpc as rpc
from kvindexd.wire import BlockStored, decode_batch

DATA = Path(__file__).parent / "testing" / "data"
CAPTURES = {"worker-0": "c_kimi768_default", "worker-1": "c_kimi768_dense"}
"""The same prompts on two engines: one keeps few states of the linear layers, one keeps all."""
MODEL = "kimi-like"
FRAMES = {"worker-0": 2, "worker-1": 4}
"""Recorded batches that each has published: worker-0 served one conversation, worker-1 two."""


class NaiveIndex:
    """What an index does that takes every group's event for an attention block's."""

    def __init__(self) -> None:
        self._key: dict[Any, int] = {}
        self._held: set[int] = set()

    def feed(self, payload: bytes) -> None:
        """Pair the listed hashes with the first blocks of each event's tokens.

        In the other of the two orders in which an engine may announce its groups: attention
        first, so that what a linear-attention group says of the same hash comes last.
        """
        for event in reversed(decode_batch(payload).events):
            if not isinstance(event, BlockStored) or not event.tokens:
                continue
            parent = 0 if event.parent is None else self._key.get(event.parent)
            if parent is None:
                continue
            keys = chain.extend(parent, event.tokens, event.block_size)
            for engine_hash, key in zip(event.hashes, keys, strict=False):
                self._key[engine_hash] = key
                self._held.add(key)

    def matched(self, tokens: bytes, block_size: int) -> int:
        """Leading tokens it would credit."""
        n = 0
        for key in chain.extend(0, tokens, block_size):
            if key not in self._held:
                break
            n += block_size
        return n


class Publisher:
    """One worker's PUB side, which waits for its subscriber before it publishes."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        self._socket = context.socket(zmq.XPUB)
        port = self._socket.bind_to_random_port("tcp://127.0.0.1")
        self.endpoint = f"tcp://127.0.0.1:{port}"

    def publish(self, frames: list[dict[str, Any]]) -> None:
        """Send recorded frames byte for byte."""
        if not self._socket.poll(int(TIMEOUT * 1000)):
            raise TimeoutError(f"kvindexd did not subscribe to {self.endpoint}")
        self._socket.recv()
        for frame in frames:
            payload = base64.b64decode(frame["payload"])
            seq = struct.pack(">Q", frame["seq"])
            self._socket.send_multipart([frame["topic"].encode(), seq, payload])

    def close(self) -> None:
        """Drop the socket."""
        self._socket.close(linger=0)


def _truth(captures: Mapping[str, Capture]) -> dict[str, dict[str, int]]:
    """Per worker and prompt, what the engine said at the moment its last frame was out."""
    answers: dict[str, dict[str, int]] = {}
    for worker, frames in FRAMES.items():
        answers[worker] = {}
        latest: dict[str, Any] = {}
        for step in captures[worker].steps:
            if isinstance(step["probes"], dict):
                latest |= {p: v for p, v in step["probes"].items() if v != "="}
            if step["after_frames"] == frames:
                answers[worker] |= {p: int(v["hit"]) for p, v in latest.items()}
    return answers


def _rows(captures: Mapping[str, Capture], address: str) -> Iterator[tuple[str, ...]]:
    truth = _truth(captures)
    naive = {worker: NaiveIndex() for worker in FRAMES}
    for worker, count in FRAMES.items():
        for frame in captures[worker].frames[:count]:
            naive[worker].feed(base64.b64decode(frame["payload"]))
    with grpc.insecure_channel(address) as channel:
        index = rpc.KVIndexStub(channel)
        for name in ("A", "A2", "B", "C"):
            tokens = captures["worker-0"].packed[name]
            request = pb.ScoreWorkersRequest(prompt=pb.Prompt(model=MODEL, token_ids=tokens))
            scores = index.ScoreWorkers(request, timeout=5).scores
            for s in sorted(scores, key=lambda s: s.worker_id):
                unfiltered = naive[s.worker_id].matched(tokens, s.block_size)
                yield (
                    f"{name} ({len(tokens) // 4:,} tokens)",
                    s.worker_id,
                    f"{s.reusable_tokens:,}",
                    f"{truth[s.worker_id][name]:,}",
                    f"{s.matched_tokens:,}",
                    f"{unfiltered:,}",
                )


def _print(console: Console, rows: list[tuple[str, ...]]) -> None:
    table = Table(title="Prompt tokens that each worker would reuse")
    for header in ("prompt", "worker"):
        table.add_column(header)
    for header in ("kvindexd", "the engine itself", "attention-only rule", "naive index"):
        table.add_column(header, justify="right")
    before = ""
    for row in rows:
        if before and row[0] != before:
            table.add_section()
        shown = "" if row[0] == before else row[0]
        before = row[0]
        wrong = ["" if cell == row[3] else " [red]✗[/]" for cell in row]
        table.add_row(
            shown,
            row[1],
            f"[bold]{row[2]}[/]{wrong[2]}",
            row[3],
            row[4] + wrong[4],
            row[5] + wrong[5],
        )
    console.print(table)
    console.print(
        "The model has 24 MLA layers and 69 linear-attention layers. Its engine announces each "
        "block once\nper KV-cache group, and can resume a prompt only where [italic]every[/] "
        "group can: the attention-only rule\npromises reuse that will not happen, and an index "
        "that takes every group's event for an attention block's loses the chain."
    )


def main() -> int:
    """Run the demo; 0 when kvindexd's answers equal the engine's own."""
    console = Console(width=None if sys.stdout.isatty() else 100)
    captures = {worker: Capture(DATA / name) for worker, name in CAPTURES.items()}
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    publishers = {worker: Publisher(context) for worker in FRAMES}
    try:
        with (
            tempfile.TemporaryDirectory(prefix="kvindexd-demo-") as folder,
            serving(Path(folder)) as ready,
        ):
            address = ready["grpc"]
            console.print(f"kvindexd serves gRPC on {address}, with an embedded store")
            with grpc.insecure_channel(address) as channel:
                admin = rpc.KVIndexAdminStub(channel)
                for i, (worker, publisher) in enumerate(publishers.items()):
                    registration = pb.Worker(
                        worker_id=worker,
                        model=MODEL,
                        address=f"127.0.0.1:{8000 + i}",
                        kv_events_endpoint=publisher.endpoint,
                        engine="vllm",
                    )
                    admin.RegisterWorker(pb.RegisterWorkerRequest(worker=registration), timeout=10)
                for worker, publisher in publishers.items():
                    frames = captures[worker].frames[: FRAMES[worker]]
                    publisher.publish(frames)
                    wait_for(admin, worker, frames[-1]["seq"])
                    console.print(f"{worker}: {len(frames)} recorded batches published and indexed")
            rows = list(_rows(captures, address))
    finally:
        for publisher in publishers.values():
            publisher.close()
        context.term()
    _print(console, rows)
    return 0 if all(row[2] == row[3] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
