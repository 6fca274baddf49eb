"""The command line against a daemon: what an operator sees, as a process where that matters.

One daemon, two workers. The tests of a store without a daemon are the last ones: they stop it.
"""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import structlog
import typer
from daemon import Daemon
from picks import fresh, pick, request, stored
from servers import Server, start_valkey
from typer.testing import CliRunner

from kvindexd import chain
from kvindexd.cli import offline
from kvindexd.cli.main import app
from kvindexd.cli.tail import Asked
from kvindexd.cli.tail import events as follow_events
from kvindexd.testing.engine import FakeEngine
from kvindexd.v1 import index_pb2 as pb

COMMAND = [sys.executable, "-m", "kvindexd.cli.main"]
DEADLINE = 30.0


class Fleet(NamedTuple):
    """`w0`: model m, attention, Mamba (filtered) and a sliding window. `w1`: model other.

    `held`: a prompt of which w0 holds all in attention and three blocks in the window.
    """

    daemon: Daemon
    store: Server
    engines: dict[str, FakeEngine]
    held: list[int]
    elsewhere: list[int]

    @property
    def server(self) -> str:
        return str(self.daemon.ready["grpc"])


@pytest.fixture(scope="module")
def fleet() -> Iterator[Fleet]:
    with start_valkey() as store, FakeEngine() as e0, FakeEngine() as e1:
        settings = {"groups.treat_as": {"mamba": "ignored"}, "pick.prediction_ttl": 0}
        daemon = Daemon(redis__url=store.url, **settings)
        daemon.start()
        try:
            daemon.register("w0", e0.endpoint(), replay_endpoint=e0.replay_endpoint())
            daemon.register("w1", e1.endpoint(), model="other")
            for engine in (e0, e1):
                engine.wait_subscribed()
            held, elsewhere = fresh(6, 1), fresh(4, 1)
            attention = stored(held)
            window = attention | {
                "block_hashes": attention["block_hashes"][:3],
                "token_ids": attention["token_ids"][:48],
                "group_idx": 2,
                "kv_cache_spec_kind": "sliding_window",
                "kv_cache_spec_sliding_window": 32,
            }
            adapter = stored(fresh(2), lora_name="sql")
            e0.publish([attention, window, mamba(), adapter])
            e1.publish([stored(elsewhere)])
            for worker in ("w0", "w1"):
                daemon.until_seq(worker, 0)
            yield Fleet(daemon, store, {"w0": e0, "w1": e1}, held, elsewhere)
        finally:
            daemon.kill()


def mamba() -> dict[str, Any]:
    return stored(fresh(1), group_idx=1, kv_cache_spec_kind="mamba")


def cli(fleet: Fleet, *arguments: str, status: int = 0, **env: str) -> str:
    """Run a command in this process against the fleet's daemon; what it printed."""
    env = {"KVINDEXD_SERVER": fleet.server} | env
    result = CliRunner().invoke(app, arguments, env=env)
    assert result.exit_code == status, result.output
    return result.stdout if status == 0 else result.output


def tokens_of(prompt: Sequence[int]) -> str:
    return json.dumps(list(prompt))


class Process:
    """A command as a process of its own, its lines collected as they come."""

    def __init__(self, fleet: Fleet, *arguments: str, **env: str) -> None:
        self.process = subprocess.Popen(
            [*COMMAND, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"KVINDEXD_SERVER": fleet.server} | env,
        )
        self.out: list[str] = []
        self.err: list[str] = []
        self._threads = [
            threading.Thread(target=self._read, args=pair, daemon=True)
            for pair in ((self.process.stdout, self.out), (self.process.stderr, self.err))
        ]
        for thread in self._threads:
            thread.start()

    def _read(self, stream: Any, lines: list[str]) -> None:
        lines.extend(iter(stream.readline, ""))

    def until(self, lines: list[str], text: str) -> None:
        end = time.monotonic() + DEADLINE
        while not any(text in line for line in lines):
            assert time.monotonic() < end, f"no {text!r} in {self.out} {self.err}"
            time.sleep(0.02)

    def end(self) -> int:
        try:
            status = self.process.wait(DEADLINE)
        finally:
            self.process.kill()
        for thread in self._threads:
            thread.join(5)
        return status


# -- tail -------------------------------------------------------------------------------------


