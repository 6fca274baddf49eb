"""Logs: repeats are told once in a while, requests by their ids, and what is private never."""

from __future__ import annotations

import io
import json
import logging
import os
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import msgspec
import pytest
import structlog
import tokenizer_files
from daemon import Daemon, serving
from picks import request, stored
from servers import free_port, start_redis
from test_ext_proc import BUFFERED, Fleet, ep, headers
from tokenize_server import TokenizeServer, tokenizing

from kvindexd.config import ConfigError, load
from kvindexd.telemetry import configure_logging, name_request, tell_rest
from kvindexd.telemetry.repeats import LimitRepeats, Repeats
from kvindexd.testing.engine import FakeEngine
from kvindexd.v1 import index_pb2 as pb

# -- repeats ---------------------------------------------------------------------------------


def lines(repeats: Repeats[str], *times: float, key: str = "k") -> list[str]:
    """What is shown of one line a second from some times on, as "time+suppressed"."""
    shown = []
    for now in times:
        withheld = repeats.admit(key, f"{now:g}", now)
        if withheld is not None:
            shown.append(f"{now:g}+{withheld}")
    return shown


def test_the_first_is_shown_at_once_and_then_one_per_interval() -> None:
    repeats: Repeats[str] = Repeats(10)
    assert lines(repeats, 0, 1, 2, 9.9, 10, 11, 19, 20, 45) == ["0+0", "10+3", "20+2", "45+0"]


def test_when_it_ends_the_rest_is_told() -> None:
    repeats: Repeats[str] = Repeats(10)
    lines(repeats, 0, 1, 2, 3)
    assert repeats.due(9) == []
    assert repeats.due(10) == [("3", 2)]
    assert repeats.due(30) == []
    # Nothing is left of it: the next one is a first one.
    assert lines(repeats, 31) == ["31+0"]
    lines(repeats, 32)
    assert repeats.rest() == [("32", 0)]
    assert repeats.rest() == []


def test_every_line_is_shown_or_counted() -> None:
    repeats: Repeats[str] = Repeats(10)
    told, now = 0, 0.0
    for step in range(1000):
        now += (step * 7 % 13) / 4
        withheld = repeats.admit("k", "x", now)
        told += 0 if withheld is None else 1 + withheld
        if step % 50 == 0:
            told += sum(1 + suppressed for _, suppressed in repeats.due(now))
    told += sum(1 + suppressed for _, suppressed in repeats.rest())
    assert told == 1000


def test_what_is_remembered_is_bounded_and_0_shows_everything() -> None:
    repeats: Repeats[str] = Repeats(10, max_keys=2)
    for key in "abc":
        assert lines(repeats, 0, 1, key=key) == (["0+0"] if key != "c" else ["0+0", "1+0"])
    assert lines(Repeats(0), 0, 0, 0) == ["0+0"] * 3


def test_lines_are_alike_by_event_level_and_worker() -> None:
    now = [0.0]
    limit = LimitRepeats(Repeats(10), lambda: now[0])

    def say(**event: Any) -> dict[str, Any] | None:
        try:
            return dict(limit(None, "x", {"event": "gap", "level": "warning"} | event))
        except structlog.DropEvent:
            return None

    assert say(worker="a#0", first=1)
    assert say(worker="a#0", first=2) is None
    assert say(worker="b#0", first=1)
    assert say(worker="a#0", level="error")
    assert say(worker="a#0", event="other")
    assert say(worker="a#0", state="STALE")
    now[0] = 10.0
    assert say(worker="a#0", first=3) == {
        "event": "gap",
        "level": "warning",
        "worker": "a#0",
        "first": 3,
        "suppressed": 1,
    }
    assert all(say(level="debug") for _ in range(3))


@pytest.fixture
def out() -> Iterator[io.StringIO]:
    root = logging.getLogger()
    before = root.handlers[:], root.level
    yield io.StringIO()
    configure_logging(stream=io.StringIO())
    structlog.reset_defaults()
    structlog.contextvars.clear_contextvars()
    root.handlers[:], root.level = before[0], before[1]


