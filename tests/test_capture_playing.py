"""A capture played back in process: order, pace, history, restarts."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
import zmq
from captures import DEADLINE, frames_of, in_process, records_of, until, write
from daemon import capture_folder

from kvindexd.capturing.checking import check
from kvindexd.capturing.player import Player, Settings
from kvindexd.capturing.reader import open_capture
from kvindexd.capturing.records import (
    FrameRecord,
    LinkRecord,
    MessageRecord,
    Record,
    ReplayRecord,
)
from kvindexd.testing import FakeEngine, encode_batch


class Played:
    """A player on free ports in a thread, and a subscriber that takes what it sends."""

    def __init__(self, path: Path, **settings: Any) -> None:
        binds = {"bind": "tcp://127.0.0.1:0", "replay_bind": "tcp://127.0.0.1:0"}
        self.player = Player(open_capture(path), "w0", Settings(subscribers=1, **binds, **settings))
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._subscriber = self._context.socket(zmq.SUB)
        self._subscriber.subscribe(b"")
        self._subscriber.setsockopt(zmq.RECONNECT_IVL, 10)
        self._subscriber.connect(self.player.publisher.endpoint)
        self._thread = threading.Thread(target=self.player.play, daemon=True)

    def __enter__(self) -> Played:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.player.stop()
        self._thread.join(DEADLINE)
        self.player.close()
        self._context.destroy(0)

    def next(self) -> list[bytes]:
        assert self._subscriber.poll(int(DEADLINE * 1000))
        return self._subscriber.recv_multipart()

    def replay(self, start: int = 0) -> list[int]:
        """Sequence numbers that a replay request brings."""
        with self._context.socket(zmq.DEALER) as dealer:
            dealer.setsockopt(zmq.LINGER, 0)
            dealer.connect(self.player.publisher.replay_endpoint or "")
            dealer.send_multipart([b"", start.to_bytes(8, "big")])
            found = []
            while True:
                assert dealer.poll(int(DEADLINE * 1000))
                *_, seq, payload = dealer.recv_multipart()
                if not payload:
                    return found
                found.append(int.from_bytes(seq, "big"))


def batch(seq: int, ts: float, *, replayed: bool = False, at: float = 0.0) -> FrameRecord:
    payload = encode_batch(ts, [{"type": "AllBlocksCleared"}])
    return FrameRecord(
        src="w0", at=at or ts, topic=b"kv", seq=seq, payload=payload, replayed=replayed
    )


def test_history_gaps_restarts_and_odd_messages_are_played_as_recorded(tmp_path: Path) -> None:
    up = LinkRecord(src="w0", event="connected")
    records: list[Record] = [
        up,
        batch(2, 12.0),
        batch(0, 10.0, replayed=True),
        batch(1, 11.0, replayed=True),
        batch(2, 12.0, replayed=True),
        batch(3, 13.0, replayed=True),  # never came live: a gap, filled by the replay
        ReplayRecord(src="w0", outcome="complete", batches=4),
        MessageRecord(src="w0", parts=[b"odd"]),
        batch(4, 14.0),
        up,
        batch(0, 20.0, replayed=True),
        ReplayRecord(src="w0", outcome="complete", batches=1),
        batch(1, 21.0),
    ]
    with Played(write(tmp_path / "x.gz", records, includes_replay=True), speed=0) as played:
        got = [played.next() for _ in range(4)]
        assert [m[-2] for m in got if len(m) == 3] == [n.to_bytes(8, "big") for n in (2, 4, 1)]
        assert got[1] == [b"odd"]
        assert got[0] == [b"kv", bytes(7) + b"\x02", batch(2, 12.0).payload]
        assert played.replay() == [0, 1]
        assert played.player._restarts == 1


def test_before_the_restart_the_replay_socket_has_history_and_gap(tmp_path: Path) -> None:
    records: list[Record] = [
        LinkRecord(src="w0", event="connected"),
        *(batch(n, 10.0 + n, replayed=True) for n in range(4)),
        ReplayRecord(src="w0", outcome="complete", batches=4),
        batch(2, 12.0, at=100.0),
        batch(4, 14.0, at=100.0),
        batch(5, 15.0, at=900.0),
    ]
    with Played(write(tmp_path / "x.gz", records, includes_replay=True), speed=1.0) as played:
        assert [played.next()[1][-1] for _ in range(2)] == [2, 4]
        assert played.replay() == [0, 1, 2, 3, 4]
        assert played.replay(3) == [3, 4]


def test_frames_come_at_their_recorded_pace_scaled(tmp_path: Path) -> None:
    records: list[Record] = [batch(0, 1.0, at=50.0), batch(1, 2.0, at=53.0), batch(2, 3.0, at=53.0)]
    with Played(write(tmp_path / "x.gz", records, includes_replay=True), speed=10.0) as played:
        played.next()
        began = time.monotonic()
        played.next()
        took = time.monotonic() - began
        played.next()
        assert 0.2 < took < 3.0


def test_a_loop_restarts_the_engine_and_its_clock_goes_on(tmp_path: Path) -> None:
    records: list[Record] = [batch(0, 10.0), batch(1, 14.0)]
    with Played(
        write(tmp_path / "x.gz", records, includes_replay=True), speed=0, loop=True
    ) as played:
        got = [played.next() for _ in range(5)]
    assert [m[1][-1] for m in got] == [0, 1, 0, 1, 0]
    assert got[0][2] == records[0].payload  # type: ignore[union-attr]
    assert got[2][2] == batch(0, 15.0).payload
    assert got[3][2] == batch(1, 19.0).payload
    assert got[4][2] == batch(0, 20.0).payload


def test_an_engine_restarted_while_it_is_captured_is_restarted_in_the_playback(
    tmp_path: Path,
) -> None:
    file = tmp_path / "restarted.gz"
    with FakeEngine() as engine:
        engine.publish([{"type": "AllBlocksCleared"}])

        def publish() -> None:
            until(lambda: replays(file) == 1, "the first replay")
            for _ in range(2):
                engine.publish([{"type": "AllBlocksCleared"}])
            until(lambda: len(frames_of(file)) == 2, "two frames")
            engine.restart()
            until(lambda: replays(file) == 2, "the second replay")
            for _ in range(3):
                engine.publish([{"type": "AllBlocksCleared"}])

        done = in_process(
            "capture", "--endpoint", engine.endpoint(), "--replay-endpoint",
            engine.replay_endpoint(), "--include-replay", "--count", 5, "-o", file,
            meanwhile=publish,
        )  # fmt: skip
    assert done.exit_code == 0
    sent = frames_of(file)
    assert [r.seq for r in sent] == [1, 2, 0, 1, 2]
    rank = check(open_capture(file)).ranks[0]
    assert rank.counters["restarts"] == 1
    assert rank.counters["link:connected"] == 2
    assert "gaps" not in rank.counters
    with Played(file, speed=0) as played:
        assert played.replay()[0] == 0
        got = [played.next() for _ in sent]
        assert [(m[1][-1], m[2]) for m in got] == [(r.seq, r.payload) for r in sent]
        assert played.replay() == [0, 1, 2]


def replays(file: Path) -> int:
    return sum(isinstance(r, ReplayRecord) for r in records_of(file))


def test_a_subscriber_that_does_not_come_is_told(tmp_path: Path) -> None:
    path = write(tmp_path / "x.gz", [batch(0, 1.0)])
    player = Player(
        open_capture(path), "w0", Settings(bind="tcp://127.0.0.1:0", subscribers=1, patience=0.05)
    )
    try:
        with pytest.raises(TimeoutError, match="0 subscribers after"):
            player.play()
    finally:
        player.close()


def test_a_taken_address_and_a_source_to_choose_are_told() -> None:
    with FakeEngine(replay_port=None) as engine:
        taken = engine.endpoint()
        done = in_process("replay", capture_folder("a_full_attention"), "--bind", taken)
    assert done.exit_code == 1
    assert f"cannot bind {taken}" in done.output
    done = in_process("replay", capture_folder("h_dp2"), "--bind", "tcp://127.0.0.1:0")
    assert done.exit_code == 1
    assert "--source (w0, w1)" in done.output
