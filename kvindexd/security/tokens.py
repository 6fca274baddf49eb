"""Bearer tokens in force: those of the configuration, and those of a file that may change."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

import structlog

from kvindexd.config import ConfigError
from kvindexd.security.credentials import CredentialError, Token, tokens_in

log = structlog.get_logger(__name__)

_LOOK_EVERY = 1.0
"""Seconds between looks at the file at most."""
Signature = tuple[int, int, int]


def signature(path: Path) -> Signature:
    """What changes with a file's content. Raises OSError."""
    found = path.stat()
    return (found.st_mtime_ns, found.st_size, found.st_ino)


class TokenSource:
    """Call it for the tokens in force. A file that cannot be read any more changes nothing."""

    def __init__(
        self,
        fixed: Sequence[Token],
        path: str = "",
        on_reload: Callable[[bool], None] = lambda _: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`on_reload`: told whether a changed file could be used. Raises ConfigError when the file
        cannot be used at the start."""
        self._fixed = list(fixed)
        self._path = Path(path) if path else None
        self._on_reload = on_reload
        self._clock = clock
        self._looked = clock()
        self._seen: Signature | None = None
        self._tokens = self._fixed
        if self._path is not None:
            try:
                self._seen = signature(self._path)
                self._tokens = self._read(self._path)
            except (OSError, UnicodeDecodeError, CredentialError) as e:
                raise ConfigError(f"auth.tokens_file: {self._path}: {_said(e)}") from None

    def __call__(self) -> Sequence[Token]:
        """The tokens in force; looks at the file once a second."""
        now = self._clock()
        if self._path is not None and now - self._looked >= _LOOK_EVERY:
            self._looked = now
            self._look(self._path)
        return self._tokens

    def _look(self, path: Path) -> None:
        try:
            found = signature(path)
        except OSError as e:
            found = (0, 0, 0)
            if found != self._seen:
                self._failed(path, e)
            self._seen = found
            return
        if found == self._seen:
            return
        self._seen = found
        try:
            self._tokens = self._read(path)
        except (OSError, UnicodeDecodeError, CredentialError) as e:
            self._failed(path, e)
        else:
            log.info("tokens_reloaded", path=str(path), count=len(self._tokens))
            self._on_reload(True)

    def _failed(self, path: Path, error: Exception) -> None:
        log.error(
            "tokens_not_reloaded",
            path=str(path),
            error=_said(error),
            cost="the tokens read before stay in force",
        )
        self._on_reload(False)

    def _read(self, path: Path) -> list[Token]:
        return [*self._fixed, *tokens_in(path.read_text(encoding="utf-8"))]


def _said(error: Exception) -> str:
    # What cannot be decoded is quoted by the error, and might be a token.
    return "it is not UTF-8 text" if isinstance(error, UnicodeDecodeError) else str(error)
