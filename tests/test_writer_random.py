"""RankWriter under everything at once: the store ends up as the memory, and both as the stream."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Iterator

import pytest
from proxies import Proxy
from reliability import removed, stored
from servers import Server, start_valkey

from kvindexd.ingest.actions import SequencerState
from kvindexd.ingest.counting import RankCounters
from kvindexd.ingest.frame import Frame
from kvindexd.ingest.writer import RankWriter
from kvindexd.model import EngineHash, WorkerKey
from kvindexd.rank_state import Options
from kvindexd.records import pack
from kvindexd.registering import register
from kvindexd.registration import Registration
from kvindexd.residency import Residency
from kvindexd.store import Store, StoreError, StoreFull, StoreOptions
from kvindexd.telemetry import Metrics
from kvindexd.testing.wire import encode_batch
from kvindexd.wire import decode_batch

KEY = WorkerKey("", "w0", 0)
WHO = Registration(
    worker_id="w0", model="m", address="127.0.0.1:1", kv_events_endpoint="tcp://127.0.0.1:2"
)
OPTIONS = StoreOptions(timeout=0.3, deadline=0.4, connections=4)
STEPS = 150


@pytest.fixture(scope="module")
def valkey() -> Iterator[Server]:
    with start_valkey() as server:
        yield server


class Engine:
    """One incarnation after the other; `frames`: all of the current one, from number 0."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._life = 0
        self.frames: list[Frame] = []

    def restart(self) -> None:
        self._life += 1
        self.frames = []

    def publish(self) -> Frame:
        rng, seq = self._rng, len(self.frames)
        events = []
        for _ in range(rng.randrange(1, 4)):
            first = rng.randrange(1, 400)
            if rng.random() < 0.3:
                events.append(removed(*rng.sample(range(400), 5)))
            else:
                root = {"parent_block_hash": None, "block_size": 16}
                events.append(stored(first, rng.randrange(1, 30)) | root)
        payload = encode_batch(1.0 + seq, events)
        frame = Frame(b"", seq, payload, 1.0 + seq, 1000 * self._life + seq + 1, 0.0)
        self.frames.append(frame)
        return frame

    def truth(self) -> Residency:
        """What all of it comes to, without a store."""
        residency = Residency(Options())
        for frame in self.frames:
            residency.apply(decode_batch(frame.payload), seq=frame.seq, digest=0, now=1.0)
        return residency


class Owner:
    """Applies an engine's frames in order, as a session does, under one lease after the other."""

    def __init__(self, store: Store, engine: Engine, valkey: Server) -> None:
        self._store = store
        self._valkey = valkey
        self._engine = engine
        self.writer: RankWriter | None = None
        self._writing: asyncio.Task[None] | None = None
        self._next = 0

    async def take_over(self) -> RankWriter:
        """Own the rank, load what is stored, and go on where it stands."""
        while self.writer is None:
            try:
                await self._store.verify()
                await register(self._store, WHO, restoring=True)
                lease = await self._store.acquire(KEY, "a", 10_000)
                counters = RankCounters(str(KEY), Metrics())
                one = RankWriter(self._store, lease, Options(), WHO, counters, SequencerState)
                if lease.intact:
                    await one.load(await self._store.load(KEY))
            except StoreFull:  # and emptied: nobody can register
                self._valkey("CONFIG", "SET", "maxmemory", "0")
            except StoreError:
                await asyncio.sleep(0.01)
            else:
                self._resume(one)
        return self.writer

    def _resume(self, one: RankWriter) -> None:
        last, frames = one.lease.last_seq, self._engine.frames
        known = last < len(frames) and (last < 0 or frames[last].digest == one.lease.last_digest)
        self._next = last + 1 if known and one.lease.intact else 0
        if not self._next:
            one.reset(incarnation=True)
        self.writer = one
        self._writing = asyncio.create_task(one.run())

    def restarted(self) -> None:
        """The engine is another one, and that was noticed."""
        self._next = 0
        if self.writer is not None:
            self.writer.reset(incarnation=True)

    async def catch_up(self) -> None:
        """Apply what there is; takes the rank over first if it must."""
        if self._writing is not None and self._writing.done():
            await self.hand_over()
        one = await self.take_over()
        while self._next < len(self._engine.frames) and not self._ended():
            frame = self._engine.frames[self._next]
            self._next += 1
            await one.apply(frame)
            one.wake()
            room = asyncio.create_task(one.room())
            assert self._writing is not None
            await asyncio.wait((room, self._writing), return_when=asyncio.FIRST_COMPLETED)
            room.cancel()

    def _ended(self) -> bool:
        return self._writing is None or self._writing.done()

    async def hand_over(self) -> None:
        """The session ends at whatever it is doing, and saves what it can."""
        one, task = self.writer, self._writing
        self.writer = self._writing = None
        if one is None or task is None:
            return
        task.cancel()
        await asyncio.wait((task,))
        if not task.cancelled() and not isinstance(task.exception(), StoreError):
            raise AssertionError("the writer failed") from task.exception()
        with contextlib.suppress(StoreError, TimeoutError):
            async with asyncio.timeout(0.2):
                one.save()
                await one.flush()


