"""Names to rows: a hash index in numpy whose growth, inserts and removals are all bounded steps."""

from __future__ import annotations

import secrets

import numpy as np
import numpy.typing as npt

from kvindexd.replica.lane import Lane

Names = npt.NDArray[np.uint64]
Rows = npt.NDArray[np.int32]
Places = npt.NDArray[np.int64]

_MASK64 = (1 << 64) - 1
_FIRST_BITS = 8
_SPLIT_MIN = 128
_SPLIT_PER_ROW = 4
"""Buckets split per inserted row while the index doubles, so that it ends long before the next."""

_LOAD = 0.75
"""Rows per bucket from which the index doubles: fewer rounds of a lookup against 4 bytes each."""

_RUN_MIN = 96
"""Names in a run of rows from which comparing slices costs less than looking each name up."""
_PREFIX_STEP = 256


class Index:
    """Rows by name. Row 0 is nobody's and stands for "missing"; rows are chained per bucket.

    Name 0 is never in it: queries use it for "nothing holds this".

    The bucket of a name is the top bits of `name * k` with a secret odd k per index: universal
    hashing, so that crafted names cannot share a bucket, and small test integers spread too.

    The index doubles in place and bit by bit: bucket b becomes 2b and 2b+1, the highest first, so
    that a bucket never lands on one that is still to be moved. `_unsplit` is the boundary: below
    it buckets sit where they were. No step handles more than a few thousand rows, and nothing is
    ever rehashed at once.
    """

    __slots__ = (
        "_buckets",
        "_heads",
        "_k",
        "_k_int",
        "_shift",
        "_unsplit",
        "names",
        "next",
        "size",
    )

    def __init__(self, rows: int, seed: int | None = None) -> None:
        self._k_int = (secrets.randbits(64) if seed is None else seed * 0x9E3779B97F4A7C15) | 1
        self._k_int &= _MASK64
        self._k = np.uint64(self._k_int)
        self._shift = 64 - _FIRST_BITS
        self._buckets = 1 << _FIRST_BITS
        self._unsplit = 0
        self._heads: Lane[np.int32] = Lane(np.int32, self._buckets)
        self.names: Lane[np.uint64] = Lane(np.uint64, rows)
        self.next: Lane[np.int32] = Lane(np.int32, rows)
        self.size = 0
        """Rows in the index."""

    @property
    def nbytes(self) -> int:
        """Bytes of the buckets (names and chain links are per row)."""
        return self._buckets * 4

    def _places(self, names: Names) -> Places:
        product = names * self._k
        product >>= np.uint64(self._shift)
        places: Places = product.view(np.int64)
        if self._unsplit:
            low = (places < 2 * self._unsplit).nonzero()[0]
            places[low] >>= 1
        return places

    def find_one(self, name: int) -> int:
        """The row of one name, 0 when missing."""
        place = ((name * self._k_int) & _MASK64) >> self._shift
        if place < 2 * self._unsplit:
            place >>= 1
        row = self._heads.a.item(place)
        names, chain = self.names.a, self.next.a
        while row and names.item(row) != name:
            row = chain.item(row)
        return row

    def find(self, names: Names) -> Rows:
        """The row of each name, 0 where missing."""
        rows: Rows = self._heads.a.take(self._places(names), mode="clip")
        all_names, chain = self.names.a, self.next.a
        wrong = all_names.take(rows, mode="clip") != names
        wrong &= rows != 0
        at = wrong.nonzero()[0]
        if not at.size:
            return rows
        here, wanted = rows[at], names[at]
        while True:
            here = chain.take(here, mode="clip")
            rows[at] = here
            wrong = all_names.take(here, mode="clip") != wanted
            wrong &= here != 0
            left = wrong.nonzero()[0]
            if not left.size:
                return rows
            at, here, wanted = at[left], here[left], wanted[left]

    def find_chain(self, names: Names, *, prefix: bool = False) -> Rows:
        """`find` for names in chain order, as prompts are.

        Blocks of one prompt arrive together, so their rows follow each other: one comparison of a
        slice answers a whole run, without hashing or random reads. With `prefix`, names behind
        the first missing one may be answered 0 whether missing or not.
        """
        n = len(names)
        rows = np.zeros(n, np.int32)
        at = 0
        short = 2  # runs: of a prompt that came in pieces, the first and the last are cut
        while n - at >= _RUN_MIN and short:
            row = self.find_one(names.item(at))
            if not row:
                if prefix:
                    return rows
                break
            ahead = self.names.a[row : row + n - at]
            same = ahead == names[at : at + len(ahead)]
            same &= ahead != 0  # rows not in use
            run = int(same.argmin()) if not same.all() else len(ahead)
            rows[at : at + run] = np.arange(row, row + run, dtype=np.int32)
            at += run
            short -= run < _RUN_MIN
        step = _PREFIX_STEP if prefix else n
        while at < n:
            found = self.find(names[at : at + step])
            rows[at : at + step] = found
            if prefix and not found.all():
                break
            at += step
            step *= 4
        return rows

    def insert(self, rows: Rows, names: Names) -> None:
        """Add rows under names that are neither in the index nor twice in the call."""
        self.names.a[rows] = names
        self.size += len(rows)
        self._link(rows, names)
        quota = _SPLIT_MIN + _SPLIT_PER_ROW * len(rows)
        if self._unsplit:
            self._split(quota)
        while self.size > _LOAD * self._buckets:  # more than once only while it is small
            while self._unsplit:
                self._split(quota)
            self._heads.grow(2 * self._buckets)
            self._unsplit = self._buckets
            self._buckets *= 2
            self._shift -= 1
            self._split(quota)

    def _link(self, rows: Rows, names: Names) -> None:
        heads, chain = self._heads.a, self.next.a
        places = self._places(names)
        while True:
            chain[rows] = heads.take(places, mode="clip")
            heads[places] = rows
            # Of several rows for one bucket the last written is its head now; the others again.
            lost = (heads.take(places, mode="clip") != rows).nonzero()[0]
            if not lost.size:
                return
            rows, places = rows[lost], places[lost]

    def _split(self, count: int) -> None:
        """Move the next `count` buckets to where they belong in the doubled index."""
        high = self._unsplit
        low = max(0, high - count)
        heads, chain = self._heads.a, self.next.a
        here = heads[low:high]
        found = []
        here = here[here.nonzero()[0]]
        while here.size:
            found.append(here)
            here = chain.take(here, mode="clip")
            here = here[here.nonzero()[0]]
        heads[low:high] = 0
        self._unsplit = low
        if found:
            rows = np.concatenate(found)
            self._link(rows, self.names.a.take(rows, mode="clip"))

    def remove(self, rows: Rows) -> None:
        """Take rows out of their chains. They must be in the index, and distinct."""
        heads, chain = self._heads.a, self.next.a
        places = self._places(self.names.a.take(rows, mode="clip"))
        places.sort()
        if len(places) > 1:
            places = places[np.concatenate(([True], places[1:] != places[:-1]))]
        chain[rows] = ~chain.take(rows, mode="clip")  # negative: on its way out
        here = heads.take(places, mode="clip")
        before = np.zeros_like(here)
        while places.size:
            link = chain.take(here, mode="clip")
            out = link < 0
            after = np.where(out, ~link, link)
            first = before == 0
            at_head = (out & first).nonzero()[0]
            heads[places[at_head]] = after[at_head]
            inner = (out & ~first).nonzero()[0]
            chain[before[inner]] = after[inner]
            before = np.where(out, before, here)
            left = after.nonzero()[0]
            here, before, places = after[left], before[left], places[left]
        self.names.a[rows] = 0
        self.size -= len(rows)
