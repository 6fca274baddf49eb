"""The capture file: its format, cuts and damage, masking, and the rules run over it in process."""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from daemon import capture_folder
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from kvindexd.capturing.checking import check
from kvindexd.capturing.lines import CaptureError
from kvindexd.capturing.masking import Mask
from kvindexd.capturing.player import shifted
from kvindexd.capturing.reader import FileCapture, open_capture
from kvindexd.capturing.records import (
    EndRecord,
    FrameRecord,
    Header,
    LinkRecord,
    MessageRecord,
    NoteRecord,
    ProbeRecord,
    PromptRecord,
    Record,
    ReplayRecord,
    encode,
)
from kvindexd.capturing.writer import CaptureWriter
from kvindexd.chain import pack_tokens
from kvindexd.cli.main import app
from kvindexd.registration import Registration
from kvindexd.testing import encode_batch
from kvindexd.wire import (
    Batch,
    BatchError,
    BlockRemoved,
    BlockStored,
    Rejected,
    decode_batch,
)

MASK = Mask(b"k" * 32)


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


# -- the format -----------------------------------------------------------------------------------

texts = st.text(max_size=8)
times = st.floats(0, 2e9)
blobs = st.binary(max_size=40)
record_lists = st.lists(
    st.one_of(
        st.builds(
            FrameRecord, src=texts, at=times, topic=blobs, payload=blobs, replayed=st.booleans(),
            seq=st.integers(0, 2**63 - 1),
        ),
        st.builds(MessageRecord, src=texts, at=times, parts=st.lists(blobs, max_size=4)),
        st.builds(LinkRecord, src=texts, at=times, event=texts, detail=texts),
        st.builds(ReplayRecord, src=texts, outcome=texts, start=st.integers(0, 9), detail=texts),
        st.builds(
            PromptRecord, name=texts, tokens=blobs, lora_name=texts, cache_salt=texts,
            items=st.lists(st.tuples(texts, st.integers(0, 99), st.integers(0, 99)), max_size=2),
        ),
        st.builds(
            ProbeRecord, src=texts, prompt=texts, reusable=st.integers(0, 2**40),
            matched=st.none() | st.integers(0, 99), device_only=st.booleans(),
        ),
        st.builds(NoteRecord, text=texts),
    ),
    max_size=12,
)  # fmt: skip


@given(record_lists)
@settings(max_examples=60, deadline=None)
def test_what_is_written_is_read(tmp_path_factory: pytest.TempPathFactory, records: Any) -> None:
    path = write(tmp_path_factory.getbasetemp() / "round.gz", records, note="here")
    found = FileCapture(path)
    assert found.header.note == "here"
    *read, end = found.records()
    assert read == records
    assert isinstance(end, EndRecord)
    assert end.frames == sum(isinstance(r, FrameRecord) for r in records)
    assert end.messages == sum(isinstance(r, MessageRecord) for r in records)
    assert found.cut == ""


def some_frames(count: int) -> list[Record]:
    return [FrameRecord(src="w0", seq=i, payload=bytes([i]) * 20) for i in range(count)]


def test_a_file_cut_at_any_byte_is_readable_up_to_the_cut(tmp_path: Path) -> None:
    path = tmp_path / "whole.gz"
    writer = CaptureWriter(path, Header(sources={"w0": Registration(worker_id="w0")}))
    flushed = {writer.size: 0}
    frames = some_frames(4)
    for i, frame in enumerate(frames, 1):
        writer.write(frame)
        writer.flush()
        flushed[writer.size] = i
    writer.close("done")
    data = path.read_bytes()
    cut = tmp_path / "cut.gz"
    for size in range(len(data)):
        cut.write_bytes(data[:size])
        promised = max((n for at, n in flushed.items() if at <= size), default=None)
        if promised is None:
            try:
                found = FileCapture(cut)
            except CaptureError as e:
                assert "no header" in str(e)  # noqa: PT017
                continue
        found = FileCapture(cut)
        read = [r for r in found.records() if not isinstance(r, EndRecord)]
        assert read == frames[: len(read)]
        assert len(read) >= (promised or 0)
    assert len(flushed) == 5