def test_repeats_of_ours_and_of_libraries_through_the_whole_chain(out: io.StringIO) -> None:
    configure_logging("json", "info", out, repeat_seconds=60)
    for i in range(5):
        try:
            raise RuntimeError("redis://:s3cret@h")
        except RuntimeError:
            structlog.get_logger().exception("failed", worker="a#0", n=i)
        logging.getLogger("some.library").warning("attempt %d of redis://:s3cret@h", i)
    assert len(out.getvalue().splitlines()) == 2
    tell_rest()
    assert "s3cret" not in out.getvalue()
    first, second, third, fourth = map(json.loads, out.getvalue().splitlines())
    assert (first["n"], "RuntimeError" in first["exception"]) == (0, True)
    assert second["event"] == "attempt 0 of redis://:***@h"
    assert second["logger"] == "some.library"
    assert (third["n"], third["suppressed"], third["worker"]) == (4, 3, "a#0")
    assert (fourth["event"], fourth["suppressed"]) == ("attempt 4 of redis://:***@h", 3)


def test_request_ids_of_clients_cannot_break_a_line(out: io.StringIO) -> None:
    configure_logging("console", "info", out)
    for given in ("ok-1", "a\nevent=forged", "\x1b[31m", "ü", "", "x" * 500):
        structlog.contextvars.clear_contextvars()
        name_request(given)
        structlog.get_logger().info("x")
    seen = out.getvalue().splitlines()
    assert len(seen) == 6
    assert "request_id=ok-1" in seen[0]
    assert not any("request_id" in line for line in seen[1:5])
    assert seen[5].count("x") < 140


# -- what is private -------------------------------------------------------------------------

PASSWORD = "Fr4ncolin-pass"
WORDS = ("quokka", "axolotl", "numbat", "okapi", "tapir", "gharial", "pangolin", "kakapo")
"""Each is part of a prompt, a salt, a message or a body, and of nothing else."""
TOKENS = [731_946_201 + i for i in range(64)]
SALT = "saltlick-7781"
PRIVATE = (*WORDS, PASSWORD, SALT, *map(str, TOKENS))
ECHO = "{{ raise_exception('no role like ' ~ messages[0].role) }}"


class Rig:
    """A daemon at level debug on a Redis with a password, and all that it talks to."""

    def __init__(self, daemon: Daemon, engine: FakeEngine, tokenizer: TokenizeServer) -> None:
        self.daemon = daemon
        self.engine = engine
        self.tokenizer = tokenizer
        self.fleet = Fleet(daemon, {"a": engine})

    def output(self) -> str:
        return "\n".join([*map(json.dumps, self.daemon.records), *self.daemon.other])

    def ask(self, **prompt: Any) -> str:
        """ScoreWorkers; the code it was answered with."""
        try:
            asked = pb.ScoreWorkersRequest(prompt=pb.Prompt(**({"model": "m"} | prompt)))
            self.daemon.index.ScoreWorkers(asked, timeout=10)
        except grpc.RpcError as e:
            return str(e.code().name)
        return "OK"

    def chat(self, body: Any, model: str = "m", **more: str) -> None:
        """One request through ext_proc."""
        raw = body if isinstance(body, bytes) else json.dumps({"model": model} | body).encode()
        with self.fleet.stream() as s:
            s.ask(request_headers=headers(**more), protocol_config=BUFFERED)
            s.ask(request_body=ep.HttpBody(body=raw, end_of_stream=True))


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    folder = tmp_path_factory.mktemp("private")
    tokenizer_files.make(folder / "local", ECHO)
    with (
        start_redis("--requirepass", PASSWORD, password=PASSWORD) as redis,
        tokenizing() as tokenizer,
        FakeEngine() as engine,
    ):
        settings = {
            "redis.url": f"redis://:{PASSWORD}@127.0.0.1:{redis.port}",
            "redis.timeout": 0.3,
            "tokens.models": {
                "m": tokenizer.url.replace("http://", f"http://user:{PASSWORD}@"),
                "local": str(folder / "local"),
                "absent": str(folder / "nowhere"),
            },
            "ext_proc.budget": 5,
            "limits.max_prompt_tokens": 1000,
            "log.level": "debug",
        }
        with serving(index__data_dir=str(folder / "data"), **settings) as daemon:
            for model in ("m", "local"):
                worker = f"a-{model}"
                daemon.register(worker, engine.endpoint(), address="10.0.0.1:8000", model=model)
            engine.wait_subscribed(2)
            rig = Rig(daemon, engine, tokenizer)
            yield rig
            rig.fleet.channel.close()
            redis.kill()
            daemon.until(lambda: daemon.events("store_unavailable"), "the store is away")
        check(rig.output())


