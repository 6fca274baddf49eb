"""The engine stand-in is true to the wire, and its block pool to the engine's own rules."""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st

import kvindexd.testing
from kvindexd.testing import (
    BlockPool,
    EngineProcess,
    FakeEngine,
    Group,
    PoolExhausted,
    Prompt,
    encode_batch,
    load_capture,
)
from kvindexd.testing.engine import GARBAGE
from kvindexd.testing.wire import CapturedFrame

CAPTURE = Path(kvindexd.testing.__path__[0]) / "data" / "c_kimi768_default"
END = [b"\xff" * 8, b""]
EVENT = {"type": "AllBlocksCleared"}


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    yield context
    context.destroy(linger=0)


def subscribe(context: zmq.Context[zmq.Socket[bytes]], endpoint: str) -> zmq.Socket[bytes]:
    socket = context.socket(zmq.SUB)
    socket.setsockopt(zmq.IPV6, int("[" in endpoint))
    socket.setsockopt(zmq.RECONNECT_IVL, 10)
    socket.subscribe(b"")
    socket.connect(endpoint)
    return socket


@contextlib.contextmanager
def polled(socket: zmq.Socket[bytes]) -> Iterator[None]:
    """Poll the socket meanwhile: a SUB that nobody polls does not subscribe again by itself."""
    done = threading.Event()

    def poll() -> None:
        while not done.is_set():
            socket.poll(2)

    thread = threading.Thread(target=poll)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def receive(socket: zmq.Socket[bytes], seconds: float = 5.0) -> list[bytes]:
    assert socket.poll(int(seconds * 1000)), "no message"
    return socket.recv_multipart()


def seqs(socket: zmq.Socket[bytes], count: int) -> list[int]:
    return [int.from_bytes(receive(socket)[1], "big") for _ in range(count)]


def replay(
    context: zmq.Context[zmq.Socket[bytes]], endpoint: str, request: list[bytes], wait: float = 5.0
) -> list[list[bytes]]:
    """All replies up to the end marker, or up to a silence of `wait` seconds."""
    dealer = context.socket(zmq.DEALER)
    dealer.connect(endpoint)
    dealer.send_multipart(request)
    replies = []
    while dealer.poll(int(wait * 1000)):
        replies.append(dealer.recv_multipart())
        if replies[-1][-2:] == END:
            break
    dealer.close(0)
    return replies


def ask(start: int) -> list[bytes]:
    return [b"", start.to_bytes(8, "big")]


# -- the wire ----------------------------------------------------------------------------------


def test_recorded_batches_come_out_in_their_own_bytes() -> None:
    frames = load_capture(CAPTURE)
    assert len(frames) > 3
    for frame in frames:
        ts, events, rank = msgspec.msgpack.decode(frame.payload)
        assert encode_batch(ts, events, rank) == frame.payload


def test_what_no_engine_sends_is_encoded_as_it_stands() -> None:
    events = [{"type": "TierBlocksCleared", "medium": "GPU"}, {"type": "BlockStored", "x": 1}]
    assert msgspec.msgpack.decode(encode_batch(1.0, events, None)) == [1.0, events, None]


def test_a_capture_in_another_format_is_refused_by_line(tmp_path: Path) -> None:
    (tmp_path / "frames.jsonl").write_text('{"i": 0}\n')
    with pytest.raises(ValueError, match=r"frames\.jsonl:1"):
        load_capture(tmp_path)


def test_batches_are_numbered_from_zero_and_carry_topic_time_and_rank(
    context: zmq.Context[zmq.Socket[bytes]],
) -> None:
    with FakeEngine(dp_size=2, topic="kv@pod@m") as engine:
        subscriber = subscribe(context, engine.endpoint(1))
        engine.wait_subscribed(rank=1)
        assert [engine.publish([EVENT], rank=1) for _ in range(2)] == [0, 1]
        first, second = receive(subscriber), receive(subscriber)
        assert (first[0], first[1], second[1]) == (b"kv@pod@m", bytes(8), b"\0" * 7 + b"\1")
        ts, events, rank = msgspec.msgpack.decode(first[2])
        assert (events, rank) == ([EVENT], 1)
        assert ts < msgspec.msgpack.decode(second[2])[0]
        assert engine.next_seq(0) == 0


