"""Structured logs. No secret, no prompt and no token id passes."""

from __future__ import annotations

import enum
import logging
import re
import sys
from collections.abc import MutableMapping
from typing import Any, Literal, TextIO

import msgspec
import numpy as np
import structlog

_USERINFO = re.compile(r"([a-zA-Z][a-zA-Z0-9+.\-]*://[^\s:/@\"']*):[^\s\"']*@")
_QUERY_SECRET = re.compile(r"([?&](?:password|token|secret)=)[^&\s\"']*", re.IGNORECASE)
_SECRET_KEY = re.compile(r"(^|_)(password|secret|authorization|credential)s?$", re.IGNORECASE)
_CONTENT_KEYS = frozenset(
    {"token_ids", "tokens", "lookahead_token_ids", "prompt", "text", "openai_body"}
)
_MAX_REQUEST_ID = 128
_SCALARS = (type(None), bool, int, float)
_WITHHELD_TYPES = (str, bytes, bytearray, list, tuple, dict)


def mask_secrets(text: str) -> str:
    """Replace passwords in URLs by `***`. Masks too much rather than too little."""
    return _QUERY_SECRET.sub(r"\1***", _USERINFO.sub(r"\1:***@", text))


def name_request(request_id: str) -> None:
    """Put a request's id on every line that this asyncio task and its children log from here on.
    The id comes from a client: what cannot be one is left out, and a long one is cut."""
    if request_id and request_id.isascii() and request_id.isprintable():
        structlog.contextvars.bind_contextvars(request_id=request_id[:_MAX_REQUEST_ID])


def redact(
    _logger: object, _method: str, event: MutableMapping[str, Any]
) -> MutableMapping[str, Any]:
    """The structlog processor that keeps secrets, prompts and token ids out of the log."""
    for key, value in event.items():
        if key != "_record":  # the standard library's own record; removed before rendering
            event[key] = _redact_value(key, value)
    return event


def _redact_value(key: str, value: object) -> object:
    if _SECRET_KEY.search(key) and value:
        return "***"
    if key in _CONTENT_KEYS and isinstance(value, _WITHHELD_TYPES):
        return f"<{len(value)} withheld>"
    if isinstance(value, str) and not isinstance(value, enum.Enum):
        return mask_secrets(value)
    if isinstance(value, dict):
        return {str(k): _redact_value(str(k), v) for k, v in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_redact_value("", v) for v in value]
    if isinstance(value, msgspec.Struct):
        return {k: _redact_value(k, v) for k, v in msgspec.structs.asdict(value).items()}
    return _redact_scalar(value)


def _redact_scalar(value: object) -> object:
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, enum.Enum):
        return value.name
    return value if type(value) in _SCALARS else mask_secrets(repr(value))


def _encode_json(event: object, **_: object) -> str:
    return msgspec.json.encode(event).decode()


class _Threshold:
    """The least level shown; a processor, so that loggers made earlier follow a change as well."""

    def __init__(self) -> None:
        self.number = logging.INFO

    def __call__(
        self, _logger: object, method: str, event: MutableMapping[str, Any]
    ) -> MutableMapping[str, Any]:
        name = "ERROR" if method == "exception" else method.upper()
        if logging.getLevelNamesMapping()[name] < self.number:
            raise structlog.DropEvent
        return event


_threshold = _Threshold()


def set_log_level(level: Literal["debug", "info", "warning", "error"]) -> None:
    """Change the least level shown, of all loggers there are."""
    _threshold.number = logging.getLevelNamesMapping()[level.upper()]
    logging.getLogger().setLevel(_threshold.number)


def configure_logging(
    format: Literal["json", "console"] = "json",
    level: Literal["debug", "info", "warning", "error"] = "info",
    stream: TextIO | None = None,
) -> None:
    """Send structlog and the standard library's logging to `stream` (default: standard error).

    One JSON object per line, or aligned text for people; libraries' records take the same way,
    so that an error inside one of them is neither lost nor unmasked.
    """
    out = stream or sys.stderr
    shared: list[Any] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.StackInfoRenderer(),
    ]
    # Exceptions become text before `redact`, so that what they quote is masked as well.
    shared += [structlog.processors.format_exc_info, redact]
    last: Any = structlog.processors.JSONRenderer(serializer=_encode_json)
    if format == "console":
        last = structlog.dev.ConsoleRenderer(
            colors=out.isatty(), exception_formatter=structlog.dev.plain_traceback
        )
    structlog.configure(
        processors=[_threshold, *shared, last],
        wrapper_class=structlog.make_filtering_bound_logger(logging.NOTSET),
        logger_factory=structlog.WriteLoggerFactory(file=out),
        cache_logger_on_first_use=False,
    )
    handler = logging.StreamHandler(out)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, last],
        )
    )
    logging.basicConfig(handlers=[handler], force=True)
    set_log_level(level)
