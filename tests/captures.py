"""Capture files and commands for tests."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import structlog
import waiting
from daemon import capture_folder
from typer.testing import CliRunner

from kvindexd.capturing.masking import Mask
from kvindexd.capturing.reader import FileCapture, open_capture
from kvindexd.capturing.records import FrameRecord, Header, Record
from kvindexd.capturing.writer import CaptureWriter
from kvindexd.cli.main import app
from kvindexd.registration import Registration

DEADLINE = 30.0
until = functools.partial(waiting.until, deadline=DEADLINE)


def write(path: Path, records: Sequence[Record], **header: Any) -> Path:
    header = {"sources": {"w0": Registration(worker_id="w0")}} | header
    with CaptureWriter(path, Header(**header), overwrite=True) as writer:
        for record in records:
            writer.write(record)
    return path


def convert(name: str, path: Path, mask: Mask | None = None) -> Path:
    """A recording as a capture file."""
    found = open_capture(capture_folder(name))
    records = list(found.records())
    masked = [mask.record(r) for r in records] if mask else records
    return write(path, masked, sources=found.header.sources, masked=mask is not None)


def records_of(path: Path) -> list[Record]:
    """What can be read so far of a file that may not be there yet."""
    try:
        return list(FileCapture(path).records())
    except (OSError, ValueError):
        return []


def frames_of(path: Path, *, replayed: bool = False) -> list[FrameRecord]:
    return [r for r in records_of(path) if isinstance(r, FrameRecord) and r.replayed == replayed]


def in_process(*arguments: object, meanwhile: Callable[[], Any] = lambda: None) -> Any:
    """Run a command in this process and thread, and something else beside it."""
    beside = threading.Thread(target=meanwhile, daemon=True)
    beside.start()
    done = CliRunner().invoke(app, [*map(str, arguments)])
    beside.join(DEADLINE)
    structlog.reset_defaults()
    assert not beside.is_alive()
    return done
