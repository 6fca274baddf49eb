"""Where in a prompt a store event belongs: parents, keys, names, and reproduced engine hashes."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import NamedTuple

from kvindexd import chain, enginehash
from kvindexd.chain import NO_EXTRAS, BlockExtras
from kvindexd.enginehash import Guesses, Verified
from kvindexd.groups import ABSENT
from kvindexd.holdings import Holdings
from kvindexd.model import EngineHash
from kvindexd.records import Block
from kvindexd.wire.events import BlockStored

_ROOTLESS = "?"
"""Behind a function's saved name: its root's seed is not the default and not known."""
_ATTEMPTS = 16
"""Dense root events on which to try the known hash functions before giving up."""


class Place(NamedTuple):
    """The start of an event's span: chain key, tokens before it, the engine's digest if known.

    `tainted`: the span has extras, so that keys of blocks it does not list are not known.
    """

    key: int
    length: int
    digest: bytes | None
    tainted: bool


class Placer:
    """Finds places, computes names, and binds boundaries that only the engine's hash names.

    `wanted`: whether reproducing is worth its cost: a rank whose groups are all main explains
    every hash by its own dense events.
    """

    def __init__(self, holdings: Holdings) -> None:
        self._holdings = holdings
        self._verified: Verified | None = None
        self._attempts = 0
        self._guesses = Guesses()
        self.sglang = False
        self.wanted = False

    # -- places -------------------------------------------------------------------------------

    def place_of(self, event: BlockStored, counters: Counter[str]) -> Place | None:
        """The start of the event's span; None when its parent is not bound."""
        tainted = bool(event.extra_keys)
        if event.parent is None:
            salt = event.cache_salt or self._root_salt(event)
            key = chain.root_key(event.lora_name or "", salt, event.lora_id)
            if self._unseen_namespace(event, salt):
                counters["unseen_namespace"] += 1
                key = chain.root_key(f"\0namespace:{event.hashes[0]!r}")
            digest = self._root_digest(event)
            return Place(key, 0, digest, tainted or bool(salt))
        parent = self._holdings.blocks.get(event.parent)
        if parent is None:
            return None
        return Place(parent.key, parent.length, self._digest(event.parent, parent), tainted)

    @staticmethod
    def _root_salt(event: BlockStored) -> str:
        if not event.extra_keys:
            return ""
        return chain.parse_extra_keys(event.extra_keys[0], event.lora_name, at_root=True).salt

    def _root_digest(self, event: BlockStored) -> bytes | None:
        if self._verified is None or event.lora_name or event.lora_id is not None:
            return None
        return self._verified.algorithm.root

    def _digest(self, engine_hash: EngineHash, block: Block) -> bytes | None:
        if block.digest is not None:
            return block.digest
        verified = self._verified
        if verified is not None and not verified.as_int and isinstance(engine_hash, bytes):
            return engine_hash
        return None

    def _unseen_namespace(self, event: BlockStored, salt: str) -> bool:
        """SGLang hashes an `extra_key` that is not on the wire: its root page's hash then differs
        from the plain one although the event shows neither salt nor adapter."""
        if event.group_idx is not None or event.kind not in (None, ABSENT) or not event.hashes:
            return False
        if salt or event.lora_name or event.lora_id is not None:
            return False
        page = event.tokens[: event.block_size * 4]
        ahead = event.lookahead[0] if event.pairs and event.lookahead else None
        if enginehash.sglang_root_hash(page, ahead) == event.hashes[0]:
            self.sglang = True
            return False
        return self.sglang

    # -- names --------------------------------------------------------------------------------

    def dense_blocks(
        self, event: BlockStored, place: Place, unit: int
    ) -> list[tuple[EngineHash, Block, bool]] | None:
        """(hash, block, is new) per block of a dense event.

        None when a hash is already bound to other content that is still held: the event
        contradicts what the engine said before (or closes a cycle), and is rejected whole.
        """
        keys = chain.extend(place.key, event.tokens, unit, self._extras(event, place, unit))
        known = self._holdings.blocks
        step = event.block_size // unit
        parent, length = place.key, place.length
        out: list[tuple[EngineHash, Block, bool]] = []
        lookahead = event.lookahead
        for i, engine_hash in enumerate(event.hashes):
            key = keys[(i + 1) * step - 1]
            length += event.block_size
            have = known.get(engine_hash)
            if have is not None and have.key == key and have.length == length:
                out.append((engine_hash, have, False))
            elif have is not None and have.copies:
                return None
            else:
                ahead = lookahead[i] if lookahead else b""
                name = chain.lookahead_key(key, ahead) if ahead else key
                out.append((engine_hash, Block(key, length, name, parent), True))
            parent = key
        return out

    def span_blocks(self, event: BlockStored, place: Place, unit: int) -> list[Block]:
        """A block per block_size of the event's whole span, whatever hashes it lists."""
        keys = chain.extend(place.key, event.tokens, unit)
        step = event.block_size // unit
        ends = keys[step - 1 :: step]
        starts = [place.key, *ends[:-1]]
        return [
            Block(key, place.length + (i + 1) * event.block_size, key, parent)
            for i, (key, parent) in enumerate(zip(ends, starts, strict=True))
        ]

    def _extras(self, event: BlockStored, place: Place, unit: int) -> dict[int, bytes] | None:
        parsed = self._parsed(event, place)
        return chain.block_extras(parsed, event.block_size, unit) if parsed else None

    @staticmethod
    def _parsed(event: BlockStored, place: Place) -> dict[int, BlockExtras]:
        if not event.extra_keys:
            return {}
        found = {
            i: chain.parse_extra_keys(
                entry, event.lora_name, at_root=i == 0 and event.parent is None
            )
            for i, entry in enumerate(event.extra_keys)
            if entry
        }
        return {i: extra for i, extra in found.items() if extra is not NO_EXTRAS}

    # -- the engine's own hash ----------------------------------------------------------------

    def extend(
        self, event: BlockStored, place: Place, unit: int, *, dense: bool
    ) -> list[EngineHash]:
        """Reproduce the engine's hashes over the event's span; returns hashes newly bound.

        Does nothing where no function is known to reproduce them. Boundaries finer than the
        group's blocks are bound without copies: partial entries name them as parents.
        """
        if event.lookahead or not self.wanted:
            return []
        fresh: list[EngineHash] = []
        if self._verified is None:
            fresh = self._identify(event, place, unit, dense=dense)
            place = self._replaced(event, place)
        fresh += self._bind_span(event, place, unit, dense=dense)
        return fresh + self._bind_backwards(event, place, unit)

    def _bind_backwards(self, event: BlockStored, place: Place, unit: int) -> list[EngineHash]:
        """Bind listed whole digests from which the next listed one, bound already, is made: what
        lies before the first block of a root whose seed is not known."""
        verified, blocks = self._verified, self._holdings.blocks
        if verified is None or verified.as_int or self._parsed(event, place):
            return []
        size = event.block_size
        if size % verified.hash_block or verified.hash_block % unit:
            return []
        keys: list[int] = []
        fresh: list[EngineHash] = []
        for first, second in reversed(list(itertools.pairwise(event.hashes))):
            known = blocks.get(second)
            if first in blocks or known is None or not isinstance(first, bytes):
                continue
            keys = keys or [place.key, *chain.extend(place.key, event.tokens, unit)]
            end = known.length - place.length
            start = end - size
            if start <= 0 or end > event.num_tokens or keys[end // unit] != known.key:
                continue
            span = event.tokens[start * 4 : end * 4]
            if verified.chain(first, span)[-1:] != [second]:
                continue
            key, before = keys[start // unit], keys[max(0, start - size) // unit]
            self._holdings.bind(first, Block(key, place.length + start, key, before))
            fresh.append(first)
        return fresh

    def _replaced(self, event: BlockStored, place: Place) -> Place:
        if event.parent is None:
            return place._replace(digest=self._root_digest(event))
        parent = self._holdings.blocks.get(event.parent)
        digest = self._digest(event.parent, parent) if parent is not None else None
        return place._replace(digest=digest)

    def _identify(
        self, event: BlockStored, place: Place, unit: int, *, dense: bool
    ) -> list[EngineHash]:
        """Try the known functions on an event without extras; binds earlier roots on success."""
        if place.tainted or event.lora_name or event.lora_id is not None:
            return []
        at_root = event.parent is None
        sizes = {slot.size for slot in self._holdings.slots}
        if dense and event.hashes and self._attempts < _ATTEMPTS:
            self._attempts += 1
            tokens = event.tokens
            self._verified = enginehash.identify(
                event.hashes, event.block_size, tokens, at_root, sizes
            )
        if self._verified is None:
            listed = [*event.hashes, *([event.parent] if event.parent is not None else [])]
            self._verified = self._guesses.match(listed)
        if self._verified is None and at_root and not dense:
            self._guesses.note(event.tokens, [event.block_size, *sizes])
            self._verified = self._guesses.match(event.hashes)
        if self._verified is None:
            return []
        fresh: list[EngineHash] = []
        root = self._verified.algorithm.root
        for tokens in self._guesses.roots:
            start = Place(0, 0, root, False)
            fresh += self._bind(start, tokens, [], self._digests(start, tokens, [], unit), unit)
        self._guesses = Guesses()
        return fresh

    def learn_parent(self, event: BlockStored, unit: int) -> list[EngineHash]:
        """A parent that nobody announced may be a boundary that a guess explains."""
        if not self.wanted or self._verified is not None or event.lookahead:
            return []
        return self._identify(event, Place(0, 0, None, bool(event.extra_keys)), unit, dense=False)

    def _bind_span(
        self, event: BlockStored, place: Place, unit: int, *, dense: bool
    ) -> list[EngineHash]:
        parsed = self._parsed(event, place)
        verified = self._verified
        if verified is None:
            return []
        # Entries speak of listed blocks. In a block larger than the hash block, which hash block
        # an entry meant is not said, but for a salt: it is in the prompt's first one.
        salted = list(parsed) == [0] and parsed[0] == BlockExtras(parsed[0].salt, (), (), False)
        if parsed and not (dense and (salted or event.block_size == verified.hash_block)):
            return []
        extras = [parsed.get(i) for i in range(1 if salted else len(event.hashes))]
        extras = extras if parsed else []
        digests = self._digests(place, event.tokens, extras, unit)
        if dense and not self._confirmed(verified, digests, event):
            return []
        return self._bind(place, event.tokens, extras, digests, unit)

    def _confirmed(self, verified: Verified, digests: list[bytes], event: BlockStored) -> bool:
        """Never trusted unverified: what is reproduced must name the dense event's last block."""
        at = len(event.hashes) * event.block_size // verified.hash_block - 1
        if not 0 <= at < len(digests):
            return True
        if verified.announced(digests[at]) == event.hashes[-1]:
            return True
        if verified.as_int:
            # With whole digests on the wire only this chain may be odd (an adapter's, say).
            self._verified = None
            self._attempts = _ATTEMPTS
            self.wanted = False
        return False

    def _digests(
        self, place: Place, tokens: bytes, extras: list[BlockExtras | None], unit: int
    ) -> list[bytes]:
        verified = self._verified
        if verified is None or place.digest is None or verified.hash_block % unit:
            return []
        return verified.chain(place.digest, tokens, extras)

    def _bind(
        self,
        place: Place,
        tokens: bytes,
        extras: list[BlockExtras | None],
        digests: list[bytes],
        unit: int,
    ) -> list[EngineHash]:
        """Bind every reproduced boundary of a span; completes digests of those bound already."""
        verified = self._verified
        if verified is None or not digests:
            return []
        parsed = {i: e for i, e in enumerate(extras) if e is not None}
        fold = chain.block_extras(parsed, verified.hash_block, unit) if parsed else None
        keys = chain.extend(place.key, tokens, unit, fold)
        step = verified.hash_block // unit
        fresh: list[EngineHash] = []
        parent = place.key
        for i, digest in enumerate(digests):
            key = keys[(i + 1) * step - 1]
            engine_hash = verified.announced(digest)
            block = self._holdings.blocks.get(engine_hash)
            if block is None:
                length = place.length + (i + 1) * verified.hash_block
                block = Block(key, length, key, parent)
                self._holdings.bind(engine_hash, block)
                fresh.append(engine_hash)
            if verified.as_int and block.digest is None and block.key == key:
                block.digest = digest
                self._holdings.dirty.add(engine_hash)
            parent = key
        return fresh

    # -- persistence --------------------------------------------------------------------------

    def saved(self) -> tuple[str, int, bool] | None:
        """The verified function by name, hash block size and form."""
        v = self._verified
        if v is None:
            return None
        rootless = _ROOTLESS if v.algorithm.root is None else ""
        return v.algorithm.name + rootless, v.hash_block, v.as_int

    def restore(self, function: tuple[str, int, bool] | None, sglang: bool) -> None:
        """Take over what an earlier process had verified."""
        self.sglang = sglang
        if function is None:
            return
        name = function[0].removesuffix(_ROOTLESS)
        for algorithm in enginehash.ALGORITHMS:
            if algorithm.name == name:
                if name != function[0]:
                    algorithm = algorithm._replace(root=None)
                self._verified = Verified(algorithm, function[1], function[2])
