"""An engine's /tokenize for tests: one token per byte of the prompt, by a real HTTP server."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class TokenizeServer:
    """`asked`: (headers, body) of each call. `status`, `delay`: how the next ones are answered;
    an answer other than 200 quotes the prompt, as engines do."""

    def __init__(self) -> None:
        self.asked: list[tuple[dict[str, str], dict[str, Any]]] = []
        self.status = 200
        self.delay = 0.0
        self.raw: bytes | None = None
        self.url = ""

    def answer(self, body: dict[str, Any]) -> bytes:
        text = body.get("prompt") or json.dumps(body.get("messages"))
        if self.status != 200:
            return json.dumps({"message": f"cannot tokenize {text}"}).encode()
        return json.dumps({"count": len(text), "tokens": list(text.encode())}).encode()


@contextlib.contextmanager
def tokenizing() -> Iterator[TokenizeServer]:
    """Serve on a free port."""
    state = TokenizeServer()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            state.asked.append(({k.lower(): v for k, v in self.headers.items()}, body))
            time.sleep(state.delay)
            if state.raw is not None:
                self.wfile.write(state.raw)
                self.close_connection = True
                return
            answer = state.answer(body)
            with contextlib.suppress(ConnectionError):  # a caller that waited long enough
                self.send_response(state.status)
                self.send_header("content-length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    state.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield state
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
