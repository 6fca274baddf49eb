"""Traces: what the daemon tells OpenTelemetry of each request. Off, a span costs one look at a
variable, and OpenTelemetry is not even imported.

A trace says how a pick came about: counts, names and times, never a token, a prompt or a salt.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractContextManager, asynccontextmanager
from typing import Literal, Protocol

from kvindexd.config import ConfigError, TracingConfig

Kind = Literal["internal", "server", "client"]
Value = str | int | float | bool
Carrier = Mapping[str, str]
"""Headers or metadata, names in lower case."""

_INSTALL = "pip install 'kvindexd[otel]'"


class Span(Protocol):
    """One piece of work under way."""

    def set(self, attributes: Mapping[str, Value]) -> None:
        """Attributes by OpenTelemetry's names, or under `kvindexd.`."""
        ...

    def fail(self, kind: str) -> None:
        """Mark it as failed; `kind`: a status code or the name of an exception's class. Messages
        stay out: they may quote what a client sent."""
        ...


class LongSpan(Span, Protocol):
    """A span that ends when it is told to."""

    def end(self) -> None:
        """The work is over."""
        ...


class Backend(Protocol):
    """OpenTelemetry, as far as it is used; see kvindexd.otel."""

    def span(self, name: str, kind: Kind) -> AbstractContextManager[Span]:
        """A span under the current one."""
        ...

    def begin(self, name: str, parent: Carrier) -> LongSpan:
        """A server's span under the caller's, and current for the rest of this task."""
        ...

    def adopt(self, parent: Carrier) -> None:
        """Make the caller's span current for the rest of this task."""
        ...

    def headers(self) -> dict[str, str]:
        """What tells a server that is asked about the current span."""
        ...

    async def close(self, seconds: float) -> None:
        """Send what is waiting, but give up after so many seconds."""
        ...


class _Off:
    """Stands in for every span while tracing is off."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, *_: object) -> None:
        return None


_OFF = _Off()
_backend: Backend | None = None


def on() -> bool:
    """Whether spans are made."""
    return _backend is not None


def span(name: str, kind: Kind = "internal") -> AbstractContextManager[Span | None]:
    """A span around a piece of work, under the current one; None while tracing is off. An
    exception that passes through marks it as failed."""
    return _OFF if _backend is None else _backend.span(name, kind)


def begin(name: str, parent: Carrier) -> LongSpan | None:
    """A server's span for the whole of this asyncio task, which has to end it; its parent is the
    caller's span, where the carrier names one. None while tracing is off."""
    return None if _backend is None else _backend.begin(name, parent)


def adopt(parent: Carrier) -> None:
    """Make the caller's span the parent of what this asyncio task begins from here on."""
    if _backend is not None:
        _backend.adopt(parent)


def headers() -> dict[str, str]:
    """What to send along to a server that is asked, so that its spans join the trace."""
    return {} if _backend is None else _backend.headers()


@asynccontextmanager
async def running(
    settings: TracingConfig, count: Callable[[str, int], None] = lambda _outcome, _spans: None
) -> AsyncIterator[None]:
    """Trace as configured while inside. `count`: told what became of how many spans, from another
    thread. Raises ConfigError when tracing is asked for and cannot be had."""
    global _backend
    if not settings.enabled:
        yield
        return
    made = _load(settings, count)
    _backend = made
    try:
        yield
    finally:
        _backend = None
        await made.close(settings.flush_seconds)


def _load(settings: TracingConfig, count: Callable[[str, int], None]) -> Backend:
    try:
        from kvindexd.otel import Otel
    except ImportError as e:
        raise ConfigError(
            f"tracing.enabled is set, but OpenTelemetry is not installed ({e}); run {_INSTALL}, "
            "or unset tracing.enabled"
        ) from None
    except ValueError as e:  # OTEL_PROPAGATORS and the like are read on import
        raise ConfigError(f"tracing: {e}; check the OTEL_* environment variables") from None
    return Otel(settings, count)