def test_rank_r_is_on_port_plus_r() -> None:
    with FakeEngine(dp_size=3) as engine:
        for name in (engine.endpoint, engine.replay_endpoint):
            ports = [int(name(r).rpartition(":")[2]) for r in range(3)]
            assert ports == [ports[0], ports[0] + 1, ports[0] + 2]


def test_an_engine_told_a_concrete_host_connects_to_us(
    context: zmq.Context[zmq.Socket[bytes]],
) -> None:
    subscriber = context.socket(zmq.SUB)
    subscriber.subscribe(b"")
    port = subscriber.bind_to_random_port("tcp://127.0.0.1")
    with FakeEngine(port=port, connect=True, replay_port=None) as engine:
        with polled(subscriber):
            engine.wait_subscribed()
        engine.publish([EVENT])
        assert receive(subscriber)[1] == bytes(8)
        assert engine.replay_endpoint() == ""


def test_recorded_frames_are_played_byte_for_byte_and_can_be_replayed(
    context: zmq.Context[zmq.Socket[bytes]],
) -> None:
    frames = load_capture(CAPTURE)
    with FakeEngine() as engine:
        subscriber = subscribe(context, engine.endpoint())
        engine.wait_subscribed()
        assert engine.play(frames) == len(frames)
        got = [receive(subscriber) for _ in frames]
        assert got == [[f.topic, f.seq_bytes, f.payload] for f in frames]
        replies = replay(context, engine.replay_endpoint(), ask(0))
        assert [r[-1] for r in replies[:-1]] == [f.payload for f in frames]


# -- replay ------------------------------------------------------------------------------------


@pytest.fixture
def engine() -> Iterator[FakeEngine]:
    with FakeEngine(buffer_steps=4) as engine:
        for _ in range(6):
            engine.publish([EVENT])
        yield engine


Context = zmq.Context[zmq.Socket[bytes]]


def test_replay_has_the_last_batches_and_ends_with_the_marker(
    context: Context, engine: FakeEngine
) -> None:
    replies = replay(context, engine.replay_endpoint(), ask(0))
    assert [int.from_bytes(r[2], "big") for r in replies[:-1]] == [2, 3, 4, 5]
    assert all(len(r) == 4 and r[0] == b"" for r in replies)
    assert replies[-1] == [b"", b"", *END]
    assert replay(context, engine.replay_endpoint(), ask(104)) == [[b"", b"", *END]]
    assert len(replay(context, engine.replay_endpoint(), [b"", b"\x05"])) == 2
    assert engine.replay_requests() == [0, 104, 5]


def test_a_request_in_another_framing_gets_no_answer(context: Context, engine: FakeEngine) -> None:
    assert replay(context, engine.replay_endpoint(), [bytes(8)], wait=0.2) == []


@pytest.mark.parametrize(
    ("mode", "numbers", "ended"),
    [
        ("silent", [], False),
        ("empty", [], True),
        ("cut", [2, 3], False),
        ("untopical", [2, 3, 4, 5], True),
    ],
)
def test_replay_faults(
    context: Context, engine: FakeEngine, mode: str, numbers: list[int], ended: bool
) -> None:
    engine.replay_mode(mode)
    replies = replay(context, engine.replay_endpoint(), ask(0), wait=1.0)
    assert [int.from_bytes(r[-2], "big") for r in replies if r[-2:] != END] == numbers
    assert (replies[-1:] != [] and replies[-1][-2:] == END) is ended
    if mode == "untopical":
        assert {len(r) for r in replies} == {3}
    engine.replay_mode("normal")
    assert len(replay(context, engine.replay_endpoint(), ask(0))) == 5


def test_a_reply_with_a_hole(context: Context) -> None:
    with FakeEngine() as engine:
        for _ in range(20):
            engine.publish([EVENT])
        engine.replay_mode("holes")
        replies = replay(context, engine.replay_endpoint(), ask(0))
        assert [int.from_bytes(r[2], "big") for r in replies[:-1]] == [*range(12), 19]


# -- life and faults ---------------------------------------------------------------------------


