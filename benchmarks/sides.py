"""The two servers under measurement: kvindexd, and Dynamo's standalone indexer as the peer."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grpc

from benchmarks.measure import children, cpu_seconds, resident_bytes, until
from kvindexd.v1 import index_pb2 as pb
from kvindexd.v1 import index_pb2_grpc as rpc

MODEL = "m"


class Side:
    """One server with everything it started."""

    name = ""
    process: subprocess.Popen[Any]

    def pids(self) -> list[int]:
        """All server processes, a store of its own included."""
        return children(self.process.pid)

    def cpu(self) -> float:
        """Seconds of CPU so far."""
        return cpu_seconds(self.pids())

    def resident(self) -> int:
        """Resident bytes of all its processes."""
        return resident_bytes(self.pids())

    def stop(self) -> None:
        """End it."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(15)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()


class Ours(Side):
    """`kvindexd serve` (or another role) with the store that it starts itself."""

    name = "kvindexd"

    def __init__(self, role: str = "serve", url: str = "", **settings: Any) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="kvx-bench"))
        given = {
            "server.listen": "127.0.0.1:0",
            "metrics.listen": "",
            "ext_proc.listen": "",
            "index.data_dir": str(self._folder),
            "redis.url": url,
        } | {k.replace("__", "."): v for k, v in settings.items()}
        environment = {k: v for k, v in os.environ.items() if not k.startswith("KVINDEXD_")}
        for key, value in given.items():
            text = value if isinstance(value, str) else json.dumps(value)
            environment["KVINDEXD_" + key.upper().replace(".", "__")] = text
        self.started = time.monotonic()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "kvindexd.cli.main", role],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env=environment,
            text=True,
        )
        self._ready: dict[str, Any] = {}
        self._tail: list[str] = []
        threading.Thread(target=self._read, daemon=True).start()
        until(lambda: self._ready or self.process.poll() is not None, "kvindexd ready", 120)
        if not self._ready:
            raise RuntimeError("kvindexd did not start:\n" + "".join(self._tail))
        self.ready_after = time.monotonic() - self.started
        self.target = str(self._ready.get("grpc", ""))
        self.metrics = str(self._ready.get("metrics", ""))
        if self.target:
            self.channel = grpc.insecure_channel(self.target)
            self.admin: Any = rpc.KVIndexAdminStub(self.channel)
            self.index: Any = rpc.KVIndexStub(self.channel)

    def _read(self) -> None:
        for line in self.process.stderr or ():
            self._tail = [*self._tail[-200:], line]
            if '"ready"' in line:
                with contextlib.suppress(json.JSONDecodeError):
                    record = json.loads(line)
                    if record.get("event") == "ready":
                        self._ready = record

    def log(self) -> str:
        """The last lines it wrote."""
        return "".join(self._tail)

    def register(self, endpoints: Sequence[str], first: int = 0) -> None:
        """One worker per event endpoint: w0, w1, ..., or from another number on."""
        for i, endpoint in enumerate(endpoints, first):
            worker = pb.Worker(
                worker_id=f"w{i}",
                model=MODEL,
                address=f"10.0.{i // 250}.{i % 250 + 1}:8000",
                kv_events_endpoint=endpoint,
            )
            self.admin.RegisterWorker(pb.RegisterWorkerRequest(worker=worker), timeout=30)

    def index_stats(self) -> dict[str, int]:
        """Sizes of the replica."""
        stats = self.admin.IndexStats(pb.IndexStatsRequest(), timeout=30)
        return {"blocks": stats.blocks, "entries": stats.entries, "bytes": stats.bytes}

    def wait_applied(self, last: Sequence[int], deadline: float = 300.0) -> None:
        """Until queries see the batch with this number of every rank (-1: none yet)."""
        wanted = {f"w{i}": seq for i, seq in enumerate(last)}

        def seen() -> bool:
            request = pb.ListWorkersRequest(model=MODEL, include_stale=True)
            got = {w.worker_id: w.last_seq for w in self.admin.ListWorkers(request).workers}
            return all(got.get(name) == seq for name, seq in wanted.items())

        until(seen, "kvindexd has applied everything", deadline)

    def stop(self) -> None:
        """End it and remove its folder."""
        with contextlib.suppress(AttributeError):
            self.channel.close()
        super().stop()
        shutil.rmtree(self._folder, ignore_errors=True)


PEER_PACKAGE = "ai-dynamo-runtime==1.6.1"


def peer_python(install: bool = True) -> str | None:
    """The interpreter of the peer's own venv, made on first use; None where it cannot be had."""
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    venv = cache / "kvindexd-bench" / PEER_PACKAGE.replace("==", "-")
    python = venv / "bin" / "python"
    if (venv / "installed").exists():
        return str(python)
    if not install:
        return None
    venv.parent.mkdir(parents=True, exist_ok=True)
    try:
        subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True)
        subprocess.run([str(python), "-m", "pip", "install", "-q", PEER_PACKAGE], check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    (venv / "installed").touch()
    return str(python)


def only_loopback() -> bool:
    """Whether this process sees no network but loopback: the peer listens on every interface."""
    return [name for _, name in socket.if_nameindex()] == ["lo"]


class Peer(Side):
    """Dynamo's standalone indexer."""

    name = "peer"

    def __init__(self, python: str, threads: int = 4) -> None:
        if not only_loopback():
            raise RuntimeError("the peer may run only where there is no network but loopback")
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = int(probe.getsockname()[1])
        self.process = subprocess.Popen(
            [python, "-m", "dynamo.indexer", "--port", str(self.port), "--threads", str(threads)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        until(self._listens, "the peer listens", 60)

    def _listens(self) -> bool:
        if self.process.poll() is not None:
            raise RuntimeError("the peer ended at once")
        try:
            self.ask("GET", "/workers")
        except OSError:
            return False
        return True

    def ask(self, method: str, path: str, body: Any = None) -> Any:
        """One HTTP call; the decoded answer."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            data = None if body is None else json.dumps(body)
            connection.request(method, path, data, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            text = answer.read()
            if answer.status >= 300:
                raise RuntimeError(f"peer: {method} {path}: {answer.status} {text[:200]!r}")
            return json.loads(text) if text else None
        finally:
            connection.close()

    def register(self, endpoints: Sequence[str], first: int = 0) -> None:
        """Instances 1, 2, ... of the same event endpoints."""
        for i, endpoint in enumerate(endpoints, first):
            body = {
                "instance_id": i + 1,
                "endpoint": endpoint,
                "model_name": MODEL,
                "block_size": 16,
            }
            self.ask("POST", "/register", body)
        until(self._active, "the peer's workers are active")
        time.sleep(0.4)  # it says so a little before it listens

    def _active(self) -> bool:
        return "active" in json.dumps(self.ask("GET", "/workers"))

    def wait_scores(self, tokens: Sequence[int], ranks: int, deadline: float = 300.0) -> None:
        """Until `ranks` instances hold something of a prompt, and no more is coming in."""

        def settled() -> bool:
            body = {"token_ids": list(tokens), "model_name": MODEL}
            first = self.ask("POST", "/query", body).get("scores", {})
            if len(first) < ranks:
                return False
            time.sleep(0.3)
            return bool(first == self.ask("POST", "/query", body).get("scores"))

        until(settled, f"the peer scores {ranks} workers", deadline)
