"""The example clients, each as its user runs it, against one daemon whose engines we know."""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import trustme
from certificates import HOST, Files, issue
from daemon import Daemon, serving
from picks import fresh, stored

from kvindexd.testing.engine import FakeEngine, free_ports
from kvindexd.v1 import index_pb2 as pb

ROOT = Path(__file__).parent.parent
CLIENTS = ROOT / "examples" / "clients"
BUILD = ROOT / "build" / "clients"
"""Kept between runs: what is compiled or installed for the examples in other languages."""
LIMIT = 4_000
"""Tokens that a prompt may have here."""
SPEC = (ROOT / "docs" / "hash-spec.md").read_text()
VECTORS: list[dict[str, Any]] = json.loads(re.findall(r"```json\n(.*?)```", SPEC, re.S)[-1])

sys.path.insert(0, str(CLIENTS))
import score_by_hash  # noqa: E402 - an example, found by its folder


class Ran(NamedTuple):
    """How a client ended."""

    status: int
    out: str
    err: str

    def rows(self) -> list[dict[str, str]]:
        """The table, wherever it begins."""
        lines = [line.split() for line in self.out.splitlines()]
        at = next(i for i, line in enumerate(lines) if "reusable" in line)
        whole = itertools.takewhile(lambda line: len(line) == len(lines[at]), lines[at + 1 :])
        return [dict(zip(lines[at], line, strict=True)) for line in whole]

    def reusable(self) -> dict[str, int]:
        """Tokens by worker."""
        return {row["worker"]: int(row["reusable"]) for row in self.rows()}


class Fleet:
    """A daemon with the workers a, b and ahead, the last of which names blocks by lookahead."""

    def __init__(self, daemon: Daemon, engines: dict[str, FakeEngine], folder: Path) -> None:
        self.daemon = daemon
        self.engines = engines
        self.folder = folder

    def hold(self, worker: str, tokens: Sequence[int], **more: Any) -> None:
        """Have a worker hold the full blocks of a prompt."""
        event = stored(tokens, **more)
        if worker == "ahead":
            ends = range(16, len(tokens), 16)
            event = stored(tokens[: 16 * len(ends)], **more)
            event["lookahead_token_ids"] = [[tokens[end]] for end in ends]
        self.daemon.until_seq(worker, self.engines[worker].publish([event]))

    def live(self) -> None:
        """Until picks may go to any worker."""
        self.daemon.until(
            lambda: all(s.state == pb.LIVE for s in self.daemon.score(fresh(1)).values()),
            "all live",
        )

    def active(self) -> dict[str, int]:
        """In-flight blocks by worker."""
        return {k: s.active_blocks for k, s in self.daemon.score(fresh(1)).items()}

    def file(self, content: Any) -> str:
        """A file for --tokens."""
        text = content if isinstance(content, str) else json.dumps(content)
        path = self.folder / f"{hashlib.sha256(text.encode()).hexdigest()[:16]}.json"
        path.write_text(text)
        return str(path)

    def counted(self, name: str) -> float:
        """A counter's sum over the labels that `name` leaves open."""
        found = re.findall(rf"^kvindexd_{name} (\S+)$", self.daemon.page(), re.M)
        return sum(map(float, found))

    def run(self, command: Sequence[str], content: Any, *flags: str, address: str = "") -> Ran:
        """A client with a prompt file."""
        address = address or self.daemon.ready["grpc"]
        given = ["--address", address, "--model", "m", "--deadline", "10", *flags]
        if content is not None:
            given += ["--tokens", self.file(content)]
        done = subprocess.run([*command, *given], capture_output=True, text=True, timeout=30)
        return Ran(done.returncode, done.stdout, done.stderr)


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    folder = tmp_path_factory.mktemp("clients")
    settings: dict[str, Any] = {"limits.max_prompt_tokens": LIMIT}
    with (
        FakeEngine() as a,
        FakeEngine() as b,
        FakeEngine() as ahead,
        serving(index__data_dir=str(folder / "data"), ext_proc__listen="", **settings) as daemon,
    ):
        engines = {"a": a, "b": b, "ahead": ahead}
        for number, (name, engine) in enumerate(engines.items(), 1):
            daemon.register(name, engine.endpoint(), address=f"10.0.0.{number}:8000")
            engine.wait_subscribed()
        fleet = Fleet(daemon, engines, folder)
        fleet.hold("ahead", fresh(1, 1))
        fleet.live()
        yield fleet


