"""What is private is in no log, at any level: a daemon is given it in every way there is."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import msgspec
import pytest
import tokenizer_files
from daemon import Daemon, serving
from picks import request, stored
from servers import free_port, start_redis
from test_ext_proc import BUFFERED, Fleet, ep, headers
from tokenize_server import TokenizeServer, tokenizing

from kvindexd.config import ConfigError, load
from kvindexd.testing.engine import FakeEngine
from kvindexd.v1 import index_pb2 as pb

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
            sent = [("authorization", f"Bearer {PASSWORD}")]
            self.daemon.index.ScoreWorkers(asked, timeout=10, metadata=sent)
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
    rig.daemon.until(lambda: rig.tokenizer.asked, "asked")

    def picked() -> dict[str, Any]:
        return {line.get("request_id", ""): line for line in rig.daemon.events("picked_by_load")}

    rig.daemon.until(lambda: {"req-local", "req-envoy"} <= picked().keys(), "both are told")
    lines = picked()
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
    check(rig.daemon.page())


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
