"""Recordings of real engines step by step, for tests that change something on the way.

`python -m kvindexd.testing.conformance CAPTURE...` is `kvindexd conformance`.
"""

from __future__ import annotations

import base64
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import xxhash

from kvindexd.capturing.checking import query_of
from kvindexd.capturing.folder import Truth, registration_of
from kvindexd.capturing.lines import read_lines
from kvindexd.capturing.offline import SetPresence
from kvindexd.capturing.records import ProbeRecord
from kvindexd.residency import Options, Residency
from kvindexd.scoring.query import Query
from kvindexd.wire import BatchError, decode_batch

__all__ = ["Capture", "ProbeRecord", "Result", "SetPresence", "Worker", "run"]


class Result(NamedTuple):
    """Figures of one capture in one mode; `matched_wrong` counts the attention-only prefix."""

    probes: int
    exact: int
    over: int
    under: int
    matched_wrong: int


class Worker:
    """One recorded worker: its state machine, its presence, its sequence."""

    def __init__(self, meta: Mapping[str, Any], *, reports_reuse: bool) -> None:
        self.options = registration_of(meta, "w0", "").options
        self.residency = Residency(Options(reports_reuse=reports_reuse))
        self.presence = SetPresence()
        self.last_seq = -1
        self.last_ts = 0.0

    def feed(self, seq: int, payload: bytes) -> None:
        """One frame, in the order in which it was received."""
        try:
            batch = decode_batch(payload)
        except BatchError:
            return
        if seq <= self.last_seq:
            if batch.ts <= self.last_ts:
                return
            self.residency.reset(incarnation=True)
        self.last_seq, self.last_ts = seq, batch.ts
        digest = xxhash.xxh3_64_intdigest(payload)
        self.presence.apply(self.residency.apply(batch, seq=seq, digest=digest, now=batch.ts))

    def score(self, query: Query, *, hybrid: bool, device_only: bool) -> tuple[int, int]:
        """(matched, reusable) tokens."""
        return self.presence.score(query, self.options, hybrid=hybrid, device_only=device_only)


class Capture:
    """A recording: frames, prompts, and the engine's own answers per step."""

    def __init__(self, folder: Path) -> None:
        self.name = folder.name
        self.frames = [row for _, row in read_lines(folder / "frames.jsonl")]
        self._truth = Truth(folder)
        self.metas, self.steps = self._truth.metas, self._truth.steps
        self.prompts, self.packed = self._truth.prompts, self._truth.packed
        self._queries = {name: query_of(self._truth.prompt(name)) for name in self.prompts}

    def query(self, prompt: str) -> Query:
        """The prompt as a query."""
        return self._queries[prompt]

    def workers(self) -> dict[str, Worker]:
        """Fresh state machines, one per recorded worker."""
        reuse = self.name.startswith("n_report")
        return {w: Worker(meta, reports_reuse=reuse) for w, meta in self.metas.items()}

    def play(self, workers: Mapping[str, Worker]) -> Iterator[ProbeRecord]:
        """Feed the frames and yield every probe at the moment it was recorded."""
        at = 0
        self._truth.rewind()
        for step in self.steps:
            while at < min(step["after_frames"], len(self.frames)):
                frame = self.frames[at]
                workers[frame["src"]].feed(frame["seq"], base64.b64decode(frame["payload"]))
                at += 1
            yield from self._truth.probes(step)


def run(capture: Capture, *, hybrid: bool, verbose: bool = False) -> Result:
    """Play one capture and compare every probe."""
    workers = capture.workers()
    probes = exact = over = under = wrong = 0
    for probe in capture.play(workers):
        worker = workers[probe.src]
        query = capture.query(probe.prompt)
        matched, reusable = worker.score(query, hybrid=hybrid, device_only=probe.device_only)
        probes += 1
        exact += reusable == probe.reusable
        over += reusable > probe.reusable
        under += reusable < probe.reusable
        if probe.matched is not None:
            cap = query.tokens - 1
            wrong += min(matched, cap) // probe.alignment * probe.alignment != probe.matched
        if verbose and reusable != probe.reusable:
            print(
                f"  {capture.name} {probe.src} seq {worker.last_seq} {probe.prompt}: "
                f"{reusable}, engine {probe.reusable} (matched {matched}, {probe.matched})"
            )
    return Result(probes, exact, over, under, wrong)


if __name__ == "__main__":
    from kvindexd.cli.main import app

    app(["conformance", *sys.argv[1:]], prog_name="python -m kvindexd.testing")
