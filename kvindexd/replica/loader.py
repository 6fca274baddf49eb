"""Reads one worker rank's blocks from the store into the replica, in bounded chunks."""

from __future__ import annotations

import asyncio
import struct
import time
from contextlib import aclosing

import structlog

from kvindexd.replica.book import Book
from kvindexd.replica.source import DecodeRecords, Source
from kvindexd.replica.view import Phase, R, WorkerView
from kvindexd.store import Diverged, NotRegistered, Snapshot

log = structlog.get_logger(__name__)

CHUNK = 1_000
"""Records decoded and applied without letting others run: 1-3 ms."""


class SnapshotUnreadable(Exception):
    """A rank's records do not decode with its profile."""


class _CalledOff(Exception):
    """The rank was removed, or found wanting again, while it was being loaded."""


class Loader:
    """Loads ranks; several loads may run at once."""

    def __init__(self, source: Source, decode: DecodeRecords) -> None:
        self._source = source
        self._decode = decode

    async def load(self, book: Book[R], view: WorkerView[R]) -> None:
        """Load a rank that `book.begin_load` was just called for. When it returns the rank is
        followed, gone, or wanted again. Raises SnapshotUnreadable and the store's errors; then
        `book.fail_load` is the caller's to call."""
        started = time.perf_counter()
        number = view.load
        try:
            record = await self._source.get_worker(view.key)
            # A rank that was removed meanwhile must not be made again here: whoever registers it
            # next would find it there, and nobody would load it.
            _check(view, number)
            book.describe(record, time.monotonic())
            snapshot = await self._source.load(view.key)
            count = await self._blocks(book, view, number, snapshot)
            _check(view, number)
        except _CalledOff:
            return
        except Diverged:
            if _wanted(view, number):
                book.fail_load(view, "epoch_changed")
            return
        except NotRegistered:
            log.info("worker_gone_while_loading", worker=str(view.key))
            if _wanted(view, number):
                book.drop(view.key)
            return
        if count is None:
            book.fail_load(view, "profile_changed")
            return
        book.end_load(view, snapshot.last_seq, snapshot.last_ts, time.monotonic())
        seconds = round(time.perf_counter() - started, 3)
        log.info("worker_loaded", worker=str(view.key), records=count, seconds=seconds)

    async def _blocks(
        self, book: Book[R], view: WorkerView[R], number: int, snapshot: Snapshot
    ) -> int | None:
        """How many records were read; None when the profile changed on the way: records read late
        may then speak of groups and planes that the profile read first does not have."""
        _check(view, number)
        count = 0
        unreadable: Exception | None = None
        fields: list[bytes] = []
        records: list[bytes] = []
        try:
            book.position(view, snapshot.epoch, snapshot.revision, snapshot.profile)
            # Declared as an iterator, which needs no aclose; it is a generator.
            async with aclosing(snapshot.blocks()) as pairs:  # type: ignore[type-var]
                async for field, record in pairs:
                    fields.append(field)
                    records.append(record)
                    if len(fields) == CHUNK:
                        self._add(book, view, fields, records)
                        count += CHUNK
                        fields, records = [], []
                        await asyncio.sleep(0)
                        _check(view, number)
            _check(view, number)
            self._add(book, view, fields, records)
        except (ValueError, LookupError, struct.error) as e:
            unreadable = e
        if (await self._source.load(view.key)).profile != snapshot.profile:
            return None
        if unreadable is not None:
            raise SnapshotUnreadable(
                f"a record of {view.key} does not decode with its profile: {unreadable!r}"
            ) from unreadable
        return count + len(fields)

    def _add(
        self, book: Book[R], view: WorkerView[R], fields: list[bytes], records: list[bytes]
    ) -> None:
        if fields:
            book.add_blocks(view, self._decode(fields, records, view.profile))


def _wanted(view: WorkerView[R], number: int) -> bool:
    """Whether this load is still the one that is waited for."""
    return view.phase is Phase.LOADING and view.load == number


def _check(view: WorkerView[R], number: int) -> None:
    if not _wanted(view, number):
        raise _CalledOff
