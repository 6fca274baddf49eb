"""Writing a capture file: gzip, flushed so often that a kill costs the last moment only."""

from __future__ import annotations

import os
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Self

from kvindexd.capturing import records
from kvindexd.capturing.lines import CaptureError
from kvindexd.capturing.records import (
    EndRecord,
    FrameRecord,
    Header,
    MessageRecord,
    Record,
)

_GZIP = 31
"""zlib's window bits for the gzip container."""
_LEVEL = 3
"""Token ids hardly compress further at higher levels, which cost several times the CPU."""
_MEMBER = 1 << 20
"""Bytes of text in one gzip member, which has a checksum of its own."""
_FLUSH_SECONDS = 0.5


class CaptureWriter:
    """A capture file being written. One task owns it. Use as a context manager, or `close` it.

    What was written more than half a second before the last `flush_if_due`, and all that was
    written before a `flush`, can be read whatever happens to the process.
    """

    def __init__(
        self,
        path: Path,
        header: Header,
        *,
        overwrite: bool = False,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Create the file. Raises CaptureError when it exists, without `overwrite`; OSError."""
        try:
            mode = "wb" if overwrite else "xb"
            self._file = open(path, mode, buffering=0, opener=_private)  # noqa: SIM115 - see close
        except FileExistsError:
            raise CaptureError(
                f"{path} exists: name another file, or use --force to replace it"
            ) from None
        self._deflate = _new_member()
        self._clock = clock
        self._unflushed = self._member = 0
        self._flushed_at = clock()
        self.frames = 0
        self.messages = 0
        self.payload_bytes = 0
        self.size = 0
        """Bytes in the file so far."""
        header.format, header.version = records.FORMAT, records.VERSION
        self.write(header)
        self.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close("failed" if error[0] is not None else "closed")

    def write(self, record: Record) -> None:
        """Append a record. Raises OSError when the disk refuses."""
        if isinstance(record, FrameRecord):
            self.frames += 1
            self.payload_bytes += len(record.payload)
        elif isinstance(record, MessageRecord):
            self.messages += 1
            self.payload_bytes += sum(map(len, record.parts))
        line = records.encode(record)
        self._unflushed += len(line)
        self._member += len(line)
        self._put(self._deflate.compress(line))
        if self._member >= _MEMBER:
            self._put(self._deflate.flush(zlib.Z_FINISH))
            self._deflate, self._member = _new_member(), 0
            self._unflushed, self._flushed_at = 0, self._clock()

    def flush_if_due(self) -> None:
        """Flush when half a second has passed since the last one."""
        if self._unflushed and self._clock() - self._flushed_at >= _FLUSH_SECONDS:
            self.flush()

    def flush(self) -> None:
        """Make all that was written readable."""
        self._put(self._deflate.flush(zlib.Z_SYNC_FLUSH))
        self._unflushed, self._flushed_at = 0, self._clock()

    def close(self, reason: str) -> None:
        """Write the end marker and close; nothing happens the second time."""
        if self._file.closed:
            return
        try:
            self.write(
                EndRecord(
                    at=self._clock(),
                    frames=self.frames,
                    messages=self.messages,
                    payload_bytes=self.payload_bytes,
                    reason=reason,
                )
            )
            self._put(self._deflate.flush(zlib.Z_FINISH))
        finally:
            self._file.close()

    def _put(self, data: bytes) -> None:
        while data:
            written = self._file.write(data)
            self.size += written
            data = data[written:]


def _private(path: str, flags: int) -> int:
    """Prompts are in the file, so it is its owner's alone."""
    return os.open(path, flags, 0o600)


def _new_member() -> zlib._Compress:
    return zlib.compressobj(_LEVEL, zlib.DEFLATED, _GZIP)
