"""Reproduce vLLM's own block hashes, so that blocks which a stream does not place can be placed.

H(parent digest, tuple(tokens), extra keys) at the hash block size, with H one of sha256 and
xxhash over pickle or canonical CBOR (03-index.md, "Reproducing the engine's own hash"). Nothing
on the wire names the function, so it is tried on what the engine announces and trusted only once
it has reproduced an announced hash; every later announcement is checked again.
"""

from __future__ import annotations

import hashlib
import pickle
import struct
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import cbor2
import xxhash

from kvindexd.chain import BlockExtras
from kvindexd.model import EngineHash

MIN_HASH_BLOCK = 16
DEFAULT_SEED = "vllm-none-hash"
"""vLLM's root seed for the sha256 family unless PYTHONHASHSEED is set."""


def _pickle(value: Any) -> bytes:
    return pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)


def _cbor(value: Any) -> bytes:
    return cbor2.dumps(value, canonical=True)


class Algorithm(NamedTuple):
    """One hash function; `root` is the parent digest of a first block, None where it is random."""

    name: str
    hash: Callable[[Any], bytes]
    root: bytes | None


def _sha(encode: Callable[[Any], bytes]) -> Callable[[Any], bytes]:
    return lambda value: hashlib.sha256(encode(value)).digest()


def _xx(encode: Callable[[Any], bytes]) -> Callable[[Any], bytes]:
    return lambda value: xxhash.xxh3_128_digest(encode(value))


ALGORITHMS = (
    Algorithm("sha256", _sha(_pickle), _sha(_pickle)(DEFAULT_SEED)),
    Algorithm("sha256_cbor", _sha(_cbor), _sha(_cbor)(DEFAULT_SEED)),
    Algorithm("xxhash", _xx(_pickle), None),
    Algorithm("xxhash_cbor", _xx(_cbor), None),
)


class Verified(NamedTuple):
    """A function that reproduced an announced hash, at this hash block size (tokens)."""

    algorithm: Algorithm
    hash_block: int
    as_int: bool

    def announced(self, digest: bytes) -> EngineHash:
        """A digest in the form in which the engine announces it: last 8 bytes, or all."""
        return int.from_bytes(digest[-8:], "big") if self.as_int else digest

    def chain(
        self, digest: bytes, tokens: bytes, extras: Sequence[BlockExtras | None] | None = None
    ) -> list[bytes]:
        """Digests at each hash block boundary of `tokens` (packed) behind `digest`.

        `extras`: per hash block. Stops early where a block cannot be reproduced.
        """
        return _chain(self.algorithm, self.hash_block, digest, tokens, extras)


def _chain(
    algorithm: Algorithm,
    hash_block: int,
    digest: bytes,
    tokens: bytes,
    extras: Sequence[BlockExtras | None] | None = None,
) -> list[bytes]:
    out: list[bytes] = []
    unpack = struct.Struct(f"<{hash_block}I").unpack_from
    step = hash_block * 4
    for i, at in enumerate(range(0, len(tokens) - step + 1, step)):
        tagged = None
        if extras is not None and i < len(extras) and extras[i] is not None:
            tagged = tagged_extras(extras[i])
            if tagged is None:
                return out
        digest = algorithm.hash((digest, unpack(tokens, at), tagged or None))
        out.append(digest)
    return out


def tagged_extras(extra: BlockExtras | None) -> tuple[Any, ...] | None:
    """Extra keys as they enter the hash, tagged; None when their form is not known."""
    if extra is None:
        return ()
    if any(not isinstance(part, bytes) for part in extra.opaque):
        return None
    tags: list[tuple[Any, ...]] = [("mm", i.identifier, i.start) for i in extra.items]
    if extra.salt:
        tags.append(("cache_salt", extra.salt))
    tags += [("prompt_embeds", part) for part in extra.opaque]
    return tuple(tags)


