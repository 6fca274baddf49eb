"""Workers from a file: a list like `[[workers]]`, in TOML, JSON or YAML, read when it changes."""

from __future__ import annotations

import asyncio
import tomllib
from pathlib import Path
from typing import Any

import msgspec

from kvindexd.config import ConfigError, read_workers
from kvindexd.discovery.source import Report
from kvindexd.discovery.wanted import Wanted

_LARGEST = 16 * 1024 * 1024


class FileSource:
    """One file. Its content is compared, not its times: a mounted ConfigMap is a symbolic link
    that is swapped, and an editor may write twice within the clock's resolution."""

    def __init__(self, name: str, path: str, interval: float, bind_events: bool = False) -> None:
        """`interval`: seconds between looks. `bind_events`: of workers that do not say."""
        self.name = name
        self._path = Path(path)
        self._interval = interval
        self._bind_events = bind_events
        self._asked = asyncio.Event()

    def look(self) -> None:
        """Read it now."""
        self._asked.set()

    async def run(self, report: Report) -> None:
        """Read the file for ever; a broken one keeps what was found last."""
        last: bytes | None = None
        while True:
            self._asked.clear()
            try:
                content = await asyncio.to_thread(_read, self._path)
                if content == last:
                    report.works()
                else:
                    report.publish(await asyncio.to_thread(self._parse, content))
                    last = content
            except ConfigError as e:
                report.failed(str(e))
            try:
                async with asyncio.timeout(self._interval):
                    await self._asked.wait()
            except TimeoutError:
                pass

    def _parse(self, content: bytes) -> list[Wanted]:
        return parse(content, self._path, self._bind_events)


def _read(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            content = file.read(_LARGEST + 1)
    except OSError as e:
        raise ConfigError(f"cannot read {path}: {e.strerror or e}") from None
    if len(content) > _LARGEST:
        raise ConfigError(f"{path} is larger than {_LARGEST} bytes; expected a list of workers")
    return content


def parse(content: bytes, path: Path, bind_events: bool = False) -> list[Wanted]:
    """The workers of a file's content; the ending of `path` says which format. Raises ConfigError,
    naming the file."""
    found = _decoded(content, path)
    if isinstance(found, dict):
        unknown = [key for key in found if key != "workers"]
        if unknown:
            raise ConfigError(f"{path}: {unknown[0]!r} is unknown; expected workers and no more")
        found = found.get("workers", [])
    workers = read_workers(found, f"file {path}", bind_events)
    return [Wanted(worker.registration()) for worker in workers]


def _decoded(content: bytes, path: Path) -> Any:
    kind = path.suffix
    try:
        if kind == ".toml":
            return tomllib.loads(content.decode())
        if kind == ".json":
            return msgspec.json.decode(content)
        return _yaml(content)
    except ImportError:
        raise ConfigError(
            f"{path}: reading YAML takes PyYAML; pip install 'kvindexd[discovery]', or write JSON"
        ) from None
    except (ValueError, msgspec.DecodeError) as e:
        raise ConfigError(f"{path} is not valid {kind[1:].upper()}: {e}") from None


def _yaml(content: bytes) -> Any:
    import yaml

    try:
        return yaml.safe_load(content)
    except yaml.YAMLError as e:
        raise ValueError(str(e).replace("\n", " ")) from None
