"""Play recordings of real engines through wire, residency and scoring, against their answers.

    python -m kvindexd.testing.conformance CAPTURE...

A capture is a folder with `frames.jsonl` (what the engine published) and `truth.jsonl` (what its
own cache manager would reuse after each step). Prints per capture: probes, exact, over, under,
for the exact rules and for the attention-only rule. Exit status 1 when anything over-reports.
"""

from __future__ import annotations

import argparse
import base64
import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import xxhash

from kvindexd import chain
from kvindexd.model import ADD, MUTATION, BatchDelta, Plane, Profile
from kvindexd.residency import Options, Residency
from kvindexd.scoring.geometry import WorkerOptions, geometry
from kvindexd.scoring.match import Bools, match
from kvindexd.scoring.query import Query
from kvindexd.wire import BatchError, decode_batch


class Probe(NamedTuple):
    """One recorded question and its answer. `matched` is None where the recording has none."""

    worker: str
    prompt: str
    reusable: int
    device_only: bool
    matched: int | None
    upper_bound: bool


class Result(NamedTuple):
    """Figures of one capture in one mode; `matched_wrong` counts the attention-only prefix."""

    probes: int
    exact: int
    over: int
    under: int
    matched_wrong: int


class SetPresence:
    """Presence of one worker as plain sets of names per plane: the simplest index there is."""

    workers = 1

    def __init__(self) -> None:
        self.names: dict[Plane, set[int]] = {}
        self.profile = Profile()
        self._query: Query | None = None

    def apply(self, delta: BatchDelta) -> None:
        """Take in what one batch changes."""
        if delta.clear:
            self.names.clear()
        if delta.profile is not None:
            self.profile = msgspec.msgpack.decode(delta.profile, type=Profile)
        for m in np.frombuffer(delta.mutations, MUTATION):
            names = self.names.setdefault(self.profile.planes[int(m["plane"])], set())
            (names.add if m["op"] == ADD else names.discard)(int(m["name"]))

    def ask(self, query: Query) -> SetPresence:
        """This presence, for one query."""
        self._query = query
        return self

    def held(self, plane: Plane, entry: int) -> Bools | None:
        """[entries, 1]: which names of the query this worker holds."""
        if self._query is None or plane not in self.names:
            return None
        names = self._query.names(self.profile.unit, self.profile.lookahead, entry)
        if names is None:
            return None
        have = self.names[plane]
        return np.array([n in have for n in names.tolist()], bool).reshape(-1, 1)


class Worker:
    """One recorded worker: its state machine, its presence, its sequence."""

    def __init__(self, meta: Mapping[str, Any], *, reports_reuse: bool) -> None:
        groups = meta.get("groups") or []
        chunk = max((g.get("chunk") or 0 for g in groups), default=0)
        self.options = WorkerOptions(bool(meta.get("drop_eagle_groups")), chunk)
        mains = ("full_attention", "mla_attention", "sink_full_attention")
        self.main = next((i for i, g in enumerate(groups) if g["kind"] in mains), None)
        self.align = meta.get("cache_hit_alignment_tokens") or meta.get("page_size") or 1
        self.drops = bool(meta.get("drop_eagle_groups"))
        self.single = len(groups) == 1
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
        shape = geometry(self.presence.profile, self.options, hybrid)
        found = match(self.presence.ask(query), shape, query.tokens, device_only=device_only)
        return int(found.matched[0]), int(found.reusable[0])


class Capture:
    """A recording: frames, prompts, and the engine's own answers per step."""

    def __init__(self, folder: Path) -> None:
        self.name = folder.name
        self.frames = _lines(folder / "frames.jsonl")
        truth = _lines(folder / "truth.jsonl")
        self.metas = {f"w{m.get('w', 0)}": m for m in truth if m["type"] == "meta"}
        segments = {s["name"]: s["tokens"] for s in truth if s["type"] == "segment"}
        self.steps = [s for s in truth if s["type"] == "step"]
        self.prompts = {p["name"]: p for p in truth if p["type"] == "prompt"}
        self.packed = {n: _packed(p, segments) for n, p in self.prompts.items()}
        self._queries = {n: _query(p, self.packed[n]) for n, p in self.prompts.items()}

    def query(self, prompt: str) -> Query:
        """The prompt as a query."""
        return self._queries[prompt]

    def workers(self) -> dict[str, Worker]:
        """Fresh state machines, one per recorded worker."""
        reuse = self.name.startswith("n_report")
        return {w: Worker(meta, reports_reuse=reuse) for w, meta in self.metas.items()}

    def play(self, workers: Mapping[str, Worker]) -> Iterator[Probe]:
        """Feed the frames and yield every probe at the moment it was recorded."""
        at = 0
        previous: dict[tuple[str, str], Any] = {}
        for step in self.steps:
            while at < min(step["after_frames"], len(self.frames)):
                frame = self.frames[at]
                workers[frame["src"]].feed(frame["seq"], base64.b64decode(frame["payload"]))
                at += 1
            yield from self._probes(step, workers, previous)

    def _probes(
        self, step: Mapping[str, Any], workers: Mapping[str, Worker], previous: dict[Any, Any]
    ) -> Iterator[Probe]:
        name = f"w{step.get('w', 0)}"
        probes = step.get("probes")
        last = previous.setdefault(name, {})
        answers = dict.fromkeys(last, "=") if probes == "=" else probes or {}
        tiers = step.get("cpu_tier") or {}
        for prompt, value in answers.items():
            old_value, old_tier = last.get(prompt, (None, None))
            tier = tiers.get(prompt, "=") if isinstance(tiers, dict) else "="
            last[prompt] = (
                old_value if value == "=" else value,
                old_tier if tier == "=" else tier,
            )
            if step.get("unpublished_events") or step.get("unpublished_tier_events"):
                continue
            if self.prompts[prompt].get("embeds"):
                continue  # a prompt given by embeddings cannot be asked for by its tokens
            yield self._probe(workers[name], name, prompt, *last[prompt])

    def _probe(self, worker: Worker, name: str, prompt: str, value: Any, tier: Any) -> Probe:
        if "match_all" in value:
            hit = value["hit"] + value.get("host_hit", 0)
            return Probe(name, prompt, hit, False, None, "full_kv" in value)
        device_only = bool(tier) and "total" not in tier
        reusable = tier["total"] if tier and "total" in tier else value["hit"]
        matched = None
        if worker.main is not None and not (tier and not device_only):
            alone = value.get("alone")
            if alone is not None:
                matched = alone[worker.main]
            elif worker.single and not worker.drops:
                matched = value["hit"]
        return Probe(name, prompt, reusable, device_only, matched, False)


