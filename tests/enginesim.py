"""An engine's prefix cache again, apart from testing.blockpool: vLLM's look-up step by step (main
groups first, fixed point, EAGLE's margin, hits inside blocks), chunked prefill, partial entries,
retention, items, adapters, salts, every hash function, re-announced reuse.

Written to disagree: scoring asks whether a boundary is valid for all groups at once, this follows
the engine from group to group. Deterministic.
"""

from __future__ import annotations

import hashlib
import math
import pickle
import random
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import cbor2
import msgspec
import xxhash

MAINS = ("full_attention", "mla_attention", "sink_full_attention")
WINDOWS = ("sliding_window", "sliding_window_mla")
CHUNKED, STATE = "chunked_local_attention", "mamba"


def _pickled(value: Any) -> bytes:
    return pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)


def _canonical(value: Any) -> bytes:
    return bytes(cbor2.dumps(value, canonical=True))


HASHES: dict[str, Callable[[Any], bytes]] = {
    "sha256": lambda v: hashlib.sha256(_pickled(v)).digest(),
    "sha256_cbor": lambda v: hashlib.sha256(_canonical(v)).digest(),
    "xxhash": lambda v: xxhash.xxh3_128_digest(_pickled(v)),
    "xxhash_cbor": lambda v: xxhash.xxh3_128_digest(_canonical(v)),
}


class Group(NamedTuple):
    """One KV-cache group; sizes in tokens."""

    kind: str = "full_attention"
    size: int = 16
    window: int = 0
    chunk: int = 0
    eagle: bool = False


class Prompt(NamedTuple):
    """`lora`: (name, id, path); `items`: (identifier, offset, length)."""

    tokens: tuple[int, ...]
    salt: str = ""
    lora: tuple[str, int, str] | None = None
    items: tuple[tuple[str, int, int], ...] = ()


class Config(NamedTuple):
    """One engine. `hash_block` 0 = the greatest common divisor of the groups' sizes.

    `dense`: window and state groups cache every block. `lookahead`: tokens behind a block that its
    hash covers. `seed`: PYTHONHASHSEED. `report`: reused blocks are announced again.
    """

    groups: tuple[Group, ...]
    hash_block: int = 0
    blocks: int = 20
    dense: bool = False
    algorithm: str = "sha256"
    ints: bool = True
    seed: str = "vllm-none-hash"
    lookahead: int = 0
    step: int = 80
    report: bool = False


class _Block(msgspec.Struct):
    number: int
    label: tuple[int, bytes] | None = None
    users: int = 0


