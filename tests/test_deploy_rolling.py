"""A rolling restart of everything that deploy/ ships, under continuous questions.

Two engines, a sidecar for each, two scorers and a Redis (tests/deployed_fleet.py). A client asks
both scorers in turns, as docs/deploy.md tells gateways to, while each part is stopped and started
again.
"""

from __future__ import annotations

import itertools
import json
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import servers
from deployed import DEPLOY
from deployed_fleet import NAMES, TOKEN, Fleet
from grpc_health.v1 import health_pb2, health_pb2_grpc
from reliability import prompt, stored

from kvindexd.testing.engine import FakeEngine
from kvindexd.v1 import index_pb2 as pb
from kvindexd.v1 import index_pb2_grpc as rpc


class Asking:
    """A gateway: one channel over both scorers, by what docs/deploy.md tells it to use."""

    def __init__(self, fleet: Fleet, config: str) -> None:
        addresses = ",".join(f"127.0.0.1:{fleet.ports[i][0]}" for i in (2, 3))
        options = [
            ("grpc.service_config", config),
            ("grpc.ssl_target_name_override", "localhost"),
            ("grpc.initial_reconnect_backoff_ms", 100),
            ("grpc.max_reconnect_backoff_ms", 1000),
        ]
        tls = grpc.ssl_channel_credentials(fleet.ca.cert_pem.bytes())
        self.channel = grpc.secure_channel(f"ipv4:{addresses}", tls, options)
        self.published = 0
        self.codes: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.fleet = fleet
        self._ending = threading.Event()
        self._threads = [
            threading.Thread(target=self._ask, daemon=True),
            threading.Thread(target=self._publish, daemon=True),
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._ending.set()
        for thread in self._threads:
            thread.join(10)

    def _publish(self) -> None:
        """The engines go on: one more block of one chain each time, on both."""
        for n in itertools.count():
            self.published = n + 1
            for engine in self.fleet.engines:
                engine.publish([stored(n)])
            if self._ending.wait(0.02):
                return

    def score(self, blocks: int) -> dict[str, int]:
        """Blocks that each worker is credited with. Raises grpc.RpcError."""
        asked = pb.Prompt(model="m", tokens=pb.TokenIds(ids=prompt(blocks)))
        request = pb.ScoreWorkersRequest(prompt=asked)
        answer = rpc.KVIndexStub(self.channel).ScoreWorkers(request, timeout=5)
        return {s.worker_id: s.matched_tokens // 16 for s in answer.scores}

    def _ask(self) -> None:
        while not self._ending.is_set():
            before = self.published
            try:
                found = self.score(before + 50)
            except grpc.RpcError as e:
                self.codes[f"{e.code().name}: {e.details()}"] += 1
                continue
            self.codes["OK"] += 1
            after = self.published
            if any(blocks > after for blocks in found.values()) or set(found) - set(NAMES):
                self.wrong.append(f"{found} while at most {after} were published")
            time.sleep(0.002)


def service_config() -> str:
    """The JSON that docs/deploy.md gives gateways."""
    text = (DEPLOY.parent / "docs" / "deploy.md").read_text()
    block = text.partition("<!-- service config -->")[2].partition("```json\n")[2]
    return json.dumps(json.loads(block.partition("```")[0]))


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    with FakeEngine() as one, FakeEngine() as two:
        made = Fleet(tmp_path, [one, two])
        try:
            made.redis.start()
            for process in (*made.sidecars, *made.scorers):
                process.start()
            for index in range(4):
                made.started(index)
            yield made
        finally:
            made.end()


def test_nothing_fails_while_every_part_is_restarted(fleet: Fleet) -> None:
    asking = Asking(fleet, service_config())
    _until_both(asking, 0)
    asking.start()
    try:
        for index, process in enumerate([*fleet.sidecars, *fleet.scorers]):
            _advance(asking, 20)
            process.stop()
            _advance(asking, 20)
            process.start()
            fleet.started(index)
            if index < 2:
                _until_both(asking, asking.published)
        _advance(asking, 20)
        fleet.redis.stop()
        _advance(asking, 20)
        fleet.redis.start()
        _until_both(asking, asking.published)
        for index in (2, 3):
            what = f"scorer {index} takes its share again"
            servers.wait_until(lambda i=index: fleet.scored(i) > 20, what)
    finally:
        asking.stop()
    assert set(asking.codes) == {"OK"}, asking.codes
    assert asking.codes["OK"] > 200
    assert not asking.wrong, asking.wrong[:5]
    right = dict.fromkeys(NAMES, asking.published)
    for index in (2, 3):
        what = f"scorer {index} says {right}"
        servers.wait_until(lambda i=index: _alone(fleet, i, asking.published) == right, what)
    _only_an_admin_steers(fleet)
    _a_stopping_scorer_answers_who_watches(fleet)


def _advance(asking: Asking, answers: int) -> None:
    """Go on only after the client had so many more answers, or failures."""
    goal = asking.codes.total() + answers
    servers.wait_until(lambda: asking.codes.total() >= goal, "the client goes on asking")


def _until_both(asking: Asking, blocks: int) -> None:
    """Wait until both workers are credited with so many blocks."""

    def both() -> bool:
        try:
            found = asking.score(max(1, blocks))
        except grpc.RpcError as e:
            raise AssertionError(f"{e.code()}: {e.details()}") from None
        return set(found) == set(NAMES) and min(found.values()) >= blocks

    servers.wait_until(both, f"both workers with {blocks} blocks")


def _channel(fleet: Fleet, port: int) -> grpc.Channel:
    tls = grpc.ssl_channel_credentials(fleet.ca.cert_pem.bytes())
    return grpc.secure_channel(f"localhost:{port}", tls)


def _alone(fleet: Fleet, index: int, blocks: int) -> dict[str, int]:
    """What one scorer says at the end."""
    request = pb.ScoreWorkersRequest(
        prompt=pb.Prompt(model="m", tokens=pb.TokenIds(ids=prompt(blocks + 1)))
    )
    with _channel(fleet, fleet.ports[index][0]) as channel:
        scores = rpc.KVIndexStub(channel).ScoreWorkers(request, timeout=5).scores
    return {s.worker_id: s.matched_tokens // 16 for s in scores}


def _only_an_admin_steers(fleet: Fleet) -> None:
    """Administration is on its own loopback port, and asks for the token of the file."""
    request: Any = pb.ListWorkersRequest()
    for index in (2, 3):
        with _channel(fleet, fleet.ports[index][0]) as channel, pytest.raises(grpc.RpcError) as e:
            rpc.KVIndexAdminStub(channel).ListWorkers(request, timeout=5)
        assert e.value.code() == grpc.StatusCode.UNIMPLEMENTED
        with _channel(fleet, fleet.ports[index][1]) as channel:
            admin = rpc.KVIndexAdminStub(channel)
            with pytest.raises(grpc.RpcError) as e:
                admin.ListWorkers(request, timeout=5)
            assert e.value.code() == grpc.StatusCode.UNAUTHENTICATED
            metadata = [("authorization", f"Bearer {TOKEN}")]
            listed = admin.ListWorkers(request, timeout=5, metadata=metadata).workers
            assert {w.worker_id for w in listed} == set(NAMES)


def _a_stopping_scorer_answers_who_watches(fleet: Fleet) -> None:
    """After NOT_SERVING, calls that were on their way to it are still answered. Stops a scorer."""
    with _channel(fleet, fleet.ports[3][0]) as channel:
        service = health_pb2.HealthCheckRequest(service="kvindexd.v1.KVIndex")
        watch = health_pb2_grpc.HealthStub(channel).Watch(service, timeout=20)
        assert next(watch).status == health_pb2.HealthCheckResponse.SERVING
        process = fleet.scorers[1].process
        assert process is not None
        process.terminate()
        assert next(watch).status == health_pb2.HealthCheckResponse.NOT_SERVING
        asked = pb.Prompt(model="m", tokens=pb.TokenIds(ids=prompt(1)))
        request = pb.ScoreWorkersRequest(prompt=asked)
        assert rpc.KVIndexStub(channel).ScoreWorkers(request, timeout=5).scores
        assert process.wait(20) == 0
