"""The endpoint-picker protocol over gRPC, as Envoy speaks it, against a running daemon."""

from __future__ import annotations

import contextlib
import itertools
import json
import queue
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import grpc
import pytest
from daemon import Daemon, serving
from grpc_health.v1 import health_pb2, health_pb2_grpc
from picks import Holding, fresh

from kvindexd.extproc.v1 import ext_proc_pb2 as ep
from kvindexd.rpc.ext_proc.messages import DESTINATION, SERVED, SERVICE
from kvindexd.testing.engine import FakeEngine
from kvindexd.v1 import index_pb2 as pb

BUFFERED = ep.ProtocolConfiguration(request_body_mode=ep.BUFFERED)
DUPLEX = ep.ProtocolConfiguration(
    request_body_mode=ep.FULL_DUPLEX_STREAMED, response_body_mode=ep.FULL_DUPLEX_STREAMED
)
A, B = "10.0.0.1:8000", "10.0.0.2:8000"


class Stream:
    """One ext_proc stream with blocking sends and receives."""

    def __init__(self, channel: grpc.Channel) -> None:
        self._out: queue.Queue[ep.ProcessingRequest | None] = queue.Queue()
        call = channel.stream_stream(
            f"/{SERVICE}/Process",
            ep.ProcessingRequest.SerializeToString,
            ep.ProcessingResponse.FromString,
        )
        self.call = call(iter(self._out.get, None), timeout=20)

    def send(self, **fields: Any) -> None:
        self._out.put(ep.ProcessingRequest(**fields))

    def receive(self) -> ep.ProcessingResponse:
        return next(self.call)

    def ask(self, **fields: Any) -> ep.ProcessingResponse:
        self.send(**fields)
        return self.receive()

    def close(self) -> list[ep.ProcessingResponse]:
        """Half-close; whatever else was answered."""
        self._out.put(None)
        return list(self.call)


def headers(end: bool = False, **values: str) -> ep.HttpHeaders:
    """Request headers; `_method`, `_path` give the pseudo headers."""
    listed = {":method": "POST", ":path": "/v1/completions", "content-type": "application/json"}
    listed |= {(":" + k[1:] if k[0] == "_" else k.replace("_", "-")): v for k, v in values.items()}
    out = ep.HttpHeaders(end_of_stream=end)
    for key, value in listed.items():
        out.headers.headers.add(key=key, raw_value=value.encode())
    return out


def response_headers(kind: str = "application/json", status: str = "200") -> ep.HttpHeaders:
    return headers(_status=status, content_type=kind)


def body_of(tokens: Sequence[int], **more: Any) -> bytes:
    return json.dumps({"model": "m", "prompt": list(tokens)} | more).encode()


def metadata(namespace: str, key: str, value: Any) -> ep.Metadata:
    out = ep.Metadata()
    out.filter_metadata[namespace].update({key: value})
    return out


def destination(common: ep.CommonResponse) -> str:
    for option in common.header_mutation.set_headers:
        if option.header.key == DESTINATION:
            assert option.append_action == ep.HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD
            return option.header.raw_value.decode()
    raise AssertionError(f"no {DESTINATION} in {common}")


def told(response: ep.ProcessingResponse) -> dict[str, Any]:
    """Dynamic metadata: how the pick was made, and `endpoints`."""
    fields = response.dynamic_metadata.fields
    own = {
        k: getattr(v, str(v.WhichOneof("kind")))
        for k, v in fields["kvindexd"].struct_value.fields.items()
    }
    return own | {"endpoints": fields["envoy.lb"].struct_value.fields[DESTINATION].string_value}


def error_of(response: ep.ProcessingResponse) -> tuple[int, dict[str, Any]]:
    immediate = response.immediate_response
    assert immediate.details.startswith("kvindexd_"), response
    return immediate.status.code, json.loads(immediate.body)["error"]


