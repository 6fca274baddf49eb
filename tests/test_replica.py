"""The replica against real servers: bootstrap, feed, holes, outages; and its rules in memory."""

from __future__ import annotations

import asyncio
import functools
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager

import msgspec
import numpy as np
import pytest
import waiting
from servers import DURABLE, VALKEY, Server, server, start_cluster

from kvindexd.model import (
    ADD,
    MUTATION,
    REMOVE,
    BatchDelta,
    GroupInfo,
    Plane,
    Profile,
    Slot,
    Tier,
    WorkerKey,
)
from kvindexd.records import Block, decode_records, field_of, pack, pack_mutation
from kvindexd.replica import Phase, Replica, ReplicaOptions, State
from kvindexd.replica.book import Book
from kvindexd.replica.loader import Loader
from kvindexd.store import (
    FeedEntry,
    Kind,
    Lease,
    Snapshot,
    Store,
    StoreOptions,
    WorkerRecord,
)

PLANE = Plane(Tier.DEVICE, "full_attention", 16, 0, 16)
PROFILE = Profile(
    groups=(GroupInfo(0, "full_attention", 16, 0, "main", 1),),
    planes=(PLANE,),
    slots=(Slot(Tier.DEVICE, 0, 16),),
)
PACKED = msgspec.msgpack.encode(PROFILE)
DEADLINE = 20.0
until = functools.partial(waiting.becomes, deadline=DEADLINE)
FAST = ReplicaOptions(poll=0.05, block=0.2)


class Registered(msgspec.Struct):
    """A registration, as far as the replica reads it."""

    model: str


def parse(raw: bytes) -> Registered:
    return msgspec.json.decode(raw, type=Registered)


def registration(model: str) -> bytes:
    return msgspec.json.encode(Registered(model))


class Rank:
    """An ingester of one rank in short: writes batches, and remembers what the rank holds."""

    def __init__(self, store: Store, n: int, model: str = "m") -> None:
        self.store = store
        self.key = WorkerKey("", f"w{n}", 0)
        self.model = model
        self.held: set[int] = set()
        self.seq = -1
        self.lease: Lease | None = None

    async def start(self, ttl_ms: int = 60_000) -> Rank:
        await self.store.register(self.key, registration(self.model), False, 1.0)
        self.lease = await self.store.acquire(self.key, "test", ttl_ms)
        return self

    def delta(
        self, add: Iterable[int] = (), remove: Iterable[int] = (), clear: bool = False
    ) -> BatchDelta:
        self.seq = 0 if clear else self.seq + 1
        if clear:
            self.held.clear()
        blocks: dict[bytes, bytes | None] = {}
        mutations = bytearray()
        for name in remove:
            blocks[field_of(name)] = None
            mutations += pack_mutation(name, name ^ 1, name % 999, 0, REMOVE)
            self.held.discard(name)
        for name in add:
            block = Block(name, name % 999, name, name ^ 1)
            block.copies = 1
            blocks[field_of(name)] = pack(block)
            mutations += pack_mutation(name, name ^ 1, name % 999, 0, ADD)
            self.held.add(name)
        return BatchDelta(
            seq=self.seq,
            ts=1000.0 + self.seq,
            digest=self.seq,
            clear=clear,
            blocks=blocks,
            mutations=bytes(mutations),
            profile=PACKED if self.seq == 0 else None,
        )

    async def write(
        self, add: Iterable[int] = (), remove: Iterable[int] = (), clear: bool = False
    ) -> None:
        assert self.lease is not None
        await self.store.apply(self.lease, [self.delta(add, remove, clear)])


def holds(replica: Replica[Registered], rank: Rank, universe: Iterable[int]) -> set[int]:
    """What the replica says that the rank holds."""
    view = replica.worker(rank.key)
    assert view is not None
    names = np.array(sorted(universe), np.uint64)
    plane = view.scope.table.find_plane(PLANE)
    if plane is None:
        return set()
    rows = view.scope.table.lookup(names)
    held = view.scope.table.held(rows, plane, [view.column])[:, 0]
    return set(names[held].tolist())


