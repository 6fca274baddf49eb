"""What sources find, in a real store: several processes at once, outages, leases that lapse."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import servers
from daemon import Daemon
from reliability import QUICK
from reports import until

from kvindexd import registration as registrations
from kvindexd.discovery.forgetting import Forgetting
from kvindexd.discovery.member import Member
from kvindexd.discovery.metrics import DiscoveryMetrics
from kvindexd.discovery.reconciler import Reconciler
from kvindexd.discovery.wanted import Owner, Wanted
from kvindexd.model import WorkerKey
from kvindexd.registration import InvalidRegistration, Registration
from kvindexd.store import Changed, NotRegistered, Store, StoreOptions
from kvindexd.telemetry import Metrics
from kvindexd.v1 import index_pb2 as pb

SOURCE = "kubernetes:ns/app=vllm"
CONFIG = Owner("config", frozenset({""}), sweeps=False, insists=False)


def reg(name: str = "w", **fields: Any) -> Registration:
    base = {"worker_id": name, "model": "m", "kv_events_endpoint": "tcp://127.0.0.1:1"}
    return Registration(**(base | fields))


def key(name: str = "w") -> WorkerKey:
    return WorkerKey("", name, 0)


class Process:
    """One daemon's discovery: a reconciler with a metrics registry of its own."""

    def __init__(self, store: Store, resync: float = 60.0) -> None:
        self.store = store
        self.metrics = Metrics()
        self.shown = DiscoveryMetrics(self.metrics)
        self.refuse = ""
        self.reconciler = Reconciler(store, self.shown, resync, admit=self._admit)

    async def _admit(self, wanted: Registration, _: int) -> None:
        if self.refuse and wanted.worker_id == self.refuse:
            raise InvalidRegistration("not this one")

    def member(self, owner: Owner | None = None) -> Member:
        return self.reconciler.member(owner or Owner(SOURCE))

    async def see(self, *wanted: Registration | Wanted, owner: Owner | None = None) -> None:
        """A source says what there is, and that is dealt with."""
        member = self.member(owner)
        member.publish(w if isinstance(w, Wanted) else Wanted(w) for w in wanted)
        await self.reconciler.step()

    def count(self, name: str, **labels: str) -> float:
        return self.metrics.registry.get_sample_value(f"kvindexd_{name}", labels) or 0.0


@pytest.fixture(scope="module")
def server() -> Iterator[servers.Server]:
    with servers.server(servers.VALKEY) as s:
        yield s


@contextlib.asynccontextmanager
async def opened(server: servers.Server) -> AsyncIterator[Store]:
    options = StoreOptions(timeout=0.5, connect_timeout=0.5, deadline=1.0)
    async with Store(server.url, options) as store:
        yield store


@pytest.fixture
async def store(server: servers.Server) -> AsyncIterator[Store]:
    server("FLUSHALL")
    async with opened(server) as s:
        yield s


async def known(store: Store, name: str = "w") -> Registration | None:
    try:
        return registrations.decode((await store.get_worker(key(name))).registration)
    except NotRegistered:
        return None


async def names(store: Store) -> set[str]:
    return {k.worker_id for k in await store.leases()}


async def test_two_processes_with_one_source_do_everything_once(store: Store) -> None:
    a, b = Process(store), Process(store)
    tail = await store.feed_tail()
    for process in (a, b):
        await process.see(reg(), reg("v"))
    old = reg(instance="uid-1")
    await asyncio.gather(a.see(old), b.see(old))
    new = reg(instance="uid-2")
    await asyncio.gather(a.see(new), b.see(new))
    await asyncio.gather(a.see(), b.see())
    assert await names(store) == set()
    kinds = [e.kind.value for _, _, e in (await store.read_feed(tail, 0, 100)).entries]
    # w and v; v goes and w is replaced, each order; w is replaced again; w goes.
    assert sorted(kinds) == sorted(["reg"] * 2 + ["gone"] + ["clear", "reg"] * 2 + ["gone"])


async def test_a_process_that_is_behind_undoes_nothing(store: Store) -> None:
    ahead, behind = Process(store), Process(store)
    for process in (ahead, behind):
        await process.see(reg(instance="uid-1"), reg("v"))
    await ahead.see(reg(instance="uid-1"))
    await behind.see(reg(instance="uid-1"), reg("v"), reg("other"))
    assert await names(store) == {"w", "other"}  # v is not brought back
    await ahead.see(reg(instance="uid-2"))
    await behind.see(reg("other"))
    assert (await known(store)) == reg(instance="uid-2", source=SOURCE)
    assert (await store.get_worker(key())).epoch == 2


