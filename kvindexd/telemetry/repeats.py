"""Keeps one fault from filling the log: of lines that are alike, the first is shown at once, then
at most one per interval, with how many were left out. Pure: time is an argument."""

from __future__ import annotations

from collections.abc import Callable, Hashable, MutableMapping
from typing import Any, Generic, NamedTuple, TypeVar

import structlog

T = TypeVar("T")
Event = MutableMapping[str, Any]

MAX_KEYS = 4096
"""Kinds of lines told apart at once; what is beyond is shown."""
_WHICH = (
    *("worker", "source", "endpoint", "model", "shard", "op"),
    *("state", "by", "why", "reason", "code"),
)
"""What, beside event and level, makes a line another one."""
_ALL_SHOWN = ("debug",)


class _Kind(Generic[T]):
    """`shown`: time of the last line shown. `withheld`: lines since; `last`: the newest of them."""

    __slots__ = ("last", "shown", "withheld")

    def __init__(self, shown: float) -> None:
        self.shown = shown
        self.withheld = 0
        self.last: T | None = None


class Told(NamedTuple):
    """A line that was withheld and is shown now; `suppressed`: further ones that are not."""

    line: Any
    suppressed: int


class Repeats(Generic[T]):
    """Decides line by line. `every`: seconds; 0 = everything is shown."""

    def __init__(self, every: float, max_keys: int = MAX_KEYS) -> None:
        self.every = every
        self._max = max_keys
        self._kinds: dict[Hashable, _Kind[T]] = {}

    def admit(self, key: Hashable, line: T, now: float) -> int | None:
        """None: withhold the line. Else show it, and say that so many before it were withheld."""
        if self.every <= 0:
            return 0
        kind = self._kinds.get(key)
        if kind is None:
            if len(self._kinds) < self._max:
                self._kinds[key] = _Kind(now)
            return 0
        if now - kind.shown < self.every:
            kind.withheld += 1
            kind.last = line
            return None
        withheld, kind.withheld, kind.last, kind.shown = kind.withheld, 0, None, now
        return withheld

    def due(self, now: float) -> list[Told]:
        """The newest of each kind that has waited for an interval, so that what came last is told
        even when nothing follows; kinds that ended are forgotten."""
        told = []
        for key, kind in list(self._kinds.items()):
            if now - kind.shown < self.every:
                continue
            if kind.withheld:
                told.append(Told(kind.last, kind.withheld - 1))
                kind.withheld, kind.last, kind.shown = 0, None, now
            else:
                self._kinds.pop(key, None)
        return told

    def rest(self) -> list[Told]:
        """All that is withheld; nothing is remembered any more."""
        told = [Told(k.last, k.withheld - 1) for k in self._kinds.values() if k.withheld]
        self._kinds.clear()
        return told


class LimitRepeats:
    """The structlog processor; comes behind those that add level and time."""

    def __init__(self, repeats: Repeats[Any], clock: Callable[[], float]) -> None:
        self._repeats = repeats
        self._clock = clock

    def __call__(self, _logger: object, _method: str, event: Event) -> Event:
        """The line, with `suppressed` where others were left out. Raises DropEvent."""
        if event.get("level") in _ALL_SHOWN:
            return event
        withheld = self._repeats.admit(key_of(event), event, self._clock())
        if withheld is None:
            # The traceback was shown with the first one; it would keep its frames alive.
            event.pop("exc_info", None)
            raise structlog.DropEvent
        if withheld:
            event["suppressed"] = withheld
        return event


def key_of(event: Event) -> Hashable:
    """What makes two lines alike."""
    which = tuple((name, str(event[name])) for name in _WHICH if name in event)
    return event.get("level"), event.get("event"), which