class Fleet(Holding):
    """A daemon, its picker's channel, and the engines a and b."""

    def __init__(self, daemon: Daemon, engines: dict[str, FakeEngine]) -> None:
        self.daemon = daemon
        self.engines = engines
        self.channel = grpc.insecure_channel(daemon.ready["ext_proc"])

    @contextlib.contextmanager
    def stream(self) -> Iterator[Stream]:
        stream = Stream(self.channel)
        try:
            yield stream
        finally:
            stream.call.cancel()

    def buffered(self, body: bytes, **more: Any) -> ep.ProcessingResponse:
        """One request in BUFFERED mode; the answer to the body."""
        with self.stream() as s:
            first = s.ask(request_headers=headers(), protocol_config=BUFFERED, **more)
            if first.WhichOneof("response") == "immediate_response":
                return first
            assert not first.request_headers.response.header_mutation.set_headers
            return s.ask(request_body=ep.HttpBody(body=body, end_of_stream=True))


@contextlib.contextmanager
def fleet_of(folder: Path, **settings: Any) -> Iterator[Fleet]:
    # Slow machines must not turn picks by cache into picks by load.
    settings = {"ext_proc.budget": 5} | settings
    with contextlib.ExitStack() as stack:
        engines = {name: stack.enter_context(FakeEngine()) for name in "ab"}
        daemon = stack.enter_context(serving(index__data_dir=str(folder), **settings))
        for name, address in (("a", A), ("b", B)):
            daemon.register(name, engines[name].endpoint(), address=address)
            engines[name].wait_subscribed()
        fleet = Fleet(daemon, engines)
        stack.callback(fleet.channel.close)
        yield fleet


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with fleet_of(tmp_path_factory.mktemp("picker")) as fleet:
        yield fleet


# -- the pick --------------------------------------------------------------------------------


@pytest.mark.parametrize("holder", ["a", "b"])
def test_a_buffered_body_goes_to_the_holder(fleet: Fleet, holder: str) -> None:
    tokens = fresh(60)
    fleet.hold(holder, tokens)
    first, second = (A, B) if holder == "a" else (B, A)

    answer = fleet.buffered(body_of(tokens))

    common = answer.request_body.response
    assert told(answer)["by"] == "cache"
    assert destination(common) == f"{first},{second}"
    assert common.clear_route_cache
    assert not common.HasField("body_mutation")
    how = told(answer)
    assert how["endpoints"] == f"{first},{second}"
    assert (how["by"], how["worker"], how["reusable_tokens"]) == ("cache", holder, 59 * 16)
    fleet.released()


@pytest.mark.parametrize("holder", ["a", "b"])
def test_a_streamed_body_comes_back_whole_after_the_pick(fleet: Fleet, holder: str) -> None:
    tokens = fresh(2000)
    fleet.hold(holder, tokens)
    body = body_of(tokens)
    assert len(body) > 3 * 62_000
    with fleet.stream() as s:
        s.send(request_headers=headers(), protocol_config=DUPLEX)
        for at in range(0, len(body), 50_000):
            part = body[at : at + 50_000]
            s.send(request_body=ep.HttpBody(body=part, end_of_stream=at + 50_000 >= len(body)))
        first = s.receive()
        assert destination(first.request_headers.response).split(",")[0] == (
            A if holder == "a" else B
        )
        assert told(first)["by"] == "cache"
        back, ends = b"", []
        while not any(ends):
            part = s.receive().request_body.response.body_mutation.streamed_response
            assert len(part.body) <= 62_000
            back += part.body
            ends.append(part.end_of_stream)
    assert back == body
    fleet.released()


def test_trailers_end_a_streamed_body(fleet: Fleet) -> None:
    body = body_of(fresh(3))
    with fleet.stream() as s:
        s.send(request_headers=headers(), protocol_config=DUPLEX)
        s.send(request_body=ep.HttpBody(body=body))
        s.send(request_trailers=ep.HttpTrailers())
        assert destination(s.receive().request_headers.response)
        part = s.receive().request_body.response.body_mutation.streamed_response
        assert (part.body, part.end_of_stream) == (body, False)
        assert s.receive().WhichOneof("response") == "request_trailers"


def test_an_empty_streamed_body_is_answered(fleet: Fleet) -> None:
    with fleet.stream() as s:
        s.send(request_headers=headers(_path="/other"), protocol_config=DUPLEX)
        s.send(request_body=ep.HttpBody(end_of_stream=True))
        assert destination(s.receive().request_headers.response)
        part = s.receive().request_body.response.body_mutation.streamed_response
        assert (part.body, part.end_of_stream) == (b"", True)


