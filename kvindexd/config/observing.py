"""Sections of what shows operators how the daemon fares."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from kvindexd.config.base import Section


class MetricsConfig(Section, frozen=True, kw_only=True):
    """The HTTP server of /metrics, /healthz and /readyz."""

    listen: Annotated[str, Meta(description='host:port; "" = off')] = "127.0.0.1:9400"


class LogConfig(Section, frozen=True, kw_only=True):
    """Logs, on standard error."""

    format: Annotated[
        Literal["json", "console"], Meta(description="One JSON object per line, or text")
    ] = "json"
    level: Annotated[
        Literal["debug", "info", "warning", "error"], Meta(description="Least level shown")
    ] = "info"
