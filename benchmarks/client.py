"""A closed-loop client, one connection, in a process of its own; prints its latencies as JSON.

    python -m benchmarks.client grpc|http TARGET BODIES SECONDS

BODIES is a file of length-prefixed request bodies, serialised beforehand and sent in turn. Both
kinds do as little as can be done: for gRPC, one HTTP/2 stream per call over a plain socket; for
HTTP, one keep-alive request. Neither decodes what comes back.
"""

from __future__ import annotations

import json
import socket
import struct
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

_FRAME = struct.Struct(">I")
DATA, HEADERS, RST, SETTINGS, PING, GOAWAY, WINDOW = 0, 1, 3, 4, 6, 7, 8
END_STREAM, END_HEADERS, ACK = 1, 4, 1
_BIG = 2**30


def pack_bodies(bodies: Sequence[bytes]) -> bytes:
    """The content of a BODIES file."""
    return b"".join(_FRAME.pack(len(b)) + b for b in bodies)


def unpack_bodies(data: bytes) -> list[bytes]:
    """The inverse of `pack_bodies`."""
    out, at = [], 0
    while at < len(data):
        size = _FRAME.unpack_from(data, at)[0]
        out.append(data[at + 4 : at + 4 + size])
        at += 4 + size
    return out


def _connect(target: str) -> socket.socket:
    host, _, port = target.rpartition(":")
    sock = socket.create_connection((host, int(port)), 30)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sock


def http_caller(target: str, path: str, bodies: Sequence[bytes]) -> Callable[[int], int]:
    """Posts body `i`; returns the size of the answer."""
    sock = _connect(target)
    head = (
        f"POST {path} HTTP/1.1\r\nHost: {target}\r\nContent-Type: application/json\r\n"
        "Content-Length: "
    ).encode()
    requests = [head + str(len(b)).encode() + b"\r\n\r\n" + b for b in bodies]
    mark = b"content-length:"

    def call(i: int) -> int:
        sock.sendall(requests[i])
        data = sock.recv(1 << 20)
        while (end := data.find(b"\r\n\r\n")) < 0:
            data += sock.recv(1 << 20)
        headers = data[:end].lower()
        if not headers.startswith(b"http/1.1 200"):
            raise RuntimeError(f"answered {data[:200]!r}")
        at = headers.index(mark) + len(mark)
        size = int(headers[at:].split(b"\r\n", 1)[0])
        missing = end + 4 + size - len(data)
        while missing > 0:
            missing -= len(sock.recv(1 << 20))
        return size

    return call


def _frame(kind: int, flags: int, stream: int, body: bytes) -> bytes:
    return (
        struct.pack(">I", len(body))[1:] + bytes((kind, flags)) + struct.pack(">I", stream) + body
    )


def _literal(name: str, value: str) -> bytes:
    """A header field without indexing and without Huffman code (RFC 7541, 6.2.2)."""
    out = b"\x00"
    for text in (name.encode(), value.encode()):
        if len(text) > 126:
            raise ValueError(f"{text!r} is too long for this client")
        out += bytes((len(text),)) + text
    return out


