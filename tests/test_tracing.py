"""Traces: what a real collector gets of real calls, and that nobody ever waits for it."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import pytest
from collectors import Collector, Seen, collecting
from daemon import Daemon, serving
from picks import fresh, hold, request
from test_ext_proc import BUFFERED, Fleet, ep, headers, response_headers
from tokenize_server import TokenizeServer, tokenizing
from waiting import until

from kvindexd import tracing
from kvindexd.config import ConfigError, TracingConfig, load
from kvindexd.testing.engine import FakeEngine

PROCESS = "envoy.service.ext_proc.v3.ExternalProcessor/Process"
PICK = "kvindexd.v1.KVIndex/PickWorker"
SERVER, CLIENT, ERROR = 2, 3, 2
PROMPT = "the quick brown zyzzyva jumps over the lazy qoph, and then over another one: "


class Rig(NamedTuple):
    collector: Collector
    fleet: Fleet
    tokenizer: TokenizeServer

    @property
    def daemon(self) -> Daemon:
        return self.fleet.daemon


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    folder = str(tmp_path_factory.mktemp("traced"))
    with (
        pytest.MonkeyPatch.context() as patch,
        collecting() as collector,
        tokenizing() as tokenizer,
        FakeEngine() as engine,
    ):
        patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
        patch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
        settings = {
            "tracing.enabled": True,
            "tracing.endpoint": f"http://{collector.address}",
            "tokens.models": {"m": tokenizer.url},
            "ext_proc.budget": 2,
        }
        with serving(index__data_dir=folder, **settings) as daemon:
            daemon.register("a", engine.endpoint(), address="10.0.0.1:8000")
            engine.wait_subscribed()
            hold(daemon, engine, "a", list(PROMPT.encode()))
            fleet = Fleet(daemon, {"a": engine})
            yield Rig(collector, fleet, tokenizer)
            fleet.channel.close()


def traceparent(flags: str = "01") -> tuple[str, str, str]:
    """(trace id, span id, header)."""
    trace, span = secrets.token_hex(16), secrets.token_hex(8)
    return trace, span, f"00-{trace}-{span}-{flags}"


def through_envoy(rig: Rig, body: dict[str, Any], **more: str) -> None:
    """One request through ext_proc, up to the end of its response."""
    with rig.fleet.stream() as s:
        s.ask(request_headers=headers(**more), protocol_config=BUFFERED)
        sent = json.dumps({"model": "m"} | body).encode()
        s.ask(request_body=ep.HttpBody(body=sent, end_of_stream=True))
        s.ask(response_headers=response_headers())
        end = b'{"usage": {"prompt_tokens": 77, "prompt_tokens_details": {"cached_tokens": 64}}}'
        s.ask(response_body=ep.HttpBody(body=end, end_of_stream=True))
        s.close()


def tree(spans: dict[str, Seen]) -> dict[str, str]:
    """Span -> its parent, by name."""
    names = {s.span: s.name for s in spans.values()}
    return {s.name: names.get(s.parent, s.parent) for s in spans.values()}


def test_a_request_through_envoy_is_one_trace(rig: Rig) -> None:
    trace, caller, header = traceparent()
    through_envoy(rig, {"prompt": PROMPT, "cache_salt": "s4ltys4lt"}, traceparent=header)
    names = {PROCESS, "pick", "tokens", "POST /tokenize", "hash", "score", "match"}
    spans = rig.collector.until(trace, names)

    assert tree(spans) == {
        PROCESS: caller,
        "pick": PROCESS,
        "tokens": "pick",
        "POST /tokenize": "tokens",
        "hash": "pick",
        "score": "pick",
        "match": "score",
    }
    whole = spans[PROCESS]
    assert whole.kind == SERVER
    assert whole.attributes["rpc.system"] == "grpc"
    assert whole.attributes["rpc.method"] == "Process"
    assert whole.attributes["http.response.status_code"] == 200
    assert whole.attributes["gen_ai.usage.input_tokens"] == 77
    assert whole.attributes["gen_ai.usage.cache_read.input_tokens"] == 64
    assert whole.resource["service.name"] == "kvindexd"
    picked = spans["pick"].attributes
    assert picked["gen_ai.request.model"] == "m"
    assert picked["kvindexd.worker"] == "a"
    assert picked["kvindexd.by"] == "cache"
    assert picked["kvindexd.budget_exceeded"] is False
    assert picked["kvindexd.candidates"] == 1
    assert picked["kvindexd.prompt_tokens"] == len(PROMPT)
    # The salt makes it another prompt.
    assert picked["kvindexd.matched_tokens"] == 0
    asked = spans["POST /tokenize"]
    assert asked.kind == CLIENT
    assert asked.attributes["http.response.status_code"] == 200
    sent, _ = rig.tokenizer.asked[-1]
    assert sent["traceparent"] == f"00-{trace}-{asked.span}-01"


def test_where_envoy_traces_itself_its_own_span_is_the_parent(rig: Rig) -> None:
    trace, envoy, of_envoy = traceparent()
    _, _, of_client = traceparent()
    call = rig.fleet.channel.stream_stream(
        f"/{PROCESS}",
        ep.ProcessingRequest.SerializeToString,
        ep.ProcessingResponse.FromString,
    )
    asked = ep.ProcessingRequest(request_headers=headers(end=True, traceparent=of_client))
    list(call(iter([asked]), timeout=10, metadata=[("traceparent", of_envoy)]))
    assert rig.collector.until(trace, {PROCESS})[PROCESS].parent == envoy


def test_a_pick_by_grpc_is_one_trace(rig: Rig) -> None:
    trace, caller, header = traceparent()
    asked = request(list(PROMPT.encode()), request_id="r-7")
    rig.daemon.index.PickWorker(asked, timeout=10, metadata=[("traceparent", header)])
    spans = rig.collector.until(trace, {PICK, "pick", "hash", "score", "match"})

    inner = {"pick": PICK, "hash": "pick", "score": "pick", "match": "score"}
    assert tree(spans) == {PICK: caller} | inner
    called = {k: v for k, v in spans[PICK].attributes.items() if "status" not in k}
    service = {"rpc.service": "kvindexd.v1.KVIndex", "rpc.method": "PickWorker"}
    assert called == {"rpc.system": "grpc"} | service
    assert spans[PICK].attributes["rpc.grpc.status_code"] == 0
    assert spans[PICK].attributes["rpc.response.status_code"] == "OK"
    picked = spans["pick"].attributes
    assert picked["kvindexd.request_id"] == "r-7"
    assert picked["kvindexd.matched_tokens"] == len(PROMPT) // 16 * 16
    assert picked["kvindexd.reusable_tokens"] <= picked["kvindexd.matched_tokens"]


def test_nothing_of_a_prompt_is_in_a_trace(rig: Rig) -> None:
    trace, _, header = traceparent()
    secret = "wombat-9137-xylophone"
    through_envoy(rig, {"prompt": secret, "cache_salt": "s4ltys4lt"}, traceparent=header)
    rig.collector.until(trace, {PROCESS, "POST /tokenize"})
    for text in (secret, "xylophone", "s4ltys4lt", "zyzzyva"):
        assert text.encode() not in rig.collector.raw


def test_calls_of_a_stream_join_the_callers_trace(rig: Rig) -> None:
    trace, caller, header = traceparent()
    asked = [request(fresh(2)).score] * 2
    answers = rig.daemon.index.ScoreWorkersStream(
        iter(asked), timeout=10, metadata=[("traceparent", header)]
    )
    assert len(list(answers)) == 2
    until(lambda: len([s for s in rig.collector.spans(trace) if s.name == "score"]) == 2, "both")
    scores = [s for s in rig.collector.spans(trace) if s.name == "score"]
    assert {s.parent for s in scores} == {caller}


def test_a_refused_call_says_how_and_not_what(rig: Rig) -> None:
    trace, _, header = traceparent()
    with pytest.raises(grpc.RpcError):
        rig.daemon.index.PickWorker(
            request(fresh(1), model="nobody"), timeout=10, metadata=[("traceparent", header)]
        )
    spans = rig.collector.until(trace, {PICK, "pick"})
    assert spans[PICK].attributes["rpc.response.status_code"] == "NOT_FOUND"
    assert spans[PICK].attributes["rpc.grpc.status_code"] == 5
    # The client's mistake is no failure of this server.
    assert spans[PICK].status != ERROR
    assert spans["pick"].status == ERROR
    assert spans["pick"].attributes["error.type"] == "NotFound"
    assert not spans["pick"].message


def test_a_pick_past_its_budget_says_so(rig: Rig) -> None:
    trace, _, header = traceparent()
    rig.tokenizer.delay = 3.0
    try:
        through_envoy(rig, {"prompt": "slow, slow"}, traceparent=header)
    finally:
        rig.tokenizer.delay = 0.0
    spans = rig.collector.until(trace, {PROCESS, "pick", "tokens"})
    assert spans["pick"].attributes["kvindexd.budget_exceeded"] is True
    assert spans["pick"].attributes["kvindexd.by"] == "load"
    assert spans["tokens"].attributes["error.type"] == "CancelledError"
    # Lines about the request lead to its trace.
    assert trace in {line.get("trace_id") for line in rig.daemon.events("picked_by_load")}


def test_a_trace_that_is_not_sampled_leaves_no_span(rig: Rig) -> None:
    off, _, header = traceparent("00")
    rig.daemon.index.PickWorker(request(fresh(1)), timeout=10, metadata=[("traceparent", header)])
    trace, _, header = traceparent()
    rig.daemon.index.PickWorker(request(fresh(1)), timeout=10, metadata=[("traceparent", header)])
    rig.collector.until(trace, {PICK})
    assert rig.collector.spans(trace)
    assert not rig.collector.spans(off)


def test_a_collector_that_refuses_is_told_once_and_so_is_its_return(rig: Rig) -> None:
    def ask() -> str:
        trace, _, header = traceparent()
        asked = request(fresh(1))
        rig.daemon.index.PickWorker(asked, timeout=10, metadata=[("traceparent", header)])
        return trace

    rig.collector.status = grpc.StatusCode.PERMISSION_DENIED
    try:
        for n in range(1, 4):
            ask()
            until(lambda n=n: rig.collector.refused >= n, "an attempt")
    finally:
        rig.collector.status = None
    rig.collector.until(ask(), {PICK})
    rig.daemon.until(lambda: rig.daemon.events("traces_exported_again"), "told")
    (line,) = rig.daemon.events("traces_not_exported")
    assert "PERMISSION_DENIED" in line["error"]
    assert line["cost"]
    assert not [r for r in rig.daemon.records if "Failed to export" in str(r.get("event"))]


@pytest.fixture
def black_hole() -> Iterator[str]:
    """A port that takes connections and never says a word."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen(64)
        yield f"127.0.0.1:{listening.getsockname()[1]}"


