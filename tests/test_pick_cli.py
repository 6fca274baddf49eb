"""`kvindexd layout` and `kvindexd audit`, against a running daemon where they need one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from daemon import Daemon, serving
from picks import complete, fresh, hold, pick, stored
from typer.testing import CliRunner

from kvindexd.cli.main import app
from kvindexd.testing.engine import FakeEngine
from kvindexd.v1 import index_pb2 as pb

RUN = CliRunner()


def run(*args: str, status: int = 0) -> str:
    result = RUN.invoke(app, args)
    assert result.exit_code == status, result.output
    return result.output


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    folder = str(tmp_path_factory.mktemp("cli"))
    with serving(index__data_dir=folder, pick__drift_minimum=3) as daemon:
        yield daemon


def test_layout_lists_all_six() -> None:
    rows = json.loads(run("layout", "--json"))["layouts"]
    assert {r["layout"]: r["head_major"] for r in rows} == {
        "LBHNC": True,
        "LBNHC": False,
        "LHBNC": True,
        "BLHNC": True,
        "BLNHC": False,
        "BHLNC": True,
    }
    assert "one row per page" in run("layout")


def test_layout_resolves_a_request_with_the_reason() -> None:
    found = json.loads(run("layout", "resolve", "BLNHC", "BLHNC", "--requested", "LBHNC", "--json"))
    assert (found["layout"], found["head_major"]) == ("BLHNC", True)
    assert "same head/token order" in found["reason"]
    assert run("layout", "resolve", "BLNHC", "--requested", "lbhnc").startswith("BLNHC: neither")
    assert run("layout", "resolve", "BLNHC", "BLHNC").startswith("BLNHC: nothing is requested")
    refused = run("layout", "resolve", "BLNHC", "--explicit", "LBHNC", status=1)
    assert "not supported; these are: BLNHC" in refused
    run("layout", "resolve", "NHWC", status=2)


def test_layout_checks_descriptions_and_registered_workers(daemon: Daemon) -> None:
    yes = run("layout", "check", "BLHNC:tp=1,heads=8,block=16", "LBHNC:tp=2,heads=8,block=16")
    assert yes.startswith("yes: pages are cut by KV head")
    with FakeEngine() as p, FakeEngine() as d:
        kv = {"kv_layout": "BLNHC", "num_kv_heads": 8}
        daemon.register("p", p.endpoint(), tp_size=1, **kv)
        daemon.register("d", d.endpoint(), tp_size=2, block_size=16, **kv)
        p.wait_subscribed()
        hold(daemon, p, "p", fresh(1))  # its block size is learned
        server = ("--server", daemon.ready["grpc"])
        said = run("layout", "check", "p", "d#0", "--json", *server, status=1)
        verdict = json.loads(said)
        assert verdict["transferable"] is False
        assert "prefill: BLNHC (one row per page), TP 1, 8 KV heads, blocks of 16" in said
        assert "decode: BLNHC (one row per page), TP 2, 8 KV heads, blocks of 16" in said
        assert "no: " in run(
            "layout", "check", "p", "BLNHC:tp=4,heads=8,block=16", *server, status=1
        )
        assert "nobody" in run("layout", "check", "nobody", "d", *server, status=1)


def test_audit_compares_promises_with_outcomes(daemon: Daemon) -> None:
    server = ("--server", daemon.ready["grpc"])
    assert "no outcomes yet" in run("audit", "right", *server)
    with FakeEngine() as right, FakeEngine() as wrong:
        prompts: dict[str, list[int]] = {}
        for name, engine in (("right", right), ("wrong", wrong)):
            daemon.register(name, engine.endpoint(), replay_endpoint=engine.replay_endpoint())
            engine.wait_subscribed()
            prompts[name] = fresh(10, 1)
            hold(daemon, engine, name, prompts[name])
        for _ in range(4):
            for name, actual in (("right", 160), ("wrong", 0)):
                got = pick(daemon, prompts[name], candidates=[name])
                complete(daemon, got.request_id, cached_tokens=actual, prompt_tokens=161)
        said = run("audit", *server, status=1)
        assert "drifting: 99% of prompt tokens were predicted wrongly" in said
        rows: dict[str, Any] = {
            w["worker_id"]: w
            for w in json.loads(run("audit", "--json", *server, status=1))["workers"]
        }
        assert rows["right"]["predicted_tokens"] == rows["right"]["actual_tokens"] == 640
        assert (rows["right"]["drifting"], rows["wrong"]["drifting"]) == (False, True)
        assert (rows["wrong"]["over"], rows["wrong"]["resyncs"]) == (4, 1)
        run("audit", "right", *server)


def test_audit_compares_the_index_with_a_replay(daemon: Daemon) -> None:
    server = ("--server", daemon.ready["grpc"])
    with FakeEngine() as engine:
        daemon.register("rep", engine.endpoint(), replay_endpoint=engine.replay_endpoint())
        engine.wait_subscribed()
        events = [stored(fresh(n)) for n in (4, 3, 2)]
        for event in events:
            engine.publish([event])
        daemon.until_seq("rep", 2)
        said = run("audit", "rep", "--replay", *server)
        assert "batches 0 to 2, all that it holds" in said
        assert "held by the replay 9, by the index 9" in said
        assert "looked up 9, missing in the index 0" in said
        # The index forgets; the engine's history does not.
        daemon.admin.PurgeWorker(pb.PurgeWorkerRequest(worker_id="rep"), timeout=10)
        daemon.until(lambda: daemon.worker("rep").blocks.get("device", 0) == 0, "purged")
        engine.publish([stored(fresh(1))])
        daemon.until_seq("rep", 3)
        found = json.loads(run("audit", "rep", "--replay", "--json", *server, status=1))
        assert (found["replay_blocks"], found["index_blocks"], found["missing"]) == (10, 1, 9)
        assert "credited with too little" in found["finding"]
        run("audit", "--replay", *server, status=2)
        daemon.register("mute", engine.endpoint())
        assert "no replay_endpoint" in run("audit", "mute", "--replay", *server, status=1)


def test_audit_needs_a_replay_that_answers(daemon: Daemon) -> None:
    server = ("--server", daemon.ready["grpc"])
    with FakeEngine() as engine:
        engine.replay_mode("silent")
        daemon.register("gone", engine.endpoint(), replay_endpoint=engine.replay_endpoint())
        engine.wait_subscribed()
        event = stored(fresh(4))
        daemon.until_seq("gone", engine.publish([event]))
        said = run("audit", "gone", "--replay", *server, status=1)
        assert "no answer" in said
        engine.replay_mode("normal")
        assert "ok" in run("audit", "gone", "--replay", *server)