def test_the_mode_is_learnt_where_envoy_does_not_tell_it(fleet: Fleet) -> None:
    body = body_of(fresh(3))
    with fleet.stream() as s:  # as with BUFFERED: the body waits for the headers' answer
        assert s.ask(request_headers=headers()).HasField("request_headers")
        answer = s.ask(request_body=ep.HttpBody(body=body, end_of_stream=True))
        assert destination(answer.request_body.response)
    with fleet.stream() as s:  # as with FULL_DUPLEX_STREAMED: it does not
        s.send(request_headers=headers())
        s.send(request_body=ep.HttpBody(body=body, end_of_stream=True))
        assert destination(s.receive().request_headers.response)
        part = s.receive().request_body.response.body_mutation.streamed_response
        assert part.body == body


@pytest.mark.parametrize("config", [BUFFERED, DUPLEX, None])
def test_a_request_without_a_body_is_decided_at_its_headers(
    fleet: Fleet, config: ep.ProtocolConfiguration | None
) -> None:
    with fleet.stream() as s:
        get = headers(end=True, _method="GET", _path="/v1/models")
        answer = s.ask(request_headers=get, protocol_config=config)
        assert destination(answer.request_headers.response)
        assert told(answer)["by"] == "load"
        assert s.close() == []


@pytest.mark.parametrize("mode", [ep.NONE, ep.STREAMED])
def test_modes_that_hold_the_body_back_are_picked_by_load(fleet: Fleet, mode: int) -> None:
    with fleet.stream() as s:
        config = ep.ProtocolConfiguration(request_body_mode=mode)
        answer = s.ask(request_headers=headers(), protocol_config=config)
        assert destination(answer.request_headers.response)
        assert told(answer)["by"] == "load"
        if mode == ep.STREAMED:
            for end in (False, True):
                echo = s.ask(request_body=ep.HttpBody(body=b"{", end_of_stream=end))
                assert echo == ep.ProcessingResponse(
                    request_body=ep.BodyResponse(response=ep.CommonResponse())
                )


def test_data_parallel_ranks_are_named_in_a_header(tmp_path: Path) -> None:
    with FakeEngine(dp_size=2) as engine, serving(index__data_dir=str(tmp_path)) as daemon:
        for rank in (0, 1):
            daemon.register("w", engine.endpoint(rank), dp_rank=rank, dp_size=2, address=A)
        for rank in (0, 1):
            daemon.until(lambda r=rank: daemon.worker("w", r).state == pb.LIVE, f"{rank} is live")
        fleet = Fleet(daemon, {})
        picked = set()
        for _ in range(2):
            common = fleet.buffered(body_of(fresh(40))).request_body.response
            assert destination(common) == A
            named = {h.header.key: h.header.raw_value for h in common.header_mutation.set_headers}
            picked.add(named["x-data-parallel-rank"])
        assert picked == {b"0", b"1"}
        fleet.channel.close()


# -- the subset hint -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("hint", "expected"),
    [
        ([B], B),
        (B, B),
        (["10.0.0.2"], B),
        ("10.0.0.9:8000, 10.0.0.2:8000", B),
        (["10.0.0.1:9999", B], B),
    ],
)
def test_only_the_subset_is_picked(fleet: Fleet, hint: Any, expected: str) -> None:
    tokens = fresh(40)
    fleet.hold("a", tokens)
    with_hint = metadata("envoy.lb.subset_hint", "x-gateway-destination-endpoint-subset", hint)
    answer = fleet.buffered(body_of(tokens), metadata_context=with_hint)
    assert destination(answer.request_body.response) == expected


@pytest.mark.parametrize("hint", [["10.0.0.1:9999"], [], ["nobody:1"], ""])
@pytest.mark.parametrize("bodyless", [False, True])
def test_nobody_of_the_subset_is_503(fleet: Fleet, hint: Any, bodyless: bool) -> None:
    with_hint = metadata("envoy.lb.subset_hint", "x-gateway-destination-endpoint-subset", hint)
    if bodyless:
        with fleet.stream() as s:
            answer = s.ask(
                request_headers=headers(end=True, _method="GET", _path="/v1/models"),
                protocol_config=BUFFERED,
                metadata_context=with_hint,
            )
    else:
        answer = fleet.buffered(body_of(fresh(2)), metadata_context=with_hint)
    status, error = error_of(answer)
    assert (status, error["code"], error["type"]) == (503, "no_endpoint", "server_error")


