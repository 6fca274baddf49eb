"""Capture and replay as processes: an engine's stream to a file, and from it into a daemon."""

from __future__ import annotations

import base64
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import structlog
import zmq
from daemon import Daemon, capture_folder, serving
from typer.testing import CliRunner

from kvindexd.capturing.checking import check
from kvindexd.capturing.folder import FolderCapture
from kvindexd.capturing.player import Player, Settings
from kvindexd.capturing.reader import FileCapture, open_capture
from kvindexd.capturing.records import (
    EndRecord,
    FrameRecord,
    Header,
    LinkRecord,
    MessageRecord,
    PromptRecord,
    Record,
    ReplayRecord,
)
from kvindexd.capturing.writer import CaptureWriter
from kvindexd.cli.main import app
from kvindexd.registration import Registration
from kvindexd.testing import EngineProcess, FakeEngine, encode_batch
from kvindexd.v1 import index_pb2 as pb

NAME = "c_kimi_mini_default"
DEADLINE = 30.0


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    with serving(index__data_dir=str(tmp_path_factory.mktemp("store"))) as daemon:
        yield daemon


@pytest.fixture(scope="module")
def engine() -> Iterator[EngineProcess]:
    with EngineProcess() as engine:
        yield engine


class Command:
    """A `kvindexd` command in a process of its own."""

    def __init__(self, *arguments: object) -> None:
        environment = {k: v for k, v in os.environ.items() if not k.startswith("KVINDEXD_")}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "kvindexd.cli.main", *map(str, arguments)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment,
            text=True,
        )

    def __enter__(self) -> Command:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.communicate()

    def end(self, how: int | None = None) -> tuple[int, str, str]:
        """(status, output, errors), after a signal if one is named."""
        if how is not None:
            self.process.send_signal(how)
        out, errors = self.process.communicate(timeout=DEADLINE)
        return self.process.returncode, out, errors


def until(condition: Callable[[], Any], what: str) -> Any:
    end = time.monotonic() + DEADLINE
    while time.monotonic() < end:
        if found := condition():
            return found
        time.sleep(0.01)
    raise AssertionError(f"{what}: not within {DEADLINE} s")


def records_of(path: Path) -> list[Record]:
    """What can be read so far of a file that may not be there yet."""
    try:
        return list(FileCapture(path).records())
    except (OSError, ValueError):
        return []


def frames_of(path: Path, *, replayed: bool = False) -> list[FrameRecord]:
    return [r for r in records_of(path) if isinstance(r, FrameRecord) and r.replayed == replayed]


def connected(path: Path) -> Callable[[], bool]:
    return lambda: any(isinstance(r, LinkRecord) for r in records_of(path))


def prompts() -> dict[str, PromptRecord]:
    records = FolderCapture(capture_folder(NAME)).records()
    return {r.name: r for r in records if isinstance(r, PromptRecord)}


def scores(daemon: Daemon, worker: str, model: str) -> dict[str, tuple[int, int]]:
    """(matched, reusable) tokens of every prompt of the recording."""
    return {
        name: (score.matched_tokens, score.reusable_tokens)
        for name, prompt in prompts().items()
        for score in [daemon.score(prompt.tokens, model=model)[worker]]
    }