def test_damage_is_told_and_costs_its_own_part_of_the_file(tmp_path: Path) -> None:
    frames = [FrameRecord(src="w0", seq=i, payload=random.Random(i).randbytes(100_000))
              for i in range(24)]  # fmt: skip
    data = write(tmp_path / "x.gz", frames).read_bytes()
    path = tmp_path / "damaged.gz"
    for at in (len(data) * 5 // 8, len(data) - 2000, len(data) - 6):
        path.write_bytes(data[:at] + bytes([data[at] ^ 0xFF]) + data[at + 1 :])
        found = FileCapture(path)
        read: list[Record] = []
        try:
            read.extend(found.records())
        except CaptureError as e:
            assert "record " in str(e)  # noqa: PT017
        else:
            assert found.cut.startswith("damaged between")
            assert read[:7] == frames[:7]


def test_an_unpacked_file_and_a_gzip_of_several_members_are_read(tmp_path: Path) -> None:
    packed = write(tmp_path / "x.gz", some_frames(3))
    text = gzip.decompress(packed.read_bytes())
    plain, parts = tmp_path / "x.jsonl", tmp_path / "parts.gz"
    plain.write_bytes(text)
    parts.write_bytes(b"".join(gzip.compress(line + b"\n") for line in text.splitlines()))
    expected = list(FileCapture(packed).records())
    assert list(FileCapture(plain).records()) == expected
    assert list(FileCapture(parts).records()) == expected
    assert len(text.splitlines()) == 5
    assert all(json.loads(line)["type"] for line in text.splitlines())


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "the file is empty|no header"),
        (b"hello\n", "not a capture"),
        (b'{"type":"frame","src":"w0","seq":1,"payload":""}\n', "not a capture"),
        (b'{"type":"header","format":"other","version":1}\n', "not a capture"),
        (
            b'{"type":"header","format":"kvindexd-capture","version":2,"kvindexd":"9.9","new":1}\n',
            "version 2, written by kvindexd 9.9; this kvindexd reads version 1",
        ),
    ],
)
def test_what_is_no_capture_of_ours_is_refused_in_words(
    content: bytes, says: str, tmp_path: Path
) -> None:
    path = tmp_path / "x.gz"
    path.write_bytes(gzip.compress(content) if content else b"")
    with pytest.raises(CaptureError, match=says):
        open_capture(path)
    done = CliRunner().invoke(app, ["conformance", str(path)])
    assert done.exit_code == 1
    assert "x.gz" in done.output


def test_unknown_records_are_left_out_and_counted_and_broken_ones_named(tmp_path: Path) -> None:
    header = Header(format="kvindexd-capture", version=1)
    path = tmp_path / "x.jsonl"
    path.write_bytes(encode(header) + b'{"type":"later","x":1}\n' + encode(some_frames(1)[0]))
    found = FileCapture(path)
    assert list(found.records()) == some_frames(1)
    assert found.unknown == 1
    assert "end marker" in found.cut
    done = CliRunner().invoke(app, ["conformance", str(path)])
    assert "1 records of unknown types" in done.output
    for line in ('{"type":"frame","src":"w0","seq":-1,"payload":""}', '{"type":1}', "[]"):
        path.write_bytes(encode(header) + line.encode() + b"\n")
        with pytest.raises(CaptureError, match="record 2"):
            list(FileCapture(path).records())


def test_a_probe_without_its_prompt_is_told(tmp_path: Path) -> None:
    path = write(tmp_path / "x.gz", [ProbeRecord(src="w0", prompt="p", reusable=1)])
    done = CliRunner().invoke(app, ["conformance", str(path)])
    assert "1 probes without their prompt" in done.output


def test_a_file_is_not_overwritten_unless_told(tmp_path: Path) -> None:
    path = write(tmp_path / "x.gz", some_frames(1))
    with pytest.raises(CaptureError, match="--force"):
        CaptureWriter(path, Header())
    assert len(list(FileCapture(path).records())) == 2


def test_a_folder_without_frames_is_no_capture(tmp_path: Path) -> None:
    with pytest.raises(CaptureError, match=r"frames\.jsonl"):
        open_capture(tmp_path)


# -- masking --------------------------------------------------------------------------------------


def test_masked_tokens_are_a_permutation_of_their_own_per_key() -> None:
    ids = np.concatenate([np.arange(200_000, dtype=np.uint32), np.array([2**32 - 1], np.uint32)])
    one, other = Mask().tokens(ids), Mask().tokens(ids)
    assert len(np.unique(one)) == len(ids)
    assert (one == MASK.tokens(ids)).mean() < 0.001
    assert (one == other).mean() < 0.001
    # Spread over all 32-bit numbers: neighbours tell nothing of each other.
    assert abs(float(one.astype(float).mean()) / 2**32 - 0.5) < 0.01


def masked_batch(payload: bytes) -> Batch:
    return decode_batch(MASK.payload(payload))


