"""Sections of what shows operators how the daemon fares."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from kvindexd.config.base import Section


class MetricsConfig(Section, frozen=True, kw_only=True):
    """The HTTP server of /metrics, /healthz, /readyz and /ui."""

    listen: Annotated[str, Meta(description='host:port; "" = off')] = "127.0.0.1:9400"
    ui: Annotated[bool, Meta(description="Show operators a read-only page at /ui")] = True


class LogConfig(Section, frozen=True, kw_only=True):
    """Logs, on standard error."""

    format: Annotated[
        Literal["json", "console"], Meta(description="One JSON object per line, or text")
    ] = "json"
    level: Annotated[
        Literal["debug", "info", "warning", "error"], Meta(description="Least level shown")
    ] = "info"
    repeat_seconds: Annotated[
        float,
        Meta(ge=0, description="Lines that are alike are shown once in that time; 0 = all are"),
    ] = 10.0


class TracingConfig(Section, frozen=True, kw_only=True):
    """OpenTelemetry traces; they need the extra `otel`."""

    enabled: Annotated[bool, Meta(description="Export a trace of each request that is sampled")] = (
        False
    )
    endpoint: Annotated[
        str,
        Meta(
            description='OTLP over gRPC, "http://collector:4317"; "" = as the OTEL_EXPORTER_OTLP_* '
            "variables say"
        ),
    ] = ""
    ratio: Annotated[
        float,
        Meta(
            ge=0,
            le=1,
            description="Part of the traces begun here that is sampled; callers decide for theirs",
        ),
    ] = 1.0
    flush_seconds: Annotated[
        float, Meta(ge=0, description="Longest wait for the last spans at shutdown")
    ] = 2.0
