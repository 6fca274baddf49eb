"""What is in flight on each worker rank: distinct prompt blocks with leases, and their decay."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence, Set
from itertools import islice
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvindexd.model import WorkerKey
from kvindexd.scoring.cost import IDLE, Load

Keys = npt.NDArray[np.uint64]
_NEGLIGIBLE = 1e-3


class Flight(NamedTuple):
    """A request that was sent to a worker rank and has not ended.

    `keys`: names of its prompt blocks there. `expires`, `picked_at`: the caller's clock, seconds.
    `number`: a hash of the request id, by which other scorers know it. `predicted_tokens`: reusable
    tokens that the pick promised, of which `resting` rested on predictions.
    `block_size`: tokens. `exact`: False where the promise was an upper bound.
    """

    request_id: str
    worker: WorkerKey
    keys: Keys
    expires: float
    picked_at: float
    number: int = 0
    prompt_tokens: int = 0
    predicted_tokens: int = 0
    resting: int = 0
    block_size: int = 0
    exact: bool = True


class PeerLoad(NamedTuple):
    """What another scorer has in flight on a worker rank. `more`: blocks beyond those named.
    `recent`: its decayed sum at `at` (our clock, seconds)."""

    blocks: frozenset[int]
    more: int
    recent: float
    at: float


class Own(NamedTuple):
    """Of this scorer's own picks on a rank: block names, how many blocks beyond them, the decayed
    sum, and request numbers."""

    names: list[int]
    more: int
    recent: float
    requests: list[int]


class _Rank:
    """One worker rank's blocks: `counts` name -> requests that share it; `fresh`: those of them
    that the worker had to compute; `requests`: number -> id of the requests themselves."""

    __slots__ = (
        "at",
        "counts",
        "extra",
        "fresh",
        "more",
        "peers",
        "queued",
        "queued_until",
        "recent",
        "remote",
        "requests",
        "version",
    )

    def __init__(self) -> None:
        self.counts: dict[int, int] = {}
        self.fresh: set[int] = set()
        self.requests: dict[int, str] = {}
        self.recent = 0.0
        self.at = 0.0
        self.peers: tuple[PeerLoad, ...] = ()
        self.remote: Set[int] = frozenset()
        self.extra = 0
        """Blocks in flight through other scorers only."""
        self.more = 0
        self.queued = 0.0
        self.queued_until = 0.0
        self.version = 0


class LoadLedger:
    """Requests in flight by worker rank. Pure: every method takes the time (seconds, monotonic).

    A block counts once, however many requests share it: as an active block while any of them is
    in flight, and afterwards, if it had to be computed, as a recent one that halves every
    `half_life` seconds since the pick. Beyond `max_requests` requests or `max_blocks` blocks the
    one whose lease ends first is let go.
    """

    def __init__(
        self, half_life: float, max_requests: int = 100_000, max_blocks: int = 2_000_000
    ) -> None:
        self._half_life = half_life
        self._max_requests = max_requests
        self._max_blocks = max_blocks
        self._ranks: dict[WorkerKey, _Rank] = {}
        self._flights: dict[str, Flight] = {}
        self._leases: list[tuple[float, str]] = []
        self._blocks = 0
        self.expired = 0
        """Requests let go by their lease."""
        self.evicted = 0
        """Requests let go because the ledger was full."""

    def __len__(self) -> int:
        return len(self._flights)

    # -- changing -----------------------------------------------------------------------------

    def add(self, flight: Flight, computed: int, now: float) -> None:
        """Count a request. `computed`: how many of its last blocks the worker must compute.

        A request id that is in flight already is released first: a retry elsewhere.
        """
        self.release(flight.request_id, now)
        self.expire(now)
        rank = self._ranks.setdefault(flight.worker, _Rank())
        counts, remote = rank.counts, rank.remote
        names = flight.keys.tolist()
        for name in names:
            n = counts.get(name, 0)
            counts[name] = n + 1
            if not n and name in remote:
                rank.extra -= 1
        if computed:
            rank.fresh.update(names[-computed:])
        rank.requests[flight.number] = flight.request_id
        rank.version += 1
        self._blocks += len(names)
        self._flights[flight.request_id] = flight
        heapq.heappush(self._leases, (flight.expires, flight.request_id))
        while len(self._flights) > self._max_requests or (
            self._blocks > self._max_blocks and len(self._flights) > 1
        ):
            self.evicted += 1
            self._drop_first(now)

    def release(self, request_id: str, now: float) -> Flight | None:
        """A request has ended; None if it is not in flight here."""
        flight = self._flights.pop(request_id, None)
        if flight is None:
            return None
        names = flight.keys.tolist()
        self._blocks -= len(names)
        if len(self._leases) > 2 * len(self._flights) + 1000:
            self._leases = [(f.expires, f.request_id) for f in self._flights.values()]
            heapq.heapify(self._leases)
        rank = self._ranks.get(flight.worker)
        if rank is None:
            return flight
        rank.requests.pop(flight.number, None)
        counts, fresh, remote = rank.counts, rank.fresh, rank.remote
        charged = 0
        for name in names:
            n = counts.get(name, 0)
            if n > 1:
                counts[name] = n - 1
                continue
            counts.pop(name, None)
            if name in remote:
                rank.extra += 1
            if name in fresh:
                fresh.discard(name)
                charged += 1
        if charged:
            rank.recent = self._recent(rank, now) + charged * self._decay(now - flight.picked_at)
            rank.at = now
        rank.version += 1
        return flight

    def expire(self, now: float) -> list[Flight]:
        """Let go of the requests whose lease has ended."""
        out = []
        while self._leases and self._leases[0][0] <= now:
            flight = self._drop_first(now)
            if flight is not None:
                self.expired += 1
                out.append(flight)
        return out

    def _drop_first(self, now: float) -> Flight | None:
        """Release the request of the earliest lease, unless it has ended or been renewed."""
        expires, request_id = heapq.heappop(self._leases)
        flight = self._flights.get(request_id)
        if flight is None or flight.expires != expires:
            return None
        return self.release(request_id, now)

    def forget(self, worker: WorkerKey) -> None:
        """A worker rank is gone, with all it had in flight."""
        self._ranks.pop(worker, None)
        for request_id in [r for r, f in self._flights.items() if f.worker == worker]:
            self._blocks -= len(self._flights.pop(request_id).keys)

    def set_peers(self, worker: WorkerKey, peers: Iterable[PeerLoad]) -> None:
        """What other scorers have in flight on a worker rank; replaces the last such report."""
        found = tuple(peers)
        rank = self._ranks.get(worker)
        if rank is None:
            if not found:
                return
            rank = self._ranks[worker] = _Rank()
        rank.peers = found
        rank.remote = frozenset().union(*(p.blocks for p in found)) if found else frozenset()
        rank.more = sum(p.more for p in found)
        rank.extra = sum(1 for name in rank.remote if name not in rank.counts)

    def set_queued(self, worker: WorkerKey, blocks: float, until: float) -> None:
        """What the worker's engine says is queued, in blocks; it counts until then."""
        if blocks or worker in self._ranks:
            rank = self._ranks.setdefault(worker, _Rank())
            rank.queued, rank.queued_until = blocks, until

    # -- reading ------------------------------------------------------------------------------

    def load(self, worker: WorkerKey, now: float) -> Load:
        """The load of a worker rank. Call `expire` before a round of these."""
        rank = self._ranks.get(worker)
        if rank is None:
            return IDLE
        recent = self._recent(rank, now)
        for peer in rank.peers:
            recent += peer.recent * self._decay(now - peer.at)
        if recent < _NEGLIGIBLE:
            recent = 0.0
        queued = rank.queued if now < rank.queued_until else 0.0
        return Load(len(rank.counts) + rank.extra + rank.more, recent, queued)

    def shared(self, worker: WorkerKey, keys: Iterable[int]) -> int:
        """How many leading blocks of a prompt are in flight on a worker rank."""
        rank = self._ranks.get(worker)
        n = 0
        if rank is not None:
            counts, remote = rank.counts, rank.remote
            for key in keys:
                if key not in counts and key not in remote:
                    break
                n += 1
        return n

    def request_at(self, worker: WorkerKey, number: int) -> str | None:
        """The id of a request in flight on a rank through this scorer, by its number."""
        rank = self._ranks.get(worker)
        return rank.requests.get(number) if rank is not None else None

    def own(self, worker: WorkerKey, now: float, limit: int) -> Own:
        """What this scorer itself has in flight on a rank, for the others to see; at most `limit`
        blocks and requests by name."""
        rank = self._ranks.get(worker)
        if rank is None:
            return Own([], 0, 0.0, [])
        names = list(islice(rank.counts, limit))
        requests = list(islice(rank.requests, limit))
        return Own(names, len(rank.counts) - len(names), self._recent(rank, now), requests)

    def workers(self) -> Sequence[WorkerKey]:
        """Worker ranks that anything was ever counted on."""
        return tuple(self._ranks)

    def version(self, worker: WorkerKey) -> int:
        """Changes with every request counted or released through this scorer."""
        rank = self._ranks.get(worker)
        return rank.version if rank is not None else 0

    def _recent(self, rank: _Rank, now: float) -> float:
        return rank.recent * self._decay(now - rank.at) if rank.recent else 0.0

    def _decay(self, age: float) -> float:
        halvings = max(0.0, age) / self._half_life
        return float(0.5**halvings) if halvings < 64 else 0.0