def test_tail_prints_events_as_they_come_with_what_becomes_of_them(fleet: Fleet) -> None:
    tail = Process(fleet, "tail", "w0", "--json", "--count", "4")
    tail.until(tail.err, "following w0#0")
    engine = fleet.engines["w0"]
    orphan = stored(fresh(1), parent_block_hash=987654321)
    removed = {
        "type": "BlockRemoved",
        "block_hashes": [555_555_555],
        "medium": "GPU",
        "group_idx": 0,
    }
    seq = engine.publish([stored(fresh(2)), mamba(), orphan, removed])
    assert tail.end() == 0
    events = [json.loads(line) for line in tail.out]
    assert [(e["type"], e["decision"], e["kept"]) for e in events] == [
        ("BlockStored", "main", True),
        ("BlockStored", "ignored", False),
        ("BlockStored", "parked", True),
        ("BlockRemoved", "main", True),
    ]
    assert "mamba" in events[1]["reason"]
    assert "never stored" in events[3]["reason"]
    assert {e["seq"] for e in events} == {seq}
    assert (events[0]["tokens"], events[0]["blocks"], events[0]["block_size"]) == (32, 2, 16)
    # Counts, never tokens.
    assert not [key for key in events[0] if "token_ids" in key]


def test_tail_ends_at_ctrl_c_and_where_there_is_nothing_to_follow(fleet: Fleet) -> None:
    tail = Process(fleet, "tail", "w0")
    tail.until(tail.err, "following")
    fleet.engines["w0"].publish([mamba()])
    tail.until(tail.out, "filtered: ignored")
    tail.process.send_signal(signal.SIGINT)
    assert tail.end() == 0
    assert tail.err[-1] == "ended; 1 events shown\n"
    assert "worker nobody#0 is not registered" in cli(fleet, "tail", "nobody", status=1)


def test_tail_comes_back_when_its_worker_is_registered_anew(
    fleet: Fleet, capsys: pytest.CaptureFixture[str]
) -> None:
    daemon, engine = fleet.daemon, fleet.engines["w1"]
    brief = {"model": "brief", "namespace": "n"}
    daemon.register("brief", engine.endpoint(), **brief)
    asked = Asked(fleet.server, pb.TailWorkerRequest(worker_id="brief", namespace="n"), 20.0)
    heard: list[str] = []
    ended: list[int] = []

    def follow() -> None:
        try:
            for event in follow_events(asked):
                heard.append(event.type)
        except typer.Exit as e:
            ended.append(e.exit_code)

    def published() -> bool:
        # Until somebody listens, and hears it.
        engine.publish([mamba()])
        return bool(heard)

    thread = threading.Thread(target=follow, daemon=True)
    thread.start()
    daemon.until(published, "an event")
    daemon.register("brief", engine.endpoint(), labels={"zone": "b"}, **brief)
    said: list[str] = []

    def back() -> bool:
        said.append(capsys.readouterr().err)
        return "following n/brief#0 again" in "".join(said)

    daemon.until(back, "followed again")
    assert re.search("registered anew|its lease went elsewhere", "".join(said))
    heard.clear()
    daemon.until(published, "an event again")
    removed = pb.DeregisterWorkerRequest(worker_id="brief", namespace="n")
    daemon.admin.DeregisterWorker(removed, timeout=10)
    thread.join(DEADLINE)
    assert ended == [1]
    assert "error: worker n/brief#0 was removed" in capsys.readouterr().err


# -- top --------------------------------------------------------------------------------------


def test_top_once_and_as_json(fleet: Fleet) -> None:
    daemon = fleet.daemon
    picked = pick(daemon, fleet.held)
    complete = pb.CompleteRequestRequest(request_id=picked.request_id, cached_tokens=48)
    daemon.index.CompleteRequest(complete, timeout=10)
    daemon.until(lambda: daemon.worker("w0").counters["filtered:mamba"], "counted")
    # ListWorkers has the counters as the replica last read them.
    snapshot = daemon.until(lambda: counted(fleet), "counters in the list")
    rows = {w["worker_id"]: w for w in snapshot["workers"]}
    w0 = rows["w0"]
    assert (w0["state"], w0["model"], w0["picks"]) == ("LIVE", "m", 1)
    assert w0["hit"] == pytest.approx(picked.worker.reusable_tokens / len(fleet.held))
    assert w0["reported"] == pytest.approx(48 / len(fleet.held))
    assert w0["device"] >= 6
    assert w0["evidence_ms"] < 60_000
    assert w0["lag_ms"] is not None
    assert w0["stores"] is None  # one look makes no rate
    assert (rows["w1"]["picks"], rows["w1"]["hit"]) == (0, None)
    assert snapshot["index"]["workers"] == 2
    shown = cli(fleet, "top", "--once", "--sort", "picks")
    header, first, second = shown.splitlines()[2:5]
    assert "PICKS*" in header.split()
    assert (first.split()[0], second.split()[0]) == ("w0#0", "w1#0")
    page = cli(fleet, "top", "--once", "--worker", "w0")
    assert "event:BlockStored" in page
    assert "sliding_window" in page
    assert "w1" not in page
    assert "is not registered" in cli(fleet, "top", "--worker", "nobody", status=1)
    assert "cannot reach" in cli(fleet, "top", "--once", "--server", "127.0.0.1:1", status=1)
    cli(fleet, "top", "--sort", "size", status=2)


