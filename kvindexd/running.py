"""One process from its settings to its exit status."""

from __future__ import annotations

import contextlib
import ctypes
import gc
from collections.abc import Callable, Iterator

import structlog
import typer
import uvloop

from kvindexd.config import Config, ConfigError, Role
from kvindexd.processes import Part
from kvindexd.registration import InvalidRegistration
from kvindexd.security.exposure import check_exposure
from kvindexd.serve import Daemon
from kvindexd.store import StoreError
from kvindexd.telemetry import configure_logging, mask_secrets, tell_rest

log = structlog.get_logger(__name__)

_M_ARENA_MAX = -8
"""Of mallopt(3)."""
_EXPECTED = (ConfigError, StoreError, InvalidRegistration, OSError)


def run(
    config: Config,
    role: Role,
    part: Part | None = None,
    load: Callable[[], Config] | None = None,
) -> int:
    """Run the daemon until it is told to stop; the exit status. `part`: see kvindexd.processes.
    `load`: reads the configuration again."""
    configure_logging(config.log.format, config.log.level, repeat_seconds=config.log.repeat_seconds)
    if role != "serve" and not config.redis.url:
        typer.echo(
            f"kvindexd {role}: redis.url is not set; a {role} shares its Redis with others "
            "(only `serve` can bring its own)",
            err=True,
        )
        return 2
    daemon: Daemon | None = None
    try:
        if role != "sidecar":
            check_exposure(config)
        # Calls and batches leave no cycles to speak of; looking for them among millions of blocks
        # is what would hold the loop up.
        gc.set_threshold(50_000, 20, 100)
        _few_arenas()
        daemon = Daemon(config, role, part, load)
        uvloop.run(daemon.run())
    except Exception as error:
        return failed(role, error, started=daemon is not None and daemon.started)
    finally:
        tell_rest()
    return 0


def _few_arenas() -> None:
    """gRPC's many threads each take memory from an arena of their own, and what short calls leave
    in these is not used again by others: a million cancelled calls cost 100 MB more."""
    with contextlib.suppress(AttributeError, OSError):  # no glibc
        ctypes.CDLL(None).mallopt(_M_ARENA_MAX, 1)


def failed(role: Role, error: Exception, *, started: bool) -> int:
    """Say why a daemon ended; the exit status: 2 for its configuration, else 1. What keeps one
    from starting is said in plain words, anything else with its traceback."""
    causes = list(_causes(error))
    if not started and all(isinstance(e, _EXPECTED) for e in causes):
        for cause in causes:
            typer.echo(f"kvindexd {role}: {mask_secrets(str(cause))}", err=True)
        return 2 if any(isinstance(e, ConfigError) for e in causes) else 1
    # A traceback printed by anyone else would show passwords in URLs.
    log.error(
        "crashed",
        exc_info=error,
        fix="report this; a supervisor such as systemd starts it again",
    )
    return 1


def _causes(error: BaseException) -> Iterator[BaseException]:
    """The errors that task groups have put into groups."""
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from _causes(inner)
    else:
        yield error
