"""SIGHUP: read the configuration again, and tell the parts that can take it while they run."""

from __future__ import annotations

import asyncio
import inspect
import signal
from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple

import msgspec
import structlog
from prometheus_client import Counter

from kvindexd.config import SECTIONS, Config, ConfigError
from kvindexd.telemetry import Metrics

log = structlog.get_logger(__name__)

Part = Callable[[Config], Awaitable[None] | None]
"""Takes the settings now in force. Called at every reload, since files that the settings name may
have changed where they have not. What it raises is logged, and it goes on as before."""


class _Hook(NamedTuple):
    part: Part
    keys: Sequence[str]


class Reloads:
    """Which parts can be told, and the settings in force."""

    def __init__(
        self, config: Config, metrics: Metrics, load: Callable[[], Config] | None = None
    ) -> None:
        """`load`: reads the configuration again, raises ConfigError; None = it cannot change."""
        self.config = config
        self._load = load
        self._hooks: list[_Hook] = []
        self._asked = asyncio.Event()
        self._outcomes = Counter(
            "reloads",
            "Configurations read again, by outcome: done, partly or failed",
            ("outcome",),
            namespace="kvindexd",
            registry=metrics.registry,
        )

    def on_reload(self, part: Part, *keys: str) -> None:
        """Have `part` called at every reload. `keys`: the settings that it puts into force, such as
        "log.level", or whole sections such as "log"; all others need a restart."""
        self._hooks.append(_Hook(part, keys))

    def give(self, config: Config) -> None:
        """Reload soon, with these settings."""
        self._load = lambda: config
        self._asked.set()

    def catch_signal(self) -> None:
        """Reload at SIGHUP from now on, once `run` runs; until then it is remembered."""
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, self._asked.set)

    async def run(self) -> None:
        """Reload whenever asked, until cancelled."""
        while True:
            await self._asked.wait()
            self._asked.clear()
            await self.reload()

    async def reload(self) -> None:
        """Read the configuration and tell every part. A broken one changes nothing."""
        try:
            new = await asyncio.to_thread(self._load) if self._load is not None else self.config
        except ConfigError as e:
            self._outcomes.labels("failed").inc()
            log.error("reload_failed", error=str(e), cost="the settings in force stay")
            return
        changed = changed_keys(self.config, new)
        hot = [key for key in changed if self._is_hot(key)]
        cold = [key for key in changed if key not in hot]
        self.config = merged(self.config, new, hot)
        failed = await self._tell()
        self._outcomes.labels("partly" if failed or cold else "done").inc()
        log.info("reloaded", changed=hot)
        if cold:
            log.warning("restart_needed", keys=cold, cost="their old values stay in force")

    def _is_hot(self, key: str) -> bool:
        return any(
            key == covered or key.startswith(f"{covered}.")
            for hook in self._hooks
            for covered in hook.keys
        )

    async def _tell(self) -> int:
        failed = 0
        for hook in list(self._hooks):
            try:
                waiting = hook.part(self.config)
                if inspect.isawaitable(waiting):
                    await waiting
            except Exception as e:
                failed += 1
                name = getattr(hook.part, "__qualname__", repr(hook.part))
                log.error(
                    "reload_part_failed",
                    part=name,
                    keys=hook.keys,
                    error=str(e) or repr(e),
                    cost="that part goes on with its old settings",
                )
        return failed


def changed_keys(old: Config, new: Config) -> list[str]:
    """Dotted keys that differ, and "workers"."""
    keys = [
        f"{section}.{key}"
        for section, kind in SECTIONS.items()
        for key in kind.__struct_fields__
        if getattr(getattr(old, section), key) != getattr(getattr(new, section), key)
    ]
    return keys + (["workers"] if old.workers != new.workers else [])


def merged(old: Config, new: Config, keys: Sequence[str]) -> Config:
    """`old` with the values that `new` has for `keys`."""
    for dotted in keys:
        section, _, key = dotted.partition(".")
        value = getattr(new, section)
        if key:
            value = msgspec.structs.replace(getattr(old, section), **{key: getattr(value, key)})
        old = msgspec.structs.replace(old, **{section: value})
    return old
