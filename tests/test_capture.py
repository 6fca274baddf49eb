"""The capture file: its format, cuts and damage, and the rules run over it in process."""

from __future__ import annotations

import gzip
import json
import random
from pathlib import Path
from typing import Any

import msgspec
import pytest
from captures import convert, write
from daemon import capture_folder
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from kvindexd.capturing.checking import check
from kvindexd.capturing.lines import CaptureError
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
    decode_batch,
)

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
    assert path.stat().st_mode & 0o077 == 0
    with pytest.raises(CaptureError, match="--force"):
        CaptureWriter(path, Header())
    assert len(list(FileCapture(path).records())) == 2


def test_a_folder_without_frames_is_no_capture(tmp_path: Path) -> None:
    with pytest.raises(CaptureError, match=r"frames\.jsonl"):
        open_capture(tmp_path)


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


def one_store(seq: int, parent: int | None) -> bytes:
    event = {
        "type": "BlockStored",
        "block_hashes": [seq + 1],
        "parent_block_hash": parent,
        "token_ids": list(range(16 * seq, 16 * seq + 16)),
        "block_size": 16,
        "group_idx": 0,
        "kv_cache_spec_kind": "full_attention",
    }
    return encode_batch(1.0 + seq, [event])


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