def test_a_captured_stream_played_back_gives_the_same_answers(
    daemon: Daemon, engine: EngineProcess, tmp_path: Path
) -> None:
    folder = str(capture_folder(NAME))
    file = tmp_path / "c.gz"
    engine.call("play", folder=folder, last=7)  # before anybody listens: only a replay has these
    endpoint, replay = engine.endpoints[0], engine.replay_endpoints[0]
    daemon.register("orig", endpoint, replay_endpoint=replay, model="live", engine="vllm")
    server = daemon.ready["grpc"]
    options = ["--worker", "orig", "--server", server, "--include-replay", "--count", 20, "--json"]
    with Command("capture", *options, "-o", file) as capture:
        until(lambda: len(frames_of(file, replayed=True)) == 8, "the replay in the file")
        engine.call("play", folder=folder, first=8)
        status, out, errors = capture.end()
    assert (status, errors) == (0, "")
    told = json.loads(out)
    assert (told["reason"], told["frames"], told["replayed"]) == ("count", 20, 8)
    assert told["size"] == file.stat().st_size
    header = FileCapture(file).header
    assert header.sources["w0"].kv_events_endpoint == endpoint
    assert (header.sources["w0"].model, header.sources["w0"].engine) == ("live", "vllm")
    whole = FolderCapture(capture_folder(NAME))
    sent = [(r.seq, r.payload) for r in whole.records() if isinstance(r, FrameRecord)]
    both = frames_of(file, replayed=True) + frames_of(file)
    assert [(r.seq, r.payload) for r in both] == sent
    assert all(abs(r.at - time.time()) < 60 for r in both)

    binds = ["--bind", "tcp://127.0.0.1:0", "--replay-bind", "tcp://127.0.0.1:0"]
    with Command(
        "replay", file, *binds, "--speed", 0, "--register", server, "--worker-id", "copy", "--hold"
    ) as replaying:
        daemon.until_seq("orig", 27)
        copy = daemon.until(lambda: _at(daemon, "copy", 27), "the copy at 27")
        original = scores(daemon, "orig", "live")
        assert scores(daemon, "copy", "live") == original
        assert sum(reusable > 0 for _, reusable in original.values()) > 2
        assert copy.blocks == daemon.worker("orig").blocks
        assert copy.counters["gaps"] == 0
        status, out, errors = replaying.end(signal.SIGINT)
    assert status == 0, errors
    assert "20 frames sent" in out
    names = [w.worker_id for w in daemon.admin.ListWorkers(pb.ListWorkersRequest()).workers]
    assert "copy" not in names


def _at(daemon: Daemon, worker: str, seq: int) -> pb.Worker | None:
    found = daemon.worker(worker)
    return found if found.last_seq == seq else None


def in_process(*arguments: object, meanwhile: Callable[[], Any] = lambda: None) -> Any:
    """Run a command in this process and thread, and something else beside it."""
    beside = threading.Thread(target=meanwhile, daemon=True)
    beside.start()
    done = CliRunner().invoke(app, [*map(str, arguments)])
    beside.join(DEADLINE)
    structlog.reset_defaults()
    assert not beside.is_alive()
    return done


def test_a_masked_capture_tells_nothing_and_is_as_long(
    engine: EngineProcess, tmp_path: Path
) -> None:
    folder = str(capture_folder(NAME))
    file = tmp_path / "masked.gz"
    engine.call("restart")

    def publish() -> None:
        until(connected(file), "connected")
        engine.call("play", folder=folder)

    done = in_process(
        "capture", "--endpoint", engine.endpoints[0], "--count", 28, "--mask-tokens", "-o", file,
        meanwhile=publish,
    )  # fmt: skip
    assert done.exit_code == 0
    plain, masked = FolderCapture(capture_folder(NAME)), FileCapture(file)
    reports = [check(found).ranks[0] for found in (plain, masked)]
    assert reports[0].events == reports[1].events
    assert reports[0].blocks == reports[1].blocks
    assert masked.header.masked
    sent = [r for r in plain.records() if isinstance(r, FrameRecord)]
    got = frames_of(file)
    assert [r.seq for r in got] == [r.seq for r in sent]
    assert not {r.payload for r in got} & {r.payload for r in sent}


def test_kill_9_leaves_a_file_that_is_readable_and_ctrl_c_a_whole_one(
    engine: EngineProcess, tmp_path: Path
) -> None:
    killed, closed = tmp_path / "killed.gz", tmp_path / "closed.gz"
    common = ["--endpoint", engine.endpoints[0]]
    engine.call("restart")
    with (
        Command("capture", *common, "-o", killed) as first,
        Command("capture", *common, "-o", closed) as second,
    ):
        until(lambda: connected(killed)() and connected(closed)(), "both connected")
        engine.call("publish", events=[{"type": "AllBlocksCleared"}])
        garbage = ["aGVsbG8=", "AA=="]
        engine.call("send_parts", parts=garbage)
        for path in (killed, closed):
            # Flushed within half a second, while the process goes on.
            until(lambda path=path: len(records_of(path)) == 3, "all flushed")
        assert first.end(signal.SIGKILL)[0] == -signal.SIGKILL
        status, out, errors = second.end(signal.SIGINT)
    assert (status, errors) == (0, "")
    assert "1 frames" in out
    assert "interrupted" in out
    found = FileCapture(killed)
    link, frame, message = found.records()
    assert "no end marker" in found.cut
    assert isinstance(link, LinkRecord)
    assert isinstance(frame, FrameRecord)
    assert message == MessageRecord(
        src="w0",
        at=message.at,
        parts=[base64.b64decode(p) for p in garbage],  # type: ignore[union-attr]
    )
    end = records_of(closed)[-1]
    assert isinstance(end, EndRecord)
    assert (end.frames, end.messages, end.reason) == (1, 1, "interrupted")


