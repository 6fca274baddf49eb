"""The small HTTP server of the metrics port: /metrics, /healthz and /readyz."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

_STATUS = {
    200: "OK",
    400: "Bad Request",
    404: "Not Found",
    405: "Method Not Allowed",
    503: "Service Unavailable",
}
_TEXT = "text/plain; charset=utf-8"
_REQUEST_TIMEOUT = 10.0
_MAX_HEAD = 16_384


class MetricsServer:
    """Serves /metrics, /healthz (process alive) and /readyz over HTTP/1.1, one request each.

    `ready` returns "" when queries may be sent here, else why not, in words.
    """

    def __init__(
        self,
        registry: CollectorRegistry,
        ready: Callable[[], str],
        host: str = "127.0.0.1",
        port: int = 9400,
    ) -> None:
        self._registry = registry
        self._ready = ready
        self._host, self._port = host, port
        self._server: asyncio.Server | None = None

    async def start(self) -> tuple[str, int]:
        """Bind, and return the host and port really bound. Raises OSError with the address."""
        try:
            self._server = await asyncio.start_server(
                self._serve, self._host, self._port, limit=_MAX_HEAD
            )
        except OSError as error:
            where = f"{self._host}:{self._port}"
            raise OSError(
                error.errno, f"metrics: cannot listen on {where}: {error}; change metrics.listen"
            ) from error
        host, port = self._server.sockets[0].getsockname()[:2]
        return str(host), int(port)

    async def close(self) -> None:
        """Stop listening. Harmless when not started."""
        if self._server is not None:
            self._server.close()
            await self._server.wait_closed()
            self._server = None

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(_REQUEST_TIMEOUT):
                head = await reader.readuntil(b"\r\n\r\n")
                writer.write(await self._respond(head.decode("latin-1")))
                await writer.drain()
        except asyncio.LimitOverrunError:
            writer.write(_http(400, _TEXT, b"request head too long\n"))
        except (TimeoutError, asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()
            with suppress(ConnectionError, TimeoutError):
                await writer.wait_closed()

    async def _respond(self, head: str) -> bytes:
        lines = head.split("\r\n")
        words = lines[0].split(" ")
        if len(words) != 3:
            return _http(400, _TEXT, b"not an HTTP request\n")
        method, path = words[0], words[1].split("?")[0]
        if method not in ("GET", "HEAD"):
            return _http(405, _TEXT, b"only GET and HEAD\n")
        status, kind, body = await self._page(path, _header(lines[1:], "accept"))
        return _http(status, kind, body, with_body=method == "GET")

    async def _page(self, path: str, accept: str) -> tuple[int, str, bytes]:
        if path == "/metrics":
            encode, kind = choose_encoder(accept)
            # Rendering thousands of series takes milliseconds that scoring should not wait for.
            return 200, kind, await asyncio.to_thread(encode, self._registry)
        if path == "/healthz":
            return 200, _TEXT, b"ok\n"
        if path == "/readyz":
            why = self._ready()
            return (503, _TEXT, f"{why}\n".encode()) if why else (200, _TEXT, b"ready\n")
        return 404, _TEXT, b"see /metrics, /healthz and /readyz\n"


def _header(lines: list[str], name: str) -> str:
    for line in lines:
        key, _, value = line.partition(":")
        if key.strip().lower() == name:
            return value.strip()
    return ""


def _http(status: int, kind: str, body: bytes, *, with_body: bool = True) -> bytes:
    head = (
        f"HTTP/1.1 {status} {_STATUS[status]}\r\nContent-Type: {kind}\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + (body if with_body else b"")
