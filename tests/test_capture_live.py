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
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from captures import DEADLINE, frames_of, in_process, records_of, until
from daemon import Daemon, capture_folder, serving

from kvindexd.capturing.checking import check
from kvindexd.capturing.folder import FolderCapture
from kvindexd.capturing.reader import FileCapture
from kvindexd.capturing.records import (
    EndRecord,
    FrameRecord,
    LinkRecord,
    MessageRecord,
    PromptRecord,
)
from kvindexd.testing import EngineProcess
from kvindexd.v1 import index_pb2 as pb

NAME = "c_kimi_mini_default"


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