async def test_what_others_removed_comes_back_at_the_resync(store: Store) -> None:
    process = Process(store, resync=0.05)
    running = asyncio.create_task(process.reconciler.run())
    process.member().publish([Wanted(reg(), draining=True)])
    process.member(CONFIG).publish([Wanted(reg("configured"))])
    await until(lambda: process.count("discovery_changes_total", source=SOURCE, change="added"))
    await until(lambda: process.count("discovery_changes_total", source="config", change="added"))
    await store.deregister(key("configured"))
    await store.deregister(key())
    added = {"source": SOURCE, "change": "added"}
    await until(lambda: process.count("discovery_changes_total", **added) >= 2)
    await until(
        lambda: process.count("discovery_changes_total", **added | {"change": "draining"}) >= 2
    )
    assert (await store.get_worker(key())).draining
    assert await names(store) == {"w"}  # a configured worker stays removed
    running.cancel()
    await asyncio.wait((running,))


async def test_a_new_process_sweeps_what_bears_its_name(store: Store) -> None:
    await Process(store).see(reg(), reg("left"))
    await store.register(key("called"), reg("called").encode(), False, 0.0)
    await Process(store).see(reg("theirs"), owner=Owner("dns:h"))
    await Process(store).see(reg())
    assert await names(store) == {"w", "called", "theirs"}
    # Many processes have [[workers]]: what one of them does not name is another's.
    await Process(store).see(reg("c1"), owner=CONFIG)
    again = Process(store)
    await again.see(reg("c2"), owner=CONFIG)
    assert await names(store) == {"w", "called", "theirs", "c1", "c2"}
    await again.see(owner=CONFIG)
    assert await names(store) == {"w", "called", "theirs", "c1"}


async def test_a_sweep_waits_for_the_source_to_look(store: Store) -> None:
    a, b = Process(store), Process(store)
    await a.see(reg())
    await b.see(reg(), reg("new"), reg("left"))
    a.reconciler.sweep()
    await a.reconciler.step()
    assert await names(store) == {"w", "new", "left"}  # b may know more than a
    await a.see(reg(), reg("new"))
    assert await names(store) == {"w", "new"}
    await b.see(reg(), reg("new"))
    a.reconciler.sweep()
    a.member().works()  # nothing has changed
    await store.register(key("x"), reg("x", source=SOURCE).encode(), False, 0.0)
    await a.reconciler.step()
    assert await names(store) == {"w", "new"}


async def test_drains_only_what_it_drained(store: Store) -> None:
    process = Process(store)
    await process.see(reg())
    await process.see(Wanted(reg(), draining=True))
    record = await store.get_worker(key())
    assert (record.draining, record.drained_by) == (True, SOURCE)
    await process.see(reg())
    assert not (await store.get_worker(key())).draining
    await store.set_draining(key(), True)
    await process.see(Wanted(reg(), draining=True))
    await process.see(reg())
    assert (await store.get_worker(key())).draining  # an operator's mark stays
    # And one that an operator confirms is the operator's from then on.
    await store.set_draining(key(), False)
    await process.see(Wanted(reg(), draining=True))
    await store.set_draining(key(), True)
    await process.see(reg())
    assert (await store.get_worker(key())).draining


async def test_what_must_not_be_registered_is_not_and_is_tried_again(store: Store) -> None:
    process = Process(store, resync=0.05)
    process.refuse = "w"
    await process.see(reg(), reg("v"))
    assert await names(store) == {"v"}
    assert process.count("discovery_errors_total", source=SOURCE) == 1
    assert [r.worker_id for r in process.reconciler.owned()] == ["v"]
    running = asyncio.create_task(process.reconciler.run())
    await until(lambda: process.count("discovery_errors_total", source=SOURCE) >= 2)
    process.refuse = ""
    await until(lambda: len(process.reconciler.owned()) == 2)
    assert await names(store) == {"v", "w"}
    running.cancel()
    await asyncio.wait((running,))


async def test_an_invalid_worker_spoils_itself_alone(store: Store) -> None:
    process = Process(store)
    bad = reg("bad", kv_events_endpoint="tcp://nowhere")
    await process.see(reg(), bad, reg(topic="twice"))
    assert (await known(store)) == reg(source=SOURCE)  # the first of two counts
    assert await names(store) == {"w"}
    assert process.count("discovery_errors_total", source=SOURCE) == 2
    await process.see(reg(), bad, reg(topic="twice"))
    assert process.count("discovery_errors_total", source=SOURCE) == 2