async def trouble(rng: random.Random, valkey: Server, proxy: Proxy, owner: Owner, n: int) -> None:
    """One of the first `n` things that happen to a store or to its owner."""
    match rng.randrange(n):
        case 0:
            proxy.lose_replies += 1
        case 1:
            proxy.lose_requests += 1
        case 2:
            proxy.delay = rng.choice([0.0, 0.0, 0.005])
        case 3:
            valkey("FLUSHALL")
        case 4:
            valkey("DEL", rng.choice(["kvx:{0}:b:/w0/0", "kvx:{0}:w:/w0/0", "kvx:{0}:p:/w0/0"]))
        case 5:
            await owner.hand_over()
        case 6 if owner.writer is not None:
            owner.writer.save()
        case 8:
            valkey("CONFIG", "SET", "maxmemory", "1mb")
        case 9:
            valkey("CONFIG", "SET", "maxmemory", "0")
        case _:
            await asyncio.sleep(rng.choice([0, 0.001, 0.01]))


def packed(residency: Residency) -> dict[EngineHash, bytes]:
    return {name: pack(block) for name, block in residency.holdings.blocks.items()}


@pytest.mark.parametrize("seed", [1, 17, 18, 21])
async def test_whatever_happens_the_store_ends_up_as_the_stream(valkey: Server, seed: int) -> None:
    """Seed 1: the server is full now and then too, which costs what it could not take."""
    full = seed == 1
    valkey("CONFIG", "SET", "maxmemory", "0")
    valkey("FLUSHALL")
    rng = random.Random(seed)
    engine = Engine(rng)
    async with Proxy(valkey.port) as proxy, Store(proxy.url, OPTIONS) as store:
        owner = Owner(store, engine, valkey)
        async with asyncio.timeout(30):
            for _ in range(STEPS):
                engine.publish()
                await owner.catch_up()
                if rng.random() < 0.4:
                    await trouble(rng, valkey, proxy, owner, 10 if full else 8)
                if rng.random() < 0.1:
                    await asyncio.sleep(0)  # a write is under way
                    engine.restart()
                    owner.restarted()
                    await asyncio.sleep(rng.choice([0.0, 0.003, 0.01]))
            valkey("CONFIG", "SET", "maxmemory", "0")
            proxy.delay, proxy.lose_replies, proxy.lose_requests = 0.0, 0, 0
            engine.publish()
            await owner.catch_up()
            one = await owner.take_over()
            one.save()
            one.wake()
            while one._flight or one._queue:
                await asyncio.sleep(0.002)
                await owner.catch_up()
                one = await owner.take_over()
            held = packed(one.residency)
            truth = packed(engine.truth())
            assert held == truth or (full and held.keys() <= truth.keys())
            await owner.hand_over()
            other = await owner.take_over()
            assert other.lease.last_seq == engine.frames[-1].seq
            assert packed(other.residency) == held
            await owner.hand_over()
