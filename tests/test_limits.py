"""Every limit at its boundary: what just fits is taken, one more is refused and counted."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import queue
import re
import socket
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import pytest
import servers
from daemon import Daemon
from pure import Rank, chunk, removed, stored

from kvindexd.extproc.v1 import ext_proc_pb2 as ep
from kvindexd.ingest.frame import FrameError, parse_live
from kvindexd.registration import Registration
from kvindexd.residency import Options
from kvindexd.rpc.budget import Admission, Shares, in_time
from kvindexd.rpc.errors import Overloaded, TimeUp
from kvindexd.store import Store
from kvindexd.testing.engine import FakeEngine
from kvindexd.v1 import index_pb2 as pb

INVALID, EXHAUSTED = grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.RESOURCE_EXHAUSTED
BYTES = 8192


@pytest.fixture(scope="module")
def silent() -> Iterator[str]:
    """The URL of a server that accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


@pytest.fixture(scope="module")
def redis() -> Iterator[servers.Server]:
    with servers.start_valkey() as server:
        yield server


@pytest.fixture(scope="module")
def daemon(silent: str, redis: servers.Server) -> Iterator[Daemon]:
    """Little of everything, and registrations on this machine's own address only."""
    one = Daemon(
        **{
            "redis.url": redis.url,
            "limits.ext_proc_streams": 2,
            "server.max_message_bytes": BYTES,
            "limits.max_prompt_tokens": 64,
            "limits.max_candidates": 3,
            "limits.max_batch": 3,
            "limits.max_labels": 2,
            "limits.max_workers": 4,
            "limits.max_name_bytes": 64,
            "limits.streams_per_client": 2,
            "limits.max_concurrent_calls": 2,
            "tokens.models": {"text": silent},
            "tokens.timeout": 1.5,
            "registration.allow_networks": ["127.0.0.1/32"],
        }
    )
    try:
        one.start()
        one.register("w0", "tcp://127.0.0.1:9", address="127.0.0.1:8000")
        yield one
        assert one.stop() == 0
    finally:
        if one.process is not None:
            one.kill()


def refused(daemon: Daemon, reason: str) -> int:
    """How often that was counted."""
    with urllib.request.urlopen(f"http://{daemon.ready['metrics']}/metrics", timeout=10) as page:
        text = page.read().decode()
    pattern = rf'kvindexd_requests_refused_total{{reason="{reason}"}} (\S+)'
    found = re.search(pattern, text)
    return int(float(found[1])) if found else 0


def code_of(call: Callable[[], Any]) -> tuple[grpc.StatusCode, str]:
    try:
        call()
    except grpc.RpcError as e:
        return e.code(), e.details()
    return grpc.StatusCode.OK, ""


def request(tokens: int = 16, **fields: Any) -> pb.ScoreWorkersRequest:
    prompt = pb.Prompt(model="m", tokens=pb.TokenIds(ids=range(tokens)))
    return pb.ScoreWorkersRequest(prompt=prompt, **fields)


def check(
    daemon: Daemon,
    reason: str,
    call: Callable[[Any], Any],
    fits: Any,
    beyond: Any,
    said: tuple[grpc.StatusCode, str],
) -> None:
    """`fits` is taken and `beyond` is refused, and that is counted."""
    before = refused(daemon, reason)
    assert code_of(lambda: call(fits)) == (grpc.StatusCode.OK, "")
    assert refused(daemon, reason) == before
    code, text = code_of(lambda: call(beyond))
    assert (code, said[1] in text) == (said[0], True), text
    assert refused(daemon, reason) == before + 1


# -- requests -------------------------------------------------------------------------------------


def test_prompts(daemon: Daemon) -> None:
    said = (EXHAUSTED, "prompt of 65 tokens is longer than limits.max_prompt_tokens = 64")
    check(daemon, "prompt_tokens", daemon.index.ScoreWorkers, request(64), request(65), said)


def test_candidates(daemon: Daemon) -> None:
    said = (INVALID, "candidates: 4 of them, at most limits.max_candidates = 3")
    three, four = (request(candidates=["w0"] * n) for n in (3, 4))
    check(daemon, "candidates", daemon.index.ScoreWorkers, three, four, said)
    pairs = [pb.PairWorkersRequest(prefill=request(), decode_candidates=["w0"] * n) for n in (3, 4)]
    check(daemon, "candidates", daemon.index.PairWorkers, *pairs, (INVALID, "decode_" + said[1]))


