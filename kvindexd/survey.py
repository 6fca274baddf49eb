"""What a table's blocks say of each other: where chains begin, and where they branch. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.uint64]


class Links(NamedTuple):
    """Some rows of a table, as they are now: the name of each block (0 = no block), the chain key
    at its start, and the tokens from the prompt's start to its end."""

    names: Words
    parents: Words
    lengths: npt.NDArray[np.uint32]


class Survey:
    """Goes over a table's rows, slice by slice.

    `roots`: chain key -> blocks that begin there and end at one of `sizes` tokens, which a first
    block does. `branches`: blocks, other than `known`, that begin at the key `at`.
    """

    def __init__(self, at: int, sizes: Collection[int], known: Collection[int]) -> None:
        self._at = np.uint64(at)
        self._sizes = np.array(sorted(sizes), np.uint32)
        self._known = np.array(sorted(known), np.uint64)
        self.roots: Counter[int] = Counter()
        self.branches = 0

    def add(self, links: Links) -> None:
        """Take in some rows."""
        held = links.names != 0
        here = links.names[held & (links.parents == self._at)]
        self.branches += int(np.count_nonzero(~np.isin(here, self._known)))
        first = held & np.isin(links.lengths, self._sizes)
        keys, counts = np.unique(links.parents[first], return_counts=True)
        self.roots.update(dict(zip(keys.tolist(), counts.tolist(), strict=True)))