async def equal(replica: Replica[Registered], ranks: Iterable[Rank], universe: set[int]) -> None:
    """Wait until the replica has all of every rank's batches, then compare bit by bit."""
    for rank in ranks:

        def caught_up(rank: Rank = rank) -> bool:
            view = replica.worker(rank.key)
            return (
                view is not None
                and view.phase is Phase.FOLLOWED
                and rank.lease is not None
                and (view.epoch, view.revision) == rank.lease.position
            )

        await until(caught_up, f"{rank.key} to be followed")
        assert holds(replica, rank, universe | rank.held) == rank.held


def replica_of(store: Store, **kw: object) -> Replica[Registered]:
    kw.setdefault("options", FAST)
    return Replica(store, parse, decode_records, **kw)  # type: ignore[arg-type]


@asynccontextmanager
async def running(replica: Replica[Registered]) -> AsyncIterator[Replica[Registered]]:
    task = asyncio.create_task(replica.run())
    try:
        yield replica
        assert not task.done(), task.exception()
    finally:
        task.cancel()
        await asyncio.wait([task])


@pytest.fixture
async def store(redis_server: Server) -> AsyncIterator[Store]:
    async with Store(redis_server.url, StoreOptions(shards=2)) as s:
        yield s


async def test_snapshot_then_feed(store: Store) -> None:
    ranks = [await Rank(store, n).start() for n in range(5)]
    for i, rank in enumerate(ranks):
        await rank.write(range(1, 3000 + i))
        await rank.write(range(5000, 5010), remove=range(1, 50, 2))
    seen: list[tuple[WorkerKey, float]] = []
    replica = replica_of(store, on_applied=lambda w, ts: seen.append((w, ts)))
    assert replica.not_ready()
    async with running(replica):
        await until(lambda: replica.not_ready() == "", "ready")
        universe = set(range(1, 6000))
        await equal(replica, ranks, universe)
        assert {v.last_seq for v in replica.workers()} == {1}
        await ranks[3].write([7777], remove=[5000])
        await until(lambda: (ranks[3].key, 1002.0) in seen)
        view = replica.worker(ranks[3].key)
        assert view is not None
        assert (view.last_seq, view.last_ts, view.judged.state) == (2, 1002.0, State.LIVE)
        await equal(replica, ranks, universe | {7777})
        found = view.scope.holders(7777)
        assert found == (7776, 7777 % 999, [(view, [PLANE])])
        await until(lambda: replica.lag == 0)


async def test_queries_never_ask_redis(redis_server: Server, store: Store) -> None:
    """Commands are counted by the server itself while the replica answers ten thousand times."""
    rank = await Rank(store, 1).start()
    await rank.write(range(1, 2000))
    replica = replica_of(store)
    async with running(replica):
        await until(lambda: replica.not_ready() == "")

    def commands() -> int:
        for line in redis_server("INFO", "stats").decode().splitlines():
            if line.startswith("total_commands_processed:"):
                return int(line.split(":")[1])
        raise AssertionError("no such line")

    before, settled = -1, commands()
    while settled - before != 1:  # what the replica had under way when it ended is counted late
        before, settled = settled, commands()
    before = settled
    scope = None
    for _ in range(10_000):
        scope = replica.scope("", "")
        assert scope is not None
        rows = scope.table.lookup(np.arange(1, 20, dtype=np.uint64))
        assert scope.table.masks(rows, 0)[:, 0].all()
        assert len(scope.workers) == 1
    assert scope is not None
    assert scope.holders(5) is not None
    assert commands() - before <= 2  # the two INFOs


async def test_a_store_that_is_away_ages_states_and_nothing_else(tmp_path: object) -> None:
    with server(VALKEY, *DURABLE) as s:
        async with Store(s.url, StoreOptions(deadline=0.5, timeout=0.5)) as store:
            rank = await (Rank(store, 1)).start(ttl_ms=1500)
            await rank.write(range(1, 100))
            replica = replica_of(store)
            async with running(replica):
                await until(lambda: replica.not_ready() == "")
                view = replica.worker(rank.key)
                assert view is not None
                assert view.judged.state is State.LIVE
                s.kill()
                await until(lambda: view.judged.state is State.STALE, "stale by age")
                assert replica.not_ready() == ""
                assert holds(replica, rank, range(1, 200)) == rank.held
                assert replica.lag is None
                s.start()
                assert rank.lease is not None
                deadline = time.monotonic() + DEADLINE
                while True:
                    try:
                        await rank.write([150])
                        break
                    except Exception:
                        assert time.monotonic() < deadline
                        rank.seq -= 1
                await equal(replica, [rank], set(range(1, 200)))
                await until(lambda: view.judged.state is State.LIVE, "live again")


