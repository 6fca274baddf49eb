"""Recordings told in other words: changes of form that must not change an answer."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvindexd.testing.conformance import Capture, Worker

CAPTURES = Path(__file__).parent / "data" / "captures"
NAMES = sorted(p.parent.name for p in CAPTURES.glob("*/frames.jsonl") if p.stat().st_size)
SOME = [
    "a_full_attention",
    "c_kimi_mini_default",
    "d_swa_only",
    "f_lora_salt_mm",
    "g_xxhash_cbor_bytes",
    "i_attn16_mamba64",
    "i_kimi_partial_hash",
    "j_native_offload_placeholder",
    "j_simple_cpu_offload_gptoss",
    "k_restart_and_replay",
    "l_unknown_plugin",
    "o_eagle_gptoss_lookahead",
    "s_eagle_ps16",
    "s_hicache_wb",
]
"""One of each kind, for changes that cannot go wrong in one family alone."""
FIELDS = {
    "BlockStored": (
        "block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium",
        "lora_name", "extra_keys", "group_idx", "kv_cache_spec_kind",
        "kv_cache_spec_sliding_window", "locality", "ownership", "session_id",
        "lookahead_token_ids",
    ),
    "BlockRemoved": ("block_hashes", "medium", "group_idx"),
    "AllBlocksCleared": (),
}  # fmt: skip
MAIN = {"full_attention", "mla_attention"}
Events = list[Any]


class Player(Worker):
    """A worker that gets its batches in other words: `tell` turns events into batches of events."""

    def __init__(self, meta: Any, *, reports_reuse: bool) -> None:
        super().__init__(meta, reports_reuse=reports_reuse)
        self.tell: Callable[[Events], list[Events]] = lambda events: [events]
        self.told = 0
        self._own = 0

    def feed(self, seq: int, payload: bytes) -> None:
        ts, events, *rest = msgspec.msgpack.decode(payload)
        if seq <= self.last_seq and ts > self.last_ts:
            self.restart(seq)
        before = self.last_seq
        for batch in self.tell(events):
            self.last_seq = -1  # the pieces of one batch share its number
            super().feed(seq, msgspec.msgpack.encode([ts, batch, *rest]))
            self.told += 1
        self.last_seq = max(before, seq)

    def restart(self, seq: int) -> None:
        self.residency.reset(incarnation=True)
        self.last_seq = -1


def answers(name: str, make: Callable[[], Callable[[Events], list[Events]]]) -> list[Any]:
    capture = Capture(CAPTURES / name)
    reuse = name.startswith("n_report")
    players = {w: Player(meta, reports_reuse=reuse) for w, meta in capture.metas.items()}
    for player in players.values():
        player.tell = make()
    return [
        players[p.src].score(capture.query(p.prompt), hybrid=True, device_only=p.device_only)
        for p in capture.play(dict(players))
    ]


_plain: dict[str, list[Any]] = {}


def plain(name: str) -> list[Any]:
    if name not in _plain:
        _plain[name] = answers(name, lambda: lambda events: [events])
    return _plain[name]


def test_the_player_plays_what_the_runner_plays() -> None:
    for name in ("a_full_attention", "k_restart_and_replay"):
        capture = Capture(CAPTURES / name)
        workers = capture.workers()
        assert plain(name) == [
            workers[p.src].score(capture.query(p.prompt), hybrid=True, device_only=p.device_only)
            for p in capture.play(workers)
        ]


# -- the same events ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_a_batch_in_pieces(name: str) -> None:
    """One event to a batch, but the groups of one request stay together, and so do batches with a
    clear: what a second clear means depends on the first."""

    def split(events: Events) -> list[Events]:
        if any(e["type"] == "AllBlocksCleared" for e in events):
            return [events]
        pieces: list[Events] = []
        last = -1
        for e in events:
            group = e.get("group_idx", 0)
            if group <= last or not pieces:
                pieces.append([])
            pieces[-1].append(e)
            last = group
        return pieces

    assert answers(name, lambda: split) == plain(name)


@pytest.mark.parametrize("name", SOME)
def test_events_as_arrays(name: str) -> None:
    def arrays(events: Events) -> list[Events]:
        return [[_array(e) for e in events]]

    assert answers(name, lambda: arrays) == plain(name)


def _array(event: dict[str, Any]) -> Any:
    known = FIELDS[event["type"]]
    if set(event) - {"type", *known}:
        return event
    row = [event.get(f) for f in known]
    while row and row[-1] is None:
        row.pop()
    return [event["type"], *row]


def _rehashed(event: dict[str, Any], change: Callable[[Any], Any]) -> dict[str, Any]:
    out = dict(event)
    if "block_hashes" in out:
        out["block_hashes"] = [change(h) for h in out["block_hashes"]]
    if out.get("parent_block_hash") is not None:
        out["parent_block_hash"] = change(out["parent_block_hash"])
    return out


@pytest.mark.parametrize("name", SOME)
def test_signed_and_unsigned_hashes_are_one(name: str) -> None:
    def other(h: Any) -> Any:
        return h if isinstance(h, bytes) else h - 2**64 if h >= 2**63 else h % 2**64

    def signed(events: Events) -> list[Events]:
        return [[_rehashed(e, other) for e in events]]

    assert answers(name, lambda: signed) == plain(name)


REPRODUCED = ("d_swa_only", "i_kimi", "l_dsv4")
"""Where only the engine's own hash tells which block a listed one is."""