def test_a_dead_collector_holds_nobody_up(
    tmp_path: Path, black_hole: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = {"SCHEDULE_DELAY": 20, "MAX_QUEUE_SIZE": 64, "MAX_EXPORT_BATCH_SIZE": 8}
    for name, value in queue.items():
        monkeypatch.setenv(f"OTEL_BSP_{name}", str(value))
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://{black_hole}")
    settings = {"tracing.enabled": True, "tracing.flush_seconds": 0.5, "ext_proc.listen": ""}
    daemon = Daemon(index__data_dir=str(tmp_path), **settings).start()
    try:
        with FakeEngine() as engine:
            daemon.register("a", engine.endpoint())
            # More spans than the queue holds: whoever waited for room would wait for ever.
            longest = 0.0
            for _ in range(60):
                started = time.monotonic()
                daemon.index.PickWorker(request(fresh(1)), timeout=5)
                longest = max(longest, time.monotonic() - started)
            assert longest < 4
            started = time.monotonic()
            assert daemon.stop(signal.SIGTERM) == 0
            assert time.monotonic() - started < 8
    finally:
        daemon.kill()
    (line,) = daemon.events("traces_cut_off")
    assert line["endpoint"] == black_hole
    assert daemon.events("stopped")


# -- off, and what cannot be had -------------------------------------------------------------


def _path(first: str) -> str:
    return os.pathsep.join([first, os.environ.get("PYTHONPATH", "")])


def test_off_it_costs_nothing() -> None:
    assert not tracing.on()
    assert tracing.span("a") is tracing.span("b", "client")
    with tracing.span("a") as span:
        assert span is None
    assert tracing.begin("a", {}) is None
    assert tracing.headers() == {}
    # Other libraries may import OpenTelemetry's API where it is there.
    code = "import sys, kvindexd.running; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "kvindexd.tracing" in loaded.stdout.split()
    assert "kvindexd.otel" not in loaded.stdout.split()


def test_without_the_extra_it_does_not_start(tmp_path: Path) -> None:
    (tmp_path / "opentelemetry").mkdir()
    (tmp_path / "opentelemetry" / "__init__.py").write_text("")
    environment = os.environ | {
        "PYTHONPATH": _path(str(tmp_path)),
        "KVINDEXD_TRACING__ENABLED": "true",
        "KVINDEXD_INDEX__DATA_DIR": str(tmp_path / "data"),
    }
    command = [sys.executable, "-m", "kvindexd.cli.main", "serve"]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=20)
    assert ended.returncode == 2
    assert "tracing.enabled is set" in ended.stderr
    assert "pip install 'kvindexd[otel]'" in ended.stderr
    assert not (tmp_path / "data").exists()


