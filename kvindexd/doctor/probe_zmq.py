"""Probes of an engine's sockets: a subscription of our own, and replay requests."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections import Counter
from collections.abc import Sequence

import xxhash
import zmq

from kvindexd.doctor.facts import Heard, Missing, Replayed, Root
from kvindexd.ingest.actions import ReplayOutcome
from kvindexd.ingest.frame import Frame, FrameError, parse_live
from kvindexd.ingest.replay import ReplayClient, ReplaySettings
from kvindexd.ingest.sockets import (
    TransportError,
    check_endpoint,
    is_ipv6,
    take,
    wait_readable,
)
from kvindexd.wire import BatchError, decode_batch
from kvindexd.wire.events import Batch, BlockStored

_MAX_BYTES = 64 << 20
_AT_ONCE = 100
_DECODED = 50
"""Batches per rank that are looked into; more are only counted."""
_ROOTS = 32
_BEFORE = 16
"""Batches before the last known one that a short replay asks for."""

Context = zmq.Context[zmq.Socket[bytes]]


class _Batches:
    """What a few batches show."""

    def __init__(self) -> None:
        self.looked = 0
        self.ranks: set[int] = set()
        self.roots: dict[Root, None] = {}
        self.skews: list[float] = []

    def look(self, payload: bytes, received_at: float) -> None:
        if self.looked >= _DECODED:
            return
        self.looked += 1
        try:
            batch = decode_batch(payload)
        except BatchError:
            return
        self.skews.append(received_at - batch.ts)
        if batch.rank is not None:
            self.ranks.add(batch.rank)
        for root in roots(batch):
            if len(self.roots) < _ROOTS:
                self.roots[root] = None


def roots(batch: Batch) -> list[Root]:
    """First blocks of plain prompts in a batch: those whose hash covers tokens alone."""
    found = []
    for e in batch.events:
        if (
            isinstance(e, BlockStored)
            and e.parent is None
            and e.hashes
            and e.block_size
            and not (e.lora_name or e.lora_id or e.cache_salt or e.pairs or any(e.extra_keys or ()))
            and len(e.hashes) * e.block_size == e.num_tokens
        ):
            first = e.hashes[0]
            text = first.hex() if isinstance(first, bytes) else f"{first:016x}"
            digest = xxhash.xxh3_128(e.tokens[: 4 * e.block_size])
            found.append(Root(f"{e.block_size}:{digest.hexdigest()}", text))
    return found


async def listen(endpoint: str, topic: str, seconds: float, context: Context) -> Heard | Missing:
    """Subscribe to everything on an endpoint for so long. Only counts and digests are kept."""
    try:
        endpoint = check_endpoint(endpoint)
    except TransportError as e:
        return Missing(str(e))
    heard, batches = Heard(seconds), _Batches()
    topics: Counter[str] = Counter()
    socket = context.socket(zmq.SUB)
    try:
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.IMMEDIATE, 1)  # see ingest/transport.py
        socket.setsockopt(zmq.IPV6, int(is_ipv6(endpoint)))
        socket.setsockopt(zmq.RCVHWM, 10_000)
        socket.setsockopt(zmq.MAXMSGSIZE, _MAX_BYTES)
        socket.setsockopt(zmq.SUBSCRIBE, b"")
        socket.connect(endpoint)
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            if await wait_readable((socket,), left):
                _drain(socket, topic, heard, topics, batches)
    except zmq.ZMQError as e:
        return Missing(f"cannot listen to {endpoint}: {e.strerror}")
    finally:
        socket.close(0)
    heard.topics, heard.ranks = dict(topics), sorted(batches.ranks)
    heard.roots = list(batches.roots)
    heard.skew = statistics.median(batches.skews) if batches.skews else None
    return heard


def _drain(
    socket: zmq.Socket[bytes], topic: str, heard: Heard, topics: Counter[str], batches: _Batches
) -> None:
    for _ in range(_AT_ONCE):
        parts = take(socket)
        if parts is None:
            return
        now = time.time()
        heard.messages += 1
        heard.registered += parts[0].startswith(topic.encode())
        topics[parts[0].decode("utf-8", "replace")] += 1
        try:
            frame = parse_live(parts, _MAX_BYTES, now)
        except FrameError:
            continue  # the ingester counts them
        batches.look(frame.payload, now)


async def replay(
    endpoint: str, known: int, whole: bool, within: float, context: Context
) -> Replayed | Missing:
    """Ask for the last few batches up to `known`, and if that works for all of them.

    `known`: last sequence number that was applied, -1 = none. `within`: longest silence.
    """
    try:
        client = ReplayClient(
            ReplaySettings(endpoint=endpoint, reply_timeout=within, total_timeout=5 * within),
            context,
        )
    except TransportError as e:
        return Missing(str(e))
    found = await _ask(client, max(0, known - _BEFORE), known)
    if whole and found.asked and found.outcome == "complete" and found.last >= known:
        full = await _ask(client, 0, known)
        # The short answer has the digest; the long one may be cut at the sender's queue.
        full.digest = found.digest if full.digest is None else full.digest
        return full
    return found


async def _ask(client: ReplayClient, start: int, known: int) -> Replayed:
    found, batches = Replayed("", asked=start, digest_seq=known), _Batches()

    async def deliver(frames: Sequence[Frame]) -> None:
        for frame in frames:
            if found.first < 0:
                found.first = frame.seq
            elif frame.seq > found.last + 1:
                found.holes += frame.seq - found.last - 1
            found.last = max(found.last, frame.seq)
            if frame.seq == known:
                found.digest = frame.digest
            batches.look(frame.payload, frame.received_at)
        await asyncio.sleep(0)

    result = await client.run(start, deliver)
    done = result.outcome is ReplayOutcome.COMPLETE
    found.outcome, found.detail = ("complete" if done else result.outcome.value), result.detail
    found.batches, found.roots = result.batches, list(batches.roots)
    return found