async def test_trimmed_feed_reloads(redis_server: Server, store: Store) -> None:
    """A replica that was not reading while the feed was cut off behind it."""
    ranks = [await Rank(store, n).start() for n in range(4)]
    for rank in ranks:
        await rank.write(range(1, 500))
    replica = replica_of(store)
    async with running(replica):
        await equal(replica, ranks, set(range(1, 500)))
    for rank in ranks:
        await rank.write(range(600, 700), remove=range(1, 100))
        await rank.write(range(700, 750))
    gone = await Rank(store, 9).start()
    await gone.write([5])
    for shard in range(2):
        redis_server("XTRIM", b"kvx:{%d}:feed" % shard, "MAXLEN", 1)
    async with running(replica):
        await equal(replica, [*ranks, gone], set(range(1, 1000)))
        assert replica.stats().counters["feed_trimmed"] == 2
        await ranks[0].write([999])
        await equal(replica, ranks, set(range(1, 1000)))


async def test_entry_deleted_from_the_feed(redis_server: Server, store: Store) -> None:
    rank = await Rank(store, 1).start()
    await rank.write(range(1, 100))
    replica = replica_of(store)
    async with running(replica):
        await equal(replica, [rank], set(range(1, 100)))
    await rank.write([200])
    await rank.write([300])
    for shard in range(2):
        entries = redis_server("XRANGE", b"kvx:{%d}:feed" % shard, "-", "+")
        if len(entries) > 2:
            redis_server("XDEL", b"kvx:{%d}:feed" % shard, entries[-2][0])
    async with running(replica):
        await equal(replica, [rank], set(range(1, 400)))


async def test_clear_removal_draining_and_leases(store: Store) -> None:
    one, two = await Rank(store, 1).start(), await Rank(store, 2, "other").start()
    await one.write(range(1, 3000))
    await two.write(range(1, 50))
    changes: list[WorkerKey] = []
    replica = replica_of(store)
    replica.watch(lambda view: changes.append(view.key))
    async with running(replica):
        await equal(replica, [one, two], set(range(1, 3000)))
        assert replica.models("") == ["m", "other"]
        assert replica.scope("", "") is None  # two models
        await one.write(range(5, 10), clear=True)
        await equal(replica, [one], set(range(1, 3000)))
        view = replica.worker(one.key)
        assert view is not None
        await until(lambda: not view.scope.table.scrub_pending and view.scope.table.rows == 5)

        await store.set_draining(one.key, True)
        await until(lambda: view.judged.state is State.DRAINING)
        await store.set_draining(one.key, False)
        await until(lambda: view.judged.state is State.LIVE)
        assert one.lease is not None
        await store.renew(one.lease, evidence={"state": "SYNCING", "detail": "catching up"})
        await until(lambda: view.judged == (State.SYNCING, "catching up"))
        await store.release(one.lease)
        await until(lambda: view.judged.state is State.STALE)

        await store.reset(two.key)
        other = replica.worker(two.key)
        assert other is not None
        await until(lambda: other.epoch == 2)
        assert holds(replica, two, range(1, 50)) == set()
        await until(lambda: other.judged.state is State.STALE)  # a reset revokes the lease

        changes.clear()
        await store.deregister(two.key)
        await until(lambda: replica.worker(two.key) is None)
        assert two.key in changes
        scope = replica.scope("", "other")  # known once, so not an unknown model
        assert scope is not None
        assert scope.workers == ()
        assert scope.table.rows == 0


async def test_registered_again_with_another_model(store: Store) -> None:
    rank = await Rank(store, 1).start()
    await rank.write(range(1, 100))
    replica = replica_of(store)
    async with running(replica):
        await equal(replica, [rank], set(range(1, 100)))
        await store.register(rank.key, registration("new"), False, 2.0)
        await until(lambda: replica.scope("", "new") is not None)
        await equal(replica, [rank], set(range(1, 100)))
        view = replica.worker(rank.key)
        assert view is not None
        assert view.scope.model == "new"


