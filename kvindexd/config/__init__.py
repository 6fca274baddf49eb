"""Settings: `load()` gives a `Settings`, whose `.config` is the `Config` to run by."""

from kvindexd.config.base import Role
from kvindexd.config.load import Row, Settings, json_schema, load, read_workers
from kvindexd.config.schema import (
    SECTIONS,
    Config,
    ConfigError,
    DiscoveryConfig,
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
    "DiscoveryConfig",
    "ExtProcConfig",
    "GroupsConfig",
    "IndexConfig",
    "IngestConfig",
    "LimitsConfig",
    "LogConfig",
    "MetricsConfig",
    "RedisConfig",
    "Role",
    "Row",
    "ServerConfig",
    "Settings",
    "TracingConfig",
    "WorkerConfig",
    "json_schema",
    "load",
    "parse_listen",
    "read_workers",
]