# -- each example, in each language -----------------------------------------------------------


def python(name: str) -> list[str]:
    return [sys.executable, str(CLIENTS / name)]


@functools.cache
def node() -> list[str]:
    """The Node client, its packages installed once per lock file."""
    for tool in ("node", "npm"):
        if shutil.which(tool) is None:
            pytest.skip(f"{tool} is not installed")
    version = subprocess.run(["node", "--version"], capture_output=True, text=True).stdout
    if int(version.strip("v\n").split(".")[0]) < 20:
        pytest.skip(f"node {version.strip()} is older than 20")
    lock = (CLIENTS / "node" / "package-lock.json").read_bytes()
    folder = BUILD / f"node-{hashlib.sha256(lock).hexdigest()[:12]}"
    if not (folder / "installed").exists():
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        for name in ("package.json", "package-lock.json"):
            shutil.copy(CLIENTS / "node" / name, folder)
        install = ["npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund"]
        try:
            done = subprocess.run(install, cwd=folder, capture_output=True, text=True, timeout=60)
        except subprocess.TimeoutExpired:
            pytest.skip("npm ci did not end within 60 s")
        if done.returncode:
            pytest.skip(f"npm ci cannot install the packages here: {done.stderr.strip()[-300:]}")
        (folder / "installed").touch()
    shutil.copy(CLIENTS / "node" / "score.js", folder)
    return ["node", str(folder / "score.js"), "--proto", str(ROOT / "proto")]