async def test_an_unreadable_registration_is_left_out_until_mended(store: Store) -> None:
    rank = await Rank(store, 1).start()
    await rank.write(range(1, 100))
    await store.register(rank.key, b"nonsense", False, 1.0)
    good = await Rank(store, 2).start()
    replica = replica_of(store)
    async with running(replica):
        await equal(replica, [good], set())
        assert replica.worker(rank.key) is None
        assert replica.stats().counters["registrations_unreadable"] == 1
        await rank.write([200])
        await store.register(rank.key, registration("m"), False, 1.0)
        await equal(replica, [rank], set(range(1, 300)))


async def test_loading_while_it_is_written(store: Store) -> None:
    """A big rank changes all the time while it is loaded: what comes out is exactly what it has."""
    rng = random.Random(1)
    rank = await Rank(store, 1).start()
    universe = set(range(1, 40_000))
    for low in range(1, 30_000, 2000):
        await rank.write(range(low, low + 2000))
    stop = False

    async def write() -> None:
        while not stop:
            gone = rng.sample(sorted(rank.held), 40)
            new = rng.sample(sorted(universe - rank.held), 40)
            await rank.write(new, remove=gone)

    writer = asyncio.create_task(write())
    for _ in range(3):
        replica = replica_of(store)
        async with running(replica):
            await until(lambda: replica.not_ready() == "", "ready while written")  # noqa: B023
    async with running(replica_of(store)) as replica:
        await until(lambda: replica.not_ready() == "")
        stop = True
        await writer
        await equal(replica, [rank], universe)


class Meddled(Store):
    """A store in which something happens between a load's first look and its blocks."""

    meddle: Callable[[], Awaitable[object]] | None = None
    meddled = 0

    async def load(self, key: WorkerKey) -> Snapshot:
        snapshot = await super().load(key)
        meddle, self.meddle = self.meddle, None
        if meddle is not None:
            await meddle()
            self.meddled += 1
        return snapshot


HOST = Plane(Tier.HOST, "full_attention", 16, 0, 16)
WIDER = msgspec.structs.replace(
    PROFILE, planes=(PLANE, HOST), slots=(*PROFILE.slots, Slot(Tier.HOST, 0, 16))
)


async def test_what_happens_during_a_load(redis_server: Server) -> None:
    async with Store(redis_server.url) as writing, Meddled(redis_server.url) as store:
        rank = await Rank(writing, 1).start()
        await rank.write(range(1, 3000))
        assert rank.lease is not None

        async def offload() -> None:
            """Another tier's first copies: records of a slot that the old profile has not."""
            assert rank.lease is not None
            block = Block(5, 5 % 999, 5, 4)
            block.copies = 1 << 16 | 1
            rank.seq += 1
            delta = BatchDelta(
                seq=rank.seq,
                ts=1.0,
                digest=1,
                blocks={field_of(5): pack(block)},
                mutations=pack_mutation(5, 4, 5, 1, ADD),
                profile=msgspec.msgpack.encode(WIDER),
            )
            await writing.apply(rank.lease, [delta])

        async def again() -> None:
            await writing.deregister(rank.key)
            rank.held.clear()
            await rank.start()
            rank.seq = -1
            await rank.write([1, 2, 3])

        for meddle, counter in (
            (lambda: rank.write([5000], remove=[7]), ""),
            (offload, "load_profile_changed"),
            (lambda: rank.write([1, 2], clear=True), "load_epoch_changed"),
            (again, ""),
            (lambda: writing.register(rank.key, registration("b"), False, 1.0), ""),
        ):
            replica = replica_of(store)
            store.meddle, before = meddle, store.meddled
            async with running(replica):
                await until(lambda: store.meddled > before)  # noqa: B023
                await equal(replica, [rank], set(range(1, 6000)))
                assert not counter or replica.stats().counters[counter] == 1
            if counter == "load_profile_changed":
                view = replica.worker(rank.key)
                assert view is not None
                plane = view.scope.table.plane_id(HOST)
                rows = view.scope.table.lookup(np.arange(1, 3000, dtype=np.uint64))
                held = view.scope.table.held(rows, plane, [view.column])[:, 0]
                assert held.nonzero()[0].tolist() == [4]


