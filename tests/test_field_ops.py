"""Reported faults of deployments: silent set-ups, ends, secrets, removals, seen from outside.

Each docstring starts with the row of docs/field-cases.md that it covers.
"""

from __future__ import annotations

import contextlib
import json
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
import servers
from daemon import Daemon
from reliability import QUICK, counter, matched, owns, prompt, running, state, stored

from kvindexd import chain
from kvindexd.config import load
from kvindexd.testing.engine import FakeEngine, free_ports
from kvindexd.v1 import index_pb2 as pb


@pytest.fixture(scope="module")
def redis() -> Iterator[servers.Server]:
    with servers.start_valkey() as server:
        yield server


@pytest.fixture(scope="module")
def daemon(redis: servers.Server) -> Iterator[Daemon]:
    one = Daemon(**QUICK, redis__url=redis.url, log__level="debug", ingest__event_grace=1.5)
    with running(one):
        yield one


def told(daemon: Daemon, worker: str, *words: str) -> str:
    """The worker's state in words, once all these are in it."""

    def found() -> str:
        text = str(daemon.worker(worker).detail)
        return text if all(w in text for w in words) else ""

    return str(daemon.until(found, f"{worker}: {words}"))


def cli(daemon: Daemon, *arguments: str, status: int = 0) -> str:
    """What a command of the shell prints."""
    done = subprocess.run(
        [sys.executable, "-m", "kvindexd.cli.main", *arguments, "--server", daemon.ready["grpc"]],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == status, done.stderr
    return done.stdout


def silence(daemon: Daemon, worker: str) -> list[dict[str, Any]]:
    """Warnings that nothing was heard of a worker."""
    return [e for e in daemon.events("no_events") if e["worker"] == f"{worker}#0"]


# -- set-ups that say nothing ---------------------------------------------------------------------


def test_field_wrong_set_ups_are_told_apart(daemon: Daemon) -> None:
    """O1, O3: wrong port, wrong topic, engine idle, wrong block size, nothing admitted: each has
    words of its own in the worker's detail, which the shell shows too."""
    with FakeEngine(topic="kv@pod@m") as talks, FakeEngine() as idle, FakeEngine() as sized:
        daemon.register("port", f"tcp://127.0.0.1:{free_ports(1)}")
        daemon.register("topic", talks.endpoint(), topic="kv@other")
        daemon.register("idle", idle.endpoint())
        daemon.register("sized", sized.endpoint(), block_size=64)
        sized.wait_subscribed()
        talks.publish([stored(0)])
        sized.publish([stored(0)])
        told(daemon, "port", "never connected", "is the engine up")
        daemon.until(lambda: state(daemon, "port") != "LIVE", "not live")
        told(daemon, "topic", "no events yet", "no message since")
        assert "kv@other" in told(daemon, "topic", "topic"), "a topic may be the reason"
        assert "topic" not in told(daemon, "idle", "no events yet", "no message since")
        for name in ("port", "topic", "idle"):
            found = daemon.until(lambda n=name: silence(daemon, n), "warned of", 10)
            assert "score 0" in found[0]["cost"]
        assert not silence(daemon, "sized")
        told(daemon, "sized", "block size mismatch", "registered 64", "show 16")
        assert matched(daemon, 1, "sized") == 1
        shown = cli(daemon, "workers", "show", "port")
        assert "never connected" in shown


def test_field_an_engine_that_connects_needs_us_to_bind(daemon: Daemon) -> None:
    """O2: vLLM told a concrete host connects: the symptom names the cause, and binding cures it."""
    port = free_ports(1)
    endpoint = f"tcp://127.0.0.1:{port}"
    daemon.register("o2", endpoint)
    told(daemon, "o2", "never connected", "told a concrete host it connects", "bind_events")
    daemon.register("o2-bound", endpoint, bind_events=True)
    daemon.until(lambda: daemon.worker("o2-bound").owner, "owned")
    with FakeEngine(port=port, connect=True, replay_port=None) as engine:
        engine.wait_subscribed()
        engine.publish([stored(0, 2)])
        daemon.until_seq("o2-bound", 0)
        assert matched(daemon, 2, "o2-bound") == 2


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"kv_events_endpoint": "127.0.0.1:5557"}, "kv_events_endpoint"),
        ({"kv_events_endpoint": "tcp://*:5557"}, "kv_events_endpoint"),
        ({"replay_endpoint": "http://h:1"}, "replay_endpoint"),
        ({"worker_id": ""}, "worker_id"),
        ({"dp_rank": 4, "dp_size": 4}, "dp_rank"),
    ],
)
def test_field_a_registration_that_cannot_work_is_refused(
    daemon: Daemon, fields: dict[str, Any], says: str
) -> None:
    """O3: each precondition that can be checked before any event is, and is named."""
    worker = {"worker_id": "bad", "model": "m", "address": "h:1"} | {
        "kv_events_endpoint": "tcp://127.0.0.1:1"
    }
    with pytest.raises(grpc.RpcError) as caught:
        daemon.admin.RegisterWorker(
            pb.RegisterWorkerRequest(worker=pb.Worker(**(worker | fields))), timeout=10
        )
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert says in str(caught.value.details())


