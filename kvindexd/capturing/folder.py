"""Recordings in the form of a folder: frames.jsonl, and truth.jsonl with the engine's answers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from kvindexd import chain
from kvindexd.capturing.lines import FRAMES, CapturedFrame, load_capture, read_lines
from kvindexd.capturing.records import (
    FrameRecord,
    Header,
    NoteRecord,
    ProbeRecord,
    PromptRecord,
    Record,
)
from kvindexd.ingest.frame import batch_ts
from kvindexd.registration import Registration

_TRUTH = "truth.jsonl"
_MAINS = ("full_attention", "mla_attention", "sink_full_attention")
_REPORTING = "n_report"
"""Recordings whose engine announces reused blocks again: an option, not on the wire."""


class Answers(NamedTuple):
    """Facts of a recorded worker that its probes are read with.

    `main`: place of its main attention group in a probe's lists. `single`: it has one group.
    `drops`: the engine drops the last matched block. `alignment`: of hits, in tokens.
    """

    main: int | None
    single: bool
    drops: bool
    alignment: int


def is_folder_capture(path: Path) -> bool:
    """Whether a path is a recording in this form."""
    return (path / FRAMES).is_file()


class Truth:
    """What truth.jsonl says: workers, prompts, and the engine's answers after each step."""

    def __init__(self, folder: Path) -> None:
        path = folder / _TRUTH
        rows = [row for _, row in read_lines(path)] if path.exists() else []
        self.metas = {f"w{m.get('w', 0)}": m for m in rows if m["type"] == "meta"}
        segments = {s["name"]: s["tokens"] for s in rows if s["type"] == "segment"}
        self.steps = [s for s in rows if s["type"] == "step"]
        self.prompts = {p["name"]: p for p in rows if p["type"] == "prompt"}
        self.packed = {
            name: chain.pack_tokens([t for s in p["segs"] for t in segments[s]])
            for name, p in self.prompts.items()
        }
        self._last: dict[str, dict[str, tuple[Any, Any]]] = {}

    def prompt(self, name: str) -> PromptRecord:
        """A prompt as a record."""
        p = self.prompts[name]
        lora = p.get("lora")
        return PromptRecord(
            name=name,
            tokens=self.packed[name],
            lora_name=(lora[0] if lora else "") or p.get("lora_name") or "",
            cache_salt=p.get("salt") or p.get("cache_salt") or "",
            items=[(m[0], m[1], m[2]) for m in p.get("mm") or []],
        )

    def rewind(self) -> None:
        """Forget what earlier steps said, to read the steps again."""
        self._last.clear()

    def probes(self, step: Mapping[str, Any]) -> Iterator[ProbeRecord]:
        """The probes of a step; steps must come in order, as "=" means the step before."""
        src = f"w{step.get('w', 0)}"
        probes = step.get("probes")
        last = self._last.setdefault(src, {})
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
            yield _probe(src, prompt, answers_of(self.metas[src]), *last[prompt])


def answers_of(meta: Mapping[str, Any]) -> Answers:
    """How the probes of a recorded worker are to be read."""
    groups = meta.get("groups") or []
    return Answers(
        next((i for i, g in enumerate(groups) if g["kind"] in _MAINS), None),
        len(groups) == 1,
        bool(meta.get("drop_eagle_groups")),
        meta.get("cache_hit_alignment_tokens") or meta.get("page_size") or 1,
    )


def _probe(src: str, prompt: str, how: Answers, value: Any, tier: Any) -> ProbeRecord:
    if "match_all" in value:
        hit = value["hit"] + value.get("host_hit", 0)
        return ProbeRecord(src=src, prompt=prompt, reusable=hit, upper_bound="full_kv" in value)
    device_only = bool(tier) and "total" not in tier
    reusable = tier["total"] if tier and "total" in tier else value["hit"]
    matched = None
    if how.main is not None and not (tier and not device_only):
        alone = value.get("alone")
        if alone is not None:
            matched = alone[how.main]
        elif how.single and not how.drops:
            matched = value["hit"]
    return ProbeRecord(
        src=src,
        prompt=prompt,
        reusable=reusable,
        device_only=device_only,
        matched=matched,
        alignment=how.alignment,
    )


def registration_of(meta: Mapping[str, Any], src: str, recording: str) -> Registration:
    """What a recorded worker would be registered with."""
    chunk = max((g.get("chunk") or 0 for g in meta.get("groups") or []), default=0)
    return Registration(
        worker_id=src,
        dp_rank=int(meta.get("dp_rank") or 0),
        model=recording,
        engine="sglang" if "sglang" in meta else "vllm",
        eagle=bool(meta.get("drop_eagle_groups")),
        chunk_size=chunk,
        reports_reuse=recording.startswith(_REPORTING),
    )


class FolderCapture:
    """A recording, as the records that a capture file of the same stream would hold."""

    def __init__(self, folder: Path) -> None:
        """Raises CaptureError, OSError."""
        self.name = folder.name or folder.resolve().name
        self._frames = load_capture(folder)
        self._truth = Truth(folder)
        self.cut = ""
        self.unknown = 0
        metas = {frame.src: {} for frame in self._frames} | self._truth.metas
        sources = {src: registration_of(meta, src, self.name) for src, meta in metas.items()}
        self.header = Header(sources=sources, note=f"recording {self.name}")

    def records(self) -> Iterator[Record]:
        """Prompts, then frames and probes in order. Receive times are the engine's own."""
        truth, at = self._truth, 0
        truth.rewind()
        yield from (truth.prompt(name) for name, p in truth.prompts.items() if not p.get("embeds"))
        for step in truth.steps:
            end = min(step["after_frames"], len(self._frames))
            yield from map(_record, self._frames[at:end])
            at = max(at, end)
            if note := step.get("note"):
                yield NoteRecord(src=f"w{step.get('w', 0)}", text=str(note))
            yield from truth.probes(step)
        yield from map(_record, self._frames[at:])


def _record(frame: CapturedFrame) -> FrameRecord:
    return FrameRecord(
        src=frame.src,
        at=batch_ts(frame.payload) or 0.0,
        topic=frame.topic,
        seq=frame.seq,
        payload=frame.payload,
    )
