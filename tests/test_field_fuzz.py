"""Bounds that hold for any bytes at all: memory, and what the fuzzer found so far."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import msgspec
import pytest
from fuzz.fuzz_decode import one
from hypothesis import given, settings
from hypothesis import strategies as st
from test_wire_random import near_events, values

from kvindexd.wire import BatchError, decode_batch

FUZZ = Path(__file__).parent / "fuzz"
SEEDS = sorted((FUZZ / "seeds").iterdir())
SECONDS = int(os.environ.get("KVINDEXD_FUZZ_SECONDS", "15"))

FACTOR = 96
"""Bytes of memory that a byte of payload may take at most while it is decoded. One byte can be an
empty map, which is 64 bytes in Python, and 8 in a list; a real store takes 17."""
BASE = 64 << 10

encode = msgspec.msgpack.encode


def peak(raw: bytes) -> int:
    """The most memory that decoding took, in bytes."""
    tracemalloc.start()
    try:
        decode_batch(raw)
    except BatchError:
        pass
    finally:
        _, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    return most


def batch(body: bytes, count: int) -> bytes:
    """`[1.0, [body, body, ...], 0]`, with an array header of 32 bits."""
    return b"\x93" + encode(1.0) + b"\xdd" + count.to_bytes(4, "big") + body * count + b"\x00"


def store(**changes: Any) -> bytes:
    event = {"type": "BlockStored", "block_hashes": [1], "parent_block_hash": None}
    event |= {"token_ids": [1] * 16, "block_size": 16, "lora_id": None, "medium": "GPU"}
    return encode([1.0, [event | {"lora_name": None} | changes], 0])


N = 200_000
WORST = {
    "nil events": batch(b"\xc0", N),
    "empty arrays": batch(b"\x90", N),
    "empty maps": batch(b"\x80", N),
    "unknown tags": batch(b"\x91\xa1x", N),
    "shortest events": batch(b"\x91\xb0AllBlocksCleared", N // 17),
    "nested": batch(b"\x91\x91\x91\x91\x90", N // 5),
    "tokens": store(token_ids=[1] * N, block_hashes=[]),
    "pairs": store(token_ids=[[1, 2]] * (N // 3)),
    "hashes": store(block_hashes=[1] * N),
    "extra keys": store(extra_keys=[[]] * N),
    "maps as extra keys": store(extra_keys=[[{}] * N]),
    "lookahead": store(lookahead_token_ids=[[]] * N),
    "claims more than is there": batch(b"\xc0", 1)[:10] + b"\xdd\xff\xff\xff\xff\xc0",
}


@pytest.mark.parametrize("name", WORST)
def test_field_no_payload_takes_more_memory_than_a_multiple_of_its_size(name: str) -> None:
    """W10, W11: the worst that is known, kind by kind."""
    raw = WORST[name]
    most = peak(raw)
    assert most <= FACTOR * len(raw) + BASE, f"{most / len(raw):.0f} bytes per byte"


@settings(max_examples=150, deadline=None)
@given(
    st.binary(max_size=300)
    | st.builds(encode, values)
    | st.builds(encode, st.tuples(st.floats(), st.lists(near_events, max_size=4), values))
)
def test_field_random_payloads_take_bounded_memory_and_never_break_anything(raw: bytes) -> None:
    """W10, W11: decoded, and applied to a worker's state."""
    assert peak(raw) <= FACTOR * len(raw) + BASE
    one(raw)


@pytest.mark.parametrize("seed", SEEDS, ids=lambda p: p.name)
def test_field_what_the_fuzzer_found(seed: Path) -> None:
    """W10, W11: every input that once broke something or reached new code."""
    one(seed.read_bytes())


@pytest.mark.skipif(
    importlib.util.find_spec("atheris") is None,
    reason="atheris is not installed (pip install atheris; it has wheels for Linux only)",
)
def test_field_fuzzing_finds_nothing_new(tmp_path: Path) -> None:
    """W10, W11: coverage-guided, from the seeds, for a bounded time."""
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    done = subprocess.run(
        [
            sys.executable,
            str(FUZZ / "fuzz_decode.py"),
            f"-max_total_time={SECONDS}",
            "-max_len=4096",
            "-rss_limit_mb=1024",
            "-timeout=5",
            f"-artifact_prefix={tmp_path}/",
            str(corpus),
            str(FUZZ / "seeds"),
        ],
        capture_output=True,
        text=True,
        timeout=SECONDS + 90,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert "Done" in done.stderr