# -- refusals --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "status", "code", "says"),
    [
        (b"{not json", 400, "invalid_body", "completions"),
        (b"", 400, "invalid_body", "completions"),
        (b'{"model": "m"}', 400, "invalid_body", "'prompt'"),
        (b'{"model": 5, "prompt": "x"}', 400, "invalid_body", "model"),
        (b'{"model": "m", "prompt": [-1]}', 400, "invalid_body", "token ids"),
        (b'{"model": "other", "prompt": [1]}', 404, "model_not_found", "known models: m"),
    ],
)
def test_bad_requests_are_refused(
    fleet: Fleet, body: bytes, status: int, code: str, says: str
) -> None:
    got, error = error_of(fleet.buffered(body))
    assert (got, error["code"], error["type"]) == (status, code, "invalid_request_error")
    assert says in error["message"]
    with fleet.stream() as s:
        s.send(request_headers=headers(), protocol_config=DUPLEX)
        s.send(request_body=ep.HttpBody(body=body, end_of_stream=True))
        assert error_of(s.receive())[0] == status


def test_a_truncated_body_is_no_fault_of_the_client(fleet: Fleet) -> None:
    with fleet.stream() as s:
        partial = ep.ProtocolConfiguration(request_body_mode=ep.BUFFERED_PARTIAL)
        s.ask(request_headers=headers(), protocol_config=partial)
        answer = s.ask(request_body=ep.HttpBody(body=b'{"model": "m", "prompt": [1, 2'))
        assert destination(answer.request_body.response)
        assert told(answer)["by"] == "load"


def test_a_compressed_body_is_picked_by_load(fleet: Fleet) -> None:
    with fleet.stream() as s:
        s.ask(request_headers=headers(content_encoding="gzip"), protocol_config=BUFFERED)
        answer = s.ask(request_body=ep.HttpBody(body=b"\x1f\x8b\x00", end_of_stream=True))
        assert destination(answer.request_body.response)
        assert told(answer)["why"] == "the body is in content-encoding gzip"


def test_a_prompt_over_the_limit_is_refused(tmp_path: Path) -> None:
    with fleet_of(tmp_path, **{"limits.max_prompt_tokens": 100}) as fleet:
        status, error = error_of(fleet.buffered(body_of(fresh(7))))
        assert (status, error["code"]) == (400, "invalid_request")
        assert "limits.max_prompt_tokens = 100" in error["message"]


def test_requests_that_name_no_model_go_to_the_least_loaded_of_all(tmp_path: Path) -> None:
    with FakeEngine() as one, FakeEngine() as two, serving(index__data_dir=str(tmp_path)) as daemon:
        daemon.register("one", one.endpoint(), model="m", address=A)
        daemon.register("two", two.endpoint(), model="n", address=B)
        for name in ("one", "two"):  # a rank that is still connecting comes after a live one
            daemon.until(lambda n=name: daemon.worker(n).state == pb.LIVE, f"{name} is live")
        fleet = Fleet(daemon, {})
        picked = set()
        with contextlib.ExitStack() as stack:
            for _ in range(2):
                s = stack.enter_context(fleet.stream())
                get = headers(end=True, _method="GET", _path="/v1/models")
                answer = s.ask(request_headers=get, protocol_config=BUFFERED)
                picked.add(destination(answer.request_headers.response).split(",")[0])
        assert picked == {A, B}
        assert error_of(fleet.buffered(json.dumps({"prompt": [1]}).encode()))[0] == 400
        fleet.channel.close()