def test_labels_of_a_request(daemon: Daemon) -> None:
    said = (INVALID, "options.labels: 3 of them, at most limits.max_labels = 2")
    two, three = (
        request(options=pb.ScoreOptions(labels={str(i): "x" for i in range(n)})) for n in (2, 3)
    )
    check(daemon, "labels", daemon.index.ScoreWorkers, two, three, said)


def test_batches(daemon: Daemon) -> None:
    said = (INVALID, "requests: 4 of them, at most limits.max_batch = 3")
    three, four = (pb.ScoreWorkersBatchRequest(requests=[request()] * n) for n in (3, 4))
    check(daemon, "batch", daemon.index.ScoreWorkersBatch, three, four, said)
    # What is wrong inside a batch is counted as what it is.
    inside = pb.ScoreWorkersBatchRequest(requests=[request(), request(65)])
    said = (EXHAUSTED, "requests[1]: prompt of 65 tokens")
    check(daemon, "prompt_tokens", daemon.index.ScoreWorkersBatch, three, inside, said)


def of_size(size: int) -> pb.ScoreWorkersRequest:
    """A request of so many bytes on the wire."""
    made = request(candidates=["x" * (size - 100)])
    made.candidates[0] += "x" * (size - made.ByteSize())
    assert made.ByteSize() == size
    return made


def test_messages(daemon: Daemon) -> None:
    said = (EXHAUSTED, f"{BYTES + 1} bytes is larger than server.max_message_bytes = {BYTES}")
    fits, beyond = of_size(BYTES), of_size(BYTES + 1)
    check(daemon, "message_bytes", daemon.index.ScoreWorkers, fits, beyond, said)
    stream = daemon.index.ScoreWorkersStream
    check(daemon, "message_bytes", lambda r: list(stream(iter([r]))), fits, beyond, said)
    # Far beyond, gRPC itself refuses: not counted, but not taken either.
    assert code_of(lambda: daemon.index.ScoreWorkers(of_size(3 * BYTES)))[0] == EXHAUSTED


def test_streams_of_one_client(daemon: Daemon) -> None:
    watch = daemon.admin.WatchWorkers
    before = refused(daemon, "streams")
    open_ones = [watch(pb.WatchWorkersRequest()) for _ in range(2)]
    for one in open_ones:
        next(one)
    code, text = code_of(lambda: next(watch(pb.WatchWorkersRequest())))
    assert (code, "limits.streams_per_client" in text) == (EXHAUSTED, True)
    assert refused(daemon, "streams") == before + 1
    open_ones[0].cancel()
    daemon.until(lambda: next(watch(pb.WatchWorkersRequest())).worker.worker_id, "a place is free")
    open_ones[1].cancel()


def test_requests_in_ext_proc(daemon: Daemon) -> None:
    message = ep.ProcessingRequest(request_headers=ep.HttpHeaders(end_of_stream=True))
    before = refused(daemon, "ext_proc_streams")
    with contextlib.ExitStack() as ending, grpc.insecure_channel(daemon.ready["ext_proc"]) as made:
        process = made.stream_stream(
            "/envoy.service.ext_proc.v3.ExternalProcessor/Process",
            ep.ProcessingRequest.SerializeToString,
            ep.ProcessingResponse.FromString,
        )

        def ask() -> tuple[str | None, int]:
            """What is answered, and with which status; the stream stays open."""
            requests: queue.SimpleQueue[ep.ProcessingRequest | None] = queue.SimpleQueue()
            requests.put(message)
            ending.callback(requests.put, None)
            call = process(iter(requests.get, None), timeout=10)
            ending.callback(call.cancel)
            answer = next(call)
            return answer.WhichOneof("response"), answer.immediate_response.status.code

        first, second = ask(), ask()
        assert 429 not in (first[1], second[1])
        assert ask() == ("immediate_response", 429)
    assert refused(daemon, "ext_proc_streams") == before + 1