def check(text: str) -> None:
    """Nothing private is in what a process said."""
    found = [word for word in PRIVATE if word.lower() in text.lower()]
    assert not found, [line for line in text.splitlines() if any(w in line for w in found)][:5]


def test_scoring_leaves_nothing_private(rig: Rig) -> None:
    packed = b"".join(t.to_bytes(4, "little") for t in TOKENS)
    assert rig.ask(tokens=pb.TokenIds(ids=TOKENS), cache_salt=SALT) == "OK"
    assert rig.ask(token_ids=packed, cache_salt=SALT) == "OK"
    item = pb.MultiModalItem(identifier="okapi", offset=3, length=4)
    assert rig.ask(token_ids=packed, mm_items=[item]) == "OK"
    assert rig.ask(token_ids=packed[:-1]) == "INVALID_ARGUMENT"
    assert rig.ask(tokens=pb.TokenIds(ids=TOKENS * 40)) == "RESOURCE_EXHAUSTED"
    assert rig.ask(text="the quokka of the axolotl") == "OK"
    rig.daemon.index.PickWorker(request(TOKENS), timeout=10)
    check(rig.output())


def test_bad_requests_leave_nothing_private(rig: Rig) -> None:
    before = len(rig.daemon.events("call_ended_in_error"))
    for body in (
        b"{ quokka",
        b'{"model": "m", "messages": "axolotl"}',
        b'{"model": "m", "messages": [{"role": "numbat", "content": {"okapi": 1}}]}',
        b'{"model": "m", "messages": [{"role": "user", "content": [{"type": "tapir"}]}]}',
        b'{"model": ["gharial"], "messages": []}',
        json.dumps({"messages": "\udc80pangolin"}).encode(),
    ):
        assert rig.ask(openai_body=body) != "OK"
        rig.chat(body, _path="/v1/chat/completions")
    assert rig.ask(openai_body=b"{}", openai_path="/v1/kakapo") == "INVALID_ARGUMENT"
    refused = rig.daemon.events("call_ended_in_error")[before:]
    assert {"INVALID_ARGUMENT"} <= {line["code"] for line in refused}
    assert "prompt.openai_body" in {line["field"] for line in refused}
    assert rig.daemon.events("request_refused")[-1]["code"] == "invalid_body"
    check(rig.output())


def test_failing_tokenizers_leave_nothing_private(rig: Rig) -> None:
    """The engine's answer quotes the prompt, and so does a chat template that refuses it."""
    chat = {"messages": [{"role": "quokka", "content": "axolotl"}]}
    rig.chat(chat, "local", _path="/v1/chat/completions", x_request_id="req-local")
    rig.chat(chat, "absent", _path="/v1/chat/completions")
    rig.tokenizer.status = 400
    asked = request([], request_id="req-pick")
    asked.score.prompt.text = "the numbat"
    with pytest.raises(grpc.RpcError):
        rig.daemon.index.PickWorker(asked, timeout=10)
    rig.chat({"prompt": "the okapi"}, x_request_id="req-envoy")
    rig.daemon.until(lambda: len(rig.tokenizer.asked) >= 2, "asked")

    lines = {line.get("request_id"): line for line in rig.daemon.events("picked_by_load")}
    assert lines["req-local"]["why"].startswith("the chat template refuses")
    assert "does not work" in lines["req-envoy"]["why"]
    (failed,) = [e for e in rig.daemon.events("tokenizer_failed") if e["model"] == "m"]
    assert failed["request_id"] == "req-pick"
    assert "status 400" in failed["why"]
    check(rig.output())