async def test_a_broken_record_does_not_stop_the_others(redis_server: Server, store: Store) -> None:
    ranks = [await Rank(store, n).start() for n in range(3)]
    for rank in ranks:
        await rank.write(range(1, 100))
    shard = next(
        s for s in range(2) if redis_server("EXISTS", b"kvx:{%d}:b:%s" % (s, _id(ranks[0])))
    )
    key = b"kvx:{%d}:b:%s" % (shard, _id(ranks[0]))
    field = field_of(50)
    good = redis_server("HGET", key, field)
    redis_server("HSET", key, field, b"\x03")
    replica = replica_of(store)
    async with running(replica):
        await equal(replica, ranks[1:], set(range(1, 100)))
        assert "1 of 3" in replica.not_ready()
        redis_server("HSET", key, field, good)
        await equal(replica, ranks, set(range(1, 100)))
        await until(lambda: replica.not_ready() == "")


def _id(rank: Rank) -> bytes:
    return rank.key.store_id.encode()


async def test_counters_of_the_ingester_are_shown(store: Store) -> None:
    rank = await Rank(store, 1).start()
    replica = replica_of(store, options=FAST._replace(records=0.05))
    async with running(replica):
        await until(lambda: replica.not_ready() == "")
        delta = rank.delta([1])
        delta.counters = {"gaps": 3}
        assert rank.lease is not None
        await store.apply(rank.lease, [delta])
        view = replica.worker(rank.key)
        assert view is not None
        await until(lambda: view.counters.get("gaps") == 3)
        assert view.tier_blocks() == {Tier.DEVICE: 1}


async def test_random_fleet(store: Store) -> None:
    """Writes, clears, removals and re-registrations, with replicas that begin at any time."""
    rng = random.Random(2)
    ranks = {n: await Rank(store, n).start() for n in range(6)}
    universe = set(range(1, 300))
    replicas = [replica_of(store)]
    tasks = [asyncio.create_task(replicas[0].run())]
    try:
        for step in range(300):
            n = rng.randrange(6)
            rank = ranks[n]
            roll = rng.random()
            if roll < 0.03:
                await store.deregister(rank.key)
                ranks[n] = await Rank(store, n).start()
            elif roll < 0.08:
                await rank.write(rng.sample(range(1, 300), 20), clear=True)
            else:
                add = rng.sample(range(1, 300), 20)
                remove = [b for b in rng.sample(range(1, 300), 20) if b in rank.held]
                await rank.write(add, remove=[b for b in remove if b not in add])
            if step % 60 == 30:
                replicas.append(replica_of(store))
                tasks.append(asyncio.create_task(replicas[-1].run()))
        for replica in replicas:
            await equal(replica, ranks.values(), universe)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


async def test_cluster_of_several_shards() -> None:
    with start_cluster(VALKEY) as cluster:
        async with Store(cluster.url, StoreOptions(shards=4)) as store:
            ranks = [await Rank(store, n).start() for n in range(8)]
            for rank in ranks:
                await rank.write(range(1, 100))
            async with running(replica_of(store)) as replica:
                await equal(replica, ranks, set(range(1, 100)))
                for rank in ranks:
                    await rank.write(range(200, 210), remove=range(1, 20))
                await equal(replica, ranks, set(range(1, 300)))
                assert replica.not_ready() == ""


# -- the rules, without a server ------------------------------------------------------------------

KEY = WorkerKey("", "w", 0)


def book() -> Book[Registered]:
    made: Book[Registered] = Book(parse, lambda _w, _ts: None, lambda _view: None)
    made.take(
        FeedEntry(worker=KEY, epoch=1, revision=0, kind=Kind.REG, value=registration("m")), 0.0
    )
    return made


def entry(
    revision: int,
    names: Iterable[int],
    op: int = ADD,
    *,
    epoch: int = 1,
    plane: int = 0,
    clear: bool = False,
    profile: bytes | None = None,
) -> FeedEntry:
    return FeedEntry(
        worker=KEY,
        epoch=epoch,
        revision=revision,
        seq=revision,
        mutations=b"".join(pack_mutation(n, 0, 16, plane, op) for n in names),
        clear=clear,
        profile=PACKED if revision == 1 else profile,
    )


