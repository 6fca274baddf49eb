"""What both sides are fed with and asked: prompts, and an engine fleet's events about them."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

import msgspec
import numpy as np
import numpy.typing as npt
import zmq

from benchmarks.measure import until

BLOCK = 16
EVENT_BLOCKS = 64
Tokens = npt.NDArray[np.uint32]
_encode = msgspec.msgpack.Encoder().encode


class Prompts:
    """Reproducible prompts of random tokens, with the hashes that an engine would give blocks."""

    def __init__(self, seed: int = 1) -> None:
        self._rng = np.random.default_rng(seed)

    def tokens(self, blocks: int) -> Tokens:
        """A prompt of `blocks` full blocks."""
        return self._rng.integers(0, 128_000, blocks * BLOCK, dtype=np.uint32)

    def hashes(self, blocks: int) -> list[int]:
        """Engine hashes: opaque, distinct."""
        return [int(h) for h in self._rng.integers(1, 2**63 - 1, blocks, dtype=np.uint64)]


def stored(hashes: Sequence[int], parent: int | None, tokens: Sequence[int]) -> dict[str, object]:
    """One BlockStored as vLLM sends it for a full-attention group."""
    return {
        "type": "BlockStored",
        "block_hashes": hashes,
        "parent_block_hash": parent,
        "token_ids": tokens,
        "block_size": BLOCK,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        "group_idx": 0,
        "kv_cache_spec_kind": "full_attention",
    }


def removed(hashes: Sequence[int]) -> dict[str, object]:
    """One BlockRemoved as vLLM sends it."""
    return {"type": "BlockRemoved", "block_hashes": hashes, "medium": "GPU", "group_idx": 0}


def payload(events: Sequence[dict[str, object]], ts: float | None = None) -> bytes:
    """One batch, `[ts, events, rank]`."""
    return _encode([time.time() if ts is None else ts, events, 0])


def prefix_events(
    tokens: Tokens, hashes: Sequence[int], step: int = EVENT_BLOCKS
) -> Iterator[dict[str, object]]:
    """A prompt as it is computed: `step` blocks per event."""
    flat = tokens.tolist()
    for first in range(0, len(hashes), step):
        part = hashes[first : first + step]
        parent = hashes[first - 1] if first else None
        yield stored(part, parent, flat[first * BLOCK : (first + len(part)) * BLOCK])


class Engines:
    """The event sockets of a fleet: one XPUB per rank, which learns who has subscribed."""

    def __init__(self, ranks: int) -> None:
        self._context = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, 4 * ranks + 64)
        self._sockets: list[zmq.Socket[bytes]] = []
        self.endpoints: list[str] = []
        self._seq = [0] * ranks
        self._subscribed = [0] * ranks
        for _ in range(ranks):
            socket = self._context.socket(zmq.XPUB)
            socket.setsockopt(zmq.XPUB_VERBOSE, 1)
            socket.setsockopt(zmq.SNDHWM, 0)
            socket.setsockopt(zmq.LINGER, 0)
            port = socket.bind_to_random_port("tcp://127.0.0.1")
            self._sockets.append(socket)
            self.endpoints.append(f"tcp://127.0.0.1:{port}")

    def wait_subscribed(self, count: int) -> None:
        """Until every rank has been subscribed to `count` times."""

        def all_in() -> bool:
            for i, socket in enumerate(self._sockets):
                while socket.poll(0):
                    self._subscribed[i] += 1 if socket.recv()[:1] == b"\x01" else -1
            return all(n >= count for n in self._subscribed)

        until(all_in, f"{count} subscribers at each of {len(self._sockets)} ranks")

    def publish(self, rank: int, body: bytes) -> int:
        """Send one batch; its sequence number."""
        seq = self._seq[rank]
        self._sockets[rank].send_multipart([b"", seq.to_bytes(8, "big"), body])
        self._seq[rank] = seq + 1
        return seq

    def sent(self, rank: int) -> int:
        """The last sequence number, -1 before any."""
        return self._seq[rank] - 1

    def close(self) -> None:
        """Close all sockets."""
        for socket in self._sockets:
            socket.close(0)
        self._context.term()
