"""`--processes N`: N - 1 further scorers behind the same ports, one per core that is to be used.

One event loop answers on one core. Every process binds the same addresses with SO_REUSEPORT, and
the kernel deals *connections* out among them, so a gateway with a single connection is served by
one of them. Each has a replica of its own; requests in flight and predictions are shared through
the store, as among scorers on different machines.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import structlog

from kvindexd.config import Config, DiscoveryConfig, parse_listen

log = structlog.get_logger(__name__)

_BACKOFF = 30.0
"""Longest pause before a process that ended is started again, in seconds."""
_END = b"\n"
"""The line by which a process is told to end."""
_STEADY = 60.0
"""Seconds after which a process counts as having worked: its next end is a first one again."""
_MARGIN = 5.0
"""Seconds that a process gets beyond its grace time before it is killed."""
_LONGEST_LINE = 64 * 1024 * 1024
"""Bytes of one set of settings."""


class Part(msgspec.Struct, frozen=True):
    """What one further process is told on its standard input.

    `index`: 1 to N - 1. `tail`: gRPC address of the process that ingests, for TailWorker.
    """

    config: Config
    index: int
    tail: str


@contextlib.contextmanager
def private_address() -> Iterator[str]:
    """A Unix socket's gRPC address that only this user can reach; its folder is removed after."""
    with tempfile.TemporaryDirectory(prefix="kvindexd-") as folder:
        yield f"unix:{Path(folder) / 'main.sock'}"


def part_config(config: Config, bound: dict[str, str], store_url: str, index: int) -> Config:
    """The settings of process `index`: the addresses that the first one really has, its store, no
    workers or sources of its own, and a metrics port of its own (the first one's plus `index`, or
    any where that one is 0 or there is no such port).
    """
    replace = msgspec.structs.replace
    metrics = config.metrics.listen
    if metrics:
        host, port = parse_listen(metrics)
        host = f"[{host}]" if ":" in host else host
        metrics = f"{host}:{port + index if 0 < port <= 65535 - index else 0}"
    return replace(
        config,
        server=replace(config.server, listen=bound["grpc"], admin_listen=bound.get("admin", "")),
        ext_proc=replace(config.ext_proc, listen=bound.get("ext_proc", "")),
        metrics=replace(config.metrics, listen=metrics),
        redis=replace(config.redis, url=store_url),
        workers=[],
        discovery=DiscoveryConfig(),
    )


class Processes:
    """Keeps the further processes running until told to stop."""

    def __init__(self, parts: list[Part], grace: float) -> None:
        """`grace`: seconds that each may take to end its calls."""
        self._parts = {part.index: part for part in parts}
        self._grace = grace
        self._inputs: dict[int, asyncio.StreamWriter] = {}

    def reload(self, parts: list[Part]) -> None:
        """Give every process new settings, and to those that start from now on."""
        self._parts = {part.index: part for part in parts}
        for index, pipe in self._inputs.items():
            if index in self._parts:
                _tell(pipe, self._parts[index])

    async def run(self, stopping: asyncio.Event) -> None:
        """Until `stopping`; by then, or when cancelled, all of them have ended."""
        async with asyncio.TaskGroup() as tasks:
            for index in self._parts:
                tasks.create_task(self._keep(index, stopping), name=f"process {index}")

    async def _keep(self, index: int, stopping: asyncio.Event) -> None:
        failures = 0
        loop = asyncio.get_running_loop()
        while not stopping.is_set():
            began = loop.time()
            status: int | str
            try:
                status = await self._one(self._parts[index], stopping)
            except OSError as e:  # no memory, too many processes
                status = f"not started: {e}"
            if stopping.is_set():
                return
            failures = 1 if loop.time() - began > _STEADY else failures + 1
            pause = min(_BACKOFF, 0.2 * 2.0**failures) * random.uniform(0.5, 1.0)  # noqa: S311
            log.error(
                "process_ended",
                index=index,
                status=status,
                again_in=round(pause, 1),
                cost="its connections are cut off; the other processes take new ones",
            )
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await stopping.wait()

    async def _one(self, part: Part, stopping: asyncio.Event) -> int:
        """Run one process to its end; the exit status."""
        process = await asyncio.create_subprocess_exec(*_command(), stdin=asyncio.subprocess.PIPE)
        ended = asyncio.create_task(process.wait())
        asked = asyncio.create_task(stopping.wait())
        try:
            if process.stdin is not None:
                # Through a pipe: neither `ps` nor /proc shows the store's password. It stays open;
                # its end tells the process that this one is gone.
                _tell(process.stdin, self._parts[part.index])
                self._inputs[part.index] = process.stdin
                await process.stdin.drain()
            await asyncio.wait((ended, asked), return_when=asyncio.FIRST_COMPLETED)
            return await self._end(process, ended)
        except ConnectionError:
            return await ended  # it died before it had read its settings
        finally:
            self._inputs.pop(part.index, None)
            asked.cancel()
            if not ended.done():
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                await asyncio.shield(ended)

    async def _end(self, process: asyncio.subprocess.Process, ended: asyncio.Task[int]) -> int:
        if not ended.done():
            # Not by a signal: it may have had one already, and a second one means "at once".
            if process.stdin is not None:
                with contextlib.suppress(RuntimeError):  # as in _tell
                    process.stdin.write(_END)
                process.stdin.close()
            await asyncio.wait((ended,), timeout=self._grace + _MARGIN)
        if not ended.done():
            log.warning("process_killed", pid=process.pid, cost="its calls in flight are cut off")
            with contextlib.suppress(ProcessLookupError):
                process.kill()
        return await ended


def _command() -> list[str]:
    """Of a further process. It imports from the working directory only where this one does, else
    whoever may write there would say what runs."""
    local = not {"", os.getcwd()}.isdisjoint(sys.path)
    return [sys.executable, *(() if local else ("-P",)), "-m", "kvindexd.processes"]


def _tell(pipe: asyncio.StreamWriter, part: Part) -> None:
    if not pipe.is_closing():
        with contextlib.suppress(RuntimeError):  # how uvloop says that the other end is closed
            pipe.write(msgspec.json.encode(part) + b"\n")


async def orphaned(stopping: asyncio.Event, take: Callable[[Config], None]) -> None:
    """In a further process: set `stopping` when the first one is gone, however it ended. `take` is
    given the settings that the first one sends meanwhile."""
    reader = asyncio.StreamReader(limit=_LONGEST_LINE)
    loop = asyncio.get_running_loop()
    pipe = os.fdopen(os.dup(sys.stdin.fileno()), "rb", buffering=0)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), pipe)
    while (line := await reader.readline()).endswith(b"\n") and line != _END:
        take(msgspec.json.decode(line, type=Part).config)
    if line != _END and not stopping.is_set():
        log.warning("main_process_gone", cost="this one ends")
    stopping.set()


def main() -> int:
    """Entry point of a further process: settings as one line of JSON on standard input."""
    from kvindexd.running import run  # which imports the daemon, which imports this

    line = bytearray()
    while not line.endswith(b"\n"):
        byte = os.read(sys.stdin.fileno(), 1)
        if not byte:
            return 1
        line += byte
    part = msgspec.json.decode(bytes(line), type=Part)
    return run(part.config, "scorer", part)


if __name__ == "__main__":
    sys.exit(main())
