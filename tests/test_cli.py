"""Commands against a server that answers from a script: what they send, print and exit with."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import grpc
import pytest
from typer.testing import CliRunner

from kvindexd import __version__
from kvindexd.cli.explain_page import strip
from kvindexd.cli.main import app
from kvindexd.cli.options import parse_prompt
from kvindexd.cli.output import plain
from kvindexd.config import IndexConfig
from kvindexd.store.embedded import EmbeddedServer
from kvindexd.v1 import index_pb2 as pb
from kvindexd.v1 import index_pb2_grpc

WORKER = pb.Worker(
    worker_id="w[bold]0",
    model="m",
    address="127.0.0.1:8000",
    kv_events_endpoint="tcp://127.0.0.1:5557",
    role=pb.PREFILL,
    labels={"zone": "a"},
    state=pb.LIVE,
    epoch=2,
    revision=7,
    last_seq=41,
    blocks={"device": 1200, "host": 34},
    groups=[pb.Group(kind="full_attention", block_size=16, treated_as="main", stores=9)],
    counters={"gaps": 3},
    last_event_ms_ago=90_000,
    engine_load=pb.EngineLoad(running=3, waiting=1, cache_usage=0.5, age_ms=900),
)
SCORE = pb.WorkerScore(
    worker_id="w0",
    address="127.0.0.1:8000",
    matched_blocks=4,
    matched_tokens=64,
    reusable_tokens=48,
    device_tokens=48,
    cost=1.5,
    state=pb.LIVE,
    block_size=16,
    reason="mamba: no state at 64",
    upper_bound=True,
)
BLOCK = pb.GetBlockResponse(
    hash=0xFFFFFFFFFFFFFFFE,
    parent=1,
    depth=32,
    holders=[pb.Holder(worker_id="w0", dp_rank=1, tiers=["device", "host"], groups=[0, 2])],
)


class Script:
    """Canned answers by rpc name; an exception is sent as its status. Keeps what it was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, Any]] = []
        self.refusal: tuple[grpc.StatusCode, str] | None = None

    def servicer(self, base: type, answers: dict[str, Any]) -> Any:
        def handler(name: str, answer: Any) -> Any:
            def answered(_self: object, request: Any, context: grpc.ServicerContext) -> Any:
                self.asked.append((name, request))
                if self.refusal:
                    context.abort(*self.refusal)
                return iter(answer) if isinstance(answer, list) else answer

            return answered

        return type("Scripted", (base,), {n: handler(n, a) for n, a in answers.items()})()

    def last(self) -> Any:
        return self.asked[-1][1]


INDEX = {
    "ScoreWorkers": pb.ScoreWorkersResponse(scores=[SCORE], prompt_tokens=70, index_revision="9"),
    "Explain": pb.ExplainResponse(
        workers=[
            pb.WorkerExplanation(
                score=SCORE,
                groups=[
                    pb.GroupRun(
                        group=WORKER.groups[0],
                        held=bytes([1, 1, 2, 3, 4, 0]),
                        stops_at=5,
                        why="block 5 is not held",
                    )
                ],
            )
        ]
    ),
}
ADMIN = {
    "RegisterWorker": pb.RegisterWorkerResponse(worker=WORKER),
    "DeregisterWorker": pb.DeregisterWorkerResponse(),
    "ListWorkers": pb.ListWorkersResponse(workers=[WORKER]),
    "GetWorker": pb.GetWorkerResponse(worker=WORKER),
    "DrainWorker": pb.DrainWorkerResponse(worker=WORKER),
    "PurgeWorker": pb.PurgeWorkerResponse(worker=WORKER),
    "ResyncWorker": pb.ResyncWorkerResponse(worker=WORKER),
    "GetBlock": BLOCK,
    "WalkChain": [BLOCK, pb.GetBlockResponse(hash=1, depth=16)],
}


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Iterator[Script]:
    made = Script()
    server = grpc.server(ThreadPoolExecutor(2))
    index_pb2_grpc.add_KVIndexServicer_to_server(
        made.servicer(index_pb2_grpc.KVIndexServicer, INDEX), server
    )
    index_pb2_grpc.add_KVIndexAdminServicer_to_server(
        made.servicer(index_pb2_grpc.KVIndexAdminServicer, ADMIN), server
    )
    monkeypatch.setenv("KVINDEXD_SERVER", f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}")
    server.start()
    yield made
    server.stop(None).wait()


def run(*arguments: str, status: int = 0, stdin: str | None = None) -> str:
    result = CliRunner().invoke(app, arguments, input=stdin)
    assert result.exit_code == status, result.output
    return result.stdout if status == 0 else result.output


def test_version() -> None:
    assert run("--version") == f"kvindexd {__version__}\n"


def test_workers_list(script: Script) -> None:
    shown = run("workers", "list", "--model", "m")
    header, row = shown.splitlines()
    assert header.split()[:3] == ["WORKER", "RANK", "STATE"]
    assert row.split()[:6] == ["w[bold]0", "0", "LIVE", "m", "127.0.0.1:8000", "1,234"]
    assert "2 min ago" in row
    assert script.last() == pb.ListWorkersRequest(model="m", include_stale=True)
    run("workers", "list", "--no-stale")
    assert not script.last().include_stale