def test_restart_keeps_the_ports_and_forgets_the_rest(context: Context, engine: FakeEngine) -> None:
    subscriber = subscribe(context, engine.endpoint())
    engine.wait_subscribed()
    before = engine.endpoint(), engine.replay_endpoint()
    engine.restart()
    assert (engine.endpoint(), engine.replay_endpoint()) == before
    assert replay(context, engine.replay_endpoint(), ask(5)) == [[b"", b"", *END]]
    with polled(subscriber):
        engine.wait_subscribed()
    assert engine.publish([EVENT]) == 0
    assert seqs(subscriber, 1) == [0]


def test_only_one_rank_can_be_restarted() -> None:
    with FakeEngine(dp_size=2) as engine:
        engine.publish([EVENT], rank=0)
        engine.publish([EVENT], rank=1)
        engine.restart(rank=1)
        assert (engine.next_seq(0), engine.next_seq(1)) == (1, 0)


def test_a_stopped_engine_says_so_and_can_be_started_again(engine: FakeEngine) -> None:
    engine.stop()
    with pytest.raises(RuntimeError, match="start"):
        engine.publish([EVENT])
    engine.start()
    assert engine.publish([EVENT]) == 0


def test_a_taken_port_is_an_error(engine: FakeEngine) -> None:
    port = int(engine.endpoint().rpartition(":")[2])
    began = time.monotonic()
    with pytest.raises(OSError, match="cannot bind"):
        FakeEngine(port=port, replay_port=None)
    assert time.monotonic() - began < 10


@pytest.mark.parametrize(
    ("fault", "numbers", "buffered"),
    [
        (lambda e: e.drop_next(2), [2, 3], [0, 1, 2, 3]),
        (lambda e: e.drop_next(2, replayable=False), [2, 3], [2, 3]),
        (lambda e: e.duplicate_next(2), [0, 0, 1, 1, 2, 3], [0, 1, 2, 3]),
        (lambda e: e.swap_next(), [1, 0, 2, 3], [0, 1, 2, 3]),
    ],
)
def test_faults_on_the_stream(
    context: Context, fault: Callable[[FakeEngine], None], numbers: list[int], buffered: list[int]
) -> None:
    with FakeEngine() as engine:
        subscriber = subscribe(context, engine.endpoint())
        engine.wait_subscribed()
        fault(engine)
        for _ in range(4):
            engine.publish([EVENT])
        assert seqs(subscriber, len(numbers)) == numbers
        replies = replay(context, engine.replay_endpoint(), ask(0))
        assert [int.from_bytes(r[2], "big") for r in replies[:-1]] == buffered


def test_garbage_takes_up_no_number(context: Context) -> None:
    with FakeEngine() as engine:
        subscriber = subscribe(context, engine.endpoint())
        engine.wait_subscribed()
        for kind, parts in GARBAGE.items():
            engine.garbage(kind)
            assert receive(subscriber) == parts
        assert engine.publish([EVENT]) == 0


# -- as a process ------------------------------------------------------------------------------


def test_an_engine_process_is_killed_and_started_in_place(context: Context) -> None:
    with EngineProcess("--num-blocks", "8") as engine:
        subscriber = subscribe(context, engine.endpoints[0])
        engine.call("wait_subscribed")
        tokens = list(range(40))
        assert engine.call("run", tokens=tokens) == {"ok": True, "reused": 0, "seq": 0}
        assert engine.call("run", tokens=[*tokens, 9])["reused"] == 32
        assert engine.call("resident", tokens=tokens)["resident"] == 32
        assert seqs(subscriber, 1) == [0]
        endpoints, pid = engine.endpoints, engine.pid
        engine.kill()
        engine.start()
        assert engine.endpoints == endpoints
        assert engine.pid != pid
        with polled(subscriber):
            engine.call("wait_subscribed")
        assert engine.call("run", tokens=tokens) == {"ok": True, "reused": 0, "seq": 0}
        assert seqs(subscriber, 1) == [0]