STORE = {
    "type": "BlockStored",
    "block_hashes": [5, -7],
    "parent_block_hash": b"\x01" * 32,
    "token_ids": list(range(32)),
    "block_size": 16,
    "lora_id": 3,
    "medium": "GPU",
    "lora_name": "secret-adapter",
    "extra_keys": [["secret-adapter", "secret-salt"], [["secret-image", -4]]],
    "group_idx": 2,
    "kv_cache_spec_kind": "full_attention",
    "kv_cache_spec_sliding_window": 128,
    "session_id": "secret-session",
    "lookahead_token_ids": [[7], [8]],
    "cache_salt": "secret-salt",
}
FIELDS = [
    "block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium",
    "lora_name", "extra_keys", "group_idx", "kv_cache_spec_kind", "kv_cache_spec_sliding_window",
    "locality", "ownership", "session_id", "lookahead_token_ids",
]  # fmt: skip


def as_array(event: dict[str, Any]) -> list[Any]:
    return [event["type"], *(event.get(name) for name in FIELDS)]


@pytest.mark.parametrize("form", ["map", "array", "outer map"])
def test_all_that_tells_of_a_prompt_is_masked_and_the_rest_is_kept(form: str) -> None:
    event: Any = STORE if form != "array" else as_array(STORE)
    payload = msgspec.msgpack.encode([1.5, [event], 0, {"later": "secret-field"}])
    if form == "outer map":
        payload = msgspec.msgpack.encode({"ts": 1.5, "events": [event], "more": "secret-field"})
    masked = MASK.payload(payload)
    assert b"secret" not in masked
    before, after = decode_batch(payload).events[0], decode_batch(masked).events[0]
    assert isinstance(before, BlockStored)
    assert isinstance(after, BlockStored)
    for name in ("block_size", "lora_id", "medium", "group_idx", "kind", "window"):
        assert getattr(after, name) == getattr(before, name)
    mask = MASK
    assert after.tokens == mask.packed(before.tokens) != before.tokens
    assert after.lookahead == [mask.packed(t) for t in before.lookahead or ()]
    assert after.lora_name == mask.text("secret-adapter")
    salt = mask.text("secret-salt")
    assert after.extra_keys == [[after.lora_name, salt], [[mask.text("secret-image"), -4]]]
    if form != "array":
        assert after.cache_salt == salt
    assert set(after.hashes).isdisjoint(before.hashes)
    assert isinstance(after.parent, bytes)
    assert len(after.parent) == 32
    assert after.parent != before.parent


def test_a_hash_is_the_same_wherever_it_stands_and_signed_ones_stay_signed() -> None:
    events = [
        STORE,
        STORE | {"parent_block_hash": -7, "block_hashes": [9, 10]},
        {"type": "BlockRemoved", "block_hashes": [2**64 - 7, 5], "medium": None},
    ]
    payload = MASK.payload(encode_batch(1.0, events))
    raw = msgspec.msgpack.decode(payload)[1]
    assert raw[0]["block_hashes"][1] == raw[1]["parent_block_hash"] < 0
    first, second, removed = decode_batch(payload).events
    assert isinstance(first, BlockStored)
    assert isinstance(second, BlockStored)
    assert first.hashes[1] == second.parent
    assert removed.hashes == first.hashes[::-1]  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "tokens",
    [
        [[1, 2], [2, 3]] * 8,
        [-1] * 16,
        [2**33] * 16,
        ["a"] * 16,
        pack_tokens(list(range(16))),
    ],
    ids=["pairs", "negative", "too large", "text", "packed"],
)
def test_every_form_of_tokens_is_masked_and_as_usable_as_before(tokens: Any) -> None:
    event = STORE | {"token_ids": tokens, "block_hashes": [1], "extra_keys": [None]}
    event["lookahead_token_ids"] = None
    payload = encode_batch(1.0, [event])
    before, after = decode_batch(payload).events[0], masked_batch(payload).events[0]
    assert type(before) is type(after)
    if isinstance(before, Rejected):
        assert isinstance(after, Rejected)
        assert before.reason == after.reason
    if isinstance(before, BlockStored) and isinstance(after, BlockStored):
        assert after.tokens == MASK.packed(before.tokens)
        assert after.lookahead == [MASK.packed(t) for t in before.lookahead or ()]
    masked = msgspec.msgpack.decode(MASK.payload(payload))[1][0]["token_ids"]
    if isinstance(tokens, bytes):
        assert masked == MASK.packed(tokens)


