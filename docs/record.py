"""Writes docs/ops.md: the five questions of an operator, each put to a live fleet by one command.

    python docs/record.py

Two workers follow what a real vLLM emitted for a hybrid model (the recordings of `make demo`); then
one engine restarts in place. What stands in the page is what the commands print, but for addresses.
"""

from __future__ import annotations

import base64
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from array import array
from pathlib import Path

import grpc
import msgspec

from kvindexd.demo import DATA
from kvindexd.testing.conformance import Capture
from kvindexd.testing.engine import FakeEngine
from kvindexd.testing.serving import serving, wait_for
from kvindexd.v1 import index_pb2_grpc

ROOT = Path(__file__).parents[1]
MODEL = "kimi-like"
FRAMES = {"w0": ("c_kimi768_default", 2), "w1": ("c_kimi768_dense", 4)}

PAGE = """<!-- Written by docs/record.py: do not edit. -->

# Five questions of an operator

Each is answered by one command. The session below is a recording: two workers serve a hybrid model
(24 MLA and 69 linear-attention layers), `w0` keeps few states of the linear layers, `w1` keeps all;
`prompt.json` has {tokens} tokens and begins as conversations do that both have served.

## Who holds this prompt?

{who}

A character of a strip is one block, or several on long prompts; each group has its own line, and a
hybrid worker reuses only what all of them allow: `w0` holds six blocks of attention, and no state
of the linear layers behind any of them. An index that counts attention alone takes it for as good.

## Why did it go there?

{why}

Best first: `cost` is what must be computed (blocks, weighted) plus the load; see
[picking](picking.md). What was promised and what the engines then reported is in `kvindexd audit`.

## Why are hits zero?

The same prompt as a gateway sent it that puts no BOS token in front:

{zero}

Nothing is held as it is; the changed form that *is* held names the cause.

## Is it current?

{current}

`age` is the time since the last evidence of each worker, `lag` how far queries are behind it.

## What changed after the restart?

The engine of `w0` was restarted in place, under the same address:

{restart}

`epoch` rose, `restarts` counts it, and nothing of the old cache is credited any more.

More: [failure guide](failures.md), [command line](command-line.md), [doctor](doctor.md).
"""


class Session:
    """A daemon, and commands put to it."""

    def __init__(self, address: str, folder: Path, hide: dict[str, str]) -> None:
        self._address = address
        self._folder = folder
        self._hide = hide

    def ask(self, command: str) -> str:
        """One command with its output, as a fenced block."""
        environment = os.environ | {
            "KVINDEXD_SERVER": self._address,
            "COLUMNS": "110",
            "NO_COLOR": "1",
        }
        words = [sys.executable, "-m", "kvindexd.cli.main", *command.split()[1:]]
        done = subprocess.run(  # noqa: S603 - our own program
            words, cwd=self._folder, env=environment, capture_output=True, text=True, timeout=60
        )
        if done.returncode:
            raise SystemExit(f"{command}: status {done.returncode}\n{done.stdout}{done.stderr}")
        text = "\n".join(line.rstrip() for line in done.stdout.strip("\n").splitlines())
        for real, shown in self._hide.items():
            text = text.replace(real, shown)
        return f"```console\n$ {command}\n{text}\n```"


def publish(engine: FakeEngine, name: str, frames: int) -> None:
    """What an engine had emitted up to there, as of now."""
    for frame in Capture(DATA / name).frames[:frames]:
        _, events, *rest = msgspec.msgpack.decode(base64.b64decode(frame["payload"]))
        payload = msgspec.msgpack.encode([time.time(), events, *rest])
        engine.publish_raw(b"", engine.next_seq(), payload)


def record(folder: Path) -> str:
    """The page."""
    tokens = array("I", Capture(DATA / "c_kimi768_default").packed["B"]).tolist()
    (folder / "prompt.json").write_text(json.dumps(tokens))
    (folder / "sent.json").write_text(json.dumps(tokens[1:]))
    with serving(folder) as ready, FakeEngine() as e0, FakeEngine() as e1:
        address = ready["grpc"]
        admin = index_pb2_grpc.KVIndexAdminStub(grpc.insecure_channel(address))
        engines = {"w0": e0, "w1": e1}
        hide = {address: "127.0.0.1:50051"}
        for number, engine in enumerate(engines.values()):
            hide[engine.endpoint()] = f"tcp://10.0.0.{number + 1}:5557"
            hide[engine.replay_endpoint() or "-"] = f"tcp://10.0.0.{number + 1}:5558"
        session = Session(address, folder, hide)
        for number, (name, engine) in enumerate(engines.items()):
            session.ask(
                f"kvindexd workers add {name} --model {MODEL} --address 10.0.0.{number + 1}:8000 "
                f"--kv-events-endpoint {engine.endpoint()} "
                f"--replay-endpoint {engine.replay_endpoint()}"
            )
            engine.wait_subscribed()
            publish(engine, *FRAMES[name])
            wait_for(admin, name, FRAMES[name][1] - 1)
        answers = {
            "who": session.ask("kvindexd explain @prompt.json"),
            "why": session.ask("kvindexd score @prompt.json --explain"),
            "zero": session.ask("kvindexd explain @sent.json"),
            "current": session.ask("kvindexd top --once"),
        }
        e0.restart()
        publish(e0, FRAMES["w0"][0], 1)
        wait_for(admin, "w0", 0)
        answers["restart"] = session.ask("kvindexd workers show w0")
    return PAGE.format(tokens=f"{len(tokens):,}", **answers)


def main() -> None:
    """Write it."""
    with tempfile.TemporaryDirectory() as folder:
        text = record(Path(folder))
    text = re.sub(r"127\.0\.0\.1:\d{5}", "127.0.0.1:50051", text)
    text = re.sub(r"(owner +)\S+:(\d+:\w+)", r"\1engine-host:\2", text)
    (ROOT / "docs" / "ops.md").write_text(text)


if __name__ == "__main__":
    main()