class H2:
    """Just enough HTTP/2 for one unary call after the other, flow control included."""

    def __init__(self, target: str, path: str) -> None:
        self._sock = _connect(target)
        self._headers = b"".join(
            _literal(*pair)
            for pair in (
                (":method", "POST"),
                (":scheme", "http"),
                (":path", path),
                (":authority", target),
                ("te", "trailers"),
                ("content-type", "application/grpc"),
            )
        )
        self._stream = 1
        self._window = self._initial = 65_535
        self._stream_window = 65_535
        self._max_frame = 16_384
        self._buffer = bytearray()
        self._received = 0
        settings = struct.pack(">HIHI", 4, _BIG, 5, 1 << 20)  # window per stream, frame size
        self._sock.sendall(
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
            + _frame(SETTINGS, 0, 0, settings)
            + _frame(WINDOW, 0, 0, struct.pack(">I", _BIG))
        )
        while self._read_frame()[0] != SETTINGS:
            pass

    def call(self, body: bytes) -> int:
        """One call; the size of the answer. Raises RuntimeError for a stream that fails."""
        stream = self._stream
        self._stream += 2
        self._stream_window = self._initial
        out = _frame(HEADERS, END_HEADERS, stream, self._headers)
        at, size = 0, len(body)
        while at < size:
            part = min(size - at, self._max_frame, self._window, self._stream_window)
            if part <= 0:
                self._sock.sendall(out)
                out = b""
                self._read_frame()
                continue
            last = END_STREAM if at + part == size else 0
            out += _frame(DATA, last, stream, body[at : at + part])
            self._window -= part
            self._stream_window -= part
            at += part
        self._sock.sendall(out)
        got, data = 0, b""
        while True:
            kind, flags, number, data = self._read_frame()
            if number != stream:
                continue
            if kind == DATA:
                got += len(data)
            elif kind == RST:
                raise RuntimeError("the stream was reset")
            if flags & END_STREAM and kind in (DATA, HEADERS):
                break
        if not got:
            raise RuntimeError(f"no message came: {bytes(data)!r}")
        self._received += got
        if self._received > _BIG // 2:
            self._sock.sendall(_frame(WINDOW, 0, 0, struct.pack(">I", self._received)))
            self._received = 0
        return got

    def _read_frame(self) -> tuple[int, int, int, bytes]:
        buffer = self._buffer
        while len(buffer) < 9 or len(buffer) < 9 + int.from_bytes(buffer[:3], "big"):
            data = self._sock.recv(1 << 20)
            if not data:
                raise ConnectionError("closed by the server")
            buffer += data
        size = int.from_bytes(buffer[:3], "big")
        kind, flags = buffer[3], buffer[4]
        stream = int.from_bytes(buffer[5:9], "big")
        body = bytes(buffer[9 : 9 + size])
        del buffer[: 9 + size]
        if kind == SETTINGS and not flags & ACK:
            self._settings(body)
        elif kind == PING and not flags & ACK:
            self._sock.sendall(_frame(PING, ACK, 0, body))
        elif kind == WINDOW:
            grown = int.from_bytes(body, "big")
            if stream == 0:
                self._window += grown
            else:
                self._stream_window += grown
        elif kind == GOAWAY:
            raise ConnectionError(f"sent away: {body!r}")
        return kind, flags, stream, body

    def _settings(self, body: bytes) -> None:
        for at in range(0, len(body), 6):
            name, value = struct.unpack_from(">HI", body, at)
            if name == 4:
                self._stream_window += value - self._initial
                self._initial = value
            elif name == 5:
                self._max_frame = value
        self._sock.sendall(_frame(SETTINGS, ACK, 0, b""))


def grpc_caller(target: str, path: str, bodies: Sequence[bytes]) -> Callable[[int], int]:
    """Calls with body `i`; returns the size of the answer."""
    connection = H2(target, path)
    messages = [b"\0" + _FRAME.pack(len(b)) + b for b in bodies]
    return lambda i: connection.call(messages[i])


def loop(call: Callable[[int], int], bodies: int, seconds: float) -> dict[str, object]:
    """Call in turn, one at a time, for so long; latencies in seconds."""
    for i in range(min(20, bodies)):
        call(i)
    times: list[float] = []
    clock = time.perf_counter
    begin = now = clock()
    end = begin + seconds
    i = 0
    size = 0
    while now < end:
        size = call(i)
        after = clock()
        times.append(after - now)
        now = clock()
        i = i + 1 if i + 1 < bodies else 0
    return {"times": times, "seconds": now - begin, "answer_bytes": size}


def main() -> None:
    """See the module's head."""
    kind, target, path, file, seconds = sys.argv[1:]
    bodies = unpack_bodies(Path(file).read_bytes())
    make = grpc_caller if kind == "grpc" else http_caller
    call = make(target, path, bodies)
    call(0)
    sys.stdout.write("connected\n")
    sys.stdout.flush()
    sys.stdin.readline()  # all start together
    json.dump(loop(call, len(bodies), float(seconds)), sys.stdout)


if __name__ == "__main__":
    main()