def test_workers_list_as_json(script: Script) -> None:
    worker = json.loads(run("workers", "list", "--json"))["workers"][0]
    assert worker["worker_id"] == "w[bold]0"
    assert (worker["state"], worker["role"], worker["epoch"]) == ("LIVE", "PREFILL", 2)
    assert worker["blocks"] == {"device": 1200, "host": 34}
    assert set(worker) == {f.name for f in pb.Worker.DESCRIPTOR.fields}


def test_workers_show(script: Script) -> None:
    shown = run("workers", "show", "w0", "--rank", "1", "--namespace", "n")
    assert "full_attention" in shown
    assert "device=1200, host=34" in shown
    assert script.last() == pb.GetWorkerRequest(worker_id="w0", dp_rank=1, namespace="n")
    assert json.loads(run("workers", "show", "w0", "--json"))["worker"]["last_seq"] == 41


def test_workers_add_sends_every_field(script: Script) -> None:
    run(
        *("workers", "add", "w0", "--model", "m", "--address", "a:1"),
        *("--kv-events-endpoint", "tcp://a:2", "--replay-endpoint", "tcp://a:3", "--topic", "t"),
        *("--dp-rank", "1", "--dp-size", "2", "--namespace", "n", "--block-size", "64"),
        *("--engine", "vllm", "--role", "decode", "--kv-layout", "LBHNC", "--tp-size", "4"),
        *("--num-kv-heads", "8", "--label", "zone=a", "--label", "x=y=z", "--alias", "b"),
        *("--eagle", "--bind-events", "--chunk-size", "128", "--reports-reuse"),
        *("--hidden-groups", "--instance", "pod-uid"),
    )
    sent = script.last().worker
    inputs = [f for f in pb.Worker.DESCRIPTOR.fields if f.number < 30]
    assert not [f.name for f in inputs if not getattr(sent, f.name)]
    assert (sent.role, dict(sent.labels)) == (pb.DECODE, {"zone": "a", "x": "y=z"})


def test_remove_and_tend_one_rank_or_all(script: Script) -> None:
    assert run("workers", "remove", "w0") == "removed w0\n"
    assert not script.last().HasField("dp_rank")
    for command, rpc in (
        ("drain", "DrainWorker"),
        ("purge", "PurgeWorker"),
        ("resync", "ResyncWorker"),
        ("remove", "DeregisterWorker"),
    ):
        run("workers", command, "w0", "--rank", "0", "--json")
        assert script.asked[-1][0] == rpc
        assert script.last().HasField("dp_rank")


def test_score(script: Script) -> None:
    shown = run(
        *("score", "[1, 2, 3]", "--model", "m", "--namespace", "n", "--lora-name", "l"),
        *("--cache-salt", "s", "--explain", "--candidate", "w0", "--role", "prefill"),
        *("--label", "a=b", "--top-k", "2", "--include-stale", "--device-only"),
    )
    assert "prompt: 70 tokens" in shown
    assert "<= 48" in shown
    assert "mamba: no state at 64" in shown
    sent = script.last()
    assert sent.prompt == pb.Prompt(
        model="m",
        namespace="n",
        lora_name="l",
        cache_salt="s",
        tokens=pb.TokenIds(ids=[1, 2, 3]),
    )
    assert list(sent.candidates) == ["w0"]
    assert sent.options == pb.ScoreOptions(
        explain=True,
        role=pb.PREFILL,
        labels={"a": "b"},
        top_k=2,
        include_stale=True,
        device_only=True,
    )


def test_score_without_filters_sets_none(script: Script) -> None:
    scores = json.loads(run("score", "[1]", "--json"))["scores"]
    assert scores[0]["reusable_tokens"] == 48
    assert not script.last().options.HasField("role")
    assert not script.last().options.HasField("overlap_weight")


def test_explain_draws_a_strip(script: Script) -> None:
    shown = run("explain", "[1, 2]")
    assert "██▓▒░·" in shown
    assert "stops at block 5 (token 80): block 5 is not held" in shown
    assert json.loads(run("explain", "[1]", "--json"))["workers"][0]["groups"][0]["held"] == [
        *(1, 1, 2, 3, 4, 0)
    ]


def test_block_and_chain(script: Script) -> None:
    shown = run("block", "0xfffffffffffffffe")
    assert "block 0xfffffffffffffffe, parent 0x0000000000000001, ends at 32 tokens" in shown
    assert script.last().hash == 0xFFFFFFFFFFFFFFFE
    assert json.loads(run("block", "ff", "--json"))["hash"] == "0xfffffffffffffffe"
    assert script.last().hash == 0xFF
    assert "w0#1(device+host)" in run("chain", "1")
    blocks = json.loads(run("chain", "1", "--json"))["blocks"]
    assert [b["depth"] for b in blocks] == [32, 16]


