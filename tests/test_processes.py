"""`serve --processes N`: several processes behind one port, one life and one death."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest
import structlog
import uvloop
from daemon import Daemon
from reliability import stored

from kvindexd import serve
from kvindexd.config import Config, MetricsConfig
from kvindexd.processes import Part, Processes, part_config
from kvindexd.testing.engine import FakeEngine
from kvindexd.v1 import index_pb2 as pb
from kvindexd.v1 import index_pb2_grpc as rpc

PROMPT = pb.Prompt(model="m", tokens=pb.TokenIds(ids=range(17)))
REQUEST = pb.ScoreWorkersRequest(prompt=PROMPT)


@pytest.fixture(scope="module")
def engine() -> Iterator[FakeEngine]:
    with FakeEngine() as engine:
        yield engine


@pytest.fixture(scope="module")
def daemon(engine: FakeEngine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    folder = tmp_path_factory.mktemp("data")
    config = folder / "kvindexd.toml"
    config.write_text("")
    settings = {"index.data_dir": str(folder), "config": str(config), "log.repeat_seconds": 0}
    daemon = Daemon(server__processes=3, **settings).start()
    try:
        daemon.register("w", engine.endpoint(), replay_endpoint=engine.replay_endpoint())
        engine.wait_subscribed()
        engine.publish([stored(0)])
        daemon.until_seq("w", 0)
        daemon.until(lambda: len(parts(daemon)) == 2, "further processes")
        yield daemon
    finally:
        daemon.kill()


def parts(daemon: Daemon) -> dict[int, dict[str, object]]:
    """The last ready line of each further process, by its index."""
    return {r["index"]: r for r in daemon.events("process_ready")}


def fresh(daemon: Daemon) -> grpc.Channel:
    """A connection of its own, which the kernel gives to one of the processes."""
    options = [("grpc.use_local_subchannel_pool", 1)]
    return grpc.insecure_channel(daemon.ready["grpc"], options)


def ask(daemon: Daemon, deadline: float = 10) -> int:
    with fresh(daemon) as channel:
        answer = rpc.KVIndexStub(channel).ScoreWorkers(REQUEST, timeout=deadline)
        return answer.scores[0].matched_tokens


def answered(address: object) -> float:
    """ScoreWorkers calls that the process with these metrics has answered."""
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=5) as page:
        lines = page.read().decode().splitlines()
    found = [x for x in lines if x.startswith("kvindexd_score_requests_total")]
    return sum(float(x.rsplit(" ", 1)[1]) for x in found)


def gone(pid: int) -> bool:
    try:
        return "State:\tZ" in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return True


def test_connections_are_dealt_out_and_every_process_answers_alike(daemon: Daemon) -> None:
    addresses = [daemon.ready["metrics"], *(p["metrics"] for p in parts(daemon).values())]
    before = [answered(a) for a in addresses]
    with ThreadPoolExecutor(8) as pool:
        matched = Counter(pool.map(lambda _: ask(daemon), range(60)))
    assert matched == {16: 60}
    shares = [answered(a) - b for a, b in zip(addresses, before, strict=True)]
    assert sum(shares) == 60
    assert sum(share > 0 for share in shares) >= 2, shares


def test_a_worker_is_tailed_over_any_connection(daemon: Daemon, engine: FakeEngine) -> None:
    def tail(n: int) -> str:
        with fresh(daemon) as channel:
            request = pb.TailWorkerRequest(worker_id="w")
            events = rpc.KVIndexAdminStub(channel).TailWorker(request, timeout=10)
            try:
                return next(iter(events)).type
            except grpc.RpcError as e:
                return f"{n}: {e.code().name} {e.details()}"

    with ThreadPoolExecutor(12) as pool:
        seen = [pool.submit(tail, n) for n in range(12)]
        deadline = time.monotonic() + 10
        while not all(s.done() for s in seen) and time.monotonic() < deadline:
            engine.publish([stored(1)])
            time.sleep(0.05)
    assert Counter(s.result() for s in seen) == {"BlockStored": 12}


def test_a_killed_process_is_started_again(daemon: Daemon) -> None:
    old = parts(daemon)[1]["pid"]
    assert isinstance(old, int)
    os.kill(old, signal.SIGKILL)
    daemon.until(lambda: parts(daemon)[1]["pid"] != old, "a new process")
    assert daemon.events("process_ended")[0]["index"] == 1
    with ThreadPoolExecutor(8) as pool:
        assert Counter(pool.map(lambda _: ask(daemon), range(30))) == {16: 30}


def test_settings_that_are_read_again_reach_every_process(daemon: Daemon) -> None:
    def refused(_: int) -> bool:
        try:
            ask(daemon)
        except grpc.RpcError as e:
            return e.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        return False

    def everywhere(wanted: bool) -> bool:
        with ThreadPoolExecutor(8) as pool:
            return set(pool.map(refused, range(16))) == {wanted}

    config = Path(daemon.settings["config"])
    config.write_text("[limits]\nmax_prompt_tokens = 16\n")
    assert daemon.process is not None
    daemon.process.send_signal(signal.SIGHUP)
    daemon.until(lambda: len(daemon.events("reloaded")) >= 3, "three processes to reload")
    assert everywhere(True)
    # One that starts afterwards has them too.
    old = parts(daemon)[2]["pid"]
    assert isinstance(old, int)
    os.kill(old, signal.SIGKILL)
    daemon.until(lambda: parts(daemon)[2]["pid"] != old, "a new process")
    assert everywhere(True)
    config.write_text("")
    daemon.process.send_signal(signal.SIGHUP)
    daemon.until(lambda: len(daemon.events("reloaded")) >= 6, "three processes to reload")
    assert everywhere(False)
    assert not daemon.events("restart_needed")


async def attempts(count: int) -> list[object]:
    """How so many attempts to start a process ended, of processes that cannot go on."""
    stopping = asyncio.Event()
    with structlog.testing.capture_logs() as logs:
        further = Processes([Part(Config(), i + 1, "") for i in range(count)], grace=1.0)
        running = asyncio.create_task(further.run(stopping))
        async with asyncio.timeout(20):
            while len(logs) < count and not running.done():  # noqa: ASYNC110 - it tells nobody
                await asyncio.sleep(0.01)
        stopping.set()
        await running
    return [line["status"] for line in logs if line["event"] == "process_ended"]


def test_processes_that_cannot_be_started_do_not_take_the_first_one_with_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    for _ in range(3):  # it ends while it is being told, or before, or after
        assert set(uvloop.run(attempts(3))) == {1}
    monkeypatch.setattr(sys, "executable", str(tmp_path / "none"))
    assert str(uvloop.run(attempts(1))[0]).startswith("not started: ")


def test_a_further_process_imports_nothing_from_the_working_directory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "msgspec.py").write_text("import os; os._exit(77)")
    monkeypatch.chdir(tmp_path)
    assert asyncio.run(attempts(1)) == [2], "it got as far as to miss a redis.url"


def test_a_metrics_port_that_does_not_exist_is_any() -> None:
    config = Config(metrics=MetricsConfig(listen="[::1]:65534"))
    listens = [part_config(config, {"grpc": "x:1"}, "", i).metrics.listen for i in (1, 2)]
    assert listens == ["[::1]:65535", "[::1]:0"]


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_all_end_together(how: signal.Signals, tmp_path: Path) -> None:
    daemon = Daemon(server__processes=2, index__data_dir=str(tmp_path)).start()
    try:
        daemon.until(lambda: parts(daemon), "the further process")
        pid = parts(daemon)[1]["pid"]
        assert isinstance(pid, int)
        status = daemon.stop(how)
        assert status == (0 if how == signal.SIGTERM else -signal.SIGKILL)
        deadline = time.monotonic() + 10
        while not gone(pid):
            assert time.monotonic() < deadline, "the further process goes on alone"
            time.sleep(0.02)
        told = bool(daemon.events("main_process_gone"))
        assert told or how == signal.SIGTERM, "an orderly end is no reason to warn"
        assert not told or how == signal.SIGKILL
    finally:
        daemon.kill()


async def test_to_be_told_by_the_first_process_and_by_a_signal_is_no_request_to_hurry() -> None:
    """A terminal or a service manager signals all processes, and the first one tells the others
    to end too: calls in flight keep their grace time."""
    one = serve.Daemon(Config(), "scorer", Part(Config(), 1, ""))
    one._stopping.set()  # as `orphaned` does
    one._signalled()
    assert not one._hurry.is_set()
    one._signalled()
    assert one._hurry.is_set()
