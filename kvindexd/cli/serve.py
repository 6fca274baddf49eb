"""`serve`, `sidecar` and `scorer`: run the daemon, or a part of it, in the foreground."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated

import structlog
import typer
import uvloop

from kvindexd.config import Config, ConfigError, load
from kvindexd.processes import Part
from kvindexd.registration import InvalidRegistration
from kvindexd.security.exposure import check_exposure
from kvindexd.serve import Daemon, Role
from kvindexd.store import StoreError
from kvindexd.telemetry import configure_logging, mask_secrets, tell_rest

log = structlog.get_logger(__name__)

ConfigOption = Annotated[
    Path | None, typer.Option("--config", help="TOML file; KVINDEXD_CONFIG otherwise.")
]
ListenOption = Annotated[
    str | None, typer.Option("--listen", help="gRPC address, host:port; port 0 = any.")
]
RedisOption = Annotated[
    str | None, typer.Option("--redis-url", help="Store; none = an embedded Valkey.")
]
DataOption = Annotated[
    str | None, typer.Option("--data-dir", help="Folder of the embedded Valkey's files.")
]
LogFormatOption = Annotated[str | None, typer.Option("--log-format", help="json or console.")]
LogLevelOption = Annotated[
    str | None, typer.Option("--log-level", help="debug, info, warning or error.")
]
ProcessesOption = Annotated[
    int | None, typer.Option("--processes", help="Processes that answer, one per core to use.")
]
MetricsOption = Annotated[
    str | None, typer.Option("--metrics-listen", help='Metrics address; "" = off.')
]


def register(app: typer.Typer) -> None:
    """Add the commands."""
    for role in ("serve", "sidecar", "scorer"):
        app.command(role, help=_HELP[role])(_command(role))


_HELP = {
    "serve": "Everything in one process: ingest, index, gRPC, metrics.",
    "sidecar": "Ingest only, for the engine in the same pod; writes to the shared Redis.",
    "scorer": "gRPC only, from the shared Redis.",
}


def _command(role: Role):  # type: ignore[no-untyped-def]  # typer reads the inner signature
    def command(
        config: ConfigOption = None,
        listen: ListenOption = None,
        redis_url: RedisOption = None,
        data_dir: DataOption = None,
        metrics_listen: MetricsOption = None,
        processes: ProcessesOption = None,
        log_format: LogFormatOption = None,
        log_level: LogLevelOption = None,
    ) -> None:
        flags = {
            "server.listen": listen,
            "redis.url": redis_url,
            "index.data_dir": data_dir,
            "metrics.listen": metrics_listen,
            "server.processes": processes,
            "log.format": log_format,
            "log.level": log_level,
        }

        def read() -> Config:
            return load(config, flags=flags).config

        try:
            settings = read()
        except ConfigError as e:
            typer.echo(f"kvindexd {role}: {e}", err=True)
            raise typer.Exit(2) from None
        raise typer.Exit(run(settings, role, load=read))

    return command


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
        daemon = Daemon(config, role, part, load)
        uvloop.run(daemon.run())
    except Exception as error:
        return failed(role, error, started=daemon is not None and daemon.started)
    finally:
        tell_rest()
    return 0


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