def counted(fleet: Fleet) -> Any:
    snapshot = json.loads(cli(fleet, "top", "--json", "--once"))
    filtered = sum(w["filtered"] for w in snapshot["workers"])
    return snapshot if filtered else None


def test_top_streams_looks_with_rates(fleet: Fleet) -> None:
    top = Process(fleet, "top", "--json", "--interval", "0.3", "--model", "m")
    end = time.monotonic() + DEADLINE
    while not any(json.loads(line)["workers"][0]["stores"] for line in top.out):
        assert time.monotonic() < end, (top.out[-1:], top.err)
        fleet.engines["w0"].publish([stored(fresh(1))])
        time.sleep(0.1)
    top.process.send_signal(signal.SIGINT)
    assert top.end() == 0
    assert [w["worker_id"] for w in json.loads(top.out[0])["workers"]] == ["w0"]


def test_top_on_a_terminal_takes_keys_and_puts_it_back(fleet: Fleet) -> None:
    master, slave = pty.openpty()
    env = os.environ | {
        "KVINDEXD_SERVER": fleet.server, "TERM": "xterm", "COLUMNS": "220", "LINES": "40",
    }  # fmt: skip
    env.pop("NO_COLOR", None)
    top = subprocess.Popen(
        [*COMMAND, "top", "--interval", "0.5"], stdin=slave, stdout=slave, stderr=slave, env=env
    )
    os.close(slave)
    seen = bytearray()

    def until(pattern: bytes) -> None:
        end = time.monotonic() + DEADLINE
        while not re.search(pattern, bytes(seen), re.DOTALL):
            assert time.monotonic() < end, seen[-2000:]
            if select.select([master], [], [], 0.1)[0]:
                with contextlib.suppress(OSError):  # the other end is closed
                    seen.extend(os.read(master, 65536))
        seen.clear()

    try:
        until(rb"WORKER\*.*\x1b\[32mLIVE")
        os.write(master, b"g")
        until(rb"GAPS\*")
        os.write(master, b"\x1b[B\r")
        until(rb"evidence_age_ms")
        os.write(master, b"\x1b")
        until(rb"GAPS\*")
        os.write(master, b"q")
        until(rb"\x1b\[\?1049l")  # back from the alternate screen
        assert top.wait(DEADLINE) == 0
    finally:
        top.kill()
        os.close(master)


# -- explain ----------------------------------------------------------------------------------


def test_explain_shows_each_group_and_what_stops_the_match(fleet: Fleet) -> None:
    shown = cli(fleet, "explain", "--model", "m", tokens_of([*fleet.held, 1, 2]))
    lines = shown.splitlines()
    attention = next(i for i, text in enumerate(lines) if "full_attention" in text)
    assert lines[attention + 1].strip() == "██████"
    assert "allows 96 tokens; another group stops the match at 48" in lines[attention + 2]
    window = next(i for i, text in enumerate(lines) if "sliding_window" in text)
    assert lines[window + 1].strip() == "███···"
    assert lines[window + 2].index("^") == lines[window + 1].index("·")
    assert "stops at block 3 (token 48): behind token 48, the 32 tokens" in lines[window + 3]
    assert "group 2 (sliding_window) stops the match at block 3" in shown
    assert "where the prompt leaves" not in shown  # all of its full blocks are held
    answer = json.loads(cli(fleet, "explain", "--model", "m", tokens_of(fleet.held), "--json"))
    runs = {g["group"]["kind"]: g for g in answer["workers"][0]["groups"]}
    assert runs["full_attention"]["held"] == [1] * 6
    assert (runs["sliding_window"]["held"], runs["sliding_window"]["stops_at"]) == (
        [1, 1, 1, 0, 0, 0],
        3,
    )
    assert runs["sliding_window"]["group"]["treated_as"] == "auxiliary"


