"""A stand-in for a Kubernetes API server: pods only, list and watch, with faults on demand."""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Future
from typing import Any

from aiohttp import web


def pod(name: str, ip: str, *, ready: bool = True, **more: Any) -> dict[str, Any]:
    """A pod as the API shows it. `more`: uid, phase, annotations, deleting, labels."""
    meta: dict[str, Any] = {
        "name": name,
        "namespace": "ns",
        "uid": more.get("uid", f"uid-{name}"),
        "creationTimestamp": "2026-01-01T00:00:00Z",
        "labels": {"app": "vllm"} | more.get("labels", {}),
        "annotations": more.get("annotations", {}),
    }
    if more.get("deleting"):
        meta["deletionTimestamp"] = "2026-01-02T00:00:00Z"
    return {
        "metadata": meta,
        "spec": {"nodeName": "node-1", "containers": [{"name": "vllm"}]},
        "status": {
            "phase": more.get("phase", "Running"),
            "podIP": ip,
            "hostIP": "192.168.0.1",
            "conditions": [
                {"type": "Initialized", "status": "True"},
                {"type": "Ready", "status": "True" if ready else "False"},
            ],
        },
    }


class KubeStub:
    """Its methods may be called in the loop that it runs in. `token`: the one accepted, "" = none
    is asked for. `queries`: of every call so far, with `authorization` beside."""

    def __init__(self) -> None:
        self.url = ""
        self.token = ""
        self.page = 500
        self.refuse: int = 0  # status for every call while set
        self.end_watches_with: dict[str, Any] | None = None
        self.queries: list[dict[str, str]] = []
        self._version = 100
        self._oldest = 100
        self._pods: dict[str, dict[str, Any]] = {}
        self._history: list[tuple[int, dict[str, Any]]] = []
        self._watches: set[asyncio.Queue[bytes | None]] = set()

    @property
    def watching(self) -> int:
        """Watches that are open."""
        return len(self._watches)

    @property
    def lists(self) -> int:
        """Lists that were begun."""
        return sum("watch" not in q and "continue" not in q for q in self.queries)

    # -- the cluster's life -------------------------------------------------------------------

    def apply(self, pod: dict[str, Any]) -> None:
        """Add a pod or change it."""
        name = pod["metadata"]["name"]
        kind = "MODIFIED" if name in self._pods else "ADDED"
        self._pods[name] = pod
        self._emit(kind, pod)

    def delete(self, name: str) -> None:
        """A pod is gone."""
        self._emit("DELETED", self._pods.pop(name))

    def bookmark(self) -> int:
        """Tell the version alone, which moves on."""
        self._version += 10
        meta = {"resourceVersion": str(self._version)}
        self._send({"type": "BOOKMARK", "object": {"kind": "Pod", "metadata": meta}})
        return self._version

    def forget_history(self) -> None:
        """Compaction: versions before now are gone."""
        self._version += 1
        self._oldest = self._version
        self._history.clear()

    def _emit(self, kind: str, pod: dict[str, Any]) -> None:
        self._version += 1
        pod = json.loads(json.dumps(pod))
        pod["metadata"]["resourceVersion"] = str(self._version)
        event = {"type": kind, "object": pod}
        self._history.append((self._version, event))
        self._send(event)

    def _send(self, event: dict[str, Any]) -> None:
        for queue in self._watches:
            queue.put_nowait(json.dumps(event).encode() + b"\n")

    def break_watches(self) -> None:
        """Cut every open watch off, in the middle of a line."""
        for queue in self._watches:
            queue.put_nowait(b'{"type":"ADDED","obj')
            queue.put_nowait(None)

    def expire_watches(self) -> None:
        """End every open watch by an ERROR event with code 410."""
        status = {"kind": "Status", "code": 410, "message": "too old resource version"}
        self._send({"type": "ERROR", "object": status})
        for queue in self._watches:
            queue.put_nowait(None)

    # -- what is served -----------------------------------------------------------------------

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        query = dict(request.query)
        self.queries.append(
            query
            | {"authorization": request.headers.get("authorization", ""), "path": request.path}
        )
        if self.refuse:
            return web.json_response({"kind": "Status", "code": self.refuse}, status=self.refuse)
        if self.token and request.headers.get("authorization") != f"Bearer {self.token}":
            return web.json_response({"kind": "Status", "code": 401}, status=401)
        if "watch" in query:
            return await self._watch(request, int(query["resourceVersion"]))
        return self._list(query)

    def _list(self, query: dict[str, str]) -> web.Response:
        names = sorted(self._pods)
        start = int(query.get("continue", 0))
        size = min(self.page, int(query.get("limit", 500)))
        more = str(start + size) if start + size < len(names) else ""
        meta = {"resourceVersion": str(self._version), "continue": more}
        items = [self._pods[name] for name in names[start : start + size]]
        return web.json_response({"kind": "PodList", "metadata": meta, "items": items})

    async def _watch(self, request: web.Request, version: int) -> web.StreamResponse:
        if version < self._oldest:
            return web.json_response({"kind": "Status", "code": 410}, status=410)
        response = web.StreamResponse()
        await response.prepare(request)
        queue: asyncio.Queue[bytes | None] = asyncio.Queue()
        for at, event in self._history:
            if at > version:
                queue.put_nowait(json.dumps(event).encode() + b"\n")
        self._watches.add(queue)
        try:
            while (line := await queue.get()) is not None:
                # In two pieces, as a network may cut them.
                await response.write(line[: len(line) // 2])
                await response.write(line[len(line) // 2 :])
            if request.transport is not None:
                request.transport.abort()
        finally:
            self._watches.discard(queue)
        return response

    @contextlib.asynccontextmanager
    async def serving(self, tls: ssl.SSLContext | None = None) -> AsyncIterator[KubeStub]:
        """Serve on a free loopback port."""
        app = web.Application()
        app.router.add_get("/api/v1/pods", self._handle)
        app.router.add_get("/api/v1/namespaces/{namespace}/pods", self._handle)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        try:
            site = web.TCPSite(runner, "127.0.0.1", 0, ssl_context=tls)
            await site.start()
            host, port = runner.addresses[0][:2]
            self.url = f"{'https' if tls else 'http'}://{host}:{port}"
            yield self
        finally:
            for queue in list(self._watches):
                queue.put_nowait(None)
            await runner.cleanup()


class ThreadedKubeStub:
    """The same in a thread of its own, for tests that wait in their own."""

    def __init__(self) -> None:
        self.stub = KubeStub()
        self._loop = asyncio.new_event_loop()

    def __call__(self, act: Callable[[KubeStub], Any]) -> Any:
        """Do something with the stub, in its loop."""
        done: Future[Any] = Future()

        def run() -> None:
            try:
                done.set_result(act(self.stub))
            except BaseException as e:
                done.set_exception(e)

        self._loop.call_soon_threadsafe(run)
        return done.result(10)

    @contextlib.contextmanager
    def serving(self) -> Iterator[ThreadedKubeStub]:
        """Serve until the block ends."""
        started, ending = threading.Event(), asyncio.Event()

        async def run() -> None:
            async with self.stub.serving():
                started.set()
                await ending.wait()

        thread = threading.Thread(target=lambda: self._loop.run_until_complete(run()), daemon=True)
        thread.start()
        assert started.wait(10)
        try:
            yield self
        finally:
            self._loop.call_soon_threadsafe(ending.set)
            thread.join(10)
            self._loop.close()