# -- pods that go ---------------------------------------------------------------------------------


def test_field_a_pod_that_is_gone_is_not_credited_and_a_restart_loses_nothing() -> None:
    """O4, R3, G11: worker and sidecar die together: others stop crediting it within the lease;
    a sidecar that comes back alone finds its index again."""
    with servers.start_valkey() as redis, FakeEngine() as engine:
        sidecar = Daemon(**QUICK, redis__url=redis.url)
        scorer = Daemon("scorer", **QUICK, redis__url=redis.url)
        with running(sidecar, scorer):
            sidecar.register("w", engine.endpoint(), replay_endpoint=engine.replay_endpoint())
            engine.wait_subscribed()
            for n in range(100):
                engine.publish([stored(n)])
            scorer.until_seq("w", 99)
            assert matched(scorer, 100) == 100
            sidecar.kill()
            sidecar.start()
            for n in range(100, 110):
                engine.publish([stored(n)])
            scorer.until_seq("w", 109)
            assert matched(scorer, 110) == 110
            assert counter(scorer, "restarts") == 0, sidecar.events("engine_restarted")
            assert counter(scorer, "event:BlockStored") == 110

            scorer.until(lambda: owns(sidecar, scorer), "owned")
            sidecar.kill()
            engine.stop()
            gone = time.monotonic()
            scorer.until(lambda: matched(scorer, 110) == -1, "left out", 15)
            assert time.monotonic() - gone < 10
            assert state(scorer) == "STALE"
            kept = scorer.score(prompt(110), include_stale=True)["w"]
            assert kept.matched_tokens == 1760, "and yet not forgotten: the engine may live on"


# -- what must not leak ---------------------------------------------------------------------------


def test_field_by_default_everything_listens_on_loopback() -> None:
    """O5: prompts' token ids pass here."""
    config = load(env={}).config
    listens = [config.server.listen, config.metrics.listen, config.ext_proc.listen]
    assert [listen.rpartition(":")[0] for listen in listens] == ["127.0.0.1"] * 3


def test_field_token_ids_are_neither_stored_nor_logged_nor_shown(
    daemon: Daemon, redis: servers.Server
) -> None:
    """O5: not in the index, not in the log at debug level, not on the metrics page, not in the
    shell; bad events, whose content an error might quote, included. Only a store that waits for
    its parent is kept as it came, for `limits.parked_age` at most."""

    first = 987_654_321
    tokens = [first + i for i in range(64)]
    with FakeEngine() as engine:
        daemon.register("o5", engine.endpoint(), replay_endpoint=engine.replay_endpoint())
        engine.wait_subscribed()
        event = stored(0, 4) | {"token_ids": tokens, "block_hashes": [21, 22, 23, 24]}
        orphan = event | {"parent_block_hash": 4711, "block_hashes": [31, 32, 33, 34]}
        engine.publish([event, orphan])
        engine.publish([event | {"token_ids": [*tokens, -1]}, event | {"block_size": 0}])
        engine.publish([event | {"token_ids": [str(t) for t in tokens]}])
        daemon.until_seq("o5", 2)
        score = daemon.score([*tokens, 5], explain=True)["o5"]
        assert score.matched_tokens == 64
        shown = cli(daemon, "workers", "show", "o5", "--json") + score.reason
        shown += cli(daemon, "block", f"{chain.prompt_keys(tokens)[0]:016x}")
        shown += daemon.page()
        shown += "\n".join([*map(str, daemon.records), *daemon.other])
        assert not any(str(t) in shown for t in tokens)
        content = b"".join(_everything(redis))
        assert b"o5" in content
        for t in tokens[:4]:
            forms = [struct.pack("<I", t), struct.pack(">I", t), str(t).encode()]
            assert not any(form in content for form in forms)


def _everything(redis: servers.Server) -> Iterator[bytes]:
    """All that a server holds, names and values, ziplists of records included."""
    for key in redis("KEYS", "*"):
        if b":p:" in key:
            continue  # the waiting room
        yield key
        kind = redis("TYPE", key)
        read = {
            b"hash": ("HGETALL", key),
            b"zset": ("ZRANGE", key, 0, -1),
            b"stream": ("XRANGE", key, "-", "+"),
            b"string": ("GET", key),
        }[kind]
        yield from _flat(redis(*read))