class Engine:
    """`serve` prompts and `take_events`; `hit` is what the engine would reuse right now."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.groups = config.groups
        sizes = [g.size for g in self.groups]
        self.hash_block = config.hash_block or math.gcd(*sizes)
        whole = [g.size for g in self.groups if g.kind in WINDOWS or g.kind == CHUNKED]
        self.fine = (
            len(self.groups) > 1
            and any(g.kind == STATE and g.size > self.hash_block for g in self.groups)
            and all(s == self.hash_block for s in whole)
        )
        self.align = self.hash_block if self.fine else math.lcm(*sizes)
        self._hash = HASHES[config.algorithm]
        self._root = self._hash(config.seed)
        self._free = OrderedDict((i, _Block(i)) for i in range(config.blocks * len(self.groups)))
        self._held: dict[tuple[int, bytes], OrderedDict[int, _Block]] = {}
        self._events: list[dict[str, Any]] = []
        specs: dict[tuple[Any, ...], list[int]] = {}
        for i, g in enumerate(self.groups):
            specs.setdefault(g[:4], []).append(i)
        self._specs = sorted(specs.values(), key=lambda ids: self.groups[ids[0]].kind not in MAINS)

    # -- hashes -------------------------------------------------------------------------------

    def digests(self, prompt: Prompt, tokens: tuple[int, ...] | None = None) -> list[bytes]:
        """The digest at each hash block boundary whose hash is known."""
        tokens = prompt.tokens if tokens is None else tokens
        step, ahead, digest = self.hash_block, self.config.lookahead, self._root
        out = []
        for start in range(0, len(tokens) - step + 1, step):
            end = start + step
            if len(tokens) < end + ahead:
                break
            extras: list[Any] = [
                ("mm", name, at - start)
                for name, at, n in prompt.items
                if at < end and at + n > start
            ]
            if prompt.lora:
                extras.append(("lora", prompt.lora[0], prompt.lora[2]))
            if prompt.salt and not start:
                extras.append(("cache_salt", prompt.salt))
            if ahead:
                extras.append(("lookahead", *tokens[end : end + ahead]))
            digest = self._hash((digest, tuple(tokens[start:end]), tuple(extras) or None))
            out.append(digest)
        return out

    def _name(self, digest: bytes) -> int | bytes:
        return int.from_bytes(digest[-8:], "big") if self.config.ints else digest

    # -- look-up, the engine's way ------------------------------------------------------------

    def hit(self, prompt: Prompt) -> int:
        """Tokens that the engine would reuse: group by group, again while any lowers the rest."""
        digests = self.digests(prompt)
        cap = len(prompt.tokens) - 1
        if len(self._specs) == 1 and len(self.groups) == 1:
            return self._find(self._specs[0], digests, cap, self.groups[0].eagle)
        length, checked, mains = cap, set[int](), dict[int, int]()
        while True:
            current = length
            for number, ids in enumerate(self._specs):
                g = self.groups[ids[0]]
                if g.kind in MAINS and number in mains:
                    current = min(current, mains[number])
                    continue
                drop = any(self.groups[i].eagle for i in ids) and number not in checked
                most = current
                if drop and g.kind != STATE:
                    inside = self.fine and g.kind in MAINS and g.size > self.hash_block
                    most = min(current + (self.hash_block if inside else g.size), cap)
                found = self._find(ids, digests, most, drop)
                if drop:
                    checked.add(number)
                elif found < current:
                    checked.clear()
                current = found
                if g.kind in MAINS:
                    mains[number] = found
            if current >= length:
                return current
            length = current
            if len(self._specs) == 2 and self.groups[self._specs[0][0]].kind in MAINS:
                return length

    def _find(self, ids: list[int], digests: list[bytes], most: int, drop: bool) -> int:
        g, align, unit = self.groups[ids[0]], self.align, self.hash_block

        def held(end: int) -> bool:
            at = end // unit - 1
            return at < len(digests) and all((i, digests[at]) in self._held for i in ids)

        blocks = most // g.size
        if g.kind in MAINS:
            n = next((i for i in range(blocks) if not held((i + 1) * g.size)), blocks)
            length = n * g.size
            if self.fine and g.size > align:
                inside = range(length + align, min(length + g.size - 1, most) + 1, align)
                length = next((e for e in reversed(inside) if held(e)), length)
            if drop and length:
                length -= min(align, g.size)
            return length - length % align
        if g.kind == STATE:
            step = align if align < g.size and not g.size % align else g.size
            ends = range(step, most + 1, step)
            return next((e for e in reversed(ends) if e % align == 0 and held(e)), 0)
        if g.kind == CHUNKED:
            first = most // g.chunk * g.chunk // g.size if most > 0 else 0
            stop = next((i for i in range(first, blocks) if not held((i + 1) * g.size)), blocks)
            return max(stop, first) * g.size
        need = -(-(g.window - 1) // g.size) + drop
        run, edge = 0, 0
        for i in range(blocks - 1, -1, -1):
            if not held((i + 1) * g.size):
                run = 0
                continue
            if not run and (i if drop else i + 1) * g.size % align:
                continue
            run += 1
            edge = max(edge, i + 1) if run > 1 else i + 1
            if run >= need:
                break
        edge = edge if run and (run >= need or edge == run) else 0
        edge -= 1 if drop and edge else 0
        while edge * g.size % align:
            edge -= 1
        return edge * g.size

    # -- serving ------------------------------------------------------------------------------

    def serve(self, prompt: Prompt, output: tuple[int, ...] = ()) -> Iterator[int]:
        """One request, step by step: yields tokens computed after each; close it to abort."""
        digests = self.digests(prompt)
        reused = self.hit(prompt)
        using: list[_Block] = []
        tokens, n = prompt.tokens, len(prompt.tokens)
        wanted = self._boundaries(prompt, digests)
        for g, group in enumerate(self.groups):
            for end in self._needed(group, reused):
                copies = self._held.get((g, digests[end // self.hash_block - 1]))
                if copies:
                    self._use(next(iter(copies.values())), using)
        if self.config.report and reused:
            self._report(prompt, digests, reused)
        done = [reused // g.size * g.size for g in self.groups]
        at, told = reused, False
        try:
            while at < n + len(output):
                at = min(at + self.config.step, n) if at < n else at + 1
                tokens = (prompt.tokens + output)[:at]
                digests = self.digests(prompt, tokens)
                limit = at if self.fine or len(self.groups) == 1 else at // self.align * self.align
                for g, group in enumerate(self.groups):
                    extra = group.size if group.eagle and limit else 0
                    end = min(at, limit + extra, len(digests) * self.hash_block)
                    end = end // group.size * group.size
                    if end > done[g]:
                        self._fill(prompt, tokens, digests, g, done[g], end, wanted, using)
                        done[g] = end
                tail = n // self.hash_block * self.hash_block
                if at >= n and not told and len(self.groups) > 1 and 0 < tail <= limit:
                    told = True
                    self._partial(prompt, tokens, digests, tail, using)
                yield at
        finally:
            for block in reversed(using):
                block.users -= 1
                if not block.users:
                    self._free[block.number] = block

    def _boundaries(self, prompt: Prompt, digests: list[bytes]) -> list[int]:
        """Where window and state groups keep what a later request resumes from."""
        n, align = len(prompt.tokens), self.align
        replay = (n - 1) // align * align
        main = [ids for ids in self._specs if self.groups[ids[0]].kind in MAINS]
        shared = [self._find(ids, digests, n - 1, False) for ids in main]
        return [replay, max(0, replay - align), *(s // align * align for s in shared)]

    def _needed(self, group: Group, length: int) -> range:
        """Ends of the blocks that reuse up to `length` reads."""
        end = length // group.size * group.size
        if group.kind in WINDOWS:
            need = -(-(group.window - 1) // group.size) * group.size
            return range(max(0, end - need) + group.size, end + 1, group.size)
        if group.kind == STATE:
            return range(length, length + 1) if length else range(0)
        if group.kind == CHUNKED:
            start = length // group.chunk * group.chunk // group.size * group.size
            return range(start + group.size, end + 1, group.size)
        return range(group.size, end + 1, group.size)

    def _kept(self, group: Group, end: int, wanted: list[int]) -> bool:
        if self.config.dense or group.kind in MAINS or group.kind == CHUNKED:
            return True
        shift = group.size if group.eagle else 0
        return any(end in self._needed(group, w) or end == w + shift for w in wanted if w)

    def _fill(
        self,
        prompt: Prompt,
        tokens: tuple[int, ...],
        digests: list[bytes],
        g: int,
        start: int,
        end: int,
        wanted: list[int],
        using: list[_Block],
    ) -> None:
        group = self.groups[g]
        ends = range(start + group.size, end + 1, group.size)
        listed = [e for e in ends if self._kept(group, e, wanted)]
        self._store(g, [digests[e // self.hash_block - 1] for e in listed], using)
        self._tell(prompt, tokens, digests, g, start, end, listed, group.size)

    def _partial(
        self,
        prompt: Prompt,
        tokens: tuple[int, ...],
        digests: list[bytes],
        tail: int,
        using: list[_Block],
    ) -> None:
        """The prompt's end inside a block, as an entry of its own."""
        unit = self.hash_block
        if tail // unit > len(digests):
            return
        for g, group in enumerate(self.groups):
            if tail % group.size and (group.kind in MAINS or (group.kind == STATE and self.fine)):
                self._store(g, [digests[tail // unit - 1]], using)
                self._tell(prompt, tokens, digests, g, tail - unit, tail, [tail], unit)

    def _report(self, prompt: Prompt, digests: list[bytes], reused: int) -> None:
        for g, group in enumerate(self.groups):
            if group.kind in MAINS and reused % group.size == 0:
                ends = list(range(group.size, reused + 1, group.size))
                self._tell(prompt, prompt.tokens, digests, g, 0, reused, ends, group.size)

    def _store(self, g: int, labels: list[bytes], using: list[_Block]) -> None:
        if len(self._free) < len(labels):
            raise MemoryError("every block is in use")
        for digest in labels:
            _, block = self._free.popitem(last=False)
            if block.label is not None:
                copies = self._held[block.label]
                del copies[block.number]
                if not copies:
                    del self._held[block.label]
                self._events.append(
                    {
                        "type": "BlockRemoved",
                        "block_hashes": [self._name(block.label[1])],
                        "medium": "GPU",
                        "group_idx": block.label[0],
                    }
                )
            block.label, block.users = (g, digest), 1
            self._held.setdefault(block.label, OrderedDict())[block.number] = block
            using.append(block)

    def _use(self, block: _Block, using: list[_Block]) -> None:
        self._free.pop(block.number, None)
        block.users += 1
        using.append(block)

    def reset(self) -> None:
        """Forget everything; only between requests."""
        for block in self._free.values():
            block.label = None
        self._held.clear()
        self._events.append({"type": "AllBlocksCleared"})

    # -- events -------------------------------------------------------------------------------

    def _tell(
        self,
        prompt: Prompt,
        tokens: tuple[int, ...],
        digests: list[bytes],
        g: int,
        start: int,
        end: int,
        listed: list[int],
        size: int,
    ) -> None:
        group, unit, lora = self.groups[g], self.hash_block, prompt.lora
        event: dict[str, Any] = {
            "type": "BlockStored",
            "block_hashes": [self._name(digests[e // unit - 1]) for e in listed],
            "parent_block_hash": self._name(digests[start // unit - 1]) if start else None,
            "token_ids": list(tokens[start:end]),
            "block_size": size,
            "lora_id": lora[1] if lora else None,
            "medium": "GPU",
            "lora_name": lora[0] if lora else None,
        }
        if listed:
            event["extra_keys"] = [self._extras(prompt, e - size, e) for e in listed]
        event |= {"group_idx": g, "kv_cache_spec_kind": group.kind}
        if group.window:
            event["kv_cache_spec_sliding_window"] = group.window
        if self.config.lookahead and listed:
            n = self.config.lookahead
            event["lookahead_token_ids"] = [list(tokens[e : e + n]) for e in listed]
        self._events.append(event)

    @staticmethod
    def _extras(prompt: Prompt, start: int, end: int) -> list[Any] | None:
        out: list[Any] = [prompt.lora[0]] if prompt.lora else []
        out += [[name, at - start] for name, at, n in prompt.items if at < end and at + n > start]
        if prompt.salt and not start:
            out.append(prompt.salt)
        return out or None

    def take_events(self) -> list[dict[str, Any]]:
        """Events since the last call."""
        events, self._events = self._events, []
        return events


def script(seed: int, *, unit: int, extras: str = "") -> Iterator[tuple[str, Any]]:
    """What happens to an engine: prompts that share prefixes, some at once, resets.

    `extras`: letters for what prompts may carry: l(ora), s(alt), i(tems).
    """
    rng = random.Random(seed)
    segments = [
        tuple(rng.randrange(5, 2000) for _ in range(unit * rng.randint(1, 4))) for _ in range(6)
    ]
    past: list[Prompt] = []
    for _ in range(rng.randint(8, 16)):
        if past and rng.random() < 0.06:
            yield "reset", None
            continue
        base = rng.choice(past) if past and rng.random() < 0.5 else None
        tokens = base.tokens if base else ()
        if base and rng.random() < 0.3:
            tokens = tokens[: rng.randrange(1, len(tokens) + 1)]
        for _ in range(rng.randint(0 if base else 1, 2)):
            tokens += rng.choice(segments)
        tokens += tuple(rng.randrange(5, 2000) for _ in range(rng.choice([0, 0, 1, 7, unit - 1])))
        prompt = Prompt(tokens)
        if "s" in extras and rng.random() < 0.4:
            prompt = prompt._replace(salt=rng.choice(["t1", "t2"]))
        if "l" in extras and rng.random() < 0.4:
            prompt = prompt._replace(lora=rng.choice([("a", 1, "/a"), ("b", 2, "/b")]))
        if "i" in extras and len(tokens) > 24 and rng.random() < 0.5:
            at = base.items[0][1] if base and base.items else rng.randrange(0, len(tokens) - 8)
            prompt = prompt._replace(items=((rng.choice(["img", "pic"]), at, 24),))
        past.append(prompt)
        out = tuple(rng.randrange(5, 2000) for _ in range(rng.choice([0, 0, 3, unit + 2])))
        yield ("both" if rng.random() < 0.2 and len(past) > 1 else "run"), (prompt, out)