def test_more_calls_than_places_are_shed_with_a_hint(daemon: Daemon) -> None:
    slow = pb.ScoreWorkersRequest(prompt=pb.Prompt(model="text", text="how long?"))
    before = refused(daemon, "concurrent_calls")
    with concurrent.futures.ThreadPoolExecutor(2) as threads:
        held = [threads.submit(code_of, lambda: daemon.index.ScoreWorkers(slow)) for _ in "12"]

        def shed() -> grpc.RpcError | None:
            try:
                daemon.index.ScoreWorkers(request(), timeout=5)
            except grpc.RpcError as e:
                return e
            return None

        error = daemon.until(shed, "a call is shed", deadline=5)
        assert error.code() == EXHAUSTED
        hints = dict(error.trailing_metadata())
        assert 10 <= int(hints["grpc-retry-pushback-ms"]) <= 60
        for one in held:
            assert one.result()[0] == grpc.StatusCode.UNAVAILABLE
    assert refused(daemon, "concurrent_calls") >= before + 1
    assert code_of(lambda: daemon.index.ScoreWorkers(request()))[0] == grpc.StatusCode.OK


def test_places_and_deadlines() -> None:
    places, shares = Admission(2), Shares(1)
    with places.enter(), places.enter(), pytest.raises(Overloaded) as full, places.enter():
        raise AssertionError("it was let in")
    assert (full.value.reason, full.value.retry) == ("concurrent_calls", True)
    with shares.enter("a"), shares.enter("b"), pytest.raises(Overloaded), shares.enter("a"):
        raise AssertionError("it was let in")
    with shares.enter("a"):
        pass
    for left in (0.0, -1.0):
        with pytest.raises(TimeUp) as late:
            in_time(left)
        assert late.value.reason == "deadline"
    in_time(None)
    in_time(0.001)


# -- events ---------------------------------------------------------------------------------------


def test_events_and_what_a_rank_holds() -> None:
    seq = (7).to_bytes(8, "big")
    assert parse_live([b"", seq, b"x" * 100], 100, 0.0).payload == b"x" * 100
    with pytest.raises(FrameError, match="payload of 101 bytes, limit 100") as caught:
        parse_live([b"", seq, b"x" * 101], 100, 0.0)
    assert caught.value.reason == "too_large"

    rank = Rank(Options(blocks=10))
    rank.send(*(stored([n], chunk(n)) for n in range(1, 11)))
    assert (rank.held(), rank.counters["claims_expired"]) == (10, 0)
    rank.send(stored([11], chunk(11)))
    assert (rank.held(), rank.counters["claims_expired"]) == (10, 1)

    rank = Rank(Options(parked=10))
    orphans = [stored([100 + n], chunk(n), 10_000 + n) for n in range(1, 12)]
    rank.send(*orphans[:10])
    assert (len(rank.residency.waiting), rank.counters["dropped:parked_overflow"]) == (10, 0)
    rank.send(orphans[10])
    assert (len(rank.residency.waiting), rank.counters["dropped:parked_overflow"]) == (10, 1)

    rank = Rank(Options(bindings=10))
    rank.send(*(stored([n], chunk(n)) for n in range(1, 11)))
    rank.send(removed(list(range(1, 11))))
    assert rank.counters["bindings_forgotten"] == 0
    rank.send(stored([11], chunk(11)))
    assert rank.counters["bindings_forgotten"] == 1


# -- registrations --------------------------------------------------------------------------------


def test_number_and_size_of_workers(daemon: Daemon) -> None:
    def add(fields: dict[str, Any]) -> pb.Worker:
        name = fields.get("worker_id", "w0")
        fields = {"address": "127.0.0.1:8000"} | fields
        return daemon.register(name, "tcp://127.0.0.1:9", **{**fields, "worker_id": name})

    def register(fields: dict[str, Any]) -> None:
        worker = {"worker_id": "w0", "model": "m", "address": "127.0.0.1:8000"} | fields
        worker = {"kv_events_endpoint": "tcp://127.0.0.1:9"} | worker
        daemon.admin.RegisterWorker(pb.RegisterWorkerRequest(worker=pb.Worker(**worker)))

    two, three = ({"labels": {str(i): "x" for i in range(n)}} for n in (2, 3))
    said = (INVALID, "worker.labels: 3 of them")
    check(daemon, "registration_size", register, two, three, said)
    long = (INVALID, "worker.model: a text of 65 bytes")
    fits, beyond = ({"model": "m" * n, "worker_id": "long"} for n in (64, 65))
    check(daemon, "registration_size", register, fits, beyond, long)
    register({"worker_id": "w2"})
    said = (EXHAUSTED, "4 worker ranks are registered, as many as limits.max_workers")
    check(daemon, "workers", register, {"worker_id": "w3"}, {"worker_id": "w4"}, said)
    register({"worker_id": "w3", "labels": {"a": "b"}})  # an update is no further one
    for name in ("long", "w2", "w3"):
        daemon.admin.DeregisterWorker(pb.DeregisterWorkerRequest(worker_id=name))


