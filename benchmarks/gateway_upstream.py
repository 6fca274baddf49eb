"""Stand-ins for engines behind a gateway: HTTP servers that answer chat requests at once.

    python -m benchmarks.gateway_upstream COUNT

One process serves COUNT ports and prints them. An answer tells how many bytes of body came, and
whether the request's `user` names this upstream; one with `"stream": true` comes in PIECES.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import uvloop

PIECES = 16
PIECE_SECONDS = 0.002
_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: "


def body_size(raw: bytes | bytearray, start: int) -> tuple[int, int] | None:
    """(bytes of a chunked body, where it ends); None while it is not all there."""
    size, at = 0, start
    while (line := raw.find(b"\r\n", at)) >= 0:
        chunk = int(raw[at:line], 16)
        at = line + 2 + chunk + 2
        if len(raw) < at:
            return None
        size += chunk
        if not chunk:
            return size, at
    return None


class Connection(asyncio.Protocol):
    """One keep-alive connection, one request at a time."""

    def __init__(self, name: str) -> None:
        self._user = b'"user": "' + name.encode() + b'"'
        self._raw = bytearray()
        self._transport: Any = None

    def connection_made(self, transport: Any) -> None:
        """Remember where to answer."""
        self._transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        """Pieces that are still to come go nowhere."""
        self._transport = None

    def data_received(self, data: bytes) -> None:
        """Answer each request as soon as it is whole."""
        self._raw += data
        head = self._raw.find(b"\r\n\r\n")
        if head < 0:
            return
        headers = bytes(self._raw[:head]).lower()
        start = head + 4
        if b"\r\ntransfer-encoding: chunked" in headers:
            found = body_size(self._raw, start)
            if found is None:
                return
            size, end = found
        else:
            mark = headers.find(b"\r\ncontent-length: ")
            size = int(headers[mark + 18 :].split(b"\r\n", 1)[0]) if mark >= 0 else 0
            end = start + size
            if len(self._raw) < end:
                return
        body = bytes(self._raw[start:end])
        del self._raw[:end]
        self._answer(size, self._user in body, b'"stream": true' in body)

    def _answer(self, size: int, home: bool, stream: bool) -> None:
        transport = self._transport
        usage = {"prompt_tokens": size // 4, "prompt_tokens_details": {"cached_tokens": 0}}
        told = {"got": size, "home": home, "usage": usage}
        if stream:
            transport.write(_HEAD + b"text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
            self._piece(0, json.dumps(told).encode())
            return
        text = json.dumps(told | {"choices": [{"message": {"content": "word " * 40}}]}).encode()
        length = b"application/json\r\ncontent-length: %d\r\n\r\n" % len(text)
        transport.write(_HEAD + length + text)

    def _piece(self, number: int, last: bytes) -> None:
        if self._transport is None:
            return
        if number < PIECES:
            event = b'data: {"choices": [{"delta": {"content": "word "}}], "usage": null}\n\n'
            self._transport.write(b"%x\r\n%b\r\n" % (len(event), event))
            loop = asyncio.get_running_loop()
            loop.call_later(PIECE_SECONDS, self._piece, number + 1, last)
            return
        event = b"data: " + last + b"\n\ndata: [DONE]\n\n"
        self._transport.write(b"%x\r\n%b\r\n0\r\n\r\n" % (len(event), event))


async def serve(count: int) -> None:
    """Listen until the process is ended."""
    loop = asyncio.get_running_loop()
    ports = []
    for i in range(count):
        server = await loop.create_server(lambda i=i: Connection(f"w{i}"), "127.0.0.1", 0)
        ports.append(server.sockets[0].getsockname()[1])
    print(json.dumps(ports), flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    uvloop.run(serve(int(sys.argv[1])))
