"""What makes queries fast must not change what they answer, and answers must not need Redis."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from daemon import Daemon, serving
from hypothesis import given, settings
from hypothesis import strategies as st

from kvindexd import chain
from kvindexd.fleet import Chosen, Member
from kvindexd.model import GroupInfo, Plane, Profile, Slot, WorkerKey
from kvindexd.registration import Registration
from kvindexd.rpc import codec, lines
from kvindexd.scoring.geometry import WorkerOptions
from kvindexd.scoring.picker import Picker
from kvindexd.scoring.query import Query
from kvindexd.scoring.quickrank import quick, quick_rank
from kvindexd.scoring.scorer import Scored, candidate, leading_run
from kvindexd.testing.engine import FakeEngine
from kvindexd.v1 import index_pb2 as pb

BLOCK = 16


# -- the C chain --------------------------------------------------------------------------------


@given(
    st.integers(0, 2**64 - 1),
    st.binary(max_size=1200),
    st.sampled_from([1, 2, 4, 8, 16]),
)
@settings(deadline=None)
def test_fast_keys_equal_plain_ones(key: int, tokens: bytes, unit: int) -> None:
    wanted = chain.extend_plain(key, tokens, unit)
    assert chain.extend(key, tokens, unit) == wanted
    assert np.frombuffer(chain.extend_packed(key, tokens, unit), np.uint64).tolist() == wanted


def test_the_c_module_is_used_where_it_was_built() -> None:
    native = pytest.importorskip("kvindexd._chain", reason="no C compiler when it was installed")
    tokens = np.arange(64, dtype="<u4").tobytes()
    assert native.extend(0, tokens, 16) == chain.extend_packed(0, tokens, 16)
    with pytest.raises(ValueError, match="unit"):
        native.extend(0, tokens, 17)


# -- ranking and encoding ------------------------------------------------------------------------

PROFILE = Profile(
    groups=(GroupInfo(0, "full_attention", BLOCK, 0, "main", 1),),
    planes=(Plane(0, "full_attention", BLOCK, 0, BLOCK),),
    slots=(Slot(0, 0, BLOCK),),
)


def members(count: int, dice: random.Random) -> list[Member]:
    made = []
    for i in range(count):
        key = WorkerKey("", f"w{i:02}", 0)
        who = Registration(
            worker_id=key.worker_id,
            model="m",
            address=f"10.0.0.{i}:8000",
            kv_events_endpoint="tcp://127.0.0.1:1",
            role=dice.choice(["MIXED", "PREFILL", "DECODE"]),
        )
        shape = candidate(i, PROFILE, WorkerOptions(), True)
        age = dice.randrange(5000)
        head = lines.head(lines.identity(key, who.address), "LIVE", age)
        made.append(Member(key, who, shape, "LIVE", age, 1, head))
    return made


def scores(count: int, blocks: int, dice: random.Random) -> list[Scored]:
    out = []
    for _ in range(count):
        depth = dice.randrange(blocks + 1) * BLOCK
        reusable = min(depth, (blocks - 1) * BLOCK)
        host = dice.choice([0, 0, min(BLOCK, reusable)])
        out.append(Scored(depth, reusable, reusable - host, host, 0, BLOCK, dice.random() < 0.2))
    return out


@pytest.mark.parametrize("seed", range(60))
def test_quick_rank_orders_as_the_picker_does(seed: int) -> None:
    dice = random.Random(seed)
    blocks, count = dice.choice([1, 4, 40]), dice.choice([1, 3, 20])
    query = Query(np.arange(blocks * BLOCK, dtype="<u4").tobytes())
    chosen = Chosen(members(count, dice))
    picker = Picker()
    now = 100.0
    for i in range(dice.choice([0, 0, 1, 6])):
        found = picker.rank(query, chosen.members, scores(count, blocks, dice), now)
        picker.take(f"r{i}", dice.choice(found), query, now, 30.0)
        if dice.random() < 0.4:
            picker.complete(f"r{i}", None, None, now + 1)
        now += dice.random() * 3
    scored = scores(count, blocks, dice)
    overlap = dice.choice([None, None, 0.0, 2.5])
    wanted = [
        (c.cost, c.ranked.place, c.load.active_blocks)
        for c in picker.rank(query, chosen.members, scored, now, overlap)
    ]
    assert quick(picker)
    assert quick_rank(picker, query, chosen, scored, now, overlap) == wanted


@pytest.mark.parametrize("seed", range(20))
def test_an_answer_in_parts_is_the_message(seed: int) -> None:
    dice = random.Random(seed)
    fleet, scored = members(12, dice), scores(12, 20, dice)
    scored[0] = scored[0]._replace(reason="x" * dice.choice([3, 300, 5000]), predicted=7)
    order = [(dice.choice([0.0, 3.25, 1e9]), i, dice.choice([0, 5, 70_000])) for i in range(12)]
    dice.shuffle(order)
    rest = pb.ScoreWorkersResponse(prompt_tokens=320, prompt_blocks=20, index_revision="1-2")
    got = pb.ScoreWorkersResponse.FromString(lines.answer(order, fleet, scored, rest))
    wanted = pb.ScoreWorkersResponse(
        scores=[
            codec.score_message(
                fleet[i].key,
                fleet[i].registration.address,
                scored[i],
                state=pb.LIVE,
                staleness_ms=fleet[i].staleness_ms,
                cost=cost,
                active_blocks=active,
            )
            for cost, i, active in order
        ]
    )
    wanted.MergeFrom(rest)
    assert got == wanted
    both = lines.batch([lines.Packed(wanted.SerializeToString(), 0.5)] * 2)
    assert pb.ScoreWorkersBatchResponse.FromString(both).responses[1] == wanted


@pytest.mark.parametrize("seed", range(40))
def test_leading_run_is_that_of_every_column(seed: int) -> None:
    dice = np.random.default_rng(seed)
    rows, words = int(dice.integers(0, 40)), int(dice.integers(1, 4))
    held = dice.random((rows, words * 64)) < dice.choice([0.5, 0.97, 1.0])
    packed = np.packbits(held, axis=1, bitorder="little").view(np.uint64).reshape(rows, words)
    columns = dice.permutation(words * 64)[: int(dice.integers(1, words * 64))]
    wanted = [int(np.logical_and.accumulate(held[:, c]).sum()) for c in columns]
    assert leading_run(packed, columns).tolist() == wanted


# -- the daemon ----------------------------------------------------------------------------------


def stored(blocks: int) -> dict[str, Any]:
    return {
        "type": "BlockStored",
        "block_hashes": list(range(1, blocks + 1)),
        "parent_block_hash": None,
        "token_ids": list(range(blocks * BLOCK)),
        "block_size": BLOCK,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
    }


def store_of(daemon: Daemon) -> int:
    """Process id of the store that the daemon started."""
    assert daemon.process is not None
    for tasks in Path(f"/proc/{daemon.process.pid}/task").glob("*/children"):
        for child in tasks.read_text().split():
            if "valkey" in Path(f"/proc/{child}/cmdline").read_text():
                return int(child)
    raise AssertionError("the daemon has no store of its own")


def test_a_query_touches_no_redis(tmp_path: Path) -> None:
    with serving(index__data_dir=str(tmp_path)) as daemon, FakeEngine() as engine:
        daemon.register("w0", engine.endpoint(), replay_endpoint=engine.replay_endpoint())
        engine.wait_subscribed()
        daemon.until_seq("w0", engine.publish([stored(8)]))
        prompt = np.arange(9 * BLOCK, dtype="<u4").tobytes()
        assert daemon.score(prompt)["w0"].matched_tokens == 8 * BLOCK
        store = store_of(daemon)
        os.kill(store, signal.SIGSTOP)
        try:
            slowest = 0.0
            for _ in range(200):
                began = time.monotonic()
                assert daemon.score(prompt)["w0"].matched_tokens == 8 * BLOCK
                batch = pb.ScoreWorkersBatchRequest(
                    requests=[pb.ScoreWorkersRequest(prompt=pb.Prompt(model="m", token_ids=prompt))]
                )
                answers = daemon.index.ScoreWorkersBatch(batch, timeout=10).responses
                assert answers[0].scores[0].matched_tokens == 8 * BLOCK
                slowest = max(slowest, time.monotonic() - began)
            assert slowest < 5.0, "a query waited for the stopped store"
        finally:
            os.kill(store, signal.SIGCONT)
        daemon.until_seq("w0", engine.publish([stored(8)]))


def test_generated_and_packed_answers_agree(tmp_path: Path) -> None:
    """The stream is answered by the generated handlers' way, the unary call by ours."""
    with serving(index__data_dir=str(tmp_path)) as daemon, FakeEngine() as engine:
        for name in ("w0", "w1", "w2"):
            daemon.register(name, engine.endpoint())
        engine.wait_subscribed(3)
        seq = engine.publish([stored(8)])
        for name in ("w0", "w1", "w2"):
            daemon.until_seq(name, seq)
        prompt = pb.Prompt(model="m", token_ids=np.arange(9 * BLOCK, dtype="<u4").tobytes())
        request = pb.ScoreWorkersRequest(prompt=prompt)
        alone = daemon.index.ScoreWorkers(request, timeout=10)
        batch = pb.ScoreWorkersBatchRequest(requests=[request])
        (batched,) = daemon.index.ScoreWorkersBatch(batch, timeout=10).responses
        (streamed,) = daemon.index.ScoreWorkersStream(iter([request]), timeout=10)
        for answer in (alone, batched, streamed):
            answer.index_revision = ""
            for line in answer.scores:
                line.staleness_ms = 0
        assert [s.worker_id for s in alone.scores] == ["w0", "w1", "w2"]
        assert alone.prompt_blocks == 9
        assert alone == batched == streamed
