"""The replica's table against a dictionary that does the obvious."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvindexd.model import ADD, MUTATION, REMOVE, Plane, WorkerKey
from kvindexd.replica.lane import Lane
from kvindexd.replica.table import Table

PLANES = [Plane(tier, "full_attention", 16, 0, 16) for tier in range(3)]


def worker(n: int) -> WorkerKey:
    return WorkerKey("", f"w{n}", 0)


def mutations(rows: list[tuple[int, int, int]]) -> npt.NDArray[np.void]:
    """(name, plane, op) triples; parent and length follow from the name, as they do for hashes."""
    out = np.zeros(len(rows), MUTATION)
    for i, (name, plane, op) in enumerate(rows):
        out[i] = (name, name ^ 0xABCD, name % 1000 * 16, plane, op, 0)
    return out


class Naive:
    """name -> set of (worker, plane): what the table must agree with."""

    def __init__(self) -> None:
        self.blocks: dict[int, set[tuple[WorkerKey, Plane]]] = {}

    def apply(self, who: WorkerKey, planes: list[Plane], rows: list[tuple[int, int, int]]) -> None:
        for name, plane, op in rows:
            bit = (who, planes[plane])
            if op == ADD:
                self.blocks.setdefault(name, set()).add(bit)
            elif name in self.blocks:
                self.blocks[name].discard(bit)
                if not self.blocks[name]:
                    del self.blocks[name]

    def clear(self, who: WorkerKey) -> None:
        for name in list(self.blocks):
            self.blocks[name] = {bit for bit in self.blocks[name] if bit[0] != who}
            if not self.blocks[name]:
                del self.blocks[name]


def check(table: Table, naive: Naive, workers: list[WorkerKey], names: list[int]) -> None:
    """Every answer the table can give about these names and workers."""
    rows = table.lookup(np.array(names, np.uint64))
    for name, row in zip(names, rows.tolist(), strict=True):
        info = table.block(name)
        if name not in naive.blocks:
            assert info is None
            continue
        assert row > 0
        assert info is not None
        assert (info.parent, info.length) == (name ^ 0xABCD, name % 1000 * 16)
        named = {table.column(w): w for w in workers}
        found = {
            (named[column], table.planes[plane])
            for column, planes in info.holders
            for plane in planes
        }
        assert found == naive.blocks[name]
    for plane in table.planes:
        number = table.plane_id(plane)
        masks = table.masks(rows, number)
        columns = [table.column(w) for w in workers]
        held = table.held(rows, number, columns)
        for j, w in enumerate(workers):
            expected = [(w, plane) in naive.blocks.get(name, ()) for name in names]
            assert held[:, j].tolist() == expected
            bits = masks[:, columns[j] // 64] >> np.uint64(columns[j] % 64) & np.uint64(1)
            assert bits.tolist() == expected
            count = sum((w, plane) in bits for bits in naive.blocks.values())
            assert table.counts(columns[j])[number] == count
    assert table.entries == sum(len(bits) for bits in naive.blocks.values())
    if not table.scrub_pending:
        assert table.rows == len(naive.blocks)


NAMES = st.one_of(
    st.integers(1, 40), st.integers(1, 40).map(lambda n: n << 50), st.integers(1, 2**64 - 1)
)
STEP: st.SearchStrategy[tuple[str, int, list[tuple[int, int, int]]]] = st.one_of(
    st.tuples(
        st.just("apply"),
        st.integers(0, 69),
        st.lists(
            st.tuples(NAMES, st.integers(0, 2), st.sampled_from([ADD, ADD, REMOVE])), max_size=60
        ),
    ),
    st.tuples(st.sampled_from(["clear", "renew", "free"]), st.integers(0, 69), st.just([])),
    st.tuples(st.just("scrub"), st.integers(1, 50), st.just([])),
)


@settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(STEP, max_size=25), st.integers(0, 2**32), st.sets(st.integers(0, 69), max_size=70))
def test_equals_a_dictionary(
    steps: list[tuple[str, int, list[tuple[int, int, int]]]], seed: int, early: set[int]
) -> None:
    table, naive = Table(seed), Naive()
    used = {worker(n) for n in early}
    for w in sorted(used):
        table.column(w)
    names: set[int] = {7}
    for kind, n, rows in steps:
        w = worker(n)
        if kind == "scrub":
            table.scrub(n)
            continue
        used.add(w)
        if kind == "apply":
            planes = PLANES if n % 2 else PLANES[::-1]
            plane_map = [table.plane_id(p) for p in planes]
            table.apply(table.column(w), plane_map, mutations(rows))
            naive.apply(w, planes, rows)
            names.update(name for name, _, _ in rows)
        else:
            naive.clear(w)
            if kind == "clear":
                table.clear_column(table.column(w))
            elif kind == "renew":
                table.renew_column(w)
            else:
                table.free_column(w)
                used.discard(w)
    check(table, naive, sorted(used), sorted(names))
    while table.scrub(16):
        pass
    check(table, naive, sorted(used), sorted(names))


def test_long_random_run_with_growth_and_row_reuse() -> None:
    """Tens of thousands of blocks over 100 workers: the index doubles many times, rows recycle."""
    rng = random.Random(5)
    table, naive = Table(3), Naive()
    workers = [worker(n) for n in range(100)]
    pool = [rng.getrandbits(64) | 1 for _ in range(30_000)]
    for step in range(400):
        w = rng.choice(workers)
        start = rng.randrange(len(pool) - 500)
        op = ADD if rng.random() < 0.7 else REMOVE
        rows = [
            (name, rng.randrange(3), op) for name in pool[start : start + rng.randrange(1, 500)]
        ]
        table.apply(table.column(w), [table.plane_id(p) for p in PLANES], mutations(rows))
        naive.apply(w, PLANES, rows)
        if step % 50 == 49:
            gone = rng.choice(workers)
            table.renew_column(gone)
            naive.clear(gone)
        table.scrub(1000)
    while table.scrub():
        pass
    assert table.words == 2
    check(table, naive, workers, [*pool, 1, 2, 3])


def test_chain_lookup_is_exact_across_gaps_and_reused_rows() -> None:
    """The run shortcut may only ever find what the index has."""
    table = Table(1)
    plane = table.plane_id(PLANES[0])
    rng = random.Random(2)
    chain = [rng.getrandbits(64) | 1 for _ in range(2000)]
    table.apply(0, [plane], mutations([(n, 0, ADD) for n in chain]))
    gone = chain[300:310] + chain[1500:1501] + chain[900:1200:7]
    table.apply(0, [plane], mutations([(n, 0, REMOVE) for n in gone]))
    query = np.array(
        [*chain, *([0] * 300), *[rng.getrandbits(64) | 1 for _ in range(200)]], np.uint64
    )
    rows = table.lookup(query)
    absent = set(gone)
    for name, row in zip(query.tolist(), rows.tolist(), strict=True):
        assert (row > 0) == (name in set(chain) and name not in absent)
    blanks = np.isin(query, np.array(gone, np.uint64))
    rows = table.lookup(np.where(blanks, np.uint64(0), query))
    assert (rows[blanks] == -1).all()  # name 0 is nobody's, freed rows have it
    for start in (0, 250, 300, 305, 600, 1400, 1990):
        exact = table.lookup(query[start:])
        leading = table.lookup(query[start:], prefix=True)
        run = int((exact > 0).argmin())
        assert leading[:run].tolist() == exact[:run].tolist()
        assert leading[run] == -1
        assert set(leading[run:].tolist()) <= {-1, *exact.tolist()}
    other = [rng.getrandbits(64) | 1 for _ in range(len(gone))]
    table.apply(0, [plane], mutations([(n, 0, ADD) for n in other]))
    assert (table.lookup(np.array(gone, np.uint64)) == -1).all()
    assert (table.lookup(np.array(other, np.uint64)) > 0).all()
    assert table.rows == 2000


def test_churn_does_not_degrade() -> None:
    """A million evictions through a fixed-size cache leave rows, bytes and chains as they were."""
    table = Table(9)
    plane = [table.plane_id(PLANES[0])]
    rng = np.random.default_rng(1)
    size, batch = 20_000, 2_000

    def batch_of(names: npt.NDArray[np.uint64], op: int) -> npt.NDArray[np.void]:
        out = np.zeros(len(names), MUTATION)
        out["name"], out["op"] = names, op
        return out

    live = rng.integers(1, 2**63, size, dtype=np.uint64)
    table.apply(0, plane, batch_of(live, ADD))
    before = 0
    for step in range(100):
        if step == 10:
            before = table.nbytes
        table.apply(0, plane, batch_of(live[:batch], REMOVE))
        fresh = rng.integers(1, 2**63, batch, dtype=np.uint64)
        table.apply(0, plane, batch_of(fresh, ADD))
        live = np.concatenate([live[batch:], fresh])
    assert table.rows == size
    assert table.nbytes == before
    assert (table.lookup(live) > 0).all()


def test_columns_are_reused_and_words_given_back() -> None:
    table = Table(1)
    plane = [table.plane_id(PLANES[0])]
    for n in range(130):
        table.apply(table.column(worker(n)), plane, mutations([(n + 1, 0, ADD)]))
    assert table.words == 3
    for n in range(10, 130):
        table.free_column(worker(n))
    assert table.scrub_pending
    while table.scrub():
        pass
    assert table.words == 1
    assert table.rows == 10
    assert table.column(worker(500)) == 10


def test_a_renewed_column_is_empty_at_once() -> None:
    table = Table(1)
    plane = table.plane_id(PLANES[0])
    names = np.arange(1, 50_001, dtype=np.uint64)
    rows = np.zeros(len(names), MUTATION)
    rows["name"], rows["op"] = names, ADD
    table.apply(table.column(worker(1)), [plane], rows)
    table.apply(table.column(worker(2)), [plane], rows[:10])
    column = table.renew_column(worker(1))
    assert not table.counts(column).any()
    assert not table.held(table.lookup(names), plane, [column]).any()
    assert table.block(11) is None
    info = table.block(1)
    assert info is not None
    assert info.holders == [(table.column(worker(2)), [plane])]
    table.apply(column, [plane], rows[5:7])  # while the old bits are still there
    while table.scrub(777):
        pass
    assert table.rows == 10
    assert table.held(table.lookup(names[:10]), plane, [column])[:, 0].nonzero()[0].tolist() == [
        5,
        6,
    ]


def test_block_zero_is_refused_and_counted() -> None:
    table = Table(1)
    plane = [table.plane_id(PLANES[0])]
    table.apply(0, plane, mutations([(0, 0, ADD), (5, 0, ADD), (0, 0, ADD)]))
    assert table.rows == 1
    assert table.refused == 2
    assert table.lookup(np.array([0, 5], np.uint64)).tolist()[0] == -1
    assert table.block(0) is None


def test_an_unknown_plane_applies_nothing() -> None:
    table = Table(1)
    plane = [table.plane_id(PLANES[0])]
    with pytest.raises(ValueError, match="plane 1"):
        table.apply(0, plane, mutations([(5, 0, ADD), (6, 1, ADD)]))
    assert table.rows == 0


def chain_lengths(table: Table) -> list[int]:
    heads = table._index._heads.a
    out = []
    for head in heads[heads.nonzero()[0]].tolist():
        n, row = 0, head
        while row:
            n, row = n + 1, int(table._index.next.a[row])
        out.append(n)
    return out


@pytest.mark.parametrize(
    "make",
    [
        lambda n: np.arange(1, n + 1, dtype=np.uint64),
        lambda n: np.arange(1, n + 1, dtype=np.uint64) << np.uint64(40),
        lambda n: np.arange(1, n + 1, dtype=np.uint64) << np.uint64(48),
        lambda n: np.arange(1, n + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15),
    ],
)
def test_structured_names_do_not_pile_up(make: Callable[[int], npt.NDArray[np.uint64]]) -> None:
    """The secret multiplier spreads names that an adversary, or a test, made alike."""
    table = Table()
    rows = np.zeros(50_000, MUTATION)
    rows["name"], rows["op"] = make(len(rows)), ADD
    table.apply(0, [table.plane_id(PLANES[0])], rows)
    assert max(chain_lengths(table)) <= 24


def test_a_lane_grows_in_place_and_with_a_view_held() -> None:
    lane = Lane(np.uint64, 1000)
    lane.a[:] = 7
    lane.grow(10_000_000)
    assert lane.a[:1000].tolist() == [7] * 1000
    assert not lane.a[5000:20_000].any()
    view = lane.a[:10]
    lane.grow(20_000_000)
    assert lane.a[:10].tolist() == view.tolist() == [7] * 10
