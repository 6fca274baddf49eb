"""A capture through decoder, state machine and scoring, beside the engine's own answers."""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec

from kvindexd.capturing.offline import Rank, exchanges
from kvindexd.capturing.reader import Capture
from kvindexd.capturing.records import FrameRecord, ProbeRecord, PromptRecord
from kvindexd.chain import Item
from kvindexd.scoring.query import Query

_TIERS = ("device", "host", "storage", "other")


class Result(NamedTuple):
    """Figures of one capture in one mode, in probes. `matched_wrong` counts attention prefixes."""

    probes: int = 0
    exact: int = 0
    over: int = 0
    under: int = 0
    matched_wrong: int = 0


class Difference(NamedTuple):
    """A probe that was not answered as the engine did. Counts are of tokens."""

    src: str
    last_seq: int
    prompt: str
    reusable: int
    engine: int
    matched: int
    engine_matched: int | None
    upper_bound: bool


class RankReport(msgspec.Struct, kw_only=True):
    """What one source's stream says of itself. `counters` as GetWorker shows them."""

    src: str
    frames: int
    first_seq: int
    last_seq: int
    events: dict[str, int]
    counters: dict[str, int]
    blocks: dict[str, int]
    groups: list[dict[str, Any]]
    waiting: int

    @property
    def findings(self) -> list[str]:
        """What is not as it should be, in words."""
        found = []
        for name, meaning in _FINDINGS.items():
            if n := self.counters.get(name):
                found.append(f"{n:,} {meaning}")
        if self.waiting:
            found.append(f"{self.waiting:,} stores still wait for a parent that never came")
        return found


_FINDINGS = {
    "decode_errors": "payloads that are no batch",
    "dropped:no_batch": "messages that are no numbered batch",
    "gaps": "gaps in the sequence",
    "lost_batches": "batches lost in them",
    "restarts": "restarts of the engine",
    "dropped:unknown_tag": "events of an unknown type",
    "dropped:bad_field": "events with a field that cannot be",
    "dropped:malformed": "malformed events",
    "dropped:conflict": "events that contradict earlier ones",
    "dropped:unknown_medium": "events of an unknown storage tier",
    "unknown_removes": "removals of blocks that were not known",
    "unknown_group": "removals of groups that were not known",
    "unit_changes": "block sizes that broke the unit, which drops all claims",
    "rank_mismatch": "batches that name another data-parallel rank",
}


class Report(msgspec.Struct, kw_only=True):
    """Everything about one capture. `cut`: how it ended without an end marker, "" if it did not.

    `unknown`: records of a type unknown here; `unasked`: probes whose prompt or source is missing.
    """

    name: str
    masked: bool
    cut: str
    unknown: int
    unasked: int
    exact: Result
    attention_only: Result
    differences: list[Difference]
    ranks: list[RankReport]


class _Tally:
    """One mode's counts."""

    def __init__(self) -> None:
        self.counts = dict.fromkeys(Result._fields, 0)

    def add(self, probe: ProbeRecord, query: Query, matched: int, reusable: int) -> bool:
        counts = self.counts
        counts["probes"] += 1
        counts["exact"] += reusable == probe.reusable
        counts["over"] += reusable > probe.reusable
        counts["under"] += reusable < probe.reusable
        if probe.matched is not None:
            # The engine always computes the last token, and hits end on its alignment.
            whole = min(matched, query.tokens - 1) // probe.alignment * probe.alignment
            counts["matched_wrong"] += whole != probe.matched
        return reusable == probe.reusable

    @property
    def result(self) -> Result:
        return Result(**self.counts)


class _Check:
    """One run through a capture."""

    def __init__(self, capture: Capture) -> None:
        self.ranks = {
            src: Rank(registration, exchanges(capture, src))
            for src, registration in capture.header.sources.items()
        }
        self.frames = dict.fromkeys(self.ranks, 0)
        self.exact, self.simple = _Tally(), _Tally()
        self.differences: list[Difference] = []
        self.unasked = 0
        self._queries: dict[str, Query] = {}

    def run(self, capture: Capture) -> None:
        for record in capture.records():
            if isinstance(record, PromptRecord):
                self._queries[record.name] = query_of(record)
            elif isinstance(record, ProbeRecord):
                self._probe(record)
            elif (rank := self.ranks.get(getattr(record, "src", ""))) is not None:
                rank.take(record)
                self.frames[record.src] += isinstance(record, FrameRecord)  # type: ignore[union-attr]  # one with `src`

    def _probe(self, probe: ProbeRecord) -> None:
        rank, query = self.ranks.get(probe.src), self._queries.get(probe.prompt)
        if rank is None or query is None:
            self.unasked += 1
            return
        matched, reusable = rank.score(query, device_only=probe.device_only)
        if not self.exact.add(probe, query, matched, reusable):
            self.differences.append(
                Difference(
                    probe.src,
                    rank.last_seq,
                    probe.prompt,
                    reusable,
                    probe.reusable,
                    matched,
                    probe.matched,
                    probe.upper_bound,
                )
            )
        simple = rank.score(query, hybrid=False, device_only=probe.device_only)
        self.simple.add(probe, query, *simple)


def check(capture: Capture) -> Report:
    """Play the whole capture. Raises CaptureError, OSError."""
    run = _Check(capture)
    run.run(capture)
    return Report(
        name=capture.name,
        masked=capture.header.masked,
        cut=capture.cut,
        unknown=capture.unknown,
        unasked=run.unasked,
        exact=run.exact.result,
        attention_only=run.simple.result,
        differences=run.differences,
        ranks=[_rank_report(src, rank, run.frames[src]) for src, rank in run.ranks.items()],
    )


def _rank_report(src: str, rank: Rank, frames: int) -> RankReport:
    return RankReport(
        src=src,
        frames=frames,
        first_seq=rank.first_seq,
        last_seq=rank.last_seq,
        events=dict(rank.events),
        counters={k: n for k, n in sorted(rank.counters.items()) if n},
        blocks=dict(zip(_TIERS, rank.residency.tier_blocks(), strict=True)),
        groups=[msgspec.structs.asdict(g) for g in rank.residency.profile().groups],
        waiting=len(rank.residency.waiting),
    )


def query_of(prompt: PromptRecord) -> Query:
    """A recorded prompt as a query."""
    return Query(
        prompt.tokens,
        lora_name=prompt.lora_name,
        cache_salt=prompt.cache_salt,
        items=[Item(name, start) for name, start, _ in prompt.items],
    )