def test_what_is_not_understood_is_masked_whole() -> None:
    events = [{"type": "NewStored", "ids": [1, 2, "secret"], "at": 5.5, "raw": b"secret"}, 7]
    payload = msgspec.msgpack.encode([1.0, events, 0])
    before, after = decode_batch(payload).events, masked_batch(payload).events
    assert after == before  # an unknown tag, and no event at all
    masked = msgspec.msgpack.decode(MASK.payload(payload))[1]
    assert b"secret" not in MASK.payload(payload)
    assert masked[0]["ids"][:2] == MASK.tokens(np.array([1, 2], np.uint32)).tolist()
    garbage = b"\x93secret prompt"
    assert MASK.payload(garbage) == b"\xc1" * len(garbage)
    message = MASK.record(MessageRecord(src="w0", parts=[b"t", b"secret payload"]))
    assert b"secret" not in encode(message)


@given(st.binary(max_size=60))
@settings(max_examples=100, deadline=None)
def test_masking_takes_any_bytes(payload: bytes) -> None:
    try:
        decode_batch(payload)
    except BatchError:
        with pytest.raises(BatchError):
            decode_batch(MASK.payload(payload))
    else:
        decode_batch(MASK.payload(payload))


ODD = [
    None, True, 0, -1, 2**32, 2**64 - 1, -(2**63), 1.5, "", "x", "é" * 70, b"", b"ab", b"x" * 200,
    [], [1], [[1, 2]], [[1], 2], ["x", 4], {"lora_name": "a", "cache_salt": "s"}, {1: 2},
]  # fmt: skip


@given(st.dictionaries(st.sampled_from([*FIELDS, "cache_salt", "origin", "more"]),
                       st.sampled_from(ODD), max_size=3), st.booleans(), st.booleans())  # fmt: skip
@settings(max_examples=150, deadline=None)
def test_a_masked_event_is_judged_as_the_original(
    odd: dict[str, Any], array: bool, removed: bool
) -> None:
    event = STORE | odd | ({"type": "BlockRemoved"} if removed else {})
    if array and removed:
        sent: Any = ["BlockRemoved", event["block_hashes"], event["medium"], event["group_idx"]]
    else:
        sent = as_array(event) if array else event
    payload = msgspec.msgpack.encode([1.0, [sent, sent], 0])
    before, after = decode_batch(payload), decode_batch(MASK.payload(payload))
    assert [seen(e) for e in after.events] == [seen(e) for e in before.events]


def seen(event: Any) -> Any:
    """What masking must leave as it is."""
    if isinstance(event, Rejected):
        return event.reason, event.tag
    if isinstance(event, BlockRemoved):
        return len(event.hashes), event.medium, event.group_idx, event.remaining
    assert isinstance(event, BlockStored)
    return (
        [len(h) if isinstance(h, bytes) else 0 for h in event.hashes],
        event.parent is None, event.num_tokens, event.block_size, event.medium, event.group_idx,
        event.kind, event.window, event.pairs, event.reused, event.lora_name is None,
        event.cache_salt is None, event.extra_keys is None,
        [len(t) for t in event.lookahead or ()],
    )  # fmt: skip


@pytest.mark.parametrize(
    "name",
    ["a_full_attention", "c_kimi_mini_default", "f_lora_salt_mm", "o_eagle_lookahead",
     "s_eagle_ps16", "j_native_offload_selfdesc", "s_ns_default", "g_sha256_bytes"],
)  # fmt: skip
def test_a_masked_capture_answers_masked_prompts_alike(name: str, tmp_path: Path) -> None:
    plain = check(open_capture(capture_folder(name)))
    masked = check(open_capture(convert(name, tmp_path / "x.gz", MASK)))
    assert masked.masked
    assert masked.exact == plain.exact
    assert masked.attention_only == plain.attention_only
    assert [(r.events, r.counters, r.blocks, r.groups) for r in masked.ranks] == [
        (r.events, r.counters, r.blocks, r.groups) for r in plain.ranks
    ]


def test_what_only_an_engines_hash_names_is_missing_from_a_masked_capture(tmp_path: Path) -> None:
    masked = check(open_capture(convert("i_kimi_partial_hash", tmp_path / "x.gz", MASK)))
    assert masked.exact.over == 0
    assert masked.exact.under > 61


# -- conformance ----------------------------------------------------------------------------------


def run_json(*arguments: str) -> tuple[int, dict[str, Any]]:
    done = CliRunner().invoke(app, ["conformance", "--json", *arguments])
    return done.exit_code, json.loads(done.stdout)