async def test_a_store_that_is_away_is_waited_for(server: servers.Server, store: Store) -> None:
    process = Process(store)
    await process.see(reg("before"))
    running = asyncio.create_task(process.reconciler.run())
    server.pause()
    try:
        process.member().publish([Wanted(reg())])
        await until(lambda: process.count("discovery_errors_total", source=SOURCE))
    finally:
        server.resume()
    added = {"source": SOURCE, "change": "added"}
    await until(lambda: process.count("discovery_changes_total", **added) >= 2)
    await until(lambda: process.count("discovery_changes_total", source=SOURCE, change="removed"))
    assert await names(store) == {"w"}
    running.cancel()
    await asyncio.wait((running,))


async def test_conditional_writes(store: Store) -> None:
    first, second = reg().encode(), reg(topic="x").encode()
    await store.register(key(), first, False, 0.0, b"")
    with pytest.raises(Changed):
        await store.register(key(), second, True, 0.0, b"")
    await store.register(key(), second, True, 0.0, first)
    assert not await store.deregister(key(), first)
    assert await known(store) == reg(topic="x")
    assert await store.deregister(key(), second)
    with pytest.raises(Changed):
        await store.register(key(), first, False, 0.0, second)
    assert await names(store) == set()


async def test_only_configured_workers_without_an_owner_are_forgotten(store: Store) -> None:
    process = Process(store)
    for owner, worker in ((CONFIG, "silent"), (CONFIG, "owned"), (Owner("dns:h"), "found")):
        await process.see(*process_view(process, owner), reg(worker), owner=owner)
    await store.register(key("called"), reg("called").encode(), False, 0.0)
    await store.acquire(key("owned"), "me", 60_000)
    lapsed = await store.acquire(key("silent"), "me", 60_000)
    await store.release(lapsed)
    forgetting = Forgetting(store, process.shown)
    running = asyncio.create_task(forgetting.run())
    forgetting.set(0.2)
    removed = {"source": "leases", "change": "removed"}
    await until(lambda: process.count("discovery_changes_total", **removed) == 1)
    assert await names(store) == {"owned", "found", "called"}
    running.cancel()
    await asyncio.wait((running,))


def process_view(process: Process, owner: Owner) -> list[Wanted]:
    """What an owner wants so far."""
    return list(process.member(owner).view.values())


def test_a_sidecar_comes_and_goes(server: servers.Server, tmp_path: Path) -> None:
    """Processes: a scorer forgets a frozen sidecar's worker; once it goes on, it brings it back."""
    server("FLUSHALL")
    worker = {
        "worker_id": "side",
        "model": "m",
        "address": "h:1",
        "kv_events_endpoint": "tcp://127.0.0.1:1",
    }
    found = tmp_path / "found.json"
    found.write_text("[]")
    settings = QUICK | {
        "redis.url": server.url,
        "discovery.resync": 0.3,
        "discovery.files": [str(found)],
        "discovery.file_interval": 0.05,
    }
    scorer = Daemon(
        "scorer", **settings | {"discovery.files": []}, discovery__forget_after=1.6
    ).start(wait=False)
    sidecar = Daemon("sidecar", **settings, workers=[worker])
    try:
        sidecar.start()
        scorer.until(lambda: scorer.ready, "the scorer")
        owned = scorer.until(lambda: scorer.worker("side").owner, "the sidecar's lease")
        assert f":{sidecar.process.pid}:" in owned  # type: ignore[union-attr]
        assert scorer.worker("side").source == "config"
        sidecar.pause()
        gone = scorer.until(lambda: scorer.events("worker_gone"), "forgetting")
        assert (gone[0]["worker"], gone[0]["source"]) == ("side#0", "leases")
        sidecar.resume()
        again = scorer.until(lambda: scorer.worker("side").owner, "the sidecar's lease again")
        assert again == owned
        # What it finds in a file is its own to follow as well, and to let go.
        found.write_text(json.dumps([worker | {"worker_id": "filed"}]))
        owned = scorer.until(lambda: scorer.worker("filed").owner, "its lease")
        assert f":{sidecar.process.pid}:" in owned  # type: ignore[union-attr]
        found.write_text("[]")

        def ids() -> list[str]:
            request = pb.ListWorkersRequest(include_stale=True)
            return [w.worker_id for w in scorer.admin.ListWorkers(request, timeout=10).workers]

        scorer.until(lambda: ids() == ["side"], "the file's worker to be gone")
    finally:
        for daemon in (sidecar, scorer):
            daemon.stop()