def _flat(value: Any) -> Iterator[bytes]:
    if isinstance(value, bytes):
        yield value
    elif isinstance(value, list):
        for one in value:
            yield from _flat(one)


def test_field_hashes_are_printed_as_hex_and_never_as_numbers(daemon: Daemon) -> None:
    """W14: a reader whose numbers are floats would lose their last digits."""
    with FakeEngine() as engine:
        daemon.register("w14", engine.endpoint())
        engine.wait_subscribed()
        seed = 0
        while (key := chain.prompt_keys(tokens := [seed] * 16)[0]) < 2**63:
            seed += 1
        engine.publish([stored(0) | {"token_ids": tokens, "block_hashes": [2**63 + 1]}])
        daemon.until_seq("w14", 0)
        for command in ("block", "chain"):
            text = cli(daemon, command, f"{key:016x}", "--json")
            assert f"{key:016x}" in text
            read = json.loads(text, parse_int=float)
            assert not any(n > 2**53 for n in _numbers(read)), text


def _numbers(value: Any) -> Iterator[float]:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        for one in value:
            yield from _numbers(one)
    elif isinstance(value, int | float):
        yield value


# -- lasting failures and large removals ----------------------------------------------------------


def test_field_a_worker_of_which_nothing_is_admitted_is_told_once(daemon: Daemon) -> None:
    """O6: one line with its cost in words, however many events follow; then counters."""
    with FakeEngine() as engine:
        daemon.register("o6", engine.endpoint())
        engine.wait_subscribed()
        kind = {"kv_cache_spec_kind": "some_new_kind"}
        for n in range(240):
            engine.publish([stored(n) | kind])
        daemon.until_seq("o6", 239)
        told(daemon, "o6", "0 of 240 stores admitted", "some_new_kind", "treat_as")
        lines = [e for e in daemon.events("none_admitted") if e["worker"] == "o6#0"]
        assert len(lines) == 1
        assert "scores 0" in lines[0]["cost"]
        daemon.until(lambda: counter(daemon, "filtered:some_new_kind", "o6") == 240, "counted")


def test_field_a_wrong_redis_password_is_told_at_once_and_not_shown(tmp_path: Any) -> None:
    """O6: a permanent failure ends the start with one clear line, without the secret."""
    with servers.start_valkey("--requirepass", "right", password="right") as guarded:
        url = f"redis://:hunter2@127.0.0.1:{guarded.port}"
        daemon = Daemon(**QUICK, redis__url=url)
        daemon.start(wait=False)
        assert daemon.process is not None
        assert daemon.process.wait(20) == 1
        assert daemon._reader is not None
        daemon._reader.join(5)
        assert "hunter2" not in daemon.log()
        assert "Traceback" not in daemon.log()
        assert "password" in daemon.log().lower()
        daemon.process = None


def test_field_a_large_worker_is_removed_while_others_come(daemon: Daemon) -> None:
    """O7: of 60,000 blocks; registrations and queries go on, and nothing of it comes back."""
    with contextlib.ExitStack() as stack:
        engine = stack.enter_context(FakeEngine())
        newcomers = [stack.enter_context(FakeEngine(replay_port=None)) for _ in range(4)]
        daemon.register("large", engine.endpoint(), replay_endpoint=engine.replay_endpoint())
        engine.wait_subscribed()
        for n in range(30):
            first = 10**6 + 2000 * n
            event = stored(0, 2000) | {
                "block_hashes": [first + i for i in range(2000)],
                "token_ids": [(first * 17 + i) % 2**32 for i in range(32_000)],
            }
            engine.publish([event])
        daemon.until_seq("large", 29)
        assert daemon.worker("large").blocks["device"] == 60_000
        request = pb.DeregisterWorkerRequest(worker_id="large")
        removal = threading.Thread(target=daemon.admin.DeregisterWorker, args=(request,))
        began = time.monotonic()
        removal.start()
        for n, newcomer in enumerate(newcomers):
            daemon.register(f"new-{n}", newcomer.endpoint())
            newcomer.wait_subscribed()
            newcomer.publish([stored(n)] if n == 0 else [stored(0)])
            daemon.until_seq(f"new-{n}", 0)
            assert matched(daemon, 1, f"new-{n}") == 1
        removal.join(10)
        assert not removal.is_alive()
        assert time.monotonic() - began < 10
        daemon.stop()
        daemon.start()
        with pytest.raises(grpc.RpcError) as caught:
            daemon.worker("large")
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND
        assert matched(daemon, 1, "new-3") == 1