@pytest.fixture
def silent() -> Iterator[str]:
    """The URL of a server that accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


def text_body() -> bytes:
    return json.dumps({"model": "m", "prompt": f"number {next(_numbers)}"}).encode()


_numbers = itertools.count()


def test_more_at_once_than_allowed_are_shed(tmp_path: Path, silent: str) -> None:
    settings = {"limits.max_concurrent_calls": 1, "tokens.models": {"m": silent}}
    with fleet_of(tmp_path, **settings) as fleet, fleet.stream() as s:
        s.ask(request_headers=headers(), protocol_config=BUFFERED)
        s.send(request_body=ep.HttpBody(body=text_body(), end_of_stream=True))

        def shed() -> bool:
            answer = fleet.buffered(body_of(fresh(2)))
            if answer.WhichOneof("response") != "immediate_response":
                return False
            status, error = error_of(answer)
            assert (status, error["type"]) == (429, "rate_limit_error")
            assert "limits.max_concurrent_calls" in error["message"]
            return True

        fleet.daemon.until(shed, "a request is shed", deadline=5)


def test_a_tokenizer_that_hangs_costs_the_budget_and_no_more(tmp_path: Path, silent: str) -> None:
    settings = {"ext_proc.budget": 0.05, "tokens.models": {"m": silent}}
    with fleet_of(tmp_path, **settings) as fleet:
        begun = time.monotonic()
        answer = fleet.buffered(text_body())
        assert time.monotonic() - begun < 1.5  # tokens.timeout is 2 s
        assert destination(answer.request_body.response)
        assert told(answer)["why"] == "no answer within 50 ms"
        fleet.daemon.until(lambda: fleet.daemon.events("tokenizer_failed"), "a line in the log")
        why = told(fleet.buffered(text_body()))["why"]
        assert why.startswith("the tokenizer of model 'm' does not work: no token ids within")


def test_limits_and_an_empty_fleet(tmp_path: Path) -> None:
    with fleet_of(tmp_path, **{"ext_proc.max_body_bytes": 2048}) as fleet:
        with fleet.stream() as s:
            s.send(request_headers=headers(), protocol_config=DUPLEX)
            s.send(request_body=ep.HttpBody(body=b"x" * 2049))
            assert error_of(s.receive())[0] == 413
        for name in "ab":
            fleet.daemon.admin.DrainWorker(pb.DrainWorkerRequest(worker_id=name), timeout=5)

        def refused() -> bool:
            answer = fleet.buffered(body_of(fresh(2)))
            return answer.WhichOneof("response") == "immediate_response"

        fleet.daemon.until(refused, "drained workers are not picked")
        status, error = error_of(fleet.buffered(body_of(fresh(2))))
        assert (status, error["code"]) == (503, "no_endpoint")
        assert "2 DRAINING" in error["message"]


# -- load and outcomes -----------------------------------------------------------------------


def test_a_pick_counts_until_the_response_ends(fleet: Fleet) -> None:
    fleet.released()
    tokens = fresh(50)
    fleet.hold("a", tokens)
    with fleet.stream() as s:
        s.ask(request_headers=headers(), protocol_config=BUFFERED)
        s.ask(request_body=ep.HttpBody(body=body_of(tokens), end_of_stream=True))
        assert fleet.active() == {"a": 50, "b": 0}
        assert s.ask(response_headers=response_headers()).HasField("response_headers")
        assert fleet.active() == {"a": 50, "b": 0}
        s.close()
        fleet.released()


def test_a_cut_stream_releases_too(fleet: Fleet) -> None:
    fleet.released()
    with fleet.stream() as s:
        s.ask(request_headers=headers(), protocol_config=BUFFERED)
        s.ask(request_body=ep.HttpBody(body=body_of(fresh(50)), end_of_stream=True))
        assert sum(fleet.active().values()) == 50
        s.call.cancel()
    fleet.released()


def test_the_served_endpoint_takes_the_load(fleet: Fleet) -> None:
    fleet.released()
    tokens = fresh(50)
    fleet.hold("a", tokens)
    with fleet.stream() as s:
        s.ask(request_headers=headers(), protocol_config=BUFFERED)
        s.ask(request_body=ep.HttpBody(body=body_of(tokens), end_of_stream=True))
        served = metadata("envoy.lb", SERVED, B)
        s.ask(response_headers=response_headers(), metadata_context=served)
        assert fleet.active() == {"a": 0, "b": 50}
    fleet.released()


def outcomes(fleet: Fleet, worker: str) -> int:
    """Requests that were promised 64 to 255 tokens more than the engine reported."""
    text = fleet.daemon.page()

    def up_to(bound: str) -> int:
        name = f'kvindexd_predicted_vs_actual_tokens_bucket{{le="{bound}",worker="{worker}#0"}} '
        return sum(int(float(x[len(name) :])) for x in text.splitlines() if x.startswith(name))

    return up_to("255.0") - up_to("63.0")


def reply(cached: int) -> dict[str, Any]:
    details = {"prompt_tokens": 800, "prompt_tokens_details": {"cached_tokens": cached}}
    return {"choices": [], "usage": details}


@pytest.mark.parametrize("sse", [False, True])
@pytest.mark.parametrize("config", [BUFFERED, DUPLEX])
def test_usage_in_the_response_is_an_outcome(
    fleet: Fleet, sse: bool, config: ep.ProtocolConfiguration
) -> None:
    tokens = fresh(50)
    fleet.hold("a", tokens)
    before = outcomes(fleet, "a")
    sent = json.dumps(reply(700)).encode()
    kind = "application/json"
    if sse:
        kind = "text/event-stream; charset=utf-8"
        sent = b'data: {"usage": null}\n\ndata: ' + sent + b"\n\ndata: [DONE]\n\n"
    with fleet.stream() as s:
        s.send(request_headers=headers(), protocol_config=config)
        if config is BUFFERED:
            s.receive()
        s.send(request_body=ep.HttpBody(body=body_of(tokens), end_of_stream=True))
        s.receive()
        if config is DUPLEX:
            s.receive()
        s.ask(response_headers=response_headers(kind))
        for at in range(0, len(sent), 20):
            last = at + 20 >= len(sent)
            part = sent[at : at + 20]
            back = s.ask(response_body=ep.HttpBody(body=part, end_of_stream=last))
            mutation = back.response_body.response.body_mutation
            if config is DUPLEX:
                assert mutation.streamed_response.body == part
                assert mutation.streamed_response.end_of_stream == last
            else:
                assert not mutation.WhichOneof("mutation")
        s.close()
    # Promised are 49 blocks: 784 tokens.
    fleet.daemon.until(lambda: outcomes(fleet, "a") == before + 1, "an outcome")


def test_prompts_without_a_tokenizer_are_picked_by_load_and_it_is_said(fleet: Fleet) -> None:
    answer = fleet.buffered(json.dumps({"model": "m", "prompt": "Hello " * 300}).encode())
    how = told(answer)
    assert how["by"] == "load"
    assert "no tokenizer is configured for model 'm'" in how["why"]
    fleet.daemon.until(lambda: fleet.daemon.events("picked_by_load"), "a line in the log")


def test_past_the_budget_it_is_picked_by_load_and_it_is_said(tmp_path: Path) -> None:
    with fleet_of(tmp_path, **{"ext_proc.budget": 1e-6}) as fleet:
        # Longer than what is hashed in one go, so that the pick has something to wait for.
        answer = fleet.buffered(body_of(fresh(8000)))
        assert destination(answer.request_body.response)
        how = told(answer)
        assert (how["by"], how["why"]) == ("load", "no answer within 0.001 ms")


# -- the server ------------------------------------------------------------------------------


def test_health_by_every_name(fleet: Fleet) -> None:
    stub = health_pb2_grpc.HealthStub(fleet.channel)
    for name in ("", "liveness", "readiness", SERVICE):
        answer = stub.Check(health_pb2.HealthCheckRequest(service=name), timeout=5)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING, name


def test_a_large_body_in_one_message(fleet: Fleet) -> None:
    body = json.dumps({"model": "m", "prompt": [1] * 16, "pad": "x" * (20 << 20)}).encode()
    assert told(fleet.buffered(body))["by"] == "cache"


def test_many_streams_at_once(fleet: Fleet) -> None:
    tokens = fresh(50)
    fleet.hold("b", tokens)
    wrong: list[str] = []

    def run() -> None:
        for _ in range(5):
            common = fleet.buffered(body_of(tokens)).request_body.response
            if not destination(common):
                wrong.append(str(common))

    threads = [threading.Thread(target=run) for _ in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert wrong == []
    fleet.released()


def test_off(tmp_path: Path) -> None:
    with serving(index__data_dir=str(tmp_path), ext_proc__listen="") as daemon:
        assert "ext_proc" not in daemon.ready
