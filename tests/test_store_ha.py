"""The store over Sentinel, a cluster, TLS and ACL users, with failures under load."""

from __future__ import annotations

import asyncio
import subprocess
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import servers
from conftest import SERVERS, binary_of

from kvindexd.model import BatchDelta, WorkerKey
from kvindexd.store import (
    Diverged,
    Fenced,
    Lease,
    NotRegistered,
    Store,
    StoreDenied,
    StoreOptions,
    StoreUnavailable,
    UnfitServer,
)
from kvindexd.store.keys import feed_key, shard_of, slot_of_shard, worker_keys
from kvindexd.store.pool import Connector
from kvindexd.store.replies import ACL
from kvindexd.store.url import parse_url

KINDS = [k for k in SERVERS if k in ("valkey", "redis")]
OPTIONS = StoreOptions(shards=6, deadline=20, timeout=1.0, connect_timeout=1.0)


class Ingester:
    """What an ingester does with the store: batches with ascending seq, each a block that stays,
    and after Diverged it acquires anew and goes on after what the store has."""

    def __init__(self, store: Store, key: WorkerKey) -> None:
        self.store, self.key = store, key
        self.next_seq = 0
        self.setbacks: Counter[str] = Counter()
        self.stop = asyncio.Event()
        self.lease: Lease | None = None

    async def run(self) -> None:
        while not self.stop.is_set():
            try:
                if self.lease is None:
                    self.lease = await self.store.acquire(self.key, "ingester", 60_000)
                    self.next_seq = self.lease.last_seq + 1
                await self.store.apply(self.lease, [block(self.next_seq)])
                self.next_seq += 1
            except (Diverged, Fenced, NotRegistered) as e:
                self.setbacks[type(e).__name__] += 1
                self.lease = None
            except StoreUnavailable:
                self.setbacks["StoreUnavailable"] += 1
            await asyncio.sleep(0.002)

    async def check(self) -> None:
        """Everything from seq 0 on is stored, once."""
        blocks = {f: r async for f, r in (await self.store.load(self.key)).blocks()}
        assert blocks == {b"%d" % s: b"r%d" % s for s in range(self.next_seq)}
        record = await self.store.get_worker(self.key)
        assert (record.revision, record.last_seq) == (self.next_seq, self.next_seq - 1)


def block(seq: int) -> BatchDelta:
    return BatchDelta(seq=seq, ts=float(seq), digest=seq, blocks={b"%d" % seq: b"r%d" % seq})