@pytest.mark.parametrize("name", SOME)
def test_hashes_of_an_unknown_function(name: str) -> None:
    """Equality is all that hashes are for; whatever needs more may only lose."""

    def opaque(events: Events) -> list[Events]:
        return [[_rehashed(e, lambda h: hashlib.sha256(repr(h).encode()).digest()) for e in events]]

    told, want = answers(name, lambda: opaque), plain(name)
    if name.startswith(REPRODUCED):
        assert all(a[1] <= b[1] for a, b in zip(told, want, strict=True))
        assert told != want
    else:
        assert told == want


@pytest.mark.parametrize("name", SOME)
def test_a_kind_is_said_once(name: str) -> None:
    def make() -> Callable[[Events], list[Events]]:
        known: set[int] = set()

        def omit(events: Events) -> list[Events]:
            out = []
            for e in events:
                group = e.get("group_idx")
                if e.get("kv_cache_spec_kind") in MAIN and group in known:
                    e = {k: v for k, v in e.items() if k != "kv_cache_spec_kind"}
                elif e.get("kv_cache_spec_kind"):
                    known.add(group)
                out.append(e)
            return [out]

        return omit

    assert answers(name, make) == plain(name)


@pytest.mark.parametrize("name", SOME)
def test_other_numbers_for_the_groups(name: str) -> None:
    def renumber(events: Events) -> list[Events]:
        return [
            [e | {"group_idx": 40 - 3 * e["group_idx"]} if "group_idx" in e else e for e in events]
        ]

    assert answers(name, lambda: renumber) == plain(name)


@pytest.mark.parametrize("name", SOME)
def test_garbage_between_events(name: str) -> None:
    garbage: Events = [
        {"type": "TierBlocksCleared", "medium": "CPU"},
        ["BlockStored", "nonsense"],
        {"type": 5},
        17,
        None,
        {"type": "BlockStored", "block_hashes": [1], "token_ids": [1, 2], "block_size": 16},
        ["BlockRemoved", [12345]],
    ]

    def litter(events: Events) -> list[Events]:
        return [[x for i, e in enumerate(events) for x in (garbage[i % len(garbage)], e)]]

    assert answers(name, lambda: litter) == plain(name)


# -- batches --------------------------------------------------------------------------------------


class Merging(Player):
    """A worker that hears of everything only when it is asked, in one batch."""

    def __init__(self, meta: Any, *, reports_reuse: bool) -> None:
        super().__init__(meta, reports_reuse=reports_reuse)
        self._kept: Events = []
        self._at = (0, 0.0)
        self.merged = 0

    def feed(self, seq: int, payload: bytes) -> None:
        ts, events, *_ = msgspec.msgpack.decode(payload)
        if (seq <= self._at[0] and self._kept) or any(
            e["type"] == "AllBlocksCleared" for e in events
        ):
            self.flush()
        self.merged += bool(self._kept)
        self._at = (seq, ts)
        self._kept += events
        if any(e["type"] == "AllBlocksCleared" for e in events):
            self.flush()

    def flush(self) -> None:
        if self._kept:
            seq, ts = self._at
            super().feed(seq, msgspec.msgpack.encode([ts, self._kept, 0]))
            self._kept = []

    def score(self, query: Any, **more: Any) -> tuple[int, int]:
        self.flush()
        return super().score(query, **more)


def test_consecutive_batches_as_one() -> None:
    merged = 0
    for name in SOME:
        capture = Capture(CAPTURES / name)
        capture.steps = [s for i, s in enumerate(capture.steps) if i % 5 == 4 or _tells(s)]
        wanted = _scores(capture, capture.workers())
        reuse = name.startswith("n_report")
        workers = {w: Merging(m, reports_reuse=reuse) for w, m in capture.metas.items()}
        assert _scores(capture, dict(workers)) == wanted, name
        merged += sum(w.merged for w in workers.values())
    assert merged > 20


def _tells(step: dict[str, Any]) -> bool:
    """Steps that say "as before" need the one before."""
    return "=" in (step.get("probes"), *(step.get("probes") or {})) or not step.get("probes")


def _scores(capture: Capture, workers: dict[str, Worker]) -> list[Any]:
    return [
        workers[p.src].score(capture.query(p.prompt), hybrid=True, device_only=p.device_only)
        for p in capture.play(workers)
    ]


@pytest.mark.parametrize("name", SOME)
def test_batches_sent_twice(name: str) -> None:
    capture = Capture(CAPTURES / name)
    workers = capture.workers()
    want = _scores(capture, workers)

    class Twice(Worker):
        def feed(self, seq: int, payload: bytes) -> None:
            super().feed(seq, payload)
            super().feed(seq, payload)

    reuse = name.startswith("n_report")
    again: dict[str, Worker] = {w: Twice(m, reports_reuse=reuse) for w, m in capture.metas.items()}
    assert _scores(capture, again) == want
    assert base64.b64decode(capture.frames[0]["payload"])