def test_explain_tells_a_branch_from_an_end(fleet: Fleet) -> None:
    held = fleet.held
    branch = explained(fleet, [*held[:32], *fresh(2)])
    assert (branch["held_tokens"], branch["before_token"], branch["continuations"]) == (32, 48, 1)
    assert "differs at a token from 32 to 47" in branch["detail"]
    assert not branch["variations"]
    end = explained(fleet, [*held[:96], *fresh(2)])
    assert (end["held_tokens"], end["before_token"], end["continuations"]) == (96, 112, 0)
    assert "never computed, or has been evicted" in end["detail"]


@pytest.mark.parametrize(
    ("change", "prompt", "options", "position"),
    [
        ("tokens_dropped", lambda p: [77_777, *p], (), 1),
        ("tokens_dropped", lambda p: [1, 2, 3, *p], (), 1),
        ("token_added", lambda p: p[1:], (), 1),
        ("token_replaced", lambda p: [p[0] + 1, *p[1:]], (), 1),
        ("adapter", lambda p: p, ("--lora-name", "x"), 0),
        ("salt", lambda p: p, ("--cache-salt", "x"), 0),
        ("model", lambda p: p, ("--model", "other"), 0),
    ],
)
def test_explain_finds_what_mistake_makes_nothing_match(
    fleet: Fleet, change: str, prompt: Any, options: tuple[str, ...], position: int
) -> None:
    found = explained(fleet, prompt(fleet.held), *options)
    best = found["variations"][0]
    assert (best["change"], best["matched_tokens"], best["workers"]) == (change, 96, ["w0"])
    assert (found["held_tokens"], found["before_token"]) == (0, position)


def test_explain_says_what_it_cannot_know(fleet: Fleet) -> None:
    strange = fresh(3)
    found = explained(fleet, strange)
    assert (found["held_tokens"], found["before_token"], found["variations"]) == (0, 16, [])
    assert found["roots"] == 2
    assert "usual causes: another chat template" in found["detail"]
    assert any("first tokens below 300,000" in what for what in found["tried"])
    assert any("holds hashes, no tokens" in what for what in found["unknown"])
    shown = cli(fleet, "explain", "--model", "m", tokens_of(strange))
    assert "position from 0 to 15" in shown
    assert "none of these is held" in shown
    keys = chain.prompt_keys(strange)
    hashed = request(strange).score
    hashed.prompt.chain.hashes.extend(keys)
    answer = fleet.daemon.index.Explain(hashed, timeout=20)
    assert any("hashes were sent" in what for what in answer.divergence.unknown)


def test_explain_looks_at_workers_that_the_request_leaves_out(fleet: Fleet) -> None:
    asked = ("explain", "--model", "m", tokens_of(fleet.held), "--label", "zone=none")
    shown = cli(fleet, *asked)
    assert "no worker matches" in shown
    assert "leave out all of the model's 1 workers" in shown
    assert "workers that their state or the request's filters leave out: 96 tokens on w0" in shown


def explained(fleet: Fleet, prompt: Sequence[int], *options: str) -> Any:
    options = options if "--model" in options else ("--model", "m", *options)
    answer = json.loads(cli(fleet, "explain", tokens_of(prompt), *options, "--json"))
    assert answer["prompt_tokens"] == len(prompt)
    return answer["divergence"]


def test_explain_against_another_prompt(fleet: Fleet, tmp_path: Path) -> None:
    other, text = tmp_path / "other.json", tmp_path / "text"
    other.write_text(tokens_of([*fleet.held[:37], 5, *fleet.held[38:]]))
    text.write_text("once upon a time")
    asked = ("explain", "--model", "m", tokens_of(fleet.held))
    shown = cli(fleet, *asked, "--against", str(other), "--against", str(other))
    assert f"differs from {other} first at token 37 (of 97 here, 97 there)" in shown
    assert "unit 2 of 16 tokens (32 to 47)" in shown
    assert f"nearest: {other}" in shown
    found = json.loads(cli(fleet, *asked, "--against", str(other), "--json"))["against"][0]
    assert (found["first_difference"], found["unit"]["index"]) == (37, 2)
    assert found["blocks"] == [{"size": 16, "index": 2}]
    refused = cli(fleet, *asked, "--against", str(text), status=2, COLUMNS="400")
    assert "token ids cannot be compared with text" in refused
    alone = cli(fleet, *asked, "--against", str(other), "--server", "127.0.0.1:1", status=1)
    assert "first at token 37" in alone
    assert "cannot reach kvindexd" in alone