class Follower:
    """A replica's view: revisions per worker from the feed; loads anew when told to."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.seen: dict[WorkerKey, int] = {}
        self.reloads = 0
        self.holes = 0

    async def run(self, stop: asyncio.Event) -> None:
        positions = await self.store.feed_tail()
        await self.reload(set(positions))
        while not stop.is_set():
            try:
                read = await self.store.read_feed(positions, 200, 1000)
                for shard in read.trimmed:
                    positions[shard] = (await self.store.feed_tail())[shard]
                    await self.reload({shard})
            except StoreUnavailable:
                continue
            for shard, entry_id, entry in read.entries:
                positions[shard] = entry_id
                if entry.kind:
                    continue
                known = self.seen.get(entry.worker, 0)
                if entry.revision > known + 1:
                    self.holes += 1
                self.seen[entry.worker] = max(known, entry.revision)

    async def reload(self, shards: set[int]) -> None:
        self.reloads += 1
        for record in await self.store.list_workers():
            if shard_of(record.key, self.store.shards) in shards:
                self.seen[record.key] = record.revision


async def under_load(store: Store, keys: list[WorkerKey], disturb: Any) -> list[Ingester]:
    """Ingesters and a follower at work before, during and after `disturb()`; then checked."""
    for key in keys:
        await store.register(key, b"r", False, 0.0)
    ingesters = [Ingester(store, k) for k in keys]
    follower = Follower(store)
    stop = asyncio.Event()
    async with asyncio.TaskGroup() as group:
        for ingester in ingesters:
            group.create_task(ingester.run())
        group.create_task(follower.run(stop))
        await progress(ingesters, 20)
        await disturb()
        await progress(ingesters, 50)
        for ingester in ingesters:
            ingester.stop.set()
            await ingester_done(ingester)
        async with asyncio.timeout(30):
            while any(follower.seen.get(i.key) != i.next_seq for i in ingesters):  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        stop.set()
    for ingester in ingesters:
        await ingester.check()
    assert follower.holes == 0
    return ingesters


async def ingester_done(ingester: Ingester) -> None:
    """Until its last write has returned."""
    lease = ingester.lease
    if lease is not None:
        async with asyncio.timeout(30), lease.lock:
            pass
    await asyncio.sleep(0.01)


async def progress(ingesters: list[Ingester], batches: int) -> None:
    """Until every ingester has written so many more batches."""
    goals = [(i, i.next_seq + batches) for i in ingesters]
    async with asyncio.timeout(60):
        while any(i.next_seq < goal for i, goal in goals):  # noqa: ASYNC110
            await asyncio.sleep(0.02)


# -- Sentinel -------------------------------------------------------------------------------------


@pytest.fixture(params=KINDS)
def sentinels(request: pytest.FixtureRequest) -> Iterator[servers.SentinelGroup]:
    with servers.start_sentinels(binary_of(request.param)) as group:
        yield group


# Of the slow ways, each on one kind of server: what is tested is our side of it.
@pytest.mark.parametrize(
    ("sentinels", "how"),
    [("valkey", "kill"), ("redis", "kill"), ("redis", "pause"), ("valkey", "order")],
    indirect=["sentinels"],
)
async def test_a_sentinel_failover_while_storing(
    sentinels: servers.SentinelGroup, how: str
) -> None:
    old, new = sentinels.master(), sentinels.replica()

    async def fail_over() -> None:
        if how == "kill":
            old.kill()
        elif how == "pause":
            old.pause()
        else:
            sentinels.sentinels[0]("SENTINEL", "FAILOVER", "kvx")
        await asyncio.to_thread(
            servers.wait_until, lambda: sentinels.master() is new, "failover", 60
        )
        if how != "kill":
            # The old master wakes up and believes in itself until it is demoted: what it takes
            # meanwhile is lost, and its writers must notice.
            old.resume()
            await asyncio.to_thread(
                servers.wait_until, lambda: b"role:slave" in old("INFO", "replication"), "", 60
            )

    try:
        async with Store(sentinels.url, OPTIONS) as store:
            keys = [WorkerKey("", f"w{i}", 0) for i in range(3)]
            ingesters = await under_load(store, keys, fail_over)
            assert store.url.service == "kvx"
            health = await store.verify()
            assert health == (tuple(range(6)), False)
            name = worker_keys(shard_of(keys[0], 6), keys[0].store_id).blocks
            assert new("HLEN", name) == ingesters[0].next_seq
    finally:
        if old.process is not None:
            old.resume()


@pytest.mark.parametrize("sentinels", ["valkey"], indirect=True)
async def test_a_deposed_master_that_still_answers_is_left(
    sentinels: servers.SentinelGroup,
) -> None:
    """Cut off from the sentinels and from its replica it goes on taking writes; connections to it
    are given up all the same, because sentinels are asked again."""
    async with Store(sentinels.url, OPTIONS) as store:
        old, new = sentinels.master(), sentinels.replica()
        await store.register(WorkerKey("", "w", 0), b"r", False, 0.0)
        for s in sentinels.sentinels:
            # As if they could not reach the old master: they monitor the other one from now on.
            s("SENTINEL", "REMOVE", "kvx")
        new("REPLICAOF", "NO", "ONE")
        for s in sentinels.sentinels:
            s("SENTINEL", "MONITOR", "kvx", "127.0.0.1", new.port, 2)
        assert b"role:master" in old("INFO", "replication")

        async def on_new() -> bool:
            await store.register(WorkerKey("", "w2", 0), b"r", False, 0.0)
            keys = worker_keys(shard_of(WorkerKey("", "w2", 0), 6), "/w2/0")
            return bool(new("EXISTS", keys.worker))

        async with asyncio.timeout(20):
            while not await on_new():  # noqa: ASYNC110
                await asyncio.sleep(0.2)


@pytest.mark.parametrize("sentinels", ["redis"], indirect=True)
async def test_sentinels_going_away_do_not_matter(sentinels: servers.SentinelGroup) -> None:
    async with Store(sentinels.url, OPTIONS) as store:
        sentinels.sentinels[0].kill()
        await store.register(WorkerKey("", "a", 0), b"r", False, 0.0)
        sentinels.sentinels[1].kill()
        sentinels.sentinels[2].kill()
        for _ in range(5):
            await store.register(WorkerKey("", "a", 0), b"r", False, 0.0)
            # Not even while connections break: the last master known is still tried.
            sentinels.data[0]("CLIENT", "KILL", "TYPE", "normal")
            await asyncio.sleep(0.5)


async def test_an_unknown_service_is_named() -> None:
    with servers.start_redis() as plain:
        url = f"redis+sentinel://127.0.0.1:{plain.port}/kvx"
        with pytest.raises(StoreUnavailable, match="no master of 'kvx'"):
            async with Store(url, StoreOptions(deadline=1)):
                pass


# -- cluster --------------------------------------------------------------------------------------


@pytest.fixture(params=KINDS)
def cluster(request: pytest.FixtureRequest) -> Iterator[servers.ClusterGroup]:
    with servers.start_cluster(binary_of(request.param), masters=3, replicas=1) as group:
        yield group


def one_key_per_shard(shards: int) -> list[WorkerKey]:
    keys: dict[int, WorkerKey] = {}
    for i in range(1000):
        key = WorkerKey("", f"w{i}", 0)
        keys.setdefault(shard_of(key, shards), key)
    assert len(keys) == shards
    return list(keys.values())


async def test_a_cluster_takes_all_operations(cluster: servers.ClusterGroup) -> None:
    async with Store(cluster.url, OPTIONS) as store:
        owners = {cluster.owner(slot_of_shard(s)).port for s in range(6)}
        assert len(owners) == 3
        for key in one_key_per_shard(6):
            await store.register(key, b"r", False, 0.0)
            lease = await store.acquire(key, "me", 5000)
            tail = await store.feed_tail()
            await store.apply(lease, [block(0), block(1)])
            await store.renew(lease, evidence={"a": 1})
            read = await store.read_feed(tail, 5000, 10)
            while len(read.entries) < 3:
                more = await store.read_feed(
                    {**tail, read.entries[-1][0]: read.entries[-1][1]}, 5000, 10
                )
                read.entries.extend(more.entries)
            assert [e.kind.value for _, _, e in read.entries] == ["", "", "beat"]
            assert (await store.size_of(key)).blocks == 2
            await store.release(lease)
        assert len(await store.list_workers()) == 6
        assert len(await store.leases()) == 6
        for key in one_key_per_shard(6):
            await store.deregister(key)
        assert await store.list_workers() == []


async def test_the_death_of_a_cluster_master_under_load(cluster: servers.ClusterGroup) -> None:
    victim = cluster.nodes[0]

    async def kill() -> None:
        victim.kill()

    async with Store(cluster.url, OPTIONS) as store:
        ingesters = await under_load(store, one_key_per_shard(6), kill)
        assert len(ingesters) == 6
        health = await store.verify()
        assert health.changed
        assert not health.data_lost


async def test_a_slot_that_migrates_under_load(cluster: servers.ClusterGroup) -> None:
    keys = one_key_per_shard(6)
    shard = shard_of(keys[0], 6)
    slot = slot_of_shard(shard)
    source = cluster.owner(slot)
    target = next(n for n in cluster.nodes[:3] if n is not source)

    async def migrate() -> None:
        await asyncio.to_thread(move_slot, cluster, slot, source, target)

    async with Store(cluster.url, OPTIONS) as store:
        await under_load(store, keys, migrate)
        assert target("EXISTS", feed_key(shard)) == 1


def move_slot(
    cluster: servers.ClusterGroup, slot: int, source: servers.Server, target: servers.Server
) -> None:
    """What redis-cli --cluster reshard does, key by key."""
    source_id, target_id = source("CLUSTER", "MYID"), target("CLUSTER", "MYID")
    target("CLUSTER", "SETSLOT", slot, "IMPORTING", source_id)
    source("CLUSTER", "SETSLOT", slot, "MIGRATING", target_id)
    while names := source("CLUSTER", "GETKEYSINSLOT", slot, 1):
        source("MIGRATE", "127.0.0.1", target.port, names[0], 0, 5000)
    target("CLUSTER", "SETSLOT", slot, "NODE", target_id)
    source("CLUSTER", "SETSLOT", slot, "NODE", target_id)
    servers.wait_until(lambda: cluster.owner(slot) is target, "slot moved")


async def test_wrong_kinds_of_url_are_named(cluster: servers.ClusterGroup) -> None:
    node = Store(f"redis://127.0.0.1:{cluster.nodes[0].port}", StoreOptions(shards=6))
    with pytest.raises(UnfitServer, match=r"redis\+cluster://"):
        await node.open()
    await node.close()
    with servers.start_redis() as plain:
        single = Store(f"redis+cluster://127.0.0.1:{plain.port}")
        with pytest.raises(UnfitServer, match="no node of a cluster"):
            await single.open()
        await single.close()


# -- TLS and ACL ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """ca.crt, and server.{crt,key} and client.{crt,key} signed by it."""
    folder = tmp_path_factory.mktemp("tls")

    def openssl(*args: str) -> None:
        subprocess.run(["openssl", *args], cwd=folder, check=True, capture_output=True)

    openssl(
        *("req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=test ca"),
        *("-keyout", "ca.key", "-out", "ca.crt", "-addext", "keyUsage=critical,keyCertSign"),
    )
    for name, alt in (("server", "IP:127.0.0.1"), ("client", "DNS:client")):
        openssl(
            *("req", "-newkey", "rsa:2048", "-nodes", "-subj", f"/CN={name}"),
            *("-keyout", f"{name}.key", "-out", f"{name}.csr"),
        )
        (folder / f"{name}.ext").write_text(f"subjectAltName={alt}\n")
        openssl(
            *("x509", "-req", "-in", f"{name}.csr", "-CA", "ca.crt", "-CAkey", "ca.key"),
            *("-CAcreateserial", "-days", "2", "-out", f"{name}.crt", "-extfile", f"{name}.ext"),
        )
    return folder


@pytest.fixture(params=["no", "yes"])
def tls_server(
    request: pytest.FixtureRequest, certificates: Path
) -> Iterator[tuple[servers.Server, bool]]:
    """A Redis that speaks TLS only, without and with client certificates."""
    folder, port = certificates, servers.free_port()
    args = (
        *servers.VOLATILE,
        *("--port", "0", "--tls-port", str(port), "--tls-auth-clients", request.param),
        *("--tls-cert-file", str(folder / "server.crt")),
        *("--tls-key-file", str(folder / "server.key")),
        *("--tls-ca-cert-file", str(folder / "ca.crt")),
    )
    server = servers.Server(servers.redis_binary(), port, folder, args, plain=False)
    try:
        yield server.start(), request.param == "yes"
    finally:
        server.stop()


async def test_tls(tls_server: tuple[servers.Server, bool], certificates: Path) -> None:
    server, mutual = tls_server
    url = f"rediss://127.0.0.1:{server.port}?ssl_ca_certs={certificates}/ca.crt"
    ours = f"&ssl_certfile={certificates}/client.crt&ssl_keyfile={certificates}/client.key"
    async with Store(url + (ours if mutual else ""), StoreOptions(deadline=5)) as store:
        key = WorkerKey("", "w", 0)
        await store.register(key, b"r", False, 0.0)
        lease = await store.acquire(key, "me", 5000)
        tail = await store.feed_tail()
        await store.apply(lease, [block(s) for s in range(200)])
        assert len((await store.read_feed(tail, 5000, 1000)).entries) == 200
    if mutual:
        with pytest.raises((StoreUnavailable, StoreDenied)):
            async with Store(url, StoreOptions(deadline=1)):
                pass


@pytest.mark.parametrize("tls_server", ["no"], indirect=True)
async def test_connections_share_a_tls_context(
    tls_server: tuple[servers.Server, bool], certificates: Path
) -> None:
    """Making one takes tens of milliseconds, in which nobody is answered."""
    url = parse_url(f"rediss://127.0.0.1:{tls_server[0].port}?ssl_ca_certs={certificates}/ca.crt")
    connector = Connector(url, connect_timeout=5)
    links = [await connector.open(url.endpoints[0]) for _ in range(3)]
    try:
        assert len({id(link._conn.ssl_context.get()) for link in links}) == 1
        connector._context_until = 0.0
        links.append(await connector.open(url.endpoints[0]))
        assert links[-1]._conn.ssl_context.get() is not links[0]._conn.ssl_context.get()
    finally:
        for link in links:
            await link.drop()


@pytest.mark.parametrize("tls_server", ["no"], indirect=True)
async def test_an_untrusted_certificate_is_refused_at_once(
    tls_server: tuple[servers.Server, bool], certificates: Path
) -> None:
    port = tls_server[0].port
    for url in (
        f"rediss://127.0.0.1:{port}",
        f"rediss://localhost:{port}?ssl_ca_certs={certificates}/ca.crt",  # not in the certificate
    ):
        with pytest.raises(StoreDenied, match=r"certificate is not trusted.*ssl_ca_certs"):
            async with asyncio.timeout(5), Store(url, StoreOptions(deadline=30)):
                pass
    relaxed = f"rediss://localhost:{port}?ssl_ca_certs={certificates}/ca.crt"
    async with Store(relaxed + "&ssl_check_hostname=false"):
        pass
    async with Store(f"rediss://127.0.0.1:{port}?ssl_cert_reqs=none"):
        pass


@pytest.fixture
async def guarded(redis_server: servers.Server) -> AsyncIterator[servers.Server]:
    """A server with a user that may just do what kvindexd documents, and one that may not."""
    redis_server("ACL", "SETUSER", "kvx", "reset", "on", ">s3cr3t", *ACL.split())
    redis_server("ACL", "SETUSER", "reader", "reset", "on", ">s3cr3t", "~kvx:*", "+@read")
    yield redis_server
    redis_server("ACL", "DELUSER", "kvx", "reader")


async def test_the_documented_acl_is_enough(guarded: servers.Server) -> None:
    url = f"redis://kvx:s3cr3t@127.0.0.1:{guarded.port}"
    async with Store(url, StoreOptions(deadline=5)) as store:
        key = WorkerKey("", "w", 0)
        await store.register(key, b"r", False, 0.0)
        lease = await store.acquire(key, "me", 5000)
        tail = await store.feed_tail()
        await store.apply(lease, [block(0)])
        await store.renew(lease, evidence={"a": 1})
        assert len((await store.read_feed(tail, 5000, 10)).entries) == 2
        assert [f async for f, _ in (await store.load(key)).blocks()] == [b"0"]
        await store.ask(key, "x")
        await store.set_draining(key, True)
        await store.report_load(key, "s", b"1")
        assert len(await store.list_workers()) == len(await store.leases()) == 1
        await store.size_of(key)
        await store.verify()
        await store.ping()
        await store.reset(key)
        await store.release(lease)
        await store.deregister(key)


@pytest.mark.parametrize(
    ("missing", "operation"),
    [
        ("-info", "'info'"),
        ("-evalsha -eval", "'meta'"),
        ("resetkeys ~other:*", "'meta'"),
        ("-xadd", "'register'"),
        ("-hgetall", "'get_worker'"),
    ],
)
async def test_a_missing_right_is_told_with_all_that_are_needed(
    guarded: servers.Server, missing: str, operation: str
) -> None:
    guarded("ACL", "SETUSER", "kvx", *missing.split())
    url = f"redis://kvx:s3cr3t@127.0.0.1:{guarded.port}"

    async def use() -> None:
        async with asyncio.timeout(5), Store(url, StoreOptions(deadline=30)) as store:
            key = WorkerKey("", "w", 0)
            await store.register(key, b"r", False, 0.0)
            await store.get_worker(key)

    with pytest.raises(StoreDenied) as e:
        await use()
    assert f"{operation} is not allowed" in str(e.value)
    assert f"the ACL user needs: {ACL}" in str(e.value)


@pytest.mark.parametrize(
    ("user", "says"),
    [("kvx:wrong", "check user and password"), ("nobody:x", "check user and password"),
     ("reader:s3cr3t", "ACL user needs")],
)  # fmt: skip
async def test_a_refusal_is_told_at_once_and_without_the_secret(
    guarded: servers.Server, user: str, says: str
) -> None:
    url = f"redis://{user}@127.0.0.1:{guarded.port}"
    with pytest.raises(StoreDenied, match=says) as e:
        async with asyncio.timeout(5), Store(url, StoreOptions(deadline=30)):
            pass
    assert "s3cr3t" not in str(e.value)
    assert "wrong" not in str(e.value).replace("WRONGPASS", "")
