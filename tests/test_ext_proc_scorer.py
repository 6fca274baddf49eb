"""The endpoint picker apart from ingest: sidecars beside the engines, Redis, and a scorer that
answers Envoy."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import grpc
import pytest
import servers
from daemon import Daemon
from grpc_health.v1 import health_pb2, health_pb2_grpc
from picks import fresh, stored
from reliability import running
from test_ext_proc import BUFFERED, DUPLEX, Stream, body_of, destination, headers, told

from kvindexd.extproc.v1 import ext_proc_pb2 as ep
from kvindexd.rpc.ext_proc.messages import SERVICE
from kvindexd.testing.engine import FakeEngine
from kvindexd.v1 import index_pb2 as pb

ADDRESSES = {"a": "10.0.0.1:8000", "b": "10.0.0.2:8000"}


class Pods(NamedTuple):
    """Engines with a sidecar each, and what the gateway asks."""

    redis: servers.Server
    engines: dict[str, FakeEngine]
    scorer: Daemon
    channel: grpc.Channel

    def publish(self, worker: str, *events: Any) -> None:
        """Events, until they are visible in the scorer."""
        self.scorer.until_seq(worker, self.engines[worker].publish(events))

    def active(self) -> dict[str, int]:
        """In-flight blocks by worker."""
        return {k: s.active_blocks for k, s in self.scorer.score(fresh(1)).items()}

    def picked(self, tokens: list[int]) -> tuple[str, dict[str, Any]]:
        """One BUFFERED request: (endpoints, how the pick was made)."""
        stream = Stream(self.channel)
        try:
            stream.ask(request_headers=headers(), protocol_config=BUFFERED)
            body = ep.HttpBody(body=body_of(tokens), end_of_stream=True)
            answer = stream.ask(request_body=body)
            return destination(answer.request_body.response), told(answer)
        finally:
            stream.call.cancel()


@pytest.fixture(scope="module")
def pods() -> Iterator[Pods]:
    with servers.server(servers.VALKEY) as redis, FakeEngine() as a, FakeEngine() as b:
        engines = {"a": a, "b": b}
        sidecars = [
            Daemon(
                "sidecar",
                redis__url=redis.url,
                workers=[
                    {
                        "worker_id": name,
                        "model": "m",
                        "address": ADDRESSES[name],
                        "kv_events_endpoint": engine.endpoint(),
                    }
                ],
            )
            for name, engine in engines.items()
        ]
        scorer = Daemon("scorer", redis__url=redis.url, ext_proc__budget=5)
        with running(*sidecars, scorer):
            for engine in engines.values():
                engine.wait_subscribed()
            channel = grpc.insecure_channel(scorer.ready["ext_proc"])
            pods = Pods(redis, engines, scorer, channel)
            for name in engines:
                pods.publish(name, stored(fresh(1)))
            scorer.until(
                lambda: all(s.state == pb.LIVE for s in scorer.score(fresh(1)).values()), "live"
            )
            yield pods
            channel.close()


def test_a_scorer_answers_by_what_sidecars_wrote(pods: Pods) -> None:
    assert set(pods.scorer.ready) >= {"grpc", "ext_proc"}
    health = health_pb2_grpc.HealthStub(pods.channel)
    status = health.Check(health_pb2.HealthCheckRequest(service=SERVICE), timeout=10).status
    assert status == health_pb2.HealthCheckResponse.SERVING
    for worker, other in (("a", "b"), ("b", "a")):
        tokens = fresh(30, extra=1)
        event = stored(tokens)
        pods.publish(worker, event)
        endpoints, how = pods.picked(tokens)
        assert endpoints == f"{ADDRESSES[worker]},{ADDRESSES[other]}"
        assert (how["by"], how["worker"], how["reusable_tokens"]) == ("cache", worker, 480)
        # What the engine evicts is gone here, too.
        last = event["block_hashes"][10:]
        pods.publish(worker, {"type": "BlockRemoved", "block_hashes": last, "medium": "GPU"})
        _, how = pods.picked(tokens[:480])
        assert how["reusable_tokens"] - how["predicted_tokens"] == 160


def test_bodies_that_pass_through_and_load_until_the_end(pods: Pods) -> None:
    tokens = fresh(2000)
    pods.publish("b", stored(tokens))
    body = body_of(tokens)
    pods.scorer.until(lambda: not any(pods.active().values()), "nothing in flight")
    stream = Stream(pods.channel)
    stream.send(request_headers=headers(), protocol_config=DUPLEX)
    for at in range(0, len(body), 60_000):
        part, end = body[at : at + 60_000], at + 60_000 >= len(body)
        stream.send(request_body=ep.HttpBody(body=part, end_of_stream=end))
    assert destination(stream.receive().request_headers.response).startswith(ADDRESSES["b"])
    back, end = b"", False
    while not end:
        sent = stream.receive().request_body.response.body_mutation.streamed_response
        back, end = back + sent.body, sent.end_of_stream
    assert back == body
    assert pods.active() == {"a": 0, "b": 2000}
    assert stream.close() == []
    pods.scorer.until(lambda: not any(pods.active().values()), "released")


def test_the_picker_goes_on_while_redis_is_away(pods: Pods) -> None:
    """Last in this module: Redis does not come back."""
    tokens = fresh(30, extra=1)
    pods.publish("a", stored(tokens))
    pods.redis.kill()
    endpoints, how = pods.picked(tokens)
    assert endpoints.startswith(ADDRESSES["a"])
    assert (how["by"], how["reusable_tokens"]) == ("cache", 480)
