"""The small HTTP server of the metrics port: /metrics, /healthz, /readyz, and pages of others."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, NamedTuple, Protocol

import structlog
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

log = structlog.get_logger(__name__)

_STATUS = {
    200: "OK",
    308: "Permanent Redirect",
    400: "Bad Request",
    401: "Unauthorized",
    403: "Forbidden",
    404: "Not Found",
    405: "Method Not Allowed",
    411: "Length Required",
    413: "Content Too Large",
    415: "Unsupported Media Type",
    429: "Too Many Requests",
    500: "Internal Server Error",
    503: "Service Unavailable",
    504: "Gateway Timeout",
}
TEXT = "text/plain; charset=utf-8"
_HEALTH = ("/healthz", "/readyz")
"""Open to all: whoever probes has no credentials, and learns little."""
_REQUEST_TIMEOUT = 10.0
_MAX_HEAD = 16_384
_LINGER = 1.0


class Request(NamedTuple):
    """One request. `path` without `query`, both as sent; names in `headers` are lower case."""

    method: str
    path: str
    query: str
    headers: Mapping[str, str]
    body: bytes = b""


class Response(NamedTuple):
    """What to answer. `kind`: the Content-Type; `headers`: further ones."""

    status: int
    kind: str
    body: bytes
    headers: Mapping[str, str] = {}


class Pages(Protocol):
    """Further paths on the metrics port."""

    def max_body(self, path: str) -> int:
        """Bytes that may be posted to a path; 0 = only GET and HEAD."""
        ...

    async def answer(self, request: Request) -> Response | None:
        """The answer, None for a path of somebody else. HEAD comes here as GET."""
        ...


class Protected(Protocol):
    """What keeps strangers out of the port."""

    @property
    def context(self) -> ssl.SSLContext | None:
        """For TLS, None = none."""
        ...

    def refusal(self, request: Request, peer: Mapping[str, Any] | None) -> Response | None:
        """Why the caller may not see a page, None where it may. `peer`: the certificate that it
        showed, as Python's ssl module gives it. Health pages are not asked about."""
        ...


class _Refused(Exception):
    """A request that is not read any further."""

    def __init__(self, response: Response) -> None:
        super().__init__(response.status)
        self.response = response


def text(status: int, words: str, **headers: str) -> Response:
    """A line of text as a response."""
    return Response(status, TEXT, f"{words}\n".encode(), headers)


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
        pages: Pages | None = None,
        protected: Protected | None = None,
    ) -> None:
        self._registry = registry
        self._ready = ready
        self._host, self._port = host, port
        self._pages = pages
        self._protected = protected
        self._server: asyncio.Server | None = None

    async def start(self) -> tuple[str, int]:
        """Bind, and return the host and port really bound. Raises OSError with the address."""
        try:
            self._server = await asyncio.start_server(
                self._serve,
                self._host,
                self._port,
                limit=_MAX_HEAD,
                ssl=self._protected.context if self._protected is not None else None,
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
                certificate = writer.get_extra_info("peercert")
                response, unread = await self._exchange(reader, certificate)
                writer.write(response)
                await writer.drain()
                if unread:
                    await _linger(reader, writer)
        except (TimeoutError, asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()
            with suppress(ConnectionError, TimeoutError):
                await writer.wait_closed()

    async def _exchange(
        self, reader: asyncio.StreamReader, certificate: Mapping[str, Any] | None
    ) -> tuple[bytes, bool]:
        """Read one request; its response in wire form, and whether something is left unread."""
        with_body, unread = True, False
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            request = _parse(head.decode("latin-1"))
            self._check(request, certificate)
            if request.method == "HEAD":
                request, with_body = request._replace(method="GET"), False
            elif request.method != "GET":
                request = request._replace(body=await self._body(request, reader))
            response = await self._page(request)
        except asyncio.LimitOverrunError:
            response, unread = text(400, "request head too long"), True
        except _Refused as refused:
            response, unread = refused.response, True
        except (asyncio.IncompleteReadError, ConnectionError):
            raise
        except Exception as error:
            log.exception(
                "page_failed",
                error=repr(error),
                cost="the request gets status 500",
                fix="report this",
            )
            response = text(500, "a fault of kvindexd; its log says more")
        return _wire(response, with_body), unread

    def _check(self, request: Request, certificate: Mapping[str, Any] | None) -> None:
        if self._protected is None or request.path in _HEALTH:
            return
        refusal = self._protected.refusal(request, certificate)
        if refusal is not None:
            raise _Refused(refusal)

    async def _body(self, request: Request, reader: asyncio.StreamReader) -> bytes:
        limit = self._pages.max_body(request.path) if self._pages is not None else 0
        if request.method != "POST" or not limit:
            allowed = "GET, HEAD, POST" if limit else "GET, HEAD"
            raise _Refused(text(405, f"only {allowed}", Allow=allowed))
        length = request.headers.get("content-length", "")
        if not length.isdecimal():
            raise _Refused(text(411, "a Content-Length is needed"))
        if len(length) > len(str(limit)) or int(length) > limit:
            raise _Refused(text(413, f"more than {limit} bytes"))
        return await reader.readexactly(int(length))

    async def _page(self, request: Request) -> Response:
        path = request.path
        if path == "/metrics":
            encode, kind = choose_encoder(request.headers.get("accept", ""))
            # Rendering thousands of series takes milliseconds that scoring should not wait for.
            return Response(200, kind, await asyncio.to_thread(encode, self._registry))
        if path == "/healthz":
            return text(200, "ok")
        if path == "/readyz":
            why = self._ready()
            return text(503, why) if why else text(200, "ready")
        found = await self._pages.answer(request) if self._pages is not None else None
        page = "/ui, " if self._pages is not None else ""
        return found or text(404, f"see {page}/metrics, /healthz and /readyz")


async def _linger(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Read what a refused caller is still sending: closing on it would reset the connection, and
    the answer be lost with it."""
    if writer.can_write_eof():
        writer.write_eof()
    with suppress(TimeoutError):
        async with asyncio.timeout(_LINGER):
            while await reader.read(_MAX_HEAD):
                pass


def _parse(head: str) -> Request:
    first, *lines = head.split("\r\n")
    words = first.split(" ")
    if len(words) != 3 or not words[2].startswith("HTTP/1."):
        raise _Refused(text(400, "not an HTTP request"))
    path, _, query = words[1].partition("?")
    pairs = (line.partition(":") for line in lines if line)
    headers = {name.strip().lower(): value.strip() for name, _, value in pairs}
    return Request(words[0], path, query, headers)


def _wire(response: Response, with_body: bool) -> bytes:
    head = (
        f"HTTP/1.1 {response.status} {_STATUS[response.status]}\r\n"
        f"Content-Type: {response.kind}\r\nContent-Length: {len(response.body)}\r\n"
        + "".join(f"{name}: {value}\r\n" for name, value in response.headers.items())
        + "Connection: close\r\n\r\n"
    )
    return head.encode("latin-1") + (response.body if with_body else b"")
