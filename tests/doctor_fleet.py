"""A fleet of engine stand-ins, each broken in a way of its own, for the tests of `doctor`."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from daemon import Daemon
from proxies import Proxy
from reliability import stored

from kvindexd.model import WorkerKey
from kvindexd.store import Store, StoreError
from kvindexd.testing.engine import FakeEngine

ENV = {
    "ingest.event_grace": 1.0,
    "ingest.lease_ttl": 1.5,
    "ingest.heartbeat": 0.25,
    "ingest.replay_timeout": 0.5,
}


class Page:
    """An engine's HTTP side: /metrics with vLLM's cache_config_info, /v1/models, /tokenize."""

    def __init__(self, models: list[dict[str, Any]], ids: list[int], **config: str) -> None:
        labels = ",".join(f'{k}="{v}"' for k, v in config.items())
        self._answers = {
            "/metrics": f"vllm:cache_config_info{{{labels}}} 1.0\n",
            "/v1/models": json.dumps({"data": models}),
            "/tokenize": json.dumps({"tokens": ids}),
        }
        self._server: asyncio.Server | None = None

    @property
    def address(self) -> str:
        assert self._server is not None
        return f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            length = re.search(r"content-length: (\d+)", head)
            await reader.readexactly(int(length[1]) if length else 0)
            body = self._answers[head.split(" ")[1]].encode()
            said = f"HTTP/1.1 200 OK\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
            writer.write(said.encode() + body)
            await writer.drain()
        writer.close()

    async def __aenter__(self) -> Page:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()


def healthy_page(model: str = "m") -> Page:
    """What a sound vLLM says."""
    return Page(
        [{"id": model}],
        [1, 2, 3],
        block_size="16",
        enable_prefix_caching="True",
        num_gpu_blocks="10000",
        prefix_caching_hash_algo="sha256_cbor",
    )


class Fleet:
    """Stand-ins by worker id, closed by `stack`; `workers`: to configure the daemon with. The
    `acts` are called again and again while the doctor looks."""

    def __init__(self, stack: contextlib.ExitStack, background: Background) -> None:
        self.stack = stack
        self.background = background
        self.engines: dict[str, FakeEngine] = {}
        self.workers: list[dict[str, Any]] = []
        self.acts: list[Callable[[int], None]] = []

    def add(self, name: str, stand_in: FakeEngine | None = None, **fields: Any) -> FakeEngine:
        """A stand-in, and its registration: that of a sound worker but for `fields`."""
        engine = self.stack.enter_context(stand_in or FakeEngine())
        self.engines[name] = engine
        if "address" not in fields:
            fields["address"] = self.page(healthy_page(fields.get("model", "m"))).address
        sound = {
            "kv_events_endpoint": engine.endpoint(),
            "replay_endpoint": engine.replay_endpoint(),
        }
        self.register(name, **sound | fields)
        return engine

    def register(self, name: str, **fields: Any) -> None:
        """A registration alone."""
        self.workers.append({"worker_id": name, "model": "m"} | fields)

    def page(self, page: Page) -> Page:
        """Serve an engine's page."""
        self.background.enter(page)
        return page

    def publishes(self, name: str, events: Callable[[int], list[Any]], every: int = 2) -> None:
        """While the doctor looks, publish `events(0)`, `events(1)`, ..., one per `every` rounds."""
        engine = self.engines[name]

        def act(n: int) -> None:
            if n % every == 0:
                engine.publish(events(n // every))

        self.acts.append(act)

    @contextlib.contextmanager
    def busy(self) -> Iterator[None]:
        """All acts, 40 rounds a second, on a thread."""
        ending = threading.Event()

        def run() -> None:
            n = 0
            while not ending.wait(0.025):
                for act in self.acts:
                    act(n)
                n += 1

        thread = threading.Thread(target=run)
        thread.start()
        try:
            yield
        finally:
            ending.set()
            thread.join()


def kind(name: str, group: int = 0) -> dict[str, Any]:
    """Fields of a store of another group."""
    return {"kv_cache_spec_kind": name, "group_idx": group}


class Background:
    """An event loop on a thread, for what must go on beside a test."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._stack = contextlib.AsyncExitStack()

    def enter(self, entered: Any) -> Any:
        """Enter an async context manager; it is left at the end."""
        return self.call(self._stack.enter_async_context(entered))

    def call(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(20)

    def start(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def __enter__(self) -> Background:
        return self

    def __exit__(self, *_: object) -> None:
        self.call(self._stack.aclose())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


def slow(background: Background, port: int, delay: float) -> int:
    """A port at which a server answers late."""
    proxy = Proxy(port)
    proxy.delay = delay
    background.enter(proxy)
    return proxy.port


async def take_turns(store: Store, key: WorkerKey, ending: threading.Event) -> None:
    """Two ingesters that take a rank's lease from each other, and from whoever else has it."""
    n = 0
    while not ending.is_set():
        n += 1
        try:
            await store.reset(key)
            lease = await store.acquire(key, f"elsewhere:{n % 2 + 1}:abc", 400)
            await asyncio.sleep(0.3)
            await store.release(lease)
        except StoreError:
            await asyncio.sleep(0.02)


def run_doctor(
    daemon: Daemon, *args: str, url: str, settings: Mapping[str, Any], budget: float = 60.0
) -> tuple[int, dict[str, Any]]:
    """`kvindexd doctor --json` as a process: (exit status, report)."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("KVINDEXD_")}
    for key, value in (settings | {"redis.url": url}).items():
        text = value if isinstance(value, str) else json.dumps(value)
        environment["KVINDEXD_" + key.upper().replace(".", "__")] = text
    command = [sys.executable, "-m", "kvindexd.cli.main", "doctor", "--json"]
    where = ["--server", daemon.ready["grpc"], "--metrics", daemon.ready["metrics"]]
    began = time.monotonic()
    done = subprocess.run(
        [*command, *where, *args], env=environment, capture_output=True, text=True, timeout=budget
    )
    assert done.stdout, f"after {time.monotonic() - began:.1f} s: {done.stderr}"
    return done.returncode, json.loads(done.stdout)


_HELD: list[socket.socket] = []


def unused() -> str:
    """host:port at which nobody listens, nor will: it is bound until the tests end."""
    held = socket.socket()
    held.bind(("127.0.0.1", 0))
    _HELD.append(held)
    return f"127.0.0.1:{held.getsockname()[1]}"


__all__ = [
    "ENV",
    "Background",
    "Fleet",
    "Page",
    "healthy_page",
    "kind",
    "run_doctor",
    "slow",
    "stored",
    "take_turns",
    "unused",
]
