"""Scorers tell each other through the store what they have in flight; never while answering."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

import msgspec
import numpy as np
import structlog

from kvindexd.ingest.engine_metrics import SOURCE as ENGINE
from kvindexd.ingest.engine_metrics import EngineLoad
from kvindexd.model import WorkerKey
from kvindexd.scoring.load import PeerLoad
from kvindexd.scoring.outcomes import Outcome
from kvindexd.scoring.picker import Picker, request_number
from kvindexd.store import NotRegistered, StoreError
from kvindexd.store.records import LoadReport
from kvindexd.v1 import index_pb2 as pb

log = structlog.get_logger(__name__)

_VERSION = 1
_MAX_NAMES = 4096
"""Blocks, and requests, that a report names; 32 kB each."""
_FAINT = 0.01
"""Blocks of decayed load that are not worth a report."""
_REFRESH = 2.0
"""Seconds after which a report is sent again although nothing changed."""
_ALIVE = 6.0
"""Seconds for which a report of another scorer counts."""
_FORGOTTEN = 600.0
"""Seconds after which the report of a scorer that has gone is removed."""
_REMEMBER = 10.0
"""Seconds for which a completion is offered to the other scorers."""
_ENGINE_COUNTS = 15.0
"""Seconds for which the queue that an engine showed counts as load."""
_MAX_PENDING = 10_000
_CALL_TIMEOUT = 5.0


class _Done(msgspec.Struct, frozen=True, array_like=True):
    """A request that ended, by its number; None where the caller did not say."""

    number: int
    cached: int | None
    prompt_tokens: int | None


class _Report(msgspec.Struct, frozen=True, array_like=True):
    """What one scorer has in flight on one worker rank. `names`, `requests`: packed little-endian
    u64. `done`: requests that ended there and were picked elsewhere."""

    version: int
    names: bytes
    more: int
    recent: float
    requests: bytes
    done: tuple[_Done, ...] = ()


_engines = msgspec.msgpack.Decoder(EngineLoad)
_decoder = msgspec.msgpack.Decoder(_Report)


class LoadStore(Protocol):
    """What is asked of the store."""

    async def report_load(self, key: WorkerKey, source: str, payload: bytes) -> None:
        """Publish one scorer's report of a worker rank; b"" withdraws it."""
        ...

    async def loads(self) -> dict[WorkerKey, dict[str, LoadReport]]:
        """All reports."""
        ...

    async def ask(self, key: WorkerKey, what: str) -> None:
        """Leave the rank's ingester a request."""
        ...


class _Pending:
    """A completion of a request that was not picked here. `seen`: some scorer had the request."""

    __slots__ = ("done", "seen", "until")

    def __init__(self, done: _Done, until: float) -> None:
        self.done = done
        self.until = until
        self.seen = False


