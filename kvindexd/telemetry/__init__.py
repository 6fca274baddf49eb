"""Logs, metrics, and the small HTTP server that shows them. No secret and no token id passes."""

from kvindexd.telemetry.http import MetricsServer
from kvindexd.telemetry.logs import (
    configure_logging,
    frames_of,
    mask_secrets,
    name_request,
    redact,
    set_log_level,
    tell_repeats,
    tell_rest,
)
from kvindexd.telemetry.metrics import WORKER_STATES, BoundedLabel, Metrics

__all__ = [
    "WORKER_STATES",
    "BoundedLabel",
    "Metrics",
    "MetricsServer",
    "configure_logging",
    "frames_of",
    "mask_secrets",
    "name_request",
    "redact",
    "set_log_level",
    "tell_repeats",
    "tell_rest",
]
