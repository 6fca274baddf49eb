"""Settings: `load()` gives a `Settings`, whose `.config` is the `Config` to run by."""

from kvindexd.config.load import Row, Settings, json_schema, load
from kvindexd.config.schema import (
    SECTIONS,
    Config,
    ConfigError,
    ExtProcConfig,
    GroupsConfig,
    IndexConfig,
    IngestConfig,
    LimitsConfig,
    LogConfig,
    MetricsConfig,
    RedisConfig,
    ServerConfig,
    TracingConfig,
    WorkerConfig,
    parse_listen,
)

__all__ = [
    "SECTIONS",
    "Config",
    "ConfigError",
    "ExtProcConfig",
    "GroupsConfig",
    "IndexConfig",
    "IngestConfig",
    "LimitsConfig",
    "LogConfig",
    "MetricsConfig",
    "RedisConfig",
    "Row",
    "ServerConfig",
    "Settings",
    "TracingConfig",
    "WorkerConfig",
    "json_schema",
    "load",
    "parse_listen",
]
