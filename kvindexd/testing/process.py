"""The engine stand-in in a process of its own, for tests that kill, freeze or restart an engine."""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any, Self


class EngineProcess:
    """Runs `python -m kvindexd.testing.engine`. Not for several threads at once.

    The ports of the first start are kept, so `start` after `kill` is a restart in place.
    """

    def __init__(self, *arguments: str, timeout: float = 15.0) -> None:
        """`arguments`: command-line options, without ports if any free ones will do.

        `timeout`: seconds to wait for any answer. Raises as `start`.
        """
        self._arguments: Sequence[str] = arguments
        self._timeout = timeout
        self._process: subprocess.Popen[bytes] | None = None
        self._unread = b""
        self.endpoints: list[str] = []
        self.replay_endpoints: list[str] = []
        self.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def pid(self) -> int:
        """Process id. Raises RuntimeError when it does not run."""
        return self._running().pid

    def start(self) -> None:
        """Start it and wait until its sockets are open. Raises RuntimeError or TimeoutError."""
        if self._process is not None:
            raise RuntimeError("engine process already runs")
        command = [sys.executable, "-m", "kvindexd.testing.engine", *self._arguments]
        command += self._same_ports()
        self._unread = b""
        self._process = subprocess.Popen(  # noqa: S603 - our own interpreter and module
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        try:
            ready = self._answer()
        except BaseException:
            self.kill()
            raise
        self.endpoints = ready["endpoints"]
        self.replay_endpoints = ready["replay_endpoints"]

    def _same_ports(self) -> list[str]:
        if not self.endpoints:
            return []
        options = ["--port", self.endpoints[0].rpartition(":")[2]]
        replay = self.replay_endpoints[0]
        return [*options, "--replay-port", replay.rpartition(":")[2] if replay else "-1"]

    def call(self, op: str, **arguments: Any) -> dict[str, Any]:
        """Run one command (see `kvindexd.testing.control`) and return its answer.

        Raises RuntimeError with the process's own words if it fails, TimeoutError if it hangs.
        """
        process = self._running()
        if process.stdin is None:
            raise RuntimeError("engine process has no stdin")
        process.stdin.write(json.dumps({"op": op, **arguments}).encode() + b"\n")
        process.stdin.flush()
        answer = self._answer()
        if not answer["ok"]:
            raise RuntimeError(f"engine process: {op}: {answer['error']}")
        return answer

    def pause(self) -> None:
        """Freeze it (SIGSTOP) and wait until it stands: its connections stay open, and silent."""
        os.kill(self.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WNOWAIT)

    def resume(self) -> None:
        """Let a frozen process go on."""
        os.kill(self.pid, signal.SIGCONT)

    def kill(self) -> None:
        """kill -9, and wait until it is gone."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            self._close(process)

    def stop(self) -> None:
        """End it in order; kills it if it does not answer."""
        process = self._process
        if process is None:
            return
        try:
            self.call("stop")
            process.wait(self._timeout)
        except (OSError, RuntimeError, TimeoutError, subprocess.TimeoutExpired):
            process.kill()
        self._process = None
        self._close(process)

    def _close(self, process: subprocess.Popen[bytes]) -> None:
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                try:
                    pipe.close()
                except BrokenPipeError:
                    continue

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            raise RuntimeError("engine process does not run: call start() first")
        return self._process

    def _answer(self) -> dict[str, Any]:
        """The next line of its output, as JSON."""
        stdout = self._running().stdout
        if stdout is None:
            raise RuntimeError("engine process has no stdout")
        deadline = time.monotonic() + self._timeout
        with selectors.DefaultSelector() as selector:
            selector.register(stdout, selectors.EVENT_READ)
            while b"\n" not in self._unread:
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    raise TimeoutError(f"engine process: no answer in {self._timeout:g} s")
                chunk = os.read(stdout.fileno(), 1 << 16)
                if not chunk:
                    raise RuntimeError("engine process ended; its standard error says why")
                self._unread += chunk
        line, _, self._unread = self._unread.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        return answer
