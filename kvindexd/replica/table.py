"""One scope's index: block names to presence bits, one bit plane per (tier, group spec) in use."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import numpy as np
import numpy.typing as npt

from kvindexd.model import ADD, Plane, WorkerKey
from kvindexd.replica.columns import BlockInfo, Columns, bits_of
from kvindexd.replica.index import Index, Names, Rows
from kvindexd.replica.lane import Lane, RowStack
from kvindexd.survey import Links

Words = npt.NDArray[np.uint64]
Mutations = npt.NDArray[np.void]

_FIRST_ROWS = 1024
_MAX_ROWS = 2**31 - 1
APPLY_SLICE = 4096
"""Mutations handled at once: 1-2 ms. A caller on an event loop passes no more per call."""
SCRUB_ROWS = 8192
"""Rows scrubbed per step: 1-4 ms, most of it for rows that fall free."""


class Table:
    """Block name -> row; a row holds a bit per (plane, worker column), its parent and its length.

    For one thread: a read between two calls sees every call before it in full. Each call is
    bounded by the size of its arguments, whatever the size of the table.
    """

    def __init__(self, seed: int | None = None) -> None:
        """`seed` fixes the hash of the index, for reproducible tests; None = random."""
        self._index = Index(_FIRST_ROWS, seed)
        self._parents: Lane[np.uint64] = Lane(np.uint64, _FIRST_ROWS)
        self._lengths: Lane[np.uint32] = Lane(np.uint32, _FIRST_ROWS)
        self._words: list[list[Lane[np.uint64]]] = []  # [plane][word of 64 columns]
        self._width = 1
        self._capacity = _FIRST_ROWS
        self._top = 1  # rows below were used once; row 0 is the missing one
        self._free = RowStack()
        self._planes: dict[Plane, int] = {}
        self._columns = Columns()
        self._scrub_row = 1
        self._counts = np.zeros((0, 64), np.int64)
        self.refused = 0
        """Mutations dropped because they named block 0, which stands for "no block"."""

    @property
    def planes(self) -> Sequence[Plane]:
        """The table's planes; the position is the table's plane id."""
        return tuple(self._planes)

    @property
    def rows(self) -> int:
        """Distinct blocks held."""
        return self._index.size

    @property
    def entries(self) -> int:
        """Presence bits set: (worker, block, plane) triples."""
        return int(self._counts.sum())

    @property
    def words(self) -> int:
        """64-bit words per row and plane."""
        return self._width

    @property
    def nbytes(self) -> int:
        """Bytes in use by rows that were ever used, buckets and free list; an upper bound of the
        resident memory, since pages that were never written are not backed."""
        per_row = 8 + 4 + 8 + 4 + 8 * self._width * len(self._words)
        return self._top * per_row + self._index.nbytes + self._free.nbytes + self._counts.nbytes

    def plane_id(self, plane: Plane) -> int:
        """The table's id of a plane, allocated on first use."""
        found = self._planes.get(plane)
        if found is None:
            found = self._planes[plane] = len(self._words)
            self._words.append([Lane(np.uint64, self._capacity) for _ in range(self._width)])
            more = np.zeros((1, self._counts.shape[1]), np.int64)
            self._counts = np.vstack([self._counts, more])
        return found

    def find_plane(self, plane: Plane) -> int | None:
        """The table's id of a plane, None where nobody has shown it."""
        return self._planes.get(plane)

    # -- columns

    def column(self, worker: WorkerKey) -> int:
        """The worker's column, allocated on first use: bit `column % 64` of word `column // 64`."""
        found = self._columns.get(worker)
        if found is None:
            found = self._columns.take(worker)
            while found >= 64 * self._width:
                for lanes in self._words:
                    lanes.append(Lane(np.uint64, self._capacity))
                self._width += 1
                more = np.zeros((len(self._counts), 64), np.int64)
                self._counts = np.hstack([self._counts, more])
        return found

    def _narrow(self) -> None:
        """Give back the last words once no worker has a column in them."""
        if self._columns.passing:
            return
        width = self._columns.words()
        if width < self._width:
            for lanes in self._words:
                del lanes[width:]
            self._width = width
            self._counts = self._counts[:, : 64 * width].copy()

    def renew_column(self, worker: WorkerKey) -> int:
        """Forget all of a worker's bits at once: it gets another, empty column.

        The old bits are scrubbed away by `scrub`, and no read can see them meanwhile.
        """
        self.free_column(worker)
        return self.column(worker)

    def free_column(self, worker: WorkerKey) -> None:
        """Forget a worker and its bits; a no-op for one that has no column."""
        column = self._columns.get(worker)
        if column is None:
            return
        clean = not self._counts[:, column].any()
        self._counts[:, column] = 0
        self._columns.give_up(worker, clean=clean)
        if clean:
            self._narrow()

    def clear_column(self, column: int) -> None:
        """Drop all bits of one column before returning: a pass over the whole table.

        For callers that may block; on an event loop use `renew_column` and `scrub`.
        """
        self._counts[:, column] = 0
        for low in range(1, self._top, SCRUB_ROWS):
            self._scrub_slice([column], low, min(self._top, low + SCRUB_ROWS))

    @property
    def scrub_pending(self) -> bool:
        """Whether columns given up still have bits to be scrubbed."""
        return self._columns.pending

    def scrub(self, rows: int = SCRUB_ROWS) -> bool:
        """Clean `rows` rows of columns given up; True while there is more to do.

        One pass cleans all columns that were given up before it began.
        """
        columns = self._columns
        if not columns.passing:
            if not columns.retired:
                return False
            columns.begin_pass()
            self._scrub_row = 1
        low, high = self._scrub_row, min(self._top, self._scrub_row + rows)
        if low < high:  # else the table has emptied meanwhile
            self._scrub_slice(columns.passing, low, high)
        self._scrub_row = high
        if high >= self._top:
            columns.end_pass()
            self._narrow()
        return columns.pending

    def _scrub_slice(self, columns: Sequence[int], low: int, high: int) -> None:
        gone = bits_of(columns, self._width)
        hit = np.zeros(high - low, np.uint64)
        left = np.zeros(high - low, np.uint64)
        for lanes in self._words:
            for lane, bits in zip(lanes, gone, strict=True):
                part = lane.a[low:high]
                if bits:
                    these = part & np.uint64(bits)
                    if these.any():  # else no write: it would back pages that are not there
                        hit |= these
                        part &= np.uint64(bits ^ 0xFFFF_FFFF_FFFF_FFFF)
                left |= part
        dead = ((hit != 0) & (left == 0)).nonzero()[0]
        if dead.size:
            self._release((dead + low).astype(np.int32))

    def _allocate(self, count: int) -> Rows:
        """Rows for `count` blocks, in runs as long as there are, so that chains stay together."""
        reused = self._free.pop(count)
        fresh = count - len(reused)
        if not fresh:
            return reused
        self._reserve(self._top + fresh)
        new = np.arange(self._top, self._top + fresh, dtype=np.int32)
        self._top += fresh
        return np.concatenate((reused, new)) if len(reused) else new

    def _reserve(self, rows: int) -> None:
        if rows <= self._capacity:
            return
        if rows > _MAX_ROWS:
            raise MemoryError(f"the replica holds at most {_MAX_ROWS} distinct blocks per model")
        capacity = max(rows, 2 * self._capacity)
        for lane in (self._index.names, self._index.next, self._parents, self._lengths):
            lane.grow(capacity)
        for lane in chain.from_iterable(self._words):
            lane.grow(capacity)
        self._capacity = capacity

    def _release(self, rows: Rows) -> None:
        """Free rows whose bits are all zero."""
        self._index.remove(rows)
        if self._index.size:
            self._free.push(rows)
        else:  # all are free: start over, in order
            self._top = 1
            self._free.clear()

    # -- writing

    def apply(self, column: int, plane_map: Sequence[int], mutations: Mutations) -> None:
        """Apply mutations (model.MUTATION) of one worker, in order; a later one wins.

        `plane_map`: the worker's plane id -> the table's. ADD and REMOVE are absolute: doing one
        twice, or removing what is not there, is harmless. Parent and length are taken from the
        ADD that first names a block: its name is a hash of both. Raises ValueError for a plane
        beyond the map, before anything is applied.
        """
        mapping = np.asarray(plane_map, np.int64)
        ids = mutations["plane"]
        if len(ids) and int(ids.max()) >= len(mapping):
            raise ValueError(
                f"mutation of plane {int(ids.max())}, but its worker has named {len(mapping)} "
                "planes: its profile is older than its mutations; reload the worker"
            )
        for low in range(0, len(mutations), APPLY_SLICE):
            part = mutations[low : low + APPLY_SLICE]
            self._apply(column, mapping.take(part["plane"]), part)

    def _apply(self, column: int, planes: npt.NDArray[np.int64], part: Mutations) -> None:
        names: Names = np.ascontiguousarray(part["name"])
        adds = part["op"] == ADD
        rows = self._index.find(names)
        missing = (rows == 0).nonzero()[0]
        if missing.size:
            self._insert(names, adds, rows, missing, part)
            known = rows.nonzero()[0]
            if known.size < len(rows):
                rows, adds, planes = rows[known], adds[known], planes[known]
                if not known.size:
                    return
        emptied = []
        first = planes.item(0)
        if (planes == first).all():
            emptied.append(self._write(column, first, rows, adds))
        else:
            for plane in np.bincount(planes).nonzero()[0].tolist():
                at = (planes == plane).nonzero()[0]
                emptied.append(self._write(column, plane, rows[at], adds[at]))
        self._sweep(emptied)

    def _insert(
        self,
        names: Names,
        adds: npt.NDArray[np.bool_],
        rows: Rows,
        missing: npt.NDArray[np.int64],
        part: Mutations,
    ) -> None:
        """Give rows to the names at `missing` that are added, in the order they come in."""
        at = missing[adds[missing]]
        if not len(at):
            return
        fresh = names[at]
        plain = len(at) == len(missing)
        ordered = np.sort(fresh)
        if ordered[0] == 0 or (ordered[1:] == ordered[:-1]).any():
            plain = False
            at = self._distinct(fresh, at)
            fresh = names[at]
        made = self._allocate(len(fresh))
        self._parents.a[made] = part["parent"][at]
        self._lengths.a[made] = part["length"][at]
        self._index.insert(made, fresh)
        if plain:
            rows[at] = made
        else:
            rows[missing] = self._index.find(names[missing])

    def _distinct(self, fresh: Names, at: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The places in `at` of the first mention of each name, without block 0."""
        found, firsts = np.unique(fresh, return_index=True)
        if found[0] == 0:
            self.refused += int(np.count_nonzero(fresh == 0))
            firsts = firsts[1:]
        firsts.sort()
        return at[firsts]

    def _write(self, column: int, plane: int, rows: Rows, adds: npt.NDArray[np.bool_]) -> Rows:
        """Set or clear one column's bit in one plane; the rows whose word is zero after a clear."""
        lane = self._words[plane][column // 64].a
        bit = np.uint64(1 << (column % 64))
        before = lane.take(rows, mode="clip")
        # All writes to a row differ in this one bit only: of repeated rows the last one stands.
        lane[rows] = np.where(adds, before | bit, before & ~bit)
        ordered = np.sort(rows)
        if (ordered[1:] == ordered[:-1]).any():
            rows, firsts = np.unique(rows, return_index=True)
            before = before[firsts]
            after = lane.take(rows, mode="clip")
            gone = after == 0
        else:
            after = lane.take(rows, mode="clip")
            gone = (after == 0) & ~adds
        grown = np.count_nonzero(after & bit) - np.count_nonzero(before & bit)
        self._counts[plane, column] += grown
        emptied: Rows = rows[gone.nonzero()[0]]
        return emptied

    def _sweep(self, emptied: Sequence[Rows]) -> None:
        """Free those of the rows that have no bit left anywhere."""
        rows = emptied[0] if len(emptied) == 1 else np.unique(np.concatenate(emptied))
        for lane in chain.from_iterable(self._words):
            if not rows.size:
                return
            rows = rows[(lane.a.take(rows, mode="clip") == 0).nonzero()[0]]
        if rows.size:
            self._release(rows)

    # -- reading

    def lookup(self, names: Names, *, prefix: bool = False) -> npt.NDArray[np.int64]:
        """The row of each name, -1 where nobody holds it. Fastest in chain order.

        `prefix`: only the leading run of held names matters; behind its end all may read -1.
        """
        rows = self._index.find_chain(names, prefix=prefix).astype(np.int64)
        rows -= rows == 0
        return rows

    def masks(self, rows: npt.NDArray[np.int64], plane: int) -> Words:
        """The bits of one of the table's planes: [rows, words], 0 for row -1."""
        lanes = self._words[plane]
        if len(lanes) == 1:
            return lanes[0].a.take(rows, mode="clip").reshape(-1, 1)
        out = np.empty((len(lanes), len(rows)), np.uint64)
        for i, lane in enumerate(lanes):
            lane.a.take(rows, out=out[i], mode="clip")
        return out.T

    def held(
        self, rows: npt.NDArray[np.int64], plane: int, columns: Sequence[int]
    ) -> npt.NDArray[np.bool_]:
        """Whether each of some columns holds each row in a plane: [rows, columns]."""
        masks = np.ascontiguousarray(self.masks(rows, plane), "<u8")
        bits = np.unpackbits(masks.view(np.uint8), axis=1, bitorder="little").view(np.bool_)
        first, n = (columns[0] if columns else 0), len(columns)
        if list(columns) == list(range(first, first + n)):  # as a rule: no copy
            return bits[:, first : first + n]
        out: npt.NDArray[np.bool_] = bits.take(np.asarray(columns, np.int64), axis=1)
        return out

    def counts(self, column: int) -> npt.NDArray[np.int64]:
        """Blocks held per plane of the table, by plane id."""
        return np.copy(self._counts[:, column])

    def links(self, low: int, count: int) -> Links | None:
        """Views of `count` rows from `low` on, 1 being the first; None behind the last row."""
        rows = slice(low, min(self._top, low + count))
        if low >= self._top:
            return None
        return Links(self._index.names.a[rows], self._parents.a[rows], self._lengths.a[rows])

    def block(self, name: int) -> BlockInfo | None:
        """All that is known of one block; None when nobody holds it."""
        row = self._index.find_one(name) if name else 0
        if not row:
            return None
        given_up = self._columns.dirty
        holders: dict[int, list[int]] = {}
        for plane, lanes in enumerate(self._words):
            for word, lane in enumerate(lanes):
                bits = lane.a.item(row)
                while bits:
                    column = 64 * word + (bits & -bits).bit_length() - 1
                    bits &= bits - 1
                    if column not in given_up:
                        holders.setdefault(column, []).append(plane)
        if not holders:
            return None
        return BlockInfo(
            self._parents.a.item(row), self._lengths.a.item(row), sorted(holders.items())
        )