def held(b: Book[Registered], names: Iterable[int]) -> set[int]:
    view = b.views[KEY]
    array = np.array(sorted(names), np.uint64)
    rows = view.scope.table.lookup(array)
    return set(array[view.scope.table.held(rows, 0, [view.column])[:, 0]].tolist())


def test_in_order_repeated_and_old_entries() -> None:
    b = book()
    for e in (
        entry(1, [1, 2, 3]),
        entry(2, [2], REMOVE),
        entry(1, [1, 2, 3]),  # read twice
        entry(3, [2, 4]),
    ):
        b.take(e, 0.0)
    b.flush()
    assert held(b, range(1, 9)) == {1, 2, 3, 4}
    assert b.counters["entries_already_known"] == 1
    assert not b.wanted


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (entry(3, [5]), "hole"),
        (entry(2, [5], epoch=2), "hole"),
        (entry(2, [5], plane=7), "unknown_plane"),
        (entry(2, [5], profile=b"\xc1"), "profile_unreadable"),
        (msgspec.structs.replace(entry(2, [5]), mutations=b"123"), "malformed"),
    ],
)
def test_what_cannot_be_applied_has_the_rank_loaded_anew(bad: FeedEntry, reason: str) -> None:
    b = book()
    b.take(entry(1, [1, 2]), 0.0)
    b.flush()
    b.take(bad, 0.0)
    b.flush()
    assert b.counters[f"load_{reason}"] == 1
    assert list(b.wanted) == [KEY]
    assert held(b, range(1, 9)) == set()  # under-report until it is loaded
    b.take(entry(4, [6]), 0.0)  # before its load begins: the load will see it
    view = b.begin_load(KEY)
    assert view is not None
    b.take(entry(5, [7]), 0.0)
    b.take(entry(6, [8]), 0.0)
    b.position(view, 1, 5, PACKED)
    b.add_blocks(view, np.frombuffer(entry(0, [1, 6, 7]).mutations, MUTATION))
    b.end_load(view, 5, 5.0, 0.0)
    assert held(b, range(1, 9)) == {1, 6, 7, 8}
    assert (view.revision, view.last_seq) == (6, 6)


def test_a_flood_while_loading_starts_the_load_over() -> None:
    b = book()
    b.take(entry(2, []), 0.0)
    view = b.begin_load(KEY)
    assert view is not None
    number = view.load
    big = msgspec.structs.replace(entry(3, []), mutations=b"\0" * (1 << 20))
    for _ in range(40):
        b.take(big, 0.0)
    assert b.counters["load_buffer_full"] == 1
    assert view.phase is Phase.WANTED
    assert not view.buffer
    assert b.begin_load(KEY) is view
    assert view.load != number


def test_a_gone_rank_of_an_older_life_does_not_take_the_new_one() -> None:
    b = book()
    b.take(entry(1, [1], epoch=5, clear=True), 0.0)
    b.flush()
    b.take(FeedEntry(worker=KEY, epoch=4, revision=0, kind=Kind.GONE), 0.0)
    assert held(b, [1]) == {1}
    b.take(FeedEntry(worker=KEY, epoch=5, revision=0, kind=Kind.GONE), 0.0)
    assert KEY not in b.views


async def test_a_rank_removed_while_its_record_is_read_is_not_made_again(store: Store) -> None:
    """Else its next registration would find it there, and nobody would ever load it."""
    rank = await Rank(store, 1).start()
    book = replica_of(store)._book

    class Removing:
        """The store, in which a rank is removed between the question and the answer."""

        load = store.load

        async def get_worker(self, key: WorkerKey) -> WorkerRecord:
            record = await store.get_worker(key)
            book.drop(key)
            return record

    view = book.describe(await store.get_worker(rank.key), 0.0)
    assert view is not None
    assert book.begin_load(rank.key) is view
    await Loader(Removing(), decode_records).load(book, view)  # type: ignore[arg-type]
    assert rank.key not in book.views
