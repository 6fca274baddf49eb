"""A small pure model of an engine's prefix cache: its events, and what it would really reuse.

Modelled: KV-cache groups of several kinds that share one pool of blocks, reference counts, LRU
eviction, duplicate physical blocks, sparse caching of window and state groups, reset, and vLLM's
block hashes (a sha256 chain). Not modelled: chunked prefill, partial entries, offload, preemption.
Everything is deterministic.
"""

from __future__ import annotations

import hashlib
import math
import pickle
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

_FULL = ("full_attention", "mla_attention", "sink_full_attention")
_WINDOW = ("sliding_window", "sliding_window_mla")


class Group(NamedTuple):
    """One KV-cache group. `sparse`: only the blocks that a replay of the prompt needs are cached.

    Sizes in tokens. `window` for sliding windows, `chunk` for chunked_local_attention.
    """

    kind: str = "full_attention"
    block_size: int = 16
    window: int = 0
    chunk: int = 0
    sparse: bool = False

    def needed(self, length: int) -> range:
        """Indices of the blocks that must be held for reuse up to `length` tokens."""
        end = length // self.block_size
        if self.kind in _FULL:
            return range(end)
        if self.kind in _WINDOW:
            return range(max(0, end - math.ceil((self.window - 1) / self.block_size)), end)
        if self.kind == "chunked_local_attention":
            return range(length // self.chunk * self.chunk // self.block_size, end)
        if self.kind == "mamba":
            return range(max(0, end - 1), end)
        raise ValueError(f"group kind {self.kind!r}: no reuse rule in this model")


class Prompt(NamedTuple):
    """What is asked: tokens, and what keeps equal tokens apart. `lora`: (name, id, path)."""

    tokens: tuple[int, ...]
    salt: str | None = None
    lora: tuple[str, int, str] | None = None


class PoolExhausted(RuntimeError):
    """More blocks are needed than are free; nothing was changed."""


class _Block(msgspec.Struct):
    id: int
    group: int = -1
    digest: bytes | None = None
    users: int = 0


class Request(msgspec.Struct):
    """A running request: it keeps its blocks until `finish`. `reused`: tokens skipped."""

    prompt: Prompt
    tokens: list[int]
    reused: int
    kept: list[set[int]]  # per sparse group: the block indices that get cached
    blocks: list[_Block] = msgspec.field(default_factory=list)
    cached: list[int] = msgspec.field(default_factory=list)  # per group: full blocks dealt with
    filling: list[dict[int, _Block]] = msgspec.field(default_factory=list)  # index -> uncached


class BlockPool:
    """One engine rank's block pool. `run` prompts, `take_events`, and ask what is `resident`."""

    def __init__(
        self,
        groups: Sequence[Group] = (Group(),),
        num_blocks: int = 256,
        *,
        hash_block: int = 16,
        int_hashes: bool = True,
        seed: str = "vllm-none-hash",
    ) -> None:
        """`hash_block` divides every group's block size. Raises ValueError if it does not."""
        if any(g.block_size % hash_block for g in groups):
            raise ValueError(f"hash_block {hash_block} must divide every group's block size")
        self.groups = tuple(groups)
        self.alignment = math.lcm(*(g.block_size for g in groups))
        self._hash_block = hash_block
        self._int_hashes = int_hashes
        self._root = _sha256(seed)
        self._free: OrderedDict[int, _Block] = OrderedDict(
            (i, _Block(i)) for i in range(num_blocks)
        )
        self._copies: dict[tuple[int, bytes], OrderedDict[int, _Block]] = {}
        self._running = 0
        self._events: list[dict[str, Any]] = []

    # -- ground truth ------------------------------------------------------------------------

    def resident(self, prompt: Prompt | Sequence[int]) -> int:
        """Tokens of this prompt that the engine would skip right now: every group's rule holds."""
        prompt = _as_prompt(prompt)
        digests = self._digests(prompt, prompt.tokens)
        top = (len(prompt.tokens) - 1) // self.alignment * self.alignment
        for length in range(top, 0, -self.alignment):
            if all(self._valid(g, length, digests) for g in range(len(self.groups))):
                return length
        return 0

    def copies(self, prompt: Prompt | Sequence[int]) -> list[list[int]]:
        """Per group, physical copies held of each full block of the prompt."""
        prompt = _as_prompt(prompt)
        digests = self._digests(prompt, prompt.tokens)
        return [
            [
                len(self._copies.get((g, digests[(i + 1) * group.block_size]), ()))
                for i in range(len(prompt.tokens) // group.block_size)
            ]
            for g, group in enumerate(self.groups)
        ]

    def attention_run(self, prompt: Prompt | Sequence[int]) -> int:
        """Tokens in the contiguous run of full-attention blocks, all such groups holding them."""
        runs = [
            group.block_size * next((i for i, n in enumerate(held) if not n), len(held))
            for group, held in zip(self.groups, self.copies(prompt), strict=True)
            if group.kind in _FULL
        ]
        return min(runs, default=0)

    @property
    def blocks_held(self) -> int:
        """Physical blocks that hold cached content."""
        return sum(len(copies) for copies in self._copies.values())

    # -- what an engine does -----------------------------------------------------------------

    def run(self, prompt: Prompt | Sequence[int], output: Sequence[int] = ()) -> int:
        """Serve a request from start to end; returns the tokens it reused."""
        request = self.start(prompt)
        try:
            self.extend(request, output)
        finally:
            self.finish(request)
        return request.reused

    def start(self, prompt: Prompt | Sequence[int]) -> Request:
        """Prefill a prompt and keep its blocks in use. Raises PoolExhausted."""
        prompt = _as_prompt(prompt)
        reused = self.resident(prompt)
        digests = self._digests(prompt, prompt.tokens)
        hits = [
            self._copies[g, digests[(i + 1) * group.block_size]]
            for g, group in enumerate(self.groups)
            for i in group.needed(reused)
        ]
        found = [next(iter(copies.values())) for copies in hits]
        missing = sum(
            math.ceil(len(prompt.tokens) / g.block_size) - reused // g.block_size
            for g in self.groups
        )
        idle = sum(1 for block in found if not block.users)
        if missing > len(self._free) - idle:
            raise PoolExhausted(f"{missing} blocks needed, {len(self._free) - idle} free")
        request = Request(prompt, [], reused, self._kept(len(prompt.tokens)))
        request.cached = [reused // g.block_size for g in self.groups]
        request.filling = [{} for _ in self.groups]
        for block in found:
            self._use(block, request)
        self._running += 1
        self._grow(request, list(prompt.tokens), start=reused)
        return request

    def extend(self, request: Request, tokens: Sequence[int]) -> None:
        """Decode: append generated tokens. Raises PoolExhausted with nothing changed."""
        if tokens:
            self._grow(request, [*request.tokens, *tokens], start=len(request.tokens))

    def finish(self, request: Request) -> None:
        """Free the request's blocks, the prompt's tail first in line for eviction."""
        for block in reversed(request.blocks):
            block.users -= 1
            if not block.users:
                self._free[block.id] = block
        request.blocks = []
        self._running -= 1

    def reset(self) -> bool:
        """Forget everything; False (and no change) while requests run.

        As with the real engine, the event waits for the next batch that is published.
        """
        if self._running:
            return False
        for block in self._free.values():
            block.group, block.digest = -1, None
        self._copies.clear()
        self._events.append({"type": "AllBlocksCleared"})
        return True

    def take_events(self) -> list[dict[str, Any]]:
        """The events since the last call, in order, ready to publish."""
        events, self._events = self._events, []
        return events

    # -- inside ------------------------------------------------------------------------------

    def _kept(self, length: int) -> list[set[int]]:
        """Per group, the blocks a replay of a prompt of this length would need."""
        boundary = max(0, length - 1) // self.alignment * self.alignment
        return [set(group.needed(boundary)) for group in self.groups]

    def _grow(self, request: Request, tokens: list[int], start: int) -> None:
        ranges = [
            range(math.ceil(start / g.block_size), math.ceil(len(tokens) / g.block_size))
            for g in self.groups
        ]
        if sum(map(len, ranges)) > len(self._free):
            raise PoolExhausted(f"{sum(map(len, ranges))} blocks needed, {len(self._free)} free")
        for g, indices in enumerate(ranges):
            for index in indices:
                request.filling[g][index] = self._allocate(request)
        request.tokens = tokens
        digests = self._digests(request.prompt, tokens)
        for g in range(len(self.groups)):
            self._cache_full_blocks(request, g, digests)

    def _allocate(self, request: Request) -> _Block:
        _, block = self._free.popitem(last=False)
        if block.digest is not None:
            copies = self._copies[block.group, block.digest]
            del copies[block.id]
            if not copies:
                del self._copies[block.group, block.digest]
            self._events.append(
                {
                    "type": "BlockRemoved",
                    "block_hashes": [self._announced(block.digest)],
                    "medium": "GPU",
                    "group_idx": block.group,
                }
            )
            block.group, block.digest = -1, None
        block.users = 1
        request.blocks.append(block)
        return block

    def _use(self, block: _Block, request: Request) -> None:
        self._free.pop(block.id, None)
        block.users += 1
        request.blocks.append(block)

    def _cache_full_blocks(self, request: Request, g: int, digests: dict[int, bytes]) -> None:
        group, first = self.groups[g], request.cached[g]
        full = range(first, len(request.tokens) // group.block_size)
        if not full:
            return
        request.cached[g] = full.stop
        listed = []
        for index in full:
            block = request.filling[g].pop(index)
            if group.sparse and index not in request.kept[g]:
                continue
            block.group, block.digest = g, digests[(index + 1) * group.block_size]
            self._copies.setdefault((g, block.digest), OrderedDict())[block.id] = block
            listed.append(index)
        self._events.append(self._stored(request, g, full, listed, digests))

    def _stored(
        self, request: Request, g: int, full: range, listed: list[int], digests: dict[int, bytes]
    ) -> dict[str, Any]:
        group, lora = self.groups[g], request.prompt.lora
        size = group.block_size
        start, end = full.start * size, full.stop * size
        event: dict[str, Any] = {
            "type": "BlockStored",
            "block_hashes": [self._announced(digests[(i + 1) * size]) for i in listed],
            "parent_block_hash": self._announced(digests[start]) if start else None,
            "token_ids": request.tokens[start:end],
            "block_size": size,
            "lora_id": lora[1] if lora else None,
            "medium": "GPU",
            "lora_name": lora[0] if lora else None,
        }
        if listed:
            event["extra_keys"] = [_announced_extras(request.prompt, i == 0) for i in listed]
        event |= {"group_idx": g, "kv_cache_spec_kind": group.kind}
        if group.window:
            event["kv_cache_spec_sliding_window"] = group.window
        return event

    def _valid(self, g: int, length: int, digests: dict[int, bytes]) -> bool:
        size = self.groups[g].block_size
        needed = self.groups[g].needed(length)
        return all((g, digests[(i + 1) * size]) in self._copies for i in needed)

    def _digests(self, prompt: Prompt, tokens: Sequence[int]) -> dict[int, bytes]:
        """Boundary in tokens -> the engine's digest of everything before it."""
        step, digest = self._hash_block, self._root
        digests = {}
        for end in range(step, len(tokens) + 1, step):
            extras = _hashed_extras(prompt, end == step)
            digest = _sha256((digest, tuple(tokens[end - step : end]), extras))
            digests[end] = digest
        return digests

    def _announced(self, digest: bytes) -> int | bytes:
        return int.from_bytes(digest[-8:], "big") if self._int_hashes else digest


def _as_prompt(prompt: Prompt | Sequence[int]) -> Prompt:
    return prompt if isinstance(prompt, Prompt) else Prompt(tuple(prompt))


def _sha256(value: Any) -> bytes:
    return hashlib.sha256(pickle.dumps(value, protocol=5)).digest()


def _hashed_extras(prompt: Prompt, first: bool) -> tuple[tuple[str, ...], ...] | None:
    """What goes into the hash beside the tokens: tagged, unlike on the wire."""
    extras: list[tuple[str, ...]] = []
    if prompt.lora:
        extras.append(("lora", prompt.lora[0], prompt.lora[2]))
    if prompt.salt and first:
        extras.append(("cache_salt", prompt.salt))
    return tuple(extras) or None


def _announced_extras(prompt: Prompt, first: bool) -> list[str] | None:
    extras = [prompt.lora[0]] if prompt.lora else []
    if prompt.salt and first:
        extras.append(prompt.salt)
    return extras or None