@pytest.mark.parametrize(
    ("code", "details", "said"),
    [
        (grpc.StatusCode.NOT_FOUND, "model 'x' unknown; known: m", "known: m (NOT_FOUND)"),
        (grpc.StatusCode.UNAVAILABLE, "Redis is away", "error: Redis is away (UNAVAILABLE)"),
        (grpc.StatusCode.UNIMPLEMENTED, "", "does not offer this call"),
    ],
)
def test_refusals_are_one_line(
    script: Script, code: grpc.StatusCode, details: str, said: str
) -> None:
    script.refusal = code, details
    for command in (["workers", "list"], ["chain", "1"], ["score", "[1]"]):
        output = run(*command, status=1)
        assert said in output
        assert len(output.splitlines()) == 1


def test_a_named_server_is_not_replaced_by_the_store_of_this_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    path = Path(urlsplit(EmbeddedServer(Path(IndexConfig().data_dir)).url).path)
    path.parent.mkdir(parents=True)
    with socket.socket(socket.AF_UNIX) as store:
        store.bind(str(path))
        output = run("workers", "list", "--server", "127.0.0.1:1", status=1)
    assert output.startswith("error: cannot reach kvindexd at 127.0.0.1:1")


def test_no_server() -> None:
    output = run("workers", "list", "--server", "127.0.0.1:1", status=1)
    assert output.startswith("error: cannot reach kvindexd at 127.0.0.1:1")
    assert len(output.splitlines()) == 1


@pytest.mark.parametrize(
    "arguments",
    [
        ("workers", "add", "w0"),
        ("workers", "list", "--nonsense"),
        ("workers", "show", "w0", "--rank", "-1"),
        ("block", "xyz"),
        ("block", "0x10000000000000000"),
        ("score", "@/nonexistent/file"),
        ("score", "[1, -2]"),
        ("score", "[1, 4294967296]"),
        ("score", "[1.5]"),
        ("score", "[1]", "--label", "zone"),
        ("score", "[1]", "--role", "both"),
        ("nothing",),
    ],
)
def test_wrong_usage_exits_2(arguments: tuple[str, ...]) -> None:
    run(*arguments, status=2)


@pytest.mark.parametrize(
    ("argument", "content", "value"),
    [
        ("[1, 2]", "tokens", [1, 2]),
        ("[]", "tokens", []),
        ("[INST] hello", "text", "[INST] hello"),
        ("17", "text", "17"),
        ('{"prompt": "x"}', "openai_body", "/v1/completions"),
        ('{"messages": []}', "openai_body", "/v1/chat/completions"),
        ('{"input": "x"}', "openai_body", "/v1/responses"),
        ("@1 2, 3\n4", "tokens", [1, 2, 3, 4]),
        ("@[5]\n", "tokens", [5]),
        ("@once upon a time", "text", "once upon a time"),
    ],
)
def test_prompts(tmp_path: Path, argument: str, content: str, value: object) -> None:
    if argument.startswith("@"):
        path = tmp_path / "prompt"
        path.write_text(argument[1:])
        argument = f"@{path}"
    prompt = parse_prompt(argument)
    assert prompt.WhichOneof("content") == content
    found: dict[str, object] = {
        "tokens": list(prompt.tokens.ids),
        "text": prompt.text,
        "openai_body": prompt.openai_path,
    }
    assert found[content] == value


def test_prompt_from_standard_input(script: Script) -> None:
    run("score", "@-", stdin="7 8 9\n")
    assert list(script.last().prompt.tokens.ids) == [7, 8, 9]


def test_strip_of_a_long_prompt_shows_the_worst_of_each_cell() -> None:
    held = bytes([1] * 1000)
    assert strip(held, 10).plain == "█" * 10
    broken = bytes([1] * 550 + [0] + [1] * 449)
    assert strip(broken, 10).plain == "█" * 5 + "·" + "█" * 4
    assert len(strip(bytes([1] * 65), 64).plain) == 33
    assert strip(b"").plain == ""


def test_plain_keeps_unset_optionals_out() -> None:
    assert plain(pb.CompleteRequestRequest()) == {"request_id": ""}
    assert plain(pb.CompleteRequestRequest(cached_tokens=0))["cached_tokens"] == 0


def test_config_show_and_schema(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "k.toml"
    path.write_text('[redis]\nurl = "redis://:s3cret@h"\n')
    monkeypatch.setenv("KVINDEXD_LOG__LEVEL", "debug")
    shown = run("config", "show", "--config", str(path))
    assert "s3cret" not in shown
    assert "env KVINDEXD_LOG__LEVEL" in shown
    rows = {r["key"]: r for r in json.loads(run("config", "show", "--config", str(path), "--json"))}
    assert rows["redis.url"] == {
        "key": "redis.url",
        "value": "redis://:***@h",
        "source": f"file {path}",
    }
    assert "$defs" in json.loads(run("config", "schema"))
    path.write_text("[redsi]")
    assert "did you mean redis?" in run("config", "show", "--config", str(path), status=1)


def test_console_script_survives_a_closed_pipe() -> None:
    command = f"{sys.executable} -m kvindexd.cli.main config schema | head -c 1"
    done = subprocess.run(
        ["bash", "-c", command], capture_output=True, text=True, env=dict(os.environ), check=False
    )
    assert (done.stdout, done.stderr) == ("{", "")