class LoadSharing:
    """Publishes this scorer's load, takes in the others', passes completions on to the scorer that
    made the pick, and has drifting workers resynced. `run` is its one task."""

    def __init__(
        self,
        store: LoadStore,
        picker: Picker,
        source: str,
        *,
        interval: float = 0.25,
        on_outcome: Callable[[Outcome], None] = lambda _: None,
        waiting_weight: float = 0.0,
        epoch_of: Callable[[WorkerKey], int | None] = lambda _: None,
    ) -> None:
        """`source`: a name for this scorer that no other one has. `on_outcome` is told of what
        engines reported through other scorers about picks made here. `waiting_weight`: load in
        blocks per request that waits in an engine's own queue. `epoch_of`: the epoch of a rank
        whose blocks are predicted by the names under which they are in flight, None for others."""
        self._store = store
        self._picker = picker
        self._source = source
        self._interval = interval
        self._on_outcome = on_outcome
        self._waiting_weight = waiting_weight
        self._epoch_of = epoch_of
        self._engines: dict[WorkerKey, tuple[EngineLoad, float]] = {}
        self._pending: dict[int, _Pending] = {}
        self._owners: dict[int, WorkerKey] = {}
        self._sent: dict[WorkerKey, tuple[int, float]] = {}
        self._known: dict[tuple[WorkerKey, str], tuple[bytes, _Report, frozenset[int]]] = {}
        self._gone: list[tuple[WorkerKey, str]] = []
        self._away = ""
        self.dropped = 0
        """Completions of requests that no scorer had in flight."""

    def completed_elsewhere(
        self, request_id: str, cached: int | None, prompt_tokens: int | None
    ) -> None:
        """Offer a completion to the other scorers."""
        number = request_number(request_id)
        if len(self._pending) >= _MAX_PENDING:
            self.dropped += 1
            return
        done = _Done(number, cached, prompt_tokens)
        self._pending[number] = _Pending(done, time.monotonic() + _REMEMBER)

    async def run(self) -> None:
        """Exchange until cancelled, then withdraw what was published."""
        try:
            while True:
                started = time.monotonic()
                await self._round()
                spent = time.monotonic() - started
                # A slow store is not asked all the time.
                await asyncio.sleep(max(self._interval - spent, min(spent * 4, 1.0), 0.01))
        finally:
            await self._withdraw()

    async def _round(self) -> None:
        try:
            async with asyncio.timeout(_CALL_TIMEOUT):
                self._picker.ledger.expire(time.monotonic())
                await self._take_in(await self._store.loads())
                await self._publish()
                await self._resync()
        except (StoreError, TimeoutError) as e:
            if not self._away:
                log.warning(
                    "load_sharing_away",
                    error=str(e) or type(e).__name__,
                    cost="this scorer does not see what others have in flight",
                )
            self._away = str(e) or type(e).__name__
        else:
            if self._away:
                log.info("load_sharing_back")
            self._away = ""

    # -- from the others ----------------------------------------------------------------------

    async def _take_in(self, loads: Mapping[WorkerKey, Mapping[str, LoadReport]]) -> None:
        self._owners, self._gone, known = {}, [], {}
        self._engines = {k: v for k, v in self._engines.items() if k in loads}
        for key in {*loads, *self._picker.ledger.workers()}:
            now, peers = time.monotonic(), []
            for source, raw in loads.get(key, {}).items():
                if raw.age_ms > _FORGOTTEN * 1000:
                    self._gone.append((key, source))
                if source == ENGINE:
                    self._engine(key, raw, now)
                    continue
                if source == self._source or raw.age_ms > _ALIVE * 1000:
                    continue
                before = self._known.get((key, source))
                entry = self._decode(before, raw.payload)
                if entry is None:
                    continue
                known[key, source] = entry
                if entry is not before:
                    self._predict(key, entry[2] - before[2] if before else entry[2], now)
                _, report, names = entry
                peers.append(PeerLoad(names, report.more, report.recent, now - raw.age_ms / 1000))
                for number in np.frombuffer(report.requests, "<u8").tolist():
                    self._owners[number] = key
                self._end(key, report.done, now)
            self._picker.ledger.set_peers(key, peers)
            await asyncio.sleep(0)
        self._known = known

    def _predict(self, key: WorkerKey, names: frozenset[int], now: float) -> None:
        """What others have just sent to a worker, it will hold: a burst that comes in through
        several scorers must not scatter either."""
        epoch = self._epoch_of(key)
        if epoch is not None and names:
            self._picker.predictions.add(key, epoch, list(names), 0, now)

    def _engine(self, key: WorkerKey, raw: LoadReport, now: float) -> None:
        try:
            load = _engines.decode(raw.payload)
        except msgspec.MsgspecError:
            return
        read_at = now - raw.age_ms / 1000
        self._engines[key] = (load, read_at)
        queued = load.waiting * self._waiting_weight
        self._picker.ledger.set_queued(key, queued, read_at + _ENGINE_COUNTS)

    def engine_load(self, key: WorkerKey) -> pb.EngineLoad | None:
        """What the rank's engine said of itself last, None if it is not asked."""
        found = self._engines.get(key)
        if found is None:
            return None
        load, read_at = found
        age = max(0, int((time.monotonic() - read_at) * 1000))
        return pb.EngineLoad(
            running=load.running, waiting=load.waiting, cache_usage=load.usage, age_ms=age
        )

    @staticmethod
    def _decode(
        before: tuple[bytes, _Report, frozenset[int]] | None, payload: bytes
    ) -> tuple[bytes, _Report, frozenset[int]] | None:
        """(payload, report, block names); None for what a newer or broken scorer wrote."""
        if before is not None and before[0] == payload:
            return before
        try:
            report = _decoder.decode(payload)
        except msgspec.MsgspecError:
            return None
        if report.version != _VERSION or len(report.names) % 8 or len(report.requests) % 8:
            return None
        return payload, report, frozenset(np.frombuffer(report.names, "<u8").tolist())

    def _end(self, key: WorkerKey, done: Iterable[_Done], now: float) -> None:
        """End requests of ours that were reported as ended to another scorer."""
        for one in done:
            request_id = self._picker.ledger.request_at(key, one.number)
            if request_id is None:
                continue
            _, outcome = self._picker.complete(request_id, one.cached, one.prompt_tokens, now)
            if outcome is not None:
                self._on_outcome(outcome)

    # -- to the others ------------------------------------------------------------------------

    async def _publish(self) -> None:
        for key, source in self._gone:
            await self._report(key, source, b"")
        ledger, now = self._picker.ledger, time.monotonic()
        done = self._completions(now)
        for key in {*ledger.workers(), *done}:
            version, ended = ledger.version(key), tuple(done.get(key, ()))
            sent = self._sent.get(key)
            if sent and sent[0] == version and not ended and now - sent[1] < _REFRESH:
                continue
            payload = self._payload(key, ended, now)
            if not payload and not sent:
                continue
            if await self._report(key, self._source, payload) and payload:
                self._sent[key] = (version, now)
            else:
                self._sent.pop(key, None)

    def _completions(self, now: float) -> dict[WorkerKey, list[_Done]]:
        """Pending completions whose scorer is known, by the worker they are of."""
        found: dict[WorkerKey, list[_Done]] = {}
        for number, pending in list(self._pending.items()):
            key = self._owners.get(number)
            if key is not None:
                pending.seen = True
                found.setdefault(key, []).append(pending.done)
            elif pending.seen or pending.until <= now:
                self.dropped += not pending.seen
                del self._pending[number]
        return found

    def _payload(self, key: WorkerKey, done: tuple[_Done, ...], now: float) -> bytes:
        own = self._picker.ledger.own(key, now, _MAX_NAMES)
        if not own.names and not own.requests and not done and own.recent < _FAINT:
            return b""
        names = np.array(own.names, "<u8").tobytes()
        requests = np.array(own.requests, "<u8").tobytes()
        report = _Report(_VERSION, names, own.more, own.recent, requests, done)
        return msgspec.msgpack.encode(report)

    async def _report(self, key: WorkerKey, source: str, payload: bytes) -> bool:
        try:
            await self._store.report_load(key, source, payload)
        except NotRegistered:
            return False
        return True

    async def _resync(self) -> None:
        for key, error in self._picker.drift.due():
            log.warning(
                "worker_drifting",
                worker=str(key),
                wrong_part=round(error, 3),
                cost="its scores were wrong by that part of the prompts' tokens",
                action="it is read anew from the engine's replay buffer, or reset",
            )
            try:
                await self._store.ask(key, "resync")
            except NotRegistered:
                continue

    async def _withdraw(self) -> None:
        """A scorer that ends has nothing in flight that it could still be told the end of."""
        try:
            async with asyncio.timeout(1.0):
                for key in list(self._sent):
                    await self._report(key, self._source, b"")
        except (StoreError, TimeoutError):
            log.info("load_not_withdrawn", cost="the others count it for a few seconds more")
