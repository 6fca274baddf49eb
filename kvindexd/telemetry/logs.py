"""Structured logs. No secret, no prompt and no token id passes."""

from __future__ import annotations

import asyncio
import enum
import logging
import re
import sys
import time
import traceback
from collections.abc import Callable, Iterable, MutableMapping
from typing import Any, Literal, TextIO

import msgspec
import numpy as np
import structlog

from kvindexd.telemetry.repeats import Event, LimitRepeats, Repeats, Told

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


class _Quiet(logging.Filter):
    """LimitRepeats for the standard library's records, on their handler."""

    def __init__(self, repeats: Repeats[Any], clock: Callable[[], float]) -> None:
        super().__init__()
        self._repeats = repeats
        self._clock = clock

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether to show it; records of one template are alike."""
        if record.levelno < logging.INFO:
            return True
        key = record.name, record.levelno, str(record.msg)
        withheld = self._repeats.admit(key, record, self._clock())
        if withheld is None:
            record.exc_info = None  # it would keep its frames alive
        elif withheld:
            record.suppressed = withheld
        return withheld is not None


def _of_record(_logger: object, _method: str, event: Event) -> Event:
    """What our filter, and the kind of library, add to a record of the standard library's."""
    record = event.get("_record")
    if suppressed := getattr(record, "suppressed", 0):
        event["suppressed"] = suppressed
    if isinstance(record, logging.LogRecord):
        event["logger"] = record.name
        error = record.exc_info[1] if record.exc_info else None
        if error is not None and record.name.startswith("grpc"):
            # It failed on a request, of which its message may be a part.
            event.pop("exc_info", None)
            event["exception"] = frames_of(error)
    return event


def frames_of(error: BaseException) -> str:
    """A traceback without the message, for errors that requests bring about: messages quote what
    they are about."""
    return "".join(traceback.format_tb(error.__traceback__)) + type(error).__name__


class _Rest:
    """Shows lines that were withheld, once it is their turn."""

    def __init__(
        self, repeats: Repeats[Any], show: Callable[[Event], None], handler: logging.Handler
    ) -> None:
        self.repeats = repeats
        self._show = show
        self._handler = handler

    def tell(self, told: Iterable[Told]) -> None:
        """Show these."""
        for line, suppressed in told:
            if isinstance(line, logging.LogRecord):
                line.suppressed = suppressed
                self._handler.emit(line)
            else:
                self._show(line | ({"suppressed": suppressed} if suppressed else {}))


_rest: _Rest | None = None


async def tell_repeats(interval: float = 1.0) -> None:
    """Show lines that were withheld as repeats when nothing more comes, until cancelled."""
    while True:
        await asyncio.sleep(interval)
        if _rest is not None:
            _rest.tell(_rest.repeats.due(time.monotonic()))


def tell_rest() -> None:
    """Show all that is still withheld: the process ends."""
    if _rest is not None:
        _rest.tell(_rest.repeats.rest())


def set_log_level(level: Literal["debug", "info", "warning", "error"]) -> None:
    """Change the least level shown, of all loggers there are."""
    _threshold.number = logging.getLevelNamesMapping()[level.upper()]
    logging.getLogger().setLevel(_threshold.number)


def configure_logging(
    format: Literal["json", "console"] = "json",
    level: Literal["debug", "info", "warning", "error"] = "info",
    stream: TextIO | None = None,
    repeat_seconds: float = 0.0,
) -> None:
    """Send structlog and the standard library's logging to `stream` (default: standard error).
    `repeat_seconds`: lines that are alike are shown at most once in that time; 0 = all are.

    One JSON object per line, or aligned text for people; libraries' records take the same way,
    so that an error inside one of them is neither lost nor unmasked.
    """
    global _rest
    out = stream or sys.stderr
    repeats: Repeats[Any] = Repeats(repeat_seconds)
    shared: list[Any] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.StackInfoRenderer(),
    ]
    # Exceptions become text before `redact`, so that what they quote is masked as well.
    masking: list[Any] = [structlog.processors.format_exc_info, redact]
    limit = LimitRepeats(repeats, time.monotonic)
    last: Any = structlog.processors.JSONRenderer(serializer=_encode_json)
    if format == "console":
        last = structlog.dev.ConsoleRenderer(
            colors=out.isatty(), exception_formatter=structlog.dev.plain_traceback
        )
    structlog.configure(
        processors=[_threshold, *shared, limit, *masking, last],
        wrapper_class=structlog.make_filtering_bound_logger(logging.NOTSET),
        logger_factory=structlog.WriteLoggerFactory(file=out),
        cache_logger_on_first_use=False,
    )
    handler = logging.StreamHandler(out)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[*shared, _of_record, *masking],
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, last],
        )
    )
    handler.addFilter(_Quiet(repeats, time.monotonic))

    def show(event: Event) -> None:
        for step in (*masking, last):
            event = step(None, "info", event)
        out.write(f"{event}\n")
        out.flush()

    _rest = _Rest(repeats, show, handler)
    logging.basicConfig(handlers=[handler], force=True)
    set_log_level(level)
