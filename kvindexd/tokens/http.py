"""A small HTTP/1.1 client for one kind of call: POST JSON, get JSON, over kept connections."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from urllib.parse import urlsplit

from kvindexd import tracing

Pipe = tuple[asyncio.StreamReader, asyncio.StreamWriter]
MAX_ANSWER = 64 * 1024 * 1024
_IDLE = 8
"""Connections kept per host while nobody uses them."""


class HttpError(Exception):
    """No usable answer; the text says what came instead."""


class HttpClient:
    """Callers set the time limit, by cancelling."""

    def __init__(self, resolve: Callable[[str], Awaitable[str]] | None = None) -> None:
        """`resolve`: gives the address to connect to for a host; raises ValueError, saying why,
        where there must be no connection."""
        self._resolve = resolve
        self._idle: dict[tuple[str, int], list[Pipe]] = {}

    async def post(self, url: str, body: bytes) -> bytes:
        """The body of a 200 answer. Raises HttpError."""
        parts = urlsplit(url)
        if parts.scheme != "http" or not parts.hostname:
            raise HttpError(f"{url!r}: expected http://host:port/path")
        where = (parts.hostname, parts.port or 80)
        path = parts.path or "/"
        with tracing.span(f"POST {path}", "client") as span:
            if span is not None:
                span.set({"http.request.method": "POST", "url.path": path})
                span.set({"server.address": where[0], "server.port": where[1]})
            status, answer = await self._ask(url, where, _head(path, parts.netloc, body) + body)
            if span is not None:
                span.set({"http.response.status_code": status})
            if status != 200:
                # What the answer says stays out: engines quote the prompt in it.
                raise HttpError(f"{url}: status {status}; the engine's own log says why")
        return answer

    async def _ask(self, url: str, where: tuple[str, int], request: bytes) -> tuple[int, bytes]:
        try:
            while True:
                pipe, kept = await self._connect(where)
                try:
                    return await self._exchange(where, pipe, request)
                except (OSError, asyncio.IncompleteReadError):
                    # The server may have closed a kept connection just now; a new one is asked.
                    if not kept:
                        raise
        except (OSError, asyncio.IncompleteReadError, HttpError) as e:
            raise HttpError(f"{url}: {e or type(e).__name__}") from None
        except (ValueError, IndexError, asyncio.LimitOverrunError):
            # Their texts quote the answer, which may quote the prompt.
            raise HttpError(f"{url}: the answer is not HTTP/1.1") from None

    async def _connect(self, where: tuple[str, int]) -> tuple[Pipe, bool]:
        idle = self._idle.get(where)
        while idle:
            pipe = idle.pop()
            if not pipe[0].at_eof() and not pipe[1].is_closing():
                return pipe, True
            pipe[1].close()
        host, port = where
        if self._resolve is not None:
            try:
                host = await self._resolve(host)
            except ValueError as e:
                raise HttpError(str(e)) from None
        return await asyncio.open_connection(host, port), False

    async def _exchange(
        self, where: tuple[str, int], pipe: Pipe, request: bytes
    ) -> tuple[int, bytes]:
        reader, writer = pipe
        reusable = False
        try:
            writer.write(request)
            await writer.drain()
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
            first, *lines = head.strip().split("\r\n")
            headers = {k.lower(): v.strip() for k, _, v in (x.partition(":") for x in lines)}
            answer = await _body(reader, headers)
            reusable = headers.get("connection", "").lower() != "close"
            return int(first.split(" ")[1]), answer
        finally:
            idle = self._idle.setdefault(where, [])
            if reusable and len(idle) < _IDLE:
                idle.append(pipe)
            else:
                writer.close()

    async def close(self) -> None:
        """Close what is kept."""
        for pipes in self._idle.values():
            for _, writer in pipes:
                writer.close()
                with contextlib.suppress(OSError):
                    await writer.wait_closed()
        self._idle.clear()


def _head(path: str, host: str, body: bytes) -> bytes:
    more = "".join(f"{name}: {value}\r\n" for name, value in tracing.headers().items())
    return (
        f"POST {path} HTTP/1.1\r\nhost: {host}\r\n{more}"
        f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    ).encode()


async def _body(reader: asyncio.StreamReader, headers: dict[str, str]) -> bytes:
    if headers.get("transfer-encoding", "").lower() != "chunked":
        if "content-length" not in headers:
            raise HttpError("an answer without content-length")
        return await _read(reader, int(headers["content-length"]))
    parts, total = [], 0
    while size := int((await reader.readline()).partition(b";")[0], 16):
        total += size
        if total > MAX_ANSWER:
            raise HttpError(f"an answer of more than {MAX_ANSWER} bytes")
        parts.append(await _read(reader, size))
        await reader.readexactly(2)
    while (await reader.readline()).strip():
        pass  # trailers
    return b"".join(parts)


async def _read(reader: asyncio.StreamReader, size: int) -> bytes:
    if size > MAX_ANSWER:
        raise HttpError(f"an answer of {size} bytes; at most {MAX_ANSWER} are read")
    return await reader.readexactly(size)