def hash_blocks(sizes: Iterable[int]) -> list[int]:
    """Hash block sizes worth trying: each size shown, then smaller divisors down to 16."""
    shown = sorted({s for s in sizes if s > 0}, reverse=True)
    tried = list(shown)
    if shown:
        smallest = shown[-1]
        tried += [
            s
            for s in range(smallest // 2, MIN_HASH_BLOCK - 1, -1)
            if smallest % s == 0 and s % MIN_HASH_BLOCK == 0 and s not in tried
        ]
    return tried


def identify(
    hashes: Sequence[EngineHash],
    block_size: int,
    tokens: bytes,
    at_root: bool,
    sizes: Iterable[int],
) -> Verified | None:
    """The function that made `hashes` of a dense event without extras, or None.

    `tokens` (packed) hold `len(hashes)` blocks of `block_size`; `at_root`: the first block has
    no parent. Random roots need a second block, whose parent digest is on the wire (bytes form).
    """
    as_int = isinstance(hashes[0], int)
    for hash_block in hash_blocks([block_size, *sizes]):
        if block_size % hash_block:
            continue
        for algorithm in ALGORITHMS:
            if at_root and algorithm.root is not None:
                verified = Verified(algorithm, hash_block, as_int)
                if _makes(verified, algorithm.root, tokens[: block_size * 4], hashes[0]):
                    return verified
            if len(hashes) > 1 and isinstance(hashes[0], bytes):
                # Verified behind the first block only: at the root another seed may be in use.
                root = None if at_root else algorithm.root
                verified = Verified(algorithm._replace(root=root), hash_block, as_int)
                span = tokens[block_size * 4 : block_size * 8]
                if _makes(verified, hashes[0], span, hashes[1]):
                    return verified
    return None


def _makes(verified: Verified, start: bytes, span: bytes, expected: EngineHash) -> bool:
    digests = verified.chain(start, span)
    return bool(digests) and verified.announced(digests[-1]) == expected


class Guess(NamedTuple):
    """A boundary under a function not yet verified: tokens from the root, and its digest."""

    verified: Verified
    length: int
    digest: bytes


class Guesses:
    """What unverified functions say of streams that list hashes without saying where they are.

    A window-only model may announce no dense event at all: the boundaries of its root events are
    kept under every candidate until a listed hash or a parent equals one of them. Bounded.
    """

    LIMIT = 8192

    def __init__(self) -> None:
        self._by_hash: dict[EngineHash, Guess] = {}
        self.roots: list[bytes] = []

    def note(self, tokens: bytes, sizes: Iterable[int]) -> None:
        """Keep the boundaries of a root event without extras."""
        if len(self.roots) >= 64 or tokens in self.roots:
            return
        self.roots.append(tokens)
        for hash_block in hash_blocks(sizes):
            for algorithm in ALGORITHMS:
                if algorithm.root is None or len(self._by_hash) >= self.LIMIT:
                    continue
                digests = _chain(algorithm, hash_block, algorithm.root, tokens)
                for as_int in (True, False):
                    verified = Verified(algorithm, hash_block, as_int)
                    for i, digest in enumerate(digests):
                        guess = Guess(verified, (i + 1) * hash_block, digest)
                        self._by_hash.setdefault(verified.announced(digest), guess)

    def match(self, hashes: Iterable[EngineHash]) -> Verified | None:
        """The function that explains any of these announced hashes."""
        for engine_hash in hashes:
            guess = self._by_hash.get(engine_hash)
            if guess is not None:
                return guess.verified
        return None


def sglang_root_hash(tokens: bytes, lookahead: bytes | None) -> int:
    """SGLang's hash of an unsalted first page: SHA-256 over u32 LE tokens, first 8 bytes.

    `tokens`: one packed page. `lookahead`: the last pair's second token where pages hold pairs.
    """
    if lookahead:
        following = tokens[4:] + lookahead
        tokens = b"".join(
            tokens[i : i + 4] + following[i : i + 4] for i in range(0, len(tokens), 4)
        )
    return int.from_bytes(hashlib.sha256(tokens).digest()[:8], "big")