def test_a_command_that_fails_says_why_and_costs_itself_only() -> None:
    with EngineProcess() as engine:
        with pytest.raises(RuntimeError, match="unknown op 'nonsense'"):
            engine.call("nonsense")
        with pytest.raises(RuntimeError, match="replay mode"):
            engine.call("replay_mode", mode="loud")
        event = {"type": "BlockRemoved", "block_hashes": [{"hex": "00ff"}], "medium": "GPU"}
        assert engine.call("publish", events=[event], repeat=3)["seq"] == 2
        assert engine.call("state")["next_seq"] == [3]


def test_a_frozen_process_is_silent_and_goes_on(context: Context) -> None:
    with EngineProcess() as engine:
        engine.call("publish", events=[EVENT])
        engine.pause()
        assert replay(context, engine.replay_endpoints[0], ask(0), wait=0.3) == []
        engine.resume()
        assert len(replay(context, engine.replay_endpoints[0], ask(0))) == 2


# -- the block pool ----------------------------------------------------------------------------

FULL = Group("full_attention")
WINDOW = Group("sliding_window", window=64)
SPARSE_WINDOW = WINDOW._replace(sparse=True)
MAMBA = Group("mamba", block_size=64, sparse=True)


def tokens(n: int, salt: int = 0) -> list[int]:
    return [(i * 31 + salt * 7919) % 50_000 for i in range(n)]


def test_hashes_are_those_of_the_real_engine() -> None:
    """A recorded prompt in the pool gives the recorded hashes, window and all."""
    stored = [
        event
        for frame in load_capture(CAPTURE)
        for event in msgspec.msgpack.decode(frame.payload)[1]
        if event["type"] == "BlockStored"
        and event["parent_block_hash"] is None
        and len(event["block_hashes"]) * event["block_size"] == len(event["token_ids"])
    ]
    assert stored
    for event in stored:
        size = event["block_size"]
        pool = BlockPool([Group(event["kv_cache_spec_kind"], size)], hash_block=size)
        pool.run(event["token_ids"])
        (ours,) = pool.take_events()
        assert ours["block_hashes"] == event["block_hashes"]


def test_events_have_the_fields_of_the_real_engine() -> None:
    pool = BlockPool([SPARSE_WINDOW, FULL])
    pool.run(tokens(100))
    window, full = pool.take_events()
    assert list(full) == [
        "type",
        "block_hashes",
        "parent_block_hash",
        "token_ids",
        "block_size",
        "lora_id",
        "medium",
        "lora_name",
        "extra_keys",
        "group_idx",
        "kv_cache_spec_kind",
    ]
    assert full["token_ids"] == tokens(96)
    assert len(full["block_hashes"]) == 6
    assert window["block_hashes"] == full["block_hashes"][2:6]
    assert window["kv_cache_spec_sliding_window"] == 64


def test_the_last_token_is_always_computed_and_its_block_doubled() -> None:
    pool = BlockPool()
    assert pool.run(tokens(64)) == 0
    assert pool.resident(tokens(64)) == 48
    assert pool.attention_run(tokens(64)) == 64
    assert pool.run(tokens(64)) == 48
    assert pool.copies(tokens(64)) == [[1, 1, 1, 2]]
    again = pool.take_events()[-1]
    assert len(again["block_hashes"]) == 1
    assert again["parent_block_hash"] is not None


def test_least_recently_used_blocks_go_first_tail_before_head() -> None:
    pool = BlockPool(num_blocks=6)
    pool.run(tokens(64))
    pool.take_events()
    pool.run(tokens(64, salt=1))
    removed = [e for e in pool.take_events() if e["type"] == "BlockRemoved"]
    assert [len(e["block_hashes"]) for e in removed] == [1, 1]
    assert pool.copies(tokens(64)) == [[1, 1, 0, 0]]


def test_a_running_request_keeps_its_blocks() -> None:
    pool = BlockPool(num_blocks=6)
    request = pool.start(tokens(64))
    with pytest.raises(PoolExhausted):
        pool.run(tokens(64, salt=1))
    assert pool.copies(tokens(64)) == [[1, 1, 1, 1]]
    assert pool.reset() is False
    pool.finish(request)
    assert pool.run(tokens(64, salt=1)) == 0


