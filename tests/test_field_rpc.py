"""Reported faults between gateways and the server: pings, health, ends, budgets, addresses.

Each docstring starts with the row of docs/field-cases.md that it covers.
"""

from __future__ import annotations

import os
import queue
import signal
import socket
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import servers
from daemon import Daemon, serving
from grpc_health.v1 import health_pb2, health_pb2_grpc
from reliability import QUICK, matched, prompt, running, state, stored

from kvindexd.testing.engine import FakeEngine
from kvindexd.v1 import index_pb2 as pb

SERVING = health_pb2.HealthCheckResponse.SERVING


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """With one worker that holds blocks 0, 1, 2."""
    folder = tmp_path_factory.mktemp("rpc")
    settings = QUICK | {"ingest.lease_ttl": 20.0}  # calls by the thousand must not cost it
    with FakeEngine() as engine, serving(**settings, index__data_dir=str(folder)) as one:
        one.register("w", engine.endpoint(), aliases=["10.0.0.9:8000", "[fd00::9]:8000"])
        engine.wait_subscribed()
        engine.publish([stored(0, 3)])
        one.until_seq("w", 0)
        yield one


def request(blocks: int = 3, **fields: Any) -> pb.ScoreWorkersRequest:
    tokens = pb.TokenIds(ids=prompt(blocks))
    return pb.ScoreWorkersRequest(prompt=pb.Prompt(**{"model": "m", "tokens": tokens} | fields))


def health(one: Daemon, service: str = "") -> int:
    stub = health_pb2_grpc.HealthStub(one.channel)
    return int(stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=10).status)


# -- connections ----------------------------------------------------------------------------------


class Http2:
    """Just enough of HTTP/2 to ping a server as a Go client's keepalive does, only faster."""

    def __init__(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        self._socket = socket.create_connection((host.strip("[]"), int(port)), 5)
        self._socket.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + self._frame(4, b""))

    @staticmethod
    def _frame(kind: int, body: bytes, flags: int = 0) -> bytes:
        return len(body).to_bytes(3, "big") + bytes([kind, flags]) + bytes(4) + body

    def ping(self, number: int) -> None:
        """Send a ping and wait for its answer. Raises AssertionError on GOAWAY or an end."""
        self._socket.sendall(self._frame(6, struct.pack(">Q", number)))
        while True:
            head = self._read(9)
            body = self._read(int.from_bytes(head[:3], "big"))
            kind, flags = head[3], head[4]
            assert kind != 7, f"GOAWAY {body[8:]!r}"
            if kind == 6 and flags & 1:
                assert body == struct.pack(">Q", number)
                return

    def _read(self, n: int) -> bytes:
        data = b""
        while len(data) < n:
            more = self._socket.recv(n - len(data))
            assert more, "closed by the server"
            data += more
        return data

    def close(self) -> None:
        self._socket.close()


def test_field_pings_without_calls_are_answered_for_ever(daemon: Daemon) -> None:
    """C1: gRPC's own default sends GOAWAY too_many_pings at the third ping within 5 minutes."""
    client = Http2(daemon.ready["grpc"])
    try:
        for n in range(50):
            client.ping(n)
    finally:
        client.close()


@pytest.mark.parametrize(
    "signals", [[signal.SIGINT], [signal.SIGTERM] * 2], ids=["sigint", "sigterm_twice"]
)
def test_field_signals_end_it_with_status_0_under_load(
    tmp_path: Path, signals: list[signal.Signals]
) -> None:
    """C3, C4: with calls in flight, half of them being refused; no trace is left in the log."""
    with running(one := Daemon(**QUICK, index__data_dir=str(tmp_path))):
        assert one.process is not None
        with FakeEngine() as engine:
            one.register("w", engine.endpoint(), replay_endpoint=engine.replay_endpoint())
            engine.wait_subscribed()
            engine.publish([stored(0)])
            one.until_seq("w", 0)
            stop = threading.Event()
            seen: set[grpc.StatusCode] = set()
            threads = [
                threading.Thread(target=_ask_for_ever, args=(one, n, stop, seen)) for n in range(8)
            ]
            for thread in threads:
                thread.start()
            one.until(lambda: len(seen) >= 2, "answers and refusals")
            began = time.monotonic()
            for number in signals:
                one.process.send_signal(number)
            assert one.process.wait(10) == 0
            assert time.monotonic() - began < 8
            stop.set()
            for thread in threads:
                thread.join(10)
        assert one._reader is not None
        one._reader.join(5)
        assert one.records[-1]["event"] == "stopped"
        assert "Traceback" not in one.log(), one.log()
        one.process = None