@functools.cache
def cpp() -> list[str]:
    """The C++ client, compiled when its source or the proto has changed."""
    for tool in ("g++", "make", "protoc", "grpc_cpp_plugin", "pkg-config"):
        if shutil.which(tool) is None:
            pytest.skip(f"{tool} is not installed")
    known = subprocess.run(["pkg-config", "--exists", "grpc++", "protobuf"], check=False)
    if known.returncode:
        pytest.skip("pkg-config knows no grpc++ and protobuf: libgrpc++-dev is not installed")
    make = ["make", "-j2", f"BUILD={BUILD / 'cpp'}", "CXXFLAGS=-O0 -Werror"]
    done = subprocess.run(make, cwd=CLIENTS / "cpp", capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return [str(BUILD / "cpp" / "score")]


WHOLE = {"python": lambda: python("score_sync.py"), "node": node, "cpp": cpp}
"""Clients that score, pick and complete."""


@pytest.mark.parametrize("language", WHOLE)
def test_score_pick_and_complete(fleet: Fleet, language: str) -> None:
    command = WHOLE[language]()
    tokens = fresh(20, extra=3)
    fleet.hold("a", tokens[:160])
    fleet.hold("b", tokens[:96])
    picks = fleet.counted(r"picks_total\{[^}]*a#0[^}]*\}")

    ran = fleet.run(command, tokens)

    assert ran.status == 0, ran.err
    assert ran.err == ""
    assert ran.out.startswith("323 tokens, 20 blocks\n")
    assert ran.reusable() == {"a": 160, "b": 96, "ahead": 0}
    assert [row["worker"] for row in ran.rows()] == ["a", "b", "ahead"]
    assert {row["address"] for row in ran.rows()} == {f"10.0.0.{n}:8000" for n in (1, 2, 3)}
    assert {row["state"] for row in ran.rows()} == {"LIVE"}
    assert "picked a at 10.0.0.1:8000, after it 10.0.0.2:8000, 10.0.0.3:8000\n" in ran.out
    assert re.search(r"^completed [0-9a-f-]{32,36}$", ran.out, re.M)
    assert fleet.counted(r"picks_total\{[^}]*a#0[^}]*\}") == picks + 1
    assert not any(fleet.active().values())


@pytest.mark.parametrize("language", WHOLE)
def test_what_clients_say_when_refused(fleet: Fleet, language: str) -> None:
    command = WHOLE[language]()
    unknown = fleet.run(command, [1, 2, 3], "--model", "other")
    assert unknown.status == 1
    assert "NOT_FOUND" in unknown.err
    assert "known models: m" in unknown.err
    assert "kvindexd workers add" in unknown.err

    away = fleet.run(command, [1, 2, 3], address=f"127.0.0.1:{free_ports(1)}")
    assert away.status == 1
    assert "UNAVAILABLE" in away.err
    assert "kvindexd workers list" in away.err

    shed = r'score_requests_total\{code="RESOURCE_EXHAUSTED"\}'
    before = fleet.counted(shed)
    long = fleet.run(command, fresh(LIMIT // 16 + 1))
    assert long.status == 1
    assert "RESOURCE_EXHAUSTED" in long.err
    assert "limits.max_prompt_tokens = 4000" in long.err
    # The policy in the service config is in force: the call was tried four times.
    assert fleet.counted(shed) == before + 4

    for wrong in ('["a"]', "[4294967296]"):
        ran = fleet.run(command, wrong)
        assert ran.status == 1
        assert "--tokens" in ran.err
    assert fleet.run(command, None).status == 2
    assert fleet.run(command, [1], "--unheard-of").status == 2


@pytest.mark.parametrize("language", WHOLE)
def test_a_deadline_ends_a_call(fleet: Fleet, language: str) -> None:
    command = WHOLE[language]()
    fleet.daemon.pause()
    try:
        ran = fleet.run(command, [1, 2, 3], "--deadline", "0.3")
    finally:
        fleet.daemon.resume()
    assert ran.status == 1
    # Before there is a connection, some clients call the same thing UNAVAILABLE.
    assert "DEADLINE_EXCEEDED" in ran.err or "UNAVAILABLE" in ran.err


def test_what_the_engine_reported_is_told(fleet: Fleet) -> None:
    tokens = fresh(8)
    fleet.hold("b", tokens)
    outcomes = r'predicted_vs_actual_tokens_count\{worker="b#0"\}'
    before = fleet.counted(outcomes)
    assert fleet.run(python("score_sync.py"), tokens, "--cached", "112").status == 0
    assert fleet.counted(outcomes) == before + 1


SECRET = "0123456789abcdef-score"
CLIENTS_OF_ALL_KINDS = {
    **WHOLE,
    "python, asyncio": lambda: python("score_async.py"),
    "python, by hash": lambda: python("score_by_hash.py"),
}


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Daemon, str]]:
    """A daemon with TLS that lets nobody in without a token; the file of its authority."""
    folder = tmp_path_factory.mktemp("guarded")
    ca = trustme.CA()
    files = Files(folder)
    files.write(issue(ca, HOST), ca)
    settings: dict[str, Any] = {
        "tls.cert_file": str(files.cert),
        "tls.key_file": str(files.key),
        "tls.listeners": ["server"],
        "auth.tokens": {"score": [SECRET]},
        "index.data_dir": str(folder / "data"),
        "ext_proc.listen": "",
        "metrics.listen": "",
    }
    with FakeEngine() as engine:
        worker = {
            "worker_id": "w",
            "model": "m",
            "address": "10.0.0.1:8000",
            "kv_events_endpoint": engine.endpoint(),
        }
        with serving(**settings, workers=[worker]) as daemon:
            engine.wait_subscribed()
            yield daemon, str(files.ca)


@pytest.mark.parametrize("kind", CLIENTS_OF_ALL_KINDS)
def test_tls_and_tokens(
    fleet: Fleet, guarded: tuple[Daemon, str], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = CLIENTS_OF_ALL_KINDS[kind]()
    daemon, ca = guarded
    address = daemon.ready["grpc"]
    monkeypatch.delenv("KVINDEXD_TOKEN", raising=False)
    nobody = fleet.run(command, fresh(2), "--ca", ca, address=address)
    assert nobody.status == 1
    assert "UNAUTHENTICATED" in nobody.err
    assert "KVINDEXD_TOKEN" in nobody.err
    monkeypatch.setenv("KVINDEXD_TOKEN", SECRET)
    known = fleet.run(command, fresh(2), "--ca", ca, address=address)
    assert known.status == 0, known.err
    assert "10.0.0.1:8000" in known.out


# -- many prompts -----------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["stream", "batch", "calls"])
def test_many_prompts_at_once(fleet: Fleet, way: str) -> None:
    prompts = [fresh(4, extra=n % 16) for n in range(100)]
    for worker in "ab":
        held = [stored(p) for n, p in enumerate(prompts) if "ab"[n % 2] == worker]
        fleet.daemon.until_seq(worker, fleet.engines[worker].publish(held))

    ran = fleet.run(python("score_async.py"), prompts, "--by", way)

    assert ran.status == 0, ran.err
    rows = ran.rows()
    assert [int(row["prompt"]) for row in rows] == list(range(100))
    assert [int(row["tokens"]) for row in rows] == list(map(len, prompts))
    assert "".join(row["best"] for row in rows) == "ab" * 50
    # The last token is computed anyway, and a block with it where the prompt ends with the block.
    assert [int(row["reusable"]) for row in rows] == [48 if n % 16 == 0 else 64 for n in range(100)]


@pytest.mark.parametrize("way", ["stream", "batch", "calls"])
def test_many_prompts_of_which_one_is_refused(fleet: Fleet, way: str) -> None:
    prompts = [fresh(1), fresh(LIMIT // 16 + 1), fresh(1)]
    ran = fleet.run(python("score_async.py"), prompts, "--by", way)
    assert (ran.status, ran.out) == (1, "")
    assert "RESOURCE_EXHAUSTED" in ran.err
    assert "limits.max_prompt_tokens" in ran.err


# -- keys that the client computes ------------------------------------------------------------


@pytest.mark.parametrize("vector", VECTORS, ids=lambda v: v["name"])
def test_the_clients_keys_are_those_of_the_specification(vector: dict[str, Any]) -> None:
    lora, salt = vector.get("lora_name", ""), vector.get("cache_salt", "")
    items = [(name, at) for name, at in vector.get("items", [])]
    tokens, unit = vector["tokens"], vector["unit"]
    keys = score_by_hash.chain_keys(tokens, lora, salt, items, unit)
    assert [f"{k:016x}" for k in keys] == vector["keys"]
    if "lookahead" in vector:
        ahead = score_by_hash.lookahead(tokens, keys, unit)
        assert [f"{k:016x}" for k in ahead] == vector["lookahead"]


@pytest.mark.parametrize("worker", ["a", "ahead"])
def test_keys_and_token_ids_find_the_same(fleet: Fleet, worker: str) -> None:
    tokens = fresh(20, extra=5)
    fleet.hold(worker, tokens[:200])
    ran = fleet.run(python("score_by_hash.py"), tokens)
    assert ran.status == 0, ran.err
    assert ran.reusable() == {"a": 0, "b": 0, "ahead": 0} | {worker: 192}
    assert ran.out.endswith("the same by token ids\n")
    by_keys, by_tokens = map(int, re.findall(r"(\d+) (?:bytes )?by", ran.out))
    assert by_keys < by_tokens / 3


def test_adapter_and_salt_are_inside_the_keys(fleet: Fleet) -> None:
    tokens = fresh(4, extra=1)
    fleet.hold("b", tokens, lora_name="größe", lora_id=7)
    with_name = fleet.run(python("score_by_hash.py"), tokens, "--lora", "größe")
    assert (with_name.status, with_name.reusable()["b"]) == (0, 64)
    salted = fleet.run(python("score_by_hash.py"), tokens, "--lora", "größe", "--salt", "s")
    assert (salted.status, salted.reusable()["b"]) == (0, 0)


def test_a_difference_is_a_finding(capsys: pytest.CaptureFixture[str]) -> None:
    one = [pb.WorkerScore(worker_id="w", reusable_tokens=0, reason="page size 8")]
    other = [pb.WorkerScore(worker_id="w", reusable_tokens=16)]
    assert score_by_hash.compared(one, other) == 1
    assert "w: 0 by keys, 16 by token ids: page size 8" in capsys.readouterr().err