def test_nothing_captured_is_a_failure(engine: EngineProcess, tmp_path: Path) -> None:
    engine.call("restart")
    options = ["--endpoint", engine.endpoints[0], "-o", tmp_path / "none.gz"]
    done = in_process("capture", *options, "--seconds", 0.3)
    assert done.exit_code == 1
    assert "not one frame came; connected to" in done.output


def test_a_capture_ends_at_its_size(engine: EngineProcess, tmp_path: Path) -> None:
    engine.call("restart")
    file = tmp_path / "bytes.gz"
    running = threading.Event()
    running.set()

    def publish() -> None:
        until(connected(file), "connected")
        turn = 0
        while running.is_set():
            turn += 1
            engine.call("run", tokens=[(i * 7919 + turn) % 100_003 for i in range(2000)])

    options = ["--endpoint", engine.endpoints[0], "--max-bytes", 20_000, "--json", "-o", file]
    beside = threading.Thread(target=publish, daemon=True)
    beside.start()
    done = in_process("capture", *options)
    running.clear()
    beside.join(DEADLINE)
    assert done.exit_code == 0
    assert json.loads(done.output)["reason"] == "max_bytes"
    assert 20_000 <= file.stat().st_size < 1_000_000


def test_a_full_disk_is_told(engine: EngineProcess) -> None:
    options = ["--endpoint", engine.endpoints[0], "-o", "/dev/full", "--force"]
    done = in_process("capture", *options)
    assert done.exit_code == 1
    assert "cannot write /dev/full: No space left on device" in done.output


def test_wrong_usage_and_unknown_workers_are_told(daemon: Daemon, tmp_path: Path) -> None:
    options = ["--server", daemon.ready["grpc"], "-o", tmp_path / "x.gz"]
    done = in_process("capture", "--worker", "nobody", *options)
    assert done.exit_code == 1
    assert "nobody" in done.output
    assert in_process("capture", *options).exit_code == 2
    done = in_process("capture", "--endpoint", "tcp://*:5557", *options)
    assert done.exit_code == 1
    assert "cannot be connected to" in done.output
    done = in_process("capture", "--endpoint", "tcp://h:5557", "--include-replay", *options)
    assert done.exit_code == 1
    assert "--replay-endpoint" in done.output
    daemon.register("bound", "tcp://127.0.0.1:0", bind_events=True)
    done = in_process("capture", "--worker", "bound", *options)
    assert done.exit_code == 1
    assert "bind_events" in done.output
    assert not (tmp_path / "x.gz").exists()


# -- playing --------------------------------------------------------------------------------------


def write(path: Path, records: Sequence[Record]) -> Path:
    header = Header(sources={"w0": Registration(worker_id="w0")}, includes_replay=True)
    with CaptureWriter(path, header) as writer:
        for record in records:
            writer.write(record)
    return path


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
    with Played(write(tmp_path / "x.gz", records), speed=0) as played:
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
    with Played(write(tmp_path / "x.gz", records), speed=1.0) as played:
        assert [played.next()[1][-1] for _ in range(2)] == [2, 4]
        assert played.replay() == [0, 1, 2, 3, 4]
        assert played.replay(3) == [3, 4]


def test_frames_come_at_their_recorded_pace_scaled(tmp_path: Path) -> None:
    records: list[Record] = [batch(0, 1.0, at=50.0), batch(1, 2.0, at=53.0), batch(2, 3.0, at=53.0)]
    with Played(write(tmp_path / "x.gz", records), speed=10.0) as played:
        played.next()
        began = time.monotonic()
        played.next()
        took = time.monotonic() - began
        played.next()
        assert 0.2 < took < 3.0


def test_a_loop_restarts_the_engine_and_its_clock_goes_on(tmp_path: Path) -> None:
    records: list[Record] = [batch(0, 10.0), batch(1, 14.0)]
    with Played(write(tmp_path / "x.gz", records), speed=0, loop=True) as played:
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
