"""`kvindexd serve` as a process of its own, for demonstrations and for users' own tests."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvindexd.v1 import index_pb2 as pb

TIMEOUT = 30.0
"""Seconds to wait for a process, or for a batch."""


@contextlib.contextmanager
def child(command: list[str], **options: Any) -> Iterator[subprocess.Popen[str]]:
    """A process that is gone at the end: SIGTERM, and SIGKILL where that is not enough."""
    process = subprocess.Popen(command, text=True, **options)  # noqa: S603 - our own arguments
    try:
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.communicate(timeout=TIMEOUT)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()


@contextlib.contextmanager
def serving(folder: Path, **settings: str) -> Iterator[dict[str, Any]]:
    """A daemon with its embedded store on free ports; yields its ready line.

    `folder`: for its data and its log. `settings`: environment variables without their prefix, such
    as EXT_PROC__LISTEN; ext_proc and metrics are off otherwise. Raises RuntimeError with the log
    when it ends before it is ready, TimeoutError when it is not ready in time.
    """
    given = {
        "SERVER__LISTEN": "127.0.0.1:0",
        "EXT_PROC__LISTEN": "",
        "METRICS__LISTEN": "",
        "INDEX__DATA_DIR": str(folder / "data"),
        "LOG__FORMAT": "json",
    } | settings
    environment = {k: v for k, v in os.environ.items() if not k.startswith("KVINDEXD_")}
    environment |= {f"KVINDEXD_{key}": value for key, value in given.items()}
    command = [sys.executable, "-m", "kvindexd.cli.main", "serve"]
    path = folder / "kvindexd.log"
    with (
        path.open("w") as log,
        child(command, env=environment, stderr=log, stdout=subprocess.DEVNULL) as process,
    ):
        deadline = time.monotonic() + TIMEOUT
        while (ready := _ready(path)) is None:
            if process.poll() is not None:
                lines = path.read_text().splitlines()[-20:]
                raise RuntimeError("kvindexd serve did not start:\n" + "\n".join(lines))
            if time.monotonic() > deadline:
                raise TimeoutError(f"kvindexd serve is not ready after {TIMEOUT:.0f} s")
            time.sleep(0.02)  # a file tells nobody that it grew
        yield ready


def _ready(log: Path) -> dict[str, Any] | None:
    for line in log.read_text().splitlines():
        with contextlib.suppress(json.JSONDecodeError):
            record = json.loads(line)
            if isinstance(record, dict) and record.get("event") == "ready":
                return record
    return None


def wait_for(admin: Any, worker: str, seq: int) -> None:
    """Until `seq` is a worker's newest batch that queries see. `admin`: a KVIndexAdminStub. Raises
    TimeoutError."""
    request = pb.GetWorkerRequest(worker_id=worker)
    deadline = time.monotonic() + TIMEOUT
    while admin.GetWorker(request, timeout=5).worker.last_seq != seq:
        if time.monotonic() > deadline:
            raise TimeoutError(f"{worker}: batch {seq} is not visible after {TIMEOUT:.0f} s")
        time.sleep(0.01)  # a few times, in a demonstration