def _ask_for_ever(one: Daemon, n: int, stop: threading.Event, seen: set[grpc.StatusCode]) -> None:
    stub = one.index
    good = request(1) if n % 2 else request(1, model="nobody's")
    while not stop.is_set():
        try:
            stub.ScoreWorkers(good, timeout=2)
            seen.add(grpc.StatusCode.OK)
        except (grpc.RpcError, ValueError) as e:
            if isinstance(e, grpc.RpcError):
                seen.add(e.code())
                if e.code() is grpc.StatusCode.UNAVAILABLE:
                    return


def test_field_cancelled_calls_leave_answers_right_and_memory_flat(daemon: Daemon) -> None:
    """C5, R5: a third of the calls is cancelled by its client; every answer is checked."""
    assert daemon.process is not None
    pid = daemon.process.pid
    right = daemon.index.ScoreWorkers(request()).scores[0].matched_tokens
    assert right == 48
    _cancel_some(daemon, 1500)
    before = rss(pid)
    _cancel_some(daemon, 4500)
    assert rss(pid) - before < 12 << 20, f"{before} -> {rss(pid)}"


def _cancel_some(one: Daemon, calls: int) -> None:
    packed = request()
    stub = one.index
    window: queue.Queue[Any] = queue.Queue(50)
    problems: list[str] = []

    def check() -> None:
        while (call := window.get()) is not None:
            try:
                if call.result().scores[0].matched_tokens != 48:
                    problems.append("a wrong answer")
            except grpc.FutureCancelledError:
                pass
            except grpc.RpcError as e:
                problems.append(repr(e))

    thread = threading.Thread(target=check)
    thread.start()
    for n in range(calls):
        call = stub.ScoreWorkers.future(packed, timeout=20)
        if n % 3 == 0:
            call.cancel()
        window.put(call)
    window.put(None)
    thread.join(60)
    assert problems == []