def _lines(path: Path) -> list[dict[str, Any]]:
    with path.open() as f:
        return [json.loads(line) for line in f]


def _packed(prompt: Mapping[str, Any], segments: Mapping[str, list[int]]) -> bytes:
    return chain.pack_tokens([t for s in prompt["segs"] for t in segments[s]])


def _query(prompt: Mapping[str, Any], packed: bytes) -> Query:
    lora = prompt.get("lora")
    return Query(
        packed,
        lora_name=(lora[0] if lora else "") or prompt.get("lora_name") or "",
        cache_salt=prompt.get("salt") or prompt.get("cache_salt") or "",
        items=[chain.Item(m[0], m[1]) for m in prompt.get("mm") or []],
    )


def run(capture: Capture, *, hybrid: bool, verbose: bool = False) -> Result:
    """Play one capture and compare every probe."""
    workers = capture.workers()
    probes = exact = over = under = wrong = 0
    for probe in capture.play(workers):
        worker = workers[probe.worker]
        query = capture.query(probe.prompt)
        matched, reusable = worker.score(query, hybrid=hybrid, device_only=probe.device_only)
        probes += 1
        exact += reusable == probe.reusable
        over += reusable > probe.reusable
        under += reusable < probe.reusable
        if probe.matched is not None:
            cap = query.tokens - 1
            wrong += min(matched, cap) // worker.align * worker.align != probe.matched
        if verbose and reusable != probe.reusable:
            print(
                f"  {capture.name} {probe.worker} seq {worker.last_seq} {probe.prompt}: "
                f"{reusable}, engine {probe.reusable} (matched {matched}, {probe.matched})"
            )
    return Result(probes, exact, over, under, wrong)


def main(argv: list[str] | None = None) -> int:
    """Command line entry; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m kvindexd.testing.conformance")
    parser.add_argument("captures", nargs="+", type=Path, metavar="CAPTURE")
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")
    parser.add_argument("-v", "--verbose", action="store_true", help="print every difference")
    args = parser.parse_args(argv)
    rows: dict[str, dict[str, Any]] = {}
    for folder in args.captures:
        capture = Capture(folder)
        exact = run(capture, hybrid=True, verbose=args.verbose)
        simple = run(capture, hybrid=False)
        rows[folder.name] = {"exact": exact._asdict(), "attention_only": simple._asdict()}
    if args.json:
        print(json.dumps(rows, indent=2))
    else:
        _print_table(rows)
    return 1 if any(r["exact"]["over"] for r in rows.values()) else 0


def _print_table(rows: Mapping[str, Mapping[str, Mapping[str, int]]]) -> None:
    header = f"{'capture':34} {'probes':>6} {'exact':>6} {'over':>5} {'under':>5} {'matched!':>8}"
    print(header + f" | {'attention-only':>14} {'over':>5} {'under':>5}")
    total = [0] * 8
    for name, modes in rows.items():
        e, a = modes["exact"], modes["attention_only"]
        row = [e[k] for k in Result._fields] + [a["exact"], a["over"], a["under"]]
        total = [x + y for x, y in zip(total, row, strict=True)]
        print(_row(name, row))
    print(_row("total", total))


def _row(name: str, n: list[int]) -> str:
    return f"{name:34} {n[0]:6} {n[1]:6} {n[2]:5} {n[3]:5} {n[4]:8} | {n[5]:14} {n[6]:5} {n[7]:5}"


if __name__ == "__main__":
    sys.exit(main())