def test_answers_that_are_not_http_leave_nothing_private(rig: Rig) -> None:
    rig.tokenizer.status = 200
    chunked = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
    for raw in (b"tapir\r\n\r\n", b"HTTP/1.1 tapir\r\n\r\n", chunked + b"gharial\r\n"):
        rig.tokenizer.raw = raw
        rig.daemon.until(lambda: rig.ask(text="the tapir") == "UNAVAILABLE", "not HTTP")
    rig.tokenizer.raw = None
    check(rig.output())


def test_events_leave_nothing_private(rig: Rig) -> None:
    good = stored(TOKENS, extra_keys=None, lora_name=None)
    bad: list[dict[str, Any]] = [
        good | {"token_ids": ["pangolin"] * 16},
        good | {"token_ids": TOKENS[:3]},
        good | {"token_ids": [-t for t in TOKENS]},
        good | {"token_ids": [2**40 + t for t in TOKENS]},
        good | {"block_size": "kakapo"},
        good | {"parent_block_hash": "kakapo"},
        good | {"extra_keys": [[SALT]] * 4, "block_hashes": [9, 8, 7, 6]},
        good | {"type": "BlockStored", "block_hashes": None},
        {"type": "quokka", "token_ids": TOKENS},
        {"type": "BlockRemoved", "block_hashes": "numbat", "medium": None},
    ]
    for event in bad:
        rig.engine.publish([event])
    seq = rig.engine.publish_raw("", rig.engine.next_seq(), msgspec.msgpack.encode(["okapi", 5]))
    seq = rig.engine.publish([good])
    rig.engine.send_parts([b"axolotl", b"gharial"])
    rig.daemon.until_seq("a-m", seq)
    assert rig.daemon.score(TOKENS)["a-m"].matched_tokens == 64
    rig.daemon.until(lambda: rig.daemon.events("frame_refused"), "told")
    check(rig.output())
    page = urllib.request.urlopen(f"http://{rig.daemon.ready['metrics']}/metrics", timeout=10)
    check(page.read().decode())


def test_bad_configuration_leaves_nothing_private(tmp_path: Path) -> None:
    (tmp_path / "toml").write_text(f'[redis]\nurl = "redis://:{PASSWORD}@h"\nurl = 5\n')
    for wrong in (
        {"KVINDEXD_REDIS__URL": f"user:{PASSWORD}@127.0.0.1"},
        {"KVINDEXD_CONFIG": str(tmp_path / "toml")},
    ):
        with pytest.raises(ConfigError) as error:
            load(env=wrong)
        check(str(error.value))
    cases = [
        {"KVINDEXD_REDIS__URL": f"redis://:{PASSWORD}@127.0.0.1:none"},
        {"KVINDEXD_REDIS__URL": f"reddis://user:{PASSWORD}@127.0.0.1"},
        {"KVINDEXD_REDIS__URL": f"redis://u:{PASSWORD}@127.0.0.1:{free_port()}?x={PASSWORD}"},
    ]
    base = {k: v for k, v in os.environ.items() if not k.startswith("KVINDEXD_")}
    base |= {"KVINDEXD_LOG__LEVEL": "debug", "KVINDEXD_REDIS__TIMEOUT": "0.05"}
    running = [
        subprocess.Popen(
            [sys.executable, "-m", "kvindexd.cli.main", "scorer"],
            env=base | variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for variables in cases
    ]
    for process in running:
        said, _ = process.communicate(timeout=120)
        assert process.returncode in (1, 2), said
        assert said
        check(said)