def test_every_read_command_speaks_json_with_hashes_in_hex(fleet: Fleet) -> None:
    key = f"{chain.prompt_keys(fleet.held)[1]:#018x}"
    block = json.loads(cli(fleet, "block", key, "--model", "m", "--json"))
    parent = f"{chain.prompt_keys(fleet.held)[0]:#018x}"
    assert (block["hash"], block["parent"], block["depth"]) == (key, parent, 32)
    blocks = json.loads(cli(fleet, "chain", key, "--json"))["blocks"]
    assert [b["hash"] for b in blocks] == [key, parent]
    for command in (
        ("workers", "list"),
        ("workers", "show", "w0"),
        ("score", "--model", "m", tokens_of(fleet.held)),
        ("audit",),
        ("layout",),
        ("config", "show"),
    ):
        assert json.loads(cli(fleet, *command, "--json")), command


# -- without a daemon; these come last --------------------------------------------------------


@pytest.fixture(scope="module")
def stopped(fleet: Fleet) -> Iterator[Fleet]:
    """The fleet with its daemon gone, and only the store left."""
    tail = Process(fleet, "tail", "w0", "--reconnect", "0.5")
    tail.until(tail.err, "following w0#0")
    assert fleet.daemon.stop() == 0
    assert tail.end() == 1
    assert any(line.startswith("lost: ") for line in tail.err), tail.err
    assert tail.err[-1].startswith("error: not back within 0.5 s"), tail.err
    yield fleet
    # Commands that read the store silence the logs of their process, which here is the tests'.
    structlog.reset_defaults()


def test_workers_are_read_from_the_store_where_no_daemon_answers(stopped: Fleet) -> None:
    listed = Process(stopped, "workers", "list", "--json", KVINDEXD_REDIS__URL=stopped.store.url)
    assert listed.end() == 0, listed.err
    assert f"does not answer; this is read from the store {stopped.store.url}" in listed.err[0]
    workers = {w["worker_id"]: w for w in json.loads("".join(listed.out))["workers"]}
    assert set(workers) == {"w0", "w1"}
    w0 = workers["w0"]
    assert (w0["state"], w0["model"], w0["address"]) == ("STALE", "m", "w0.test:8000")
    assert "no ingester has it" in w0["detail"]
    assert w0["blocks"]["device"] >= 6
    assert w0["counters"]["filtered:mamba"] >= 1
    kinds = {g["kind"]: g["treated_as"] for g in w0["groups"]}
    assert kinds == {"full_attention": "main", "mamba": "ignored", "sliding_window": "auxiliary"}
    shown = cli(stopped, "workers", "show", "w0", "--redis", stopped.store.url)
    assert "sliding_window" in shown
    missing = cli(stopped, "workers", "show", "nobody", "--redis", stopped.store.url, status=1)
    assert "error: the store cannot be read: worker nobody#0 is not registered" in missing


def test_blocks_are_read_from_the_store_where_no_daemon_answers(stopped: Fleet) -> None:
    keys = [f"{k:#018x}" for k in chain.prompt_keys(stopped.held)]
    redis = ("--redis", stopped.store.url)
    block = json.loads(cli(stopped, "block", keys[2], *redis, "--json"))
    assert (block["hash"], block["parent"], block["depth"]) == (keys[2], keys[1], 48)
    (holder,) = block["holders"]
    assert (holder["worker_id"], holder["tiers"], holder["groups"]) == ("w0", ["device"], [0, 2])
    walked = json.loads(cli(stopped, "chain", keys[5], *redis, "--json"))["blocks"]
    assert [b["hash"] for b in walked] == keys[5::-1]
    assert "held by no worker" in cli(stopped, "block", "0x1", *redis, status=1)


def test_a_store_that_is_none_is_left_alone(
    stopped: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    with start_valkey() as empty:
        said = cli(stopped, "workers", "list", "--redis", empty.url, status=1)
        assert "no kvindexd has written to this store" in said
        assert empty("DBSIZE") == 0
    cli(stopped, "workers", "list", "--redis", "http://nowhere", status=2)
    monkeypatch.setattr(offline, "_WITHIN", 0.3)
    gone = cli(stopped, "workers", "list", "--redis", "redis://127.0.0.1:1", status=1)
    assert "the store cannot be read" in gone