def test_decoding_fills_blocks_and_announces_them() -> None:
    pool = BlockPool()
    pool.run(tokens(20), output=tokens(30, salt=3))
    first, second = pool.take_events()
    assert (len(first["token_ids"]), len(second["token_ids"])) == (16, 32)
    assert second["parent_block_hash"] == first["block_hashes"][-1]
    assert pool.resident([*tokens(20), *tokens(30, salt=3)]) == 48


def test_reset_is_announced_with_the_next_batch() -> None:
    pool = BlockPool()
    pool.run(tokens(64))
    pool.take_events()
    assert pool.reset()
    assert pool.resident(tokens(64)) == 0
    pool.run(tokens(64))
    assert [e["type"] for e in pool.take_events()] == ["AllBlocksCleared", "BlockStored"]


def test_a_window_needs_only_its_tail_and_a_state_only_its_end() -> None:
    pool = BlockPool([WINDOW, FULL], num_blocks=20)
    pool.run(tokens(160))
    held = pool.copies(tokens(160))
    assert held == [[1] * 10, [1] * 10]
    pool.run(tokens(60, salt=5))  # evicts the tails of both groups, the window's first
    window, full = pool.copies(tokens(160))
    reused = pool.resident(tokens(160))
    assert reused // 16 <= full.index(0) if 0 in full else reused // 16 <= 10
    assert all(window[i] for i in WINDOW.needed(reused))
    state = BlockPool([MAMBA, FULL])
    state.run(tokens(200))
    assert state.copies(tokens(200))[0] == [0, 0, 1]
    assert state.resident(tokens(200)) == 192
    assert state.resident(tokens(130)) == 0, "no state was kept at 128"


def test_salt_and_adapter_keep_equal_tokens_apart() -> None:
    pool = BlockPool()
    plain = Prompt(tuple(tokens(64)))
    salted = plain._replace(salt="tenant")
    adapted = plain._replace(lora=("adapter", 1, "/adapters/a"))
    assert [pool.run(p) for p in (plain, salted, adapted)] == [0, 0, 0]
    assert [pool.resident(p) for p in (plain, salted, adapted)] == [48, 48, 48]
    _, with_salt, with_lora = pool.take_events()
    assert with_salt["extra_keys"] == [["tenant"], None, None, None]
    assert with_lora["extra_keys"] == [["adapter"]] * 4
    assert (with_lora["lora_id"], with_lora["lora_name"]) == (1, "adapter")


@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 3), st.integers(1, 150), st.integers(0, 40)),
        min_size=1,
        max_size=25,
    ),
    st.sampled_from([(FULL,), (WINDOW, FULL), (SPARSE_WINDOW, FULL), (MAMBA, MAMBA, FULL)]),
    st.randoms(use_true_random=False),
)
def test_events_counted_are_the_blocks_held(
    work: list[tuple[int, int, int]], groups: tuple[Group, ...], rng: random.Random
) -> None:
    pool = BlockPool(groups, num_blocks=40)
    counted: Counter[tuple[int, Any]] = Counter()
    for family, length, output in work:
        prompt = tokens(length, family)
        before = pool.resident(prompt)
        with contextlib.suppress(PoolExhausted):
            assert pool.run(prompt, tokens(output, family + 10)) == before
        if rng.random() < 0.1:
            pool.reset()
        for event in pool.take_events():
            if event["type"] == "AllBlocksCleared":
                counted.clear()
                continue
            step = 1 if event["type"] == "BlockStored" else -1
            for value in event["block_hashes"]:
                counted[event["group_idx"], value] += step
        assert min(counted.values(), default=0) >= 0
        assert sum(counted.values()) == pool.blocks_held


def test_captured_frames_of_one_publisher_can_be_picked(tmp_path: Path) -> None:
    rows = [
        {"i": i, "src": f"w{i % 2}", "topic": "t", "seq": i // 2, "payload": "wA=="}
        for i in range(4)
    ]
    text = "".join(msgspec.json.encode(r).decode() + "\n" for r in rows)
    (tmp_path / "frames.jsonl").write_text(text)
    frames = load_capture(tmp_path, src="w1")
    assert frames[0] == CapturedFrame(1, "w1", b"t", 0, bytes(8), b"\xc0")
    assert [f.seq for f in frames] == [0, 1]