async def started(**settings: Any) -> None:
    async with tracing.running(TracingConfig(enabled=True, flush_seconds=0.2, **settings)):
        assert tracing.on()


@pytest.mark.parametrize(
    ("variable", "value", "wanted"),
    [
        ("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf", "set it to grpc"),
        ("OTEL_EXPORTER_OTLP_COMPRESSION", "lzma", r"lzma.*OTEL_\*"),
        ("OTEL_EXPORTER_OTLP_TIMEOUT", "soon", r"soon.*OTEL_\*"),
    ],
)
async def test_variables_that_cannot_be_used_are_named(
    variable: str, value: str, wanted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(ConfigError, match=wanted):
        await started()
    assert not tracing.on()


def test_variables_that_are_read_on_import_are_named_too() -> None:
    code = "import asyncio, test_tracing; asyncio.run(test_tracing.started())"
    environment = os.environ | {
        "OTEL_PROPAGATORS": "smoke",
        "PYTHONPATH": _path(str(Path(__file__).parent)),
    }
    ended = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=20
    )
    last = ended.stderr.strip().splitlines()[-1]
    assert "ConfigError" in last
    assert "smoke" in last


async def test_the_ratio_is_of_traces_begun_here() -> None:
    with collecting() as collector:
        counted: list[tuple[str, int]] = []
        settings = TracingConfig(
            enabled=True, endpoint=f"http://{collector.address}", ratio=0.0, flush_seconds=5
        )
        trace, _, header = traceparent()
        async with tracing.running(settings, lambda *seen: counted.append(seen)):
            for parent in ({}, {"traceparent": header}):
                span = await asyncio.create_task(begun(parent))
                assert span is not None
        assert [s.trace for s in collector.spans()] == [trace]
        assert sorted(counted) == [("exported", 1), ("recorded", 1)]
    assert not tracing.on()


async def test_a_password_of_the_collector_is_not_logged(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "0.1")
    settings = TracingConfig(enabled=True, endpoint="http://u:s3cret@127.0.0.1:9", flush_seconds=5)
    async with tracing.running(settings):
        await asyncio.create_task(begun({}))
    said = capsys.readouterr().out
    assert "traces_not_exported" in said
    assert "127.0.0.1:9" in said
    assert "s3cret" not in said
    with pytest.raises(ConfigError) as error:
        load(env={"KVINDEXD_TRACING__ENDPOINT": "u:s3cret@127.0.0.1:9"})
    assert "expected a URL" in str(error.value)
    assert "s3cret" not in str(error.value)


async def begun(parent: dict[str, str]) -> tracing.LongSpan | None:
    span = tracing.begin("x", parent)
    if span is not None:
        span.end()
    return span
