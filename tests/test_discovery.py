"""Discovery and reloading in a real daemon: files, pods, SIGHUP."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import tokenizer_files
from daemon import Daemon, serving
from kubestub import ThreadedKubeStub, pod
from reliability import QUICK, matched, stored

from kvindexd.testing.engine import FakeEngine
from kvindexd.v1 import index_pb2 as pb

POD_WORKER = {
    "model": "m",
    "worker_id": "{label[worker]}",
    "address": "{pod_ip}:8000",
    "kv_events_endpoint": "tcp://{pod_ip}:{annotation[port]}",
}
STATIC = """
[[workers]]
worker_id = "{id}"
model = "files"
address = "h:1"
kv_events_endpoint = "tcp://127.0.0.1:1"
"""


@pytest.fixture(scope="module")
def kube() -> Iterator[ThreadedKubeStub]:
    with ThreadedKubeStub().serving() as stub:
        yield stub


class Fleet:
    """One daemon with every source, and the files that it reads."""

    def __init__(self, folder: Path, kube: ThreadedKubeStub) -> None:
        self.config = folder / "kvindexd.toml"
        self.workers = folder / "workers.toml"
        self.more = folder / "more.json"
        self.kube = kube
        self.write(log="info")
        self.workers.write_text(STATIC.format(id="static"))
        self.more.write_text("[]")
        self.daemon: Daemon = None  # type: ignore[assignment]

    def write(self, text: str = "", **values: str) -> None:
        """The configuration file: a level of the log, and more text."""
        level, heartbeat = values.get("log", "info"), values.get("heartbeat", "0.25")
        self.config.write_text(
            f'[log]\nlevel = "{level}"\n[ingest]\nheartbeat = {heartbeat}\n'
            f"[discovery]\nfiles = {json.dumps([str(self.workers), str(self.more)])}\n"
            "file_interval = 0.05\nresync = 0.5\n"
            "[[discovery.kubernetes]]\n"
            f'selector = "app=vllm"\nnamespace = "ns"\nserver = "{self.kube.stub.url}"\n'
            'token_file = ""\nca_file = ""\n'
            f"worker = {_toml(POD_WORKER)}\n" + text
        )

    def hang_up(self) -> None:
        """SIGHUP; returns when it has been dealt with."""
        before = self.reloads()
        assert self.daemon.process is not None
        self.daemon.process.send_signal(signal.SIGHUP)
        self.daemon.until(lambda: self.reloads() > before, "the reload")

    def reloads(self) -> float:
        """How many there were."""
        outcomes = ("done", "partly", "failed")
        return sum(self.metric("reloads_total", outcome=outcome) for outcome in outcomes)

    def ids(self) -> set[str]:
        """Everything registered."""
        request = pb.ListWorkersRequest(include_stale=True)
        return {w.worker_id for w in self.daemon.admin.ListWorkers(request, timeout=10).workers}

    def until_ids(self, wanted: set[str]) -> None:
        self.daemon.until(lambda: self.ids() == wanted, f"workers {wanted}")

    def metric(self, name: str, **labels: str) -> float:
        """One sample of the metrics page."""
        for line in self.daemon.page().splitlines():
            found = re.fullmatch(r"kvindexd_(\w+)(?:\{(.*)\})? (\S+)", line)
            if found and found[1] == name:
                has = dict(re.findall(r'(\w+)="([^"]*)"', found[2] or ""))
                if has == labels:
                    return float(found[3])
        return 0.0


def _toml(table: dict[str, str]) -> str:
    return "{" + ", ".join(f"{k} = {json.dumps(v)}" for k, v in table.items()) + "}"


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory, kube: ThreadedKubeStub) -> Iterator[Fleet]:
    folder = tmp_path_factory.mktemp("discovery")
    made = Fleet(folder, kube)
    settings = QUICK | {"index.data_dir": str(folder / "data"), "config": str(made.config)}
    settings["log.repeat_seconds"] = 0
    settings.pop("ingest.heartbeat", None)  # the file's, for a test to change
    with serving(**settings) as daemon:
        made.daemon = daemon
        made.until_ids({"static"})
        yield made


def test_a_file_is_followed_and_a_broken_one_changes_nothing(fleet: Fleet) -> None:
    source = f"file:{fleet.workers}"
    assert fleet.daemon.worker("static").source == source
    assert fleet.metric("discovery_workers", source=source) == 1
    fleet.workers.write_text(STATIC.format(id="static") + STATIC.format(id="second"))
    fleet.until_ids({"static", "second"})

    broken = STATIC.format(id="static").replace("model", "modell")
    fleet.workers.write_text(broken)
    said = fleet.daemon.until(lambda: fleet.daemon.events("discovery_failed"), "a complaint")
    fleet.daemon.until(
        lambda: fleet.metric("discovery_errors_total", source=source) >= 3, "three looks"
    )
    assert "did you mean workers[0].model?" in said[0]["error"]
    assert said[0]["source"] == source
    assert len(fleet.daemon.events("discovery_failed")) == 1  # logged once, counted each time
    assert fleet.ids() == {"static", "second"}
    fleet.workers.unlink()
    fleet.daemon.until(lambda: len(fleet.daemon.events("discovery_failed")) == 2, "a complaint")
    assert fleet.ids() == {"static", "second"}

    fleet.workers.write_text(STATIC.format(id="static"))
    fleet.until_ids({"static"})
    assert fleet.daemon.events("discovery_works_again")
    gone = fleet.daemon.events("worker_gone")[-1]
    assert (gone["worker"], gone["source"]) == ("second#0", source)


def test_the_first_owner_keeps_a_worker_until_it_lets_go(fleet: Fleet) -> None:
    entry = {
        "worker_id": "static",
        "model": "more",
        "address": "h:2",
        "kv_events_endpoint": "tcp://127.0.0.1:2",
    }
    other = f"file:{fleet.more}"
    fleet.more.write_text(json.dumps([entry]))
    conflict = fleet.daemon.until(lambda: fleet.daemon.events("discovery_conflict"), "a conflict")
    assert conflict[0]["owner"] == f"file:{fleet.workers}"
    assert conflict[0]["source"] == other
    assert fleet.metric("discovery_conflicts", source=other) == 1
    assert fleet.daemon.worker("static").model == "files"

    fleet.workers.write_text("workers = []\n")
    fleet.daemon.until(lambda: fleet.daemon.worker("static").model == "more", "the second owner")
    assert len(fleet.daemon.events("discovery_conflict")) == 1
    fleet.more.write_text('{"workers": []}')
    fleet.until_ids(set())
    fleet.workers.write_text(STATIC.format(id="static"))
    fleet.until_ids({"static"})


def test_what_a_call_registered_is_not_touched(fleet: Fleet) -> None:
    fleet.daemon.register("by-call", "tcp://127.0.0.1:3")
    assert fleet.daemon.worker("by-call").source == ""
    fleet.hang_up()  # compares everything that is registered
    assert fleet.ids() == {"static", "by-call"}
    fleet.daemon.admin.DeregisterWorker(pb.DeregisterWorkerRequest(worker_id="by-call"))
    # What a source finds is registered again when somebody else removes it.
    fleet.daemon.admin.DeregisterWorker(pb.DeregisterWorkerRequest(worker_id="static"))
    fleet.until_ids({"static"})


def _engine_pod(name: str, engine: FakeEngine, worker: str, **more: Any) -> dict[str, Any]:
    port = engine.endpoint().rpartition(":")[2]
    return pod(
        name,
        "127.0.0.1",
        labels={"worker": worker},
        annotations={"port": port},
        **more,
    )


def test_a_pod_that_takes_over_an_address_starts_empty(fleet: Fleet) -> None:
    with FakeEngine(replay_port=None) as engine:
        fleet.kube(lambda s: s.apply(_engine_pod("old", engine, "w")))
        engine.wait_subscribed()
        engine.publish([stored(0, 3)])
        fleet.daemon.until_seq("w", 0)
        assert matched(fleet.daemon, 3) == 3
        first = fleet.daemon.worker("w")
        assert (first.instance, first.source) == ("uid-old", "kubernetes:ns/app=vllm")

        # Another pod with the old one's address and name, in one step.
        def swap(stub: Any) -> None:
            stub.delete("old")
            stub.apply(_engine_pod("new", engine, "w"))

        fleet.kube(swap)
        second = fleet.daemon.until(
            lambda: (w := fleet.daemon.worker("w")).instance == "uid-new" and w, "the successor"
        )
        assert second.epoch > first.epoch
        assert matched(fleet.daemon, 3) <= 0

        def heard() -> bool:
            engine.publish([stored(0, 1)])
            return fleet.daemon.worker("w").last_seq > 0

        fleet.daemon.until(heard, "an event of the successor")
        assert matched(fleet.daemon, 3) == 1  # the new one's block, and no old one

        # Without any event in between: the same pod name, another uid.
        def recreate(stub: Any) -> None:
            stub.apply(_engine_pod("new", engine, "w", uid="uid-newer"))

        fleet.kube(recreate)
        third = fleet.daemon.until(
            lambda: (w := fleet.daemon.worker("w")).instance == "uid-newer" and w, "the next one"
        )
        assert third.epoch > second.epoch
        fleet.kube(
            lambda s: s.apply(_engine_pod("new", engine, "w", uid="uid-newer", deleting=True))
        )
        fleet.daemon.until(lambda: fleet.daemon.worker("w").state == pb.DRAINING, "draining")
        fleet.kube(lambda s: s.delete("new"))
        fleet.until_ids({"static"})
        with pytest.raises(grpc.RpcError):
            fleet.daemon.worker("w")


def test_hang_up_reloads_what_can_change(fleet: Fleet) -> None:
    configured = """
        [[workers]]
        worker_id = "configured"
        model = "m"
        address = "h:3"
        kv_events_endpoint = "tcp://127.0.0.1:3"
    """
    fleet.write(configured, log="warning")
    fleet.hang_up()
    fleet.until_ids({"static", "configured"})
    assert fleet.daemon.worker("configured").source == "config"
    assert not fleet.daemon.events("restart_needed")
    # Of the level "warning" nothing is told of it; of "info" it is.
    said = fleet.daemon.events("reloaded")
    assert all(record["changed"] == [] for record in said)
    fleet.write(configured)
    fleet.hang_up()
    fleet.daemon.until(
        lambda: fleet.daemon.events("reloaded")[len(said) :], "the level to be info again"
    )
    assert fleet.daemon.events("reloaded")[-1]["changed"] == ["log.level"]


def test_hang_up_reloads_limits_and_tokenizers(fleet: Fleet, tmp_path: Path) -> None:
    def ask(**content: Any) -> grpc.StatusCode:
        request = pb.ScoreWorkersRequest(prompt=pb.Prompt(model="files", **content))
        try:
            fleet.daemon.index.ScoreWorkers(request, timeout=10)
        except grpc.RpcError as e:
            return e.code()
        return grpc.StatusCode.OK

    ids = {"tokens": pb.TokenIds(ids=range(100))}
    assert ask(**ids) is grpc.StatusCode.OK
    assert ask(text="hello") is grpc.StatusCode.FAILED_PRECONDITION
    tokenizer_files.make(tmp_path / "tokenizer", None)
    models = _toml({"files": str(tmp_path / "tokenizer")})
    fleet.write(f"[limits]\nmax_prompt_tokens = 99\n[tokens]\nmodels = {models}\n")
    fleet.hang_up()
    assert ask(**ids) is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert ask(text="hello") is grpc.StatusCode.OK
    assert not fleet.daemon.events("restart_needed")
    fleet.write()
    fleet.hang_up()
    assert ask(**ids) is grpc.StatusCode.OK
    assert ask(text="hello") is grpc.StatusCode.FAILED_PRECONDITION


def test_hang_up_with_a_broken_file_changes_nothing(fleet: Fleet) -> None:
    fleet.config.write_text("[log]\nlevel = 5\n")
    fleet.hang_up()
    failed = fleet.daemon.until(lambda: fleet.daemon.events("reload_failed"), "a complaint")[-1]
    assert "log.level is 5" in failed["error"]
    assert fleet.ids() == {"static"}
    assert fleet.metric("reloads_total", outcome="failed") == 1


def test_hang_up_names_what_needs_a_restart(fleet: Fleet) -> None:
    fleet.write("[limits]\nfeed_maxlen = 200000\n", heartbeat="0.3")
    fleet.hang_up()
    (warning,) = fleet.daemon.until(lambda: fleet.daemon.events("restart_needed"), "a warning")
    assert set(warning["keys"]) == {"limits.feed_maxlen", "ingest.heartbeat"}
    fleet.until_ids({"static"})  # the configured one is no longer configured


def test_hang_up_adds_and_removes_sources(fleet: Fleet, tmp_path: Path) -> None:
    extra = tmp_path / "extra.yaml"
    extra.write_text(
        "- worker_id: by-yaml\n  model: m\n  address: h:4\n"
        "  kv_events_endpoint: tcp://127.0.0.1:4\n"
    )
    fleet.write()
    text = fleet.config.read_text().replace(json.dumps(str(fleet.more)), json.dumps(str(extra)))
    fleet.config.write_text(text)
    fleet.hang_up()
    fleet.until_ids({"static", "by-yaml"})
    assert fleet.metric("discovery_workers", source=f"file:{extra}") == 1
    fleet.write()
    fleet.hang_up()
    fleet.until_ids({"static"})


def test_what_disappeared_while_nobody_looked_is_swept(fleet: Fleet) -> None:
    fleet.more.write_text(
        json.dumps(
            [
                {
                    "worker_id": "old",
                    "model": "m",
                    "address": "h:5",
                    "kv_events_endpoint": "tcp://127.0.0.1:5",
                }
            ]
        )
    )
    fleet.until_ids({"static", "old"})
    fleet.daemon.stop()
    fleet.more.write_text("[]")
    fleet.daemon.start()
    fleet.until_ids({"static"})