def test_known_figures_from_a_folder_and_from_a_file(tmp_path: Path) -> None:
    folder = str(capture_folder("f_lora_salt_mm"))
    file = str(convert("f_lora_salt_mm", tmp_path / "f.gz"))
    kimi = str(capture_folder("c_kimi_mini_default"))
    status, told = run_json(folder, file, kimi)
    assert status == 1
    expected = {"probes": 390, "exact": 383, "over": 7, "under": 0, "matched_wrong": 7}
    assert told["f_lora_salt_mm"]["exact"] == told["f.gz"]["exact"] == expected
    assert len(told["f.gz"]["differences"]) == 7
    found = told["c_kimi_mini_default"]
    assert found["exact"]["exact"] == found["exact"]["probes"] > 100
    assert found["attention_only"]["over"] > 0
    assert [g["treated_as"] for g in found["ranks"][0]["groups"]].count("main") == 1
    assert run_json(file, "--allow-over", "7")[0] == 0
    assert run_json(file, "--allow-over", "6")[0] == 1


def test_a_difference_is_shown_probe_by_probe() -> None:
    folder = str(capture_folder("f_lora_salt_mm"))
    done = CliRunner().invoke(app, ["conformance", "-v", folder])
    assert done.stdout.count("lora1-repointed: ") == 7
    assert done.stdout.splitlines()[1].split() == [
        "f_lora_salt_mm", "390", "383", "7", "0", "7", "383", "7", "0",
    ]  # fmt: skip


def test_without_probes_the_stream_tells_of_itself(tmp_path: Path) -> None:
    frames = [r for r in open_capture(capture_folder("a_full_attention")).records()
              if isinstance(r, FrameRecord)]  # fmt: skip
    assert len(frames) > 8
    del frames[5]
    records: list[Record] = [*frames, FrameRecord(src="w0", seq=frames[-1].seq + 1, payload=b"no")]
    records.insert(3, MessageRecord(src="w0", parts=[b"odd"]))
    path = write(tmp_path / "x.gz", records)
    report = check(open_capture(path))
    rank = report.ranks[0]
    assert rank.counters["gaps"] == rank.counters["lost_batches"] == 1
    assert rank.counters["decode_errors"] == rank.counters["dropped:no_batch"] == 1
    done = CliRunner().invoke(app, ["conformance", str(path)])
    assert done.exit_code == 0
    for said in ("no probes", "group 0: full_attention", "finding: 1 gaps in the sequence"):
        assert said in done.stdout


def one_store(seq: int, parent: int | None, ts: float = 0.0) -> bytes:
    tokens = list(range(16 * seq, 16 * seq + 16))
    event = STORE | {
        "block_hashes": [seq + 1], "parent_block_hash": parent, "token_ids": tokens,
        "extra_keys": None, "lora_id": None, "lora_name": None, "group_idx": 0, "session_id": None,
        "lookahead_token_ids": None, "kv_cache_spec_sliding_window": None, "cache_salt": None,
    }  # fmt: skip
    return encode_batch(ts or 1.0 + seq, [event])


def test_replayed_history_comes_before_what_was_live(tmp_path: Path) -> None:
    payloads = [one_store(i, i or None) for i in range(6)]
    frames = [FrameRecord(src="w0", at=9.0, seq=i, payload=p) for i, p in enumerate(payloads)]
    replayed = [msgspec.structs.replace(f, replayed=True) for f in frames]
    records: list[Record] = [
        PromptRecord(name="p", tokens=pack_tokens(list(range(97)))),
        LinkRecord(src="w0", event="connected"),
        frames[3],
        ProbeRecord(src="w0", prompt="p", reusable=64),
        *replayed[:5],
        frames[4],
        ReplayRecord(src="w0", outcome="complete", batches=5),
        ProbeRecord(src="w0", prompt="p", reusable=80),
        frames[5],
        ProbeRecord(src="w0", prompt="p", reusable=96),
    ]
    whole = check(open_capture(write(tmp_path / "x.gz", records, includes_replay=True)))
    assert whole.exact._asdict() == {
        "probes": 3, "exact": 3, "over": 0, "under": 0, "matched_wrong": 0,
    }  # fmt: skip
    live = [r for r in records if not (isinstance(r, FrameRecord) and r.replayed)]
    without = check(open_capture(write(tmp_path / "y.gz", live)))
    assert without.exact.under == 3


def test_a_batch_can_be_told_at_another_time() -> None:
    for payload in (one_store(0, None), msgspec.msgpack.encode({"events": [], "ts": 1.0})):
        moved = decode_batch(shifted(payload, 100.0))
        assert moved.ts == 101.0
        assert moved.events == decode_batch(payload).events
        assert shifted(payload, 0.0) is payload
    assert shifted(b"no", 5.0) == b"no"