@pytest.mark.parametrize(
    ("fields", "what"),
    [
        ({"kv_events_endpoint": "tcp://169.254.169.254:80"}, "events"),
        ({"kv_events_endpoint": "tcp://127.0.0.2:80"}, "events"),
        ({"kv_events_endpoint": "ipc:///run/engine.sock"}, "events"),
        ({"replay_endpoint": "tcp://10.0.0.1:6379"}, "replay"),
        ({"address": "10.0.0.1:8000"}, "address"),
        ({"aliases": ["10.0.0.1:8000"]}, "alias"),
    ],
)
def test_registrations_that_lead_elsewhere(
    daemon: Daemon, fields: dict[str, Any], what: str
) -> None:
    before = refused(daemon, f"forbidden_{what}")
    worker = {"address": "127.0.0.1:1", "kv_events_endpoint": "tcp://127.0.0.1:9"} | fields
    made = pb.Worker(worker_id="evil", model="m", **worker)
    code, text = code_of(lambda: daemon.admin.RegisterWorker(pb.RegisterWorkerRequest(worker=made)))
    assert (code, text.startswith("worker.")) == (INVALID, True)
    assert "registration.allow_" in text
    assert refused(daemon, f"forbidden_{what}") == before + 1
    assert code_of(lambda: daemon.worker("evil"))[0] == grpc.StatusCode.NOT_FOUND


def test_what_somebody_wrote_into_the_store_is_checked_before_it_is_connected_to(
    daemon: Daemon, redis: servers.Server
) -> None:
    async def write(endpoint: str) -> None:
        made = Registration(
            worker_id="planted", model="m", address="127.0.0.1:1", kv_events_endpoint=endpoint
        )
        async with Store(redis.url) as store:
            await store.register(made.key, made.encode(), True, 0.0)

    with socket.create_server(("127.0.0.2", 0)) as trap, FakeEngine(replay_port=None) as engine:
        trap.setblocking(False)
        asyncio.run(write(f"tcp://127.0.0.2:{trap.getsockname()[1]}"))
        daemon.until(lambda: daemon.events("rank_barred"), "barred")
        daemon.until(
            lambda: "registration.allow_networks" in daemon.worker("planted").detail, "it is told"
        )
        with pytest.raises(BlockingIOError):
            trap.accept()
        # A name is followed to an address that is allowed.
        asyncio.run(write(engine.endpoint().replace("127.0.0.1", "localhost")))
        engine.wait_subscribed()
        engine.publish([stored([1], chunk(1))])
        daemon.until_seq("planted", 0)
        daemon.until(lambda: "tcp://127.0.0.1:" in daemon.worker("planted").detail, "its address")
    daemon.admin.DeregisterWorker(pb.DeregisterWorkerRequest(worker_id="planted"))


def test_configured_workers_are_checked_too(redis: servers.Server) -> None:
    worker = {"worker_id": "w", "model": "m", "address": "127.0.0.1:1"}
    worker["kv_events_endpoint"] = "tcp://10.0.0.1:5557"
    one = Daemon(
        **{
            "redis.url": redis.url,
            "registration.allow_networks": ["127.0.0.0/8"],
            "workers": [worker],
        }
    )
    one.start(wait=False)
    assert one.process is not None
    assert one.process.wait(20) == 1
    one.until(lambda: "kv_events_endpoint: 10.0.0.1 is outside" in one.log(), "it is said")
