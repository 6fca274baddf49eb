"""Reading captures: a file, whole or cut short, or a folder of the older form."""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from kvindexd.capturing import records
from kvindexd.capturing.folder import FolderCapture, is_folder_capture
from kvindexd.capturing.lines import CaptureError
from kvindexd.capturing.records import EndRecord, Header, Record

_GZIP_MAGIC = b"\x1f\x8b"
_GZIP = 31
_CHUNK = 1 << 16
_MAX_LINE = 1 << 30
"""Bytes of one record; no message that ZeroMQ would hand to us comes near."""


class Capture(Protocol):
    """What can be read of a capture, whatever its form."""

    name: str
    header: Header
    cut: str
    """Why the last `records` ended without an end marker; "" where it did not."""
    unknown: int
    """Records of unknown types that the last `records` left out."""

    def records(self) -> Iterator[Record]:
        """All records behind the header, in order; every call starts anew."""
        ...


def open_capture(path: Path) -> Capture:
    """A capture file, or a folder with frames.jsonl. Raises CaptureError, OSError."""
    if path.is_dir():
        if not is_folder_capture(path):
            raise CaptureError(f"{path}: a folder without frames.jsonl is no capture")
        return FolderCapture(path)
    return FileCapture(path)


class FileCapture:
    """A file that `kvindexd capture` wrote, compressed or unpacked."""

    def __init__(self, path: Path) -> None:
        """Read the header. Raises CaptureError, OSError."""
        self.name = path.name
        self._path = path
        self.cut = ""
        self._damage = ""
        self.unknown = 0
        with path.open("rb") as file:
            line = next(self._lines(file), None)
        if line is None:
            raise CaptureError(f"{path}: no header; {self.cut or 'the file is empty'}")
        try:
            self.header = records.decode_header(line)
        except CaptureError as e:
            raise CaptureError(f"{path}: {e}") from None

    def records(self) -> Iterator[Record]:
        """All records behind the header, up to the cut where there is one.

        Raises CaptureError, naming the line, for one that is no record.
        """
        self.unknown = 0
        with self._path.open("rb") as file:
            lines = self._lines(file)
            next(lines, None)
            for number, line in enumerate(lines, 2):
                try:
                    record = records.decode(line)
                except CaptureError as e:
                    raise CaptureError(f"{self._path}, record {number}: {e}") from None
                if record is None:
                    self.unknown += 1
                    continue
                if isinstance(record, EndRecord):
                    # To the end of the file, where a checksum tells of damage to what was read.
                    for _ in lines:
                        pass
                    self.cut = self._damage
                yield record

    def _lines(self, file: BinaryIO) -> Iterator[bytes]:
        """Whole lines. `cut` is set to what is missing before the last one is given out."""
        self.cut, self._damage = "no end marker: the capture was cut short", ""
        rest: list[bytes] = []
        size = 0
        for data in self._unpacked(file):
            head, *others = data.split(b"\n")
            rest.append(head)
            size += len(head)
            if size > _MAX_LINE:
                raise CaptureError(f"{self._path}: a record of more than {_MAX_LINE} bytes")
            for part in others:
                yield b"".join(rest)
                rest, size = [part], len(part)

    def _unpacked(self, file: BinaryIO) -> Iterator[bytes]:
        """The file's text in pieces, as far as it can be had."""
        data = file.read(_CHUNK)
        packed = data[:2] == _GZIP_MAGIC or data == _GZIP_MAGIC[:1]
        inflate = zlib.decompressobj(_GZIP)
        while data:
            if not packed:
                yield data
            else:
                before = inflate.copy()
                try:
                    out = inflate.decompress(data)
                except zlib.error as e:
                    end = file.tell()
                    self._damage = f"damaged between bytes {end - len(data)} and {end} ({e})"
                    self.cut = self._damage
                    yield _until_damage(before, data)
                    return
                yield out
                if inflate.eof:
                    data, inflate = inflate.unused_data, zlib.decompressobj(_GZIP)
                    if data:
                        continue
            data = file.read(_CHUNK)


def _until_damage(inflate: Any, data: bytes) -> bytes:
    """What can be had of a damaged piece, byte by byte."""
    out = []
    with contextlib.suppress(zlib.error):
        for i in range(len(data)):
            out.append(inflate.decompress(data[i : i + 1]))
    return b"".join(out)
