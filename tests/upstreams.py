"""Tiny HTTP/1.1 servers that answer as an OpenAI-like engine would, on a thread of their own."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import threading
from collections.abc import Iterator
from typing import Any, NamedTuple


class Seen(NamedTuple):
    """A request as it arrived."""

    method: str
    path: str
    headers: dict[str, str]
    size: int
    digest: str


class Upstream:
    """One worker. `seen`: what it got. `gate`: streams stop after their first piece until set."""

    def __init__(self, name: str, port: int = 0) -> None:
        self.name = name
        self.seen: list[Seen] = []
        self.gate = threading.Event()
        self.cached = 0
        self._loop = asyncio.new_event_loop()
        started = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(port, started), daemon=True)
        self._thread.start()
        if not started.wait(10):
            raise TimeoutError(f"upstream {name} did not start")

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def _run(self, port: int, started: threading.Event) -> None:
        asyncio.set_event_loop(self._loop)
        self._server = self._loop.run_until_complete(
            asyncio.start_server(self._serve, "127.0.0.1", port)
        )
        self.port: int = self._server.sockets[0].getsockname()[1]
        started.set()
        self._loop.run_forever()
        self._loop.close()

    def stop(self) -> None:
        """Refuse connections from now on, and end those there are."""
        if not self._thread.is_alive():
            return

        async def ending() -> None:
            self._server.close()
            tasks = [t for t in asyncio.all_tasks() if t is not asyncio.current_task()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._loop.stop()

        asyncio.run_coroutine_threadsafe(ending(), self._loop)
        self._thread.join(10)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                first, *lines = head.decode().strip().split("\r\n")
                method, path, _ = first.split(" ")
                headers = {k.lower(): v.strip() for k, _, v in (x.partition(":") for x in lines)}
                body = await _body(reader, headers)
                digest = hashlib.sha256(body).hexdigest()
                self.seen.append(Seen(method, path, headers, len(body), digest))
                if b'"stream": true' in body[:1000]:
                    await self._stream(writer)
                else:
                    self._answer(writer)
                await writer.drain()
        writer.close()

    def _usage(self) -> dict[str, Any]:
        details = {"cached_tokens": self.cached}
        return {"prompt_tokens": 800, "prompt_tokens_details": details}

    def _answer(self, writer: asyncio.StreamWriter) -> None:
        body = json.dumps({"by": self.name, "usage": self._usage()}).encode()
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n")
        writer.write(b"content-length: %d\r\n\r\n" % len(body) + body)

    async def _stream(self, writer: asyncio.StreamWriter) -> None:
        def piece(text: bytes) -> None:
            writer.write(b"%x\r\n" % len(text) + text + b"\r\n")

        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n")
        writer.write(b"transfer-encoding: chunked\r\n\r\n")
        piece(b'data: {"by": "' + self.name.encode() + b'", "usage": null}\n\n')
        await writer.drain()
        while not self.gate.is_set():  # noqa: ASYNC110 - set from another thread
            await asyncio.sleep(0.005)
        last = json.dumps({"usage": self._usage()}).encode()
        piece(b"data: " + last + b"\n\n")
        piece(b"data: [DONE]\n\n")
        writer.write(b"0\r\n\r\n")


async def _body(reader: asyncio.StreamReader, headers: dict[str, str]) -> bytes:
    if headers.get("transfer-encoding") != "chunked":
        return await reader.readexactly(int(headers.get("content-length", 0)))
    parts = []
    while size := int(await reader.readline(), 16):
        parts.append(await reader.readexactly(size))
        await reader.readexactly(2)
    while (await reader.readline()).strip():
        pass  # trailers
    return b"".join(parts)


@contextlib.contextmanager
def upstream(name: str) -> Iterator[Upstream]:
    """An upstream for one test."""
    server = Upstream(name)
    try:
        yield server
    finally:
        server.gate.set()
        server.stop()