def rss(pid: int) -> int:
    """Resident memory of a process in bytes."""
    with open(f"/proc/{pid}/statm") as page:
        return int(page.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_field_ipv6_everywhere(tmp_path: Path) -> None:
    """C10: the engine's endpoint, ours, and the worker's, whose other address is an alias."""
    if not _has_ipv6():
        pytest.skip("no IPv6 loopback here")
    settings = QUICK | {"server.listen": "[::1]:0", "metrics.listen": "[::1]:0"}
    with (
        FakeEngine(host="::1") as engine,
        serving(**settings, index__data_dir=str(tmp_path)) as one,
    ):
        assert one.ready["grpc"].startswith("[::1]:")
        one.register(
            "w",
            engine.endpoint(),
            replay_endpoint=engine.replay_endpoint(),
            address="[fd00::5]:8000",
            aliases=["10.0.0.5:8000"],
        )
        engine.wait_subscribed()
        engine.publish([stored(0, 2)])
        one.until_seq("w", 0)
        for name in ("[fd00::5]:8000", "10.0.0.5:8000", "w"):
            asked = request(2)
            asked.candidates.append(name)
            scores = one.index.ScoreWorkers(asked, timeout=10).scores
            assert [(s.worker_id, s.matched_tokens) for s in scores] == [("w", 32)], name


def _has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as one:
            one.bind(("::1", 0))
    except OSError:
        return False
    return True


# -- health and answers without data --------------------------------------------------------------


def test_field_health_is_the_standard_service(daemon: Daemon) -> None:
    """C6: "" and each service are known, anything else is NOT_FOUND."""
    for name in ("", "kvindexd.v1.KVIndex", "kvindexd.v1.KVIndexAdmin", "readiness", "liveness"):
        assert health(daemon, name) == SERVING
    with pytest.raises(grpc.RpcError) as caught:
        health(daemon, "nobody.Knows")
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND


def test_field_without_workers_it_is_ready_and_says_what_is_missing(tmp_path: Path) -> None:
    """C6, C7: ready means that it can answer; a model that nobody ever registered is a mistake of
    the caller, one whose workers are away is not."""
    with serving(**QUICK, index__data_dir=str(tmp_path)) as one:
        assert health(one) == SERVING
        with pytest.raises(grpc.RpcError) as caught:
            one.index.ScoreWorkers(request(), timeout=10)
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND
        assert "known models: none" in str(caught.value.details())
        one.register("w", f"tcp://127.0.0.1:{servers.free_port()}")
        answer = one.index.ScoreWorkers(request(), timeout=10)
        assert [(s.worker_id, s.reusable_tokens) for s in answer.scores] == [("w", 0)]
        assert answer.prompt_tokens == 49
        one.until(lambda: state(one) == "SYNCING", "told from one that is connected")
        one.admin.DeregisterWorker(pb.DeregisterWorkerRequest(worker_id="w"), timeout=10)
        with pytest.raises(grpc.RpcError) as caught:
            one.index.ScoreWorkers(request(), timeout=10)
        assert "known models: none" in str(caught.value.details())


class Stalled:
    """A daemon with blocks 0, 1, 2 on a worker, whose Redis has stopped answering."""

    def __init__(self, daemon: Daemon, redis: servers.Server, engine: FakeEngine) -> None:
        self.daemon, self.redis, self.engine = daemon, redis, engine


@pytest.fixture(scope="module")
def stalled() -> Iterator[Stalled]:
    settings = QUICK | {"ingest.lease_ttl": 8.0, "ingest.heartbeat": 0.25}
    with servers.start_valkey() as redis, FakeEngine() as engine:
        one = Daemon(**settings, redis__url=redis.url)
        with running(one):
            one.register("w", engine.endpoint(), replay_endpoint=engine.replay_endpoint())
            engine.wait_subscribed()
            engine.publish([stored(0, 3)])
            one.until_seq("w", 0)
            redis.pause()
            try:
                yield Stalled(one, redis, engine)
            finally:
                redis.resume()


def test_field_a_redis_that_hangs_is_not_waited_for(stalled: Stalled) -> None:
    """C8, R7: nothing in a query asks Redis, so that callers need no deadline, and those that have
    one of 50 ms keep it."""
    one = stalled.daemon
    slow = 0
    for _ in range(40):
        began = time.monotonic()
        score = one.index.ScoreWorkers(request()).scores[0]  # no deadline at all
        slow += time.monotonic() - began > 0.05
        assert score.matched_tokens == 48
    assert slow <= 4, f"{slow} of 40 took more than 50 ms"


def test_field_a_redis_that_hangs_leaves_health_serving(stalled: Stalled) -> None:
    """C6, C7: it can answer, and the gateway need not guess: states say how old the answer is."""
    one = stalled.daemon
    assert health(one) == SERVING
    one.until(lambda: matched(one, 3) == -1, "left out once its lease is over", 15)
    answer = one.index.ScoreWorkers(request(), timeout=10)
    assert list(answer.scores) == []
    kept = one.score(prompt(3), include_stale=True)["w"]
    assert (kept.matched_tokens, kept.state) == (48, pb.STALE)
    assert health(one) == SERVING


def test_field_a_lasting_failure_is_told_once(stalled: Stalled) -> None:
    """O6: one line with its cost in words when it begins and one when it ends; then a counter."""
    one = stalled.daemon
    for n in range(3, 200):
        stalled.engine.publish([stored(n)])
    one.until(lambda: one.events("store_unavailable"), "told")
    one.until(lambda: state(one) == "STALE", "and in the worker's state", 15)

    def cost_told() -> bool:
        return any("stale" in line.get("cost", "") for line in one.events("store_unavailable"))

    one.until(cost_told, "with its cost", 15)
    assert len(one.events("store_unavailable")) + len(one.events("heartbeat_failed")) <= 4
    stalled.redis.resume()
    one.until_seq("w", 197)
    one.until(lambda: matched(one, 200) == 200, "whole, without a restart")
    # The writer's own line, unless it was waiting for its first answer all the while.
    one.until(lambda: one.events("store_back") or one.events("store_available"), "told")
    assert len(one.events("store_unavailable")) <= 4


# -- prompts --------------------------------------------------------------------------------------


def test_field_a_gateway_that_tokenises_otherwise_shows(daemon: Daemon) -> None:
    """C12: a prompt without the engine's first token misses at block 0; the answer says so, and
    the share of such prompts is a metric."""

    def zero_share() -> tuple[float, float]:
        lines = dict(line.rsplit(" ", 1) for line in daemon.page().splitlines() if line[0] != "#")
        name = "kvindexd_matched_ratio"
        return float(lines[name + '_bucket{le="0.0"}']), float(lines[name + "_count"])

    zero, total = zero_share()
    without = prompt(3)[1:]
    asked = request(tokens=pb.TokenIds(ids=without))
    asked.options.explain = True
    (score,) = daemon.index.ScoreWorkers(asked, timeout=10).scores
    assert score.matched_tokens == 0
    assert "block 0" in score.reason
    assert zero_share() == (zero + 1, total + 1)
    assert daemon.worker("w").blocks["device"] == 3, "although it holds something"
