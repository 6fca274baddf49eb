"""Why nobody holds a prompt: which changed form of it somebody does hold. Pure.

The index keeps hashes and no tokens, so prompts cannot be compared with what is held. But a guess
can be checked: change the prompt the way that mistakes change it, hash it, and look.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from kvindexd import chain
from kvindexd.scoring.geometry import Geometry
from kvindexd.scoring.query import Query
from kvindexd.scoring.scorer import Table

MAX_DROPPED = 64
"""Leading tokens that are dropped one by one: a BOS, or the header of a chat template."""
MAX_ROOTS = 256
VOCABULARY = 300_000
"""Token ids tried as the first one."""
USUAL = (0, 1, 2, 3, 50_256, 100_257, 128_000, 151_643, 151_644, 163_584, 199_998, 200_006)
"""BOS tokens and first tokens of chat templates of well-known models: tried before all others."""
_STEP = 1024
"""First tokens tried between two pauses: about a millisecond."""

TOKEN_CHANGES = frozenset({"tokens_dropped", "token_added", "token_replaced"})
"""Changes of tokens, all of which concern the first one."""

CAUSES = (
    "usual causes: another chat template or system prompt, a BOS token added or left out, another "
    "adapter or cache salt, other media, another model or namespace, a tokenizer of another "
    "version, or a cache that was reset"
)


class Variation(NamedTuple):
    """A changed form of a prompt. `change`: see PromptVariation in index.proto."""

    change: str
    detail: str
    query: Query


class Root(NamedTuple):
    """Where chains begin: what differs from the request, by name and in words."""

    change: str
    detail: str


class Shape(NamedTuple):
    """What names a first block: tokens per unit, lookahead tokens, and tokens of the block."""

    unit: int
    lookahead: int
    size: int


def shapes(geometries: Iterable[Geometry]) -> set[Shape]:
    """Every kind of first block that ranks of these geometries hold in their lowest group."""
    return {Shape(g.unit, g.lookahead, g.block_size) for g in geometries if g.block_size}


def first_block_held(table: Table, query: Query, kinds: Iterable[Shape]) -> bool:
    """Whether anybody holds the first block of a prompt."""
    for unit, lookahead, size in kinds:
        head = query.varied(packed=query.packed[: 4 * (size + lookahead)])
        names = head.names(unit, lookahead, size)
        if names is not None and len(names) and table.lookup(names[:1])[0] >= 0:
            return True
    return False


def variations(
    query: Query, roots: Mapping[int, int], known: Mapping[int, Root]
) -> Iterator[Variation]:
    """Forms that differ in the root, in what stands in front, or in media.

    `roots`: chain key -> first blocks that the index knows to begin there. `known`: those that
    can be named.
    """
    most = sorted(roots, key=lambda r: -roots[r])[:MAX_ROOTS]
    for root in dict.fromkeys([*known, *most]):
        if root != query.root:
            yield Variation(*_of_root(root, known), query.varied(root=root))
    if query.items:
        detail = "without its media: the engine's blocks were stored without these identifiers"
        yield Variation("items", detail, query.varied(items=()))
    for n in range(1, min(MAX_DROPPED, query.tokens - 1) + 1):
        tokens = "its first token" if n == 1 else f"its first {n} tokens"
        cause = "a BOS that the engine does not add" if n == 1 else "a BOS or a template's header"
        detail = f"without {tokens}: {cause}, or that is added twice"
        items = [chain.Item(i.identifier, i.start - n) for i in query.items]
        yield Variation(
            "tokens_dropped", detail, query.varied(packed=query.packed[4 * n :], items=items)
        )


def _of_root(root: int, known: Mapping[int, Root]) -> Root:
    return known.get(root) or Root(
        "root",
        f"under root {root:#018x}: an adapter or cache salt that the request does not name, and "
        "whose name cannot be read from its hash",
    )


def known_roots(lora: str, salt: str, adapters: Iterable[str]) -> dict[int, Root]:
    """Roots, other than its own, that can be named for a request with this adapter and salt."""
    out: dict[int, Root] = {}
    for name, value in itertools.product(dict.fromkeys([lora, "", *adapters]), (salt, "")):
        differs = []
        if name != lora:
            differs.append(f"adapter {name!r}" if name else "no adapter")
        if value != salt:
            differs.append("no cache salt")
        if differs:
            change = "adapter" if name != lora else "salt"
            root = Root(change, f"as asked for with {' and '.join(differs)}")
            out.setdefault(chain.root_key(name, value), root)
    return out


def first_tokens(
    table: Table, query: Query, kinds: Sequence[Shape]
) -> Iterator[tuple[int, bool] | None]:
    """(token, True) for each token id that, added in front of the prompt, makes a first block that
    is held; (token, False) where it does in place of the first token. None now and then, for the
    caller to let others run."""
    packed = query.packed
    rest = range(0, VOCABULARY, _STEP)
    for ids in itertools.chain([USUAL], (range(low, low + _STEP) for low in rest)):
        for added, behind in ((True, packed), (False, packed[4:])):
            for shape in kinds:
                for place in _held(table, query.root, behind, shape, ids):
                    yield ids[place], added
            yield None


def _held(table: Table, root: int, rest: bytes, shape: Shape, ids: Sequence[int]) -> list[int]:
    """Places in `ids` of those that, in front of `rest`, make a first block that is held."""
    unit, lookahead, size = shape
    body, behind = rest[: 4 * (size - 1)], rest[4 * (size - 1) : 4 * (size - 1 + lookahead)]
    if len(body) < 4 * (size - 1) or len(behind) < 4 * lookahead:
        return []
    ends = bytearray()
    for token in ids:
        ends += chain.extend_packed(root, token.to_bytes(4, "little") + body, unit)[-8:]
    names = np.frombuffer(bytes(ends), np.uint64)
    if lookahead:
        made = [chain.lookahead_key(key, behind) for key in names.tolist()]
        names = np.array(made, np.uint64)
    places: list[int] = (table.lookup(names) >= 0).nonzero()[0].tolist()
    return places


def of_first_token(query: Query, token: int, *, added: bool) -> Variation:
    """The prompt with another first token, as `first_tokens` found it."""
    head = token.to_bytes(4, "little")
    if added:
        detail = f"with token {token} in front: a BOS that the engine adds and this prompt lacks"
        items = [chain.Item(i.identifier, i.start + 1) for i in query.items]
        changed = query.varied(packed=head + query.packed, items=items)
        return Variation("token_added", detail, changed)
    detail = f"with token {token} in place of its first: another BOS, or another tokenizer"
    return Variation("token_replaced", detail, query.varied(packed=head + query.packed[4:]))
