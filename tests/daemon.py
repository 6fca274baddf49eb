"""A real `kvindexd` process for tests: started on free ports, asked, stopped or killed."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc

from kvindexd.v1 import index_pb2 as pb
from kvindexd.v1 import index_pb2_grpc as rpc

DEADLINE = 30.0


class Daemon:
    """One process. `settings`: dotted key -> value, given as environment variables."""

    def __init__(self, role: str = "serve", **settings: Any) -> None:
        self.role = role
        self.settings = {
            "server.listen": "127.0.0.1:0",
            "metrics.listen": "127.0.0.1:0",
            "ext_proc.listen": "127.0.0.1:0",
            # Tests count lines; test_logs.py has what the default does.
            "log.repeat_seconds": 0,
        } | {key.replace("__", "."): value for key, value in settings.items()}
        self.process: subprocess.Popen[str] | None = None
        self.records: list[dict[str, Any]] = []
        self.other: list[str] = []
        self.ready: dict[str, Any] = {}
        self._reader: threading.Thread | None = None
        self._channel: grpc.Channel | None = None

    def start(self, wait: bool = True) -> Daemon:
        """Start the process; returns when it says that it is ready."""
        environment = {k: v for k, v in os.environ.items() if not k.startswith("KVINDEXD_")}
        for key, value in self.settings.items():
            name = "KVINDEXD_" + key.upper().replace(".", "__")
            environment[name] = value if isinstance(value, str) else json.dumps(value)
        self.records, self.other, self.ready = [], [], {}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "kvindexd.cli.main", self.role],
            stderr=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            env=environment,
            text=True,
        )
        self._reader = threading.Thread(target=self._read, args=(self.process,), daemon=True)
        self._reader.start()
        if wait:
            self.until(lambda: self.ready or self.process.poll() is not None, "ready")  # type: ignore[union-attr]
            if not self.ready:
                raise AssertionError("kvindexd did not start:\n" + self.log())
        return self

    def _read(self, process: subprocess.Popen[str]) -> None:
        for line in process.stderr or ():
            try:
                record = json.loads(line)
            except json.JSONDecodeError:
                self.other.append(line)
                continue
            if isinstance(record, dict):
                self.records.append(record)
                if record.get("event") == "ready":
                    self.ready = record

    def log(self) -> str:
        """What it said so far."""
        return "\n".join([*map(json.dumps, self.records[-60:]), *self.other[-60:]])

    def events(self, name: str) -> list[dict[str, Any]]:
        """Log lines of one event."""
        return [r for r in self.records if r.get("event") == name]

    def until(self, condition: Callable[[], Any], what: str, deadline: float = DEADLINE) -> Any:
        """Wait for a condition; on failure the message has the daemon's log."""
        end = time.monotonic() + deadline
        problem: Any = None
        while time.monotonic() < end:
            try:
                if found := condition():
                    return found
                problem = found
            except grpc.RpcError as e:
                problem = e
            time.sleep(0.01)
        raise AssertionError(f"{what}: not within {deadline} s; last: {problem!r}\n{self.log()}")

    # -- ending -------------------------------------------------------------------------------

    def stop(self, how: int = signal.SIGTERM) -> int:
        """Signal the process and wait for its end; the exit status."""
        self._close_channel()
        if self.process is None:
            return 0
        self.process.send_signal(how)
        try:
            status = self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise AssertionError(f"still running 20 s after signal {how}\n{self.log()}") from None
        if self._reader is not None:
            self._reader.join(5)
        self.process = None
        return status

    def kill(self) -> None:
        """kill -9."""
        self.stop(signal.SIGKILL)

    def pause(self) -> None:
        """SIGSTOP."""
        assert self.process is not None
        self.process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """SIGCONT."""
        assert self.process is not None
        self.process.send_signal(signal.SIGCONT)

    def _close_channel(self) -> None:
        if self._channel is not None:
            self._channel.close()
            self._channel = None

    # -- asking -------------------------------------------------------------------------------

    @property
    def channel(self) -> grpc.Channel:
        if self._channel is None:
            self._channel = grpc.insecure_channel(self.ready["grpc"])
        return self._channel

    @property
    def index(self) -> Any:
        return rpc.KVIndexStub(self.channel)

    @property
    def admin(self) -> Any:
        return rpc.KVIndexAdminStub(self.channel)

    def register(self, worker_id: str, endpoint: str, **fields: Any) -> pb.Worker:
        """RegisterWorker with sensible defaults."""
        fields = {"model": "m", "address": f"{worker_id}.test:8000"} | fields
        worker = pb.Worker(worker_id=worker_id, kv_events_endpoint=endpoint, **fields)
        request = pb.RegisterWorkerRequest(worker=worker)
        return self.admin.RegisterWorker(request, timeout=10).worker

    def worker(self, worker_id: str, dp_rank: int = 0) -> pb.Worker:
        request = pb.GetWorkerRequest(worker_id=worker_id, dp_rank=dp_rank)
        return self.admin.GetWorker(request, timeout=10).worker

    def until_seq(self, worker_id: str, seq: int, dp_rank: int = 0) -> pb.Worker:
        """Wait until a batch is visible to queries."""

        def visible() -> pb.Worker | None:
            worker = self.worker(worker_id, dp_rank)
            return worker if worker.last_seq == seq else None

        return self.until(visible, f"{worker_id}#{dp_rank} at seq {seq}")

    def page(self, path: str = "/metrics") -> str:
        """A page of the metrics port."""
        url = f"http://{self.ready['metrics']}{path}"
        with urllib.request.urlopen(url, timeout=10) as page:
            text: str = page.read().decode()
        return text

    def metric(self, series: str) -> float:
        """One series of the metrics page, with its labels; 0 when it is not there."""
        for line in self.page().splitlines():
            if line.startswith(series + " "):
                return float(line.rpartition(" ")[2])
        return 0.0

    def score(self, tokens: bytes | list[int], **options: Any) -> dict[str, pb.WorkerScore]:
        """ScoreWorkers; scores by worker id (`id#rank` for ranks above 0)."""
        prompt_fields = {
            k: options.pop(k)
            for k in ("model", "lora_name", "cache_salt", "mm_items", "namespace")
            if k in options
        }
        prompt = pb.Prompt(**({"model": "m"} | prompt_fields))
        if isinstance(tokens, bytes):
            prompt.token_ids = tokens
        else:
            prompt.tokens.ids.extend(tokens)
        request = pb.ScoreWorkersRequest(prompt=prompt, options=pb.ScoreOptions(**options))
        scores = self.index.ScoreWorkers(request, timeout=10).scores
        return {s.worker_id + (f"#{s.dp_rank}" if s.dp_rank else ""): s for s in scores}


@contextlib.contextmanager
def serving(role: str = "serve", **settings: Any) -> Iterator[Daemon]:
    """A daemon for one test; ends with SIGTERM and exit status 0."""
    daemon = Daemon(role, **settings)
    try:
        yield daemon.start()
        status = daemon.stop()
        assert status == 0, f"exit status {status}\n{daemon.log()}"
    finally:
        if daemon.process is not None:
            daemon.kill()


def capture_folder(name: str) -> Path:
    """A recorded stream under tests/data."""
    return Path(__file__).parent / "data" / "captures" / name
