"""`serve`, `sidecar` and `scorer`: run the daemon, or a part of it, in the foreground."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvindexd.config import Config, ConfigError, Role, load

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
        # Other commands need not wait for the daemon to be imported.
        from kvindexd.running import run

        raise typer.Exit(run(settings, role, load=read))

    return command
