"""The engine stand-in as a process: one JSON command per line on stdin, one JSON answer on stdout.

The first line out is `{"ready": true, "pid": ..., "endpoints": [...], "replay_endpoints": [...]}`.
A command is `{"op": NAME, ...arguments}`; the answer `{"ok": true, ...}` or `{"ok": false,
"error": TEXT}`. The process ends with `stop`, or when stdin closes. Byte strings are `{"hex":
"..."}` in events and base64 in `payload`.
"""

from __future__ import annotations

import argparse
import base64
import json
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any, TextIO

from kvindexd.testing.blockpool import BlockPool, Group, Prompt
from kvindexd.testing.engine import FakeEngine
from kvindexd.testing.wire import load_capture

_FIELDS = {"block_hashes", "parent_block_hash"}


def _bytes_or_int(value: Any) -> Any:
    if isinstance(value, list):
        return [_bytes_or_int(one) for one in value]
    if isinstance(value, dict) and set(value) == {"hex"}:
        return bytes.fromhex(value["hex"])
    return value


def _event(raw: dict[str, Any]) -> dict[str, Any]:
    return {k: _bytes_or_int(v) if k in _FIELDS else v for k, v in raw.items()}


class Control:
    """Carries out commands on an engine and, per rank, on a block pool."""

    def __init__(self, engine: FakeEngine, pools: Sequence[BlockPool]) -> None:
        self._engine = engine
        self._pools = pools

    def carry_out(self, command: dict[str, Any]) -> dict[str, Any]:
        """Run one command. Raises ValueError for an unknown one, and whatever it raises."""
        arguments = dict(command)
        name = arguments.pop("op", None)
        operation: Callable[..., dict[str, Any]] | None = getattr(self, f"op_{name}", None)
        if operation is None:
            known = ", ".join(sorted(n[3:] for n in dir(self) if n.startswith("op_")))
            raise ValueError(f"unknown op {name!r}: expected one of {known}, stop")
        return operation(**arguments)

    def op_publish(
        self, events: list[dict[str, Any]], rank: int = 0, ts: float | None = None, repeat: int = 1
    ) -> dict[str, Any]:
        decoded = [_event(e) for e in events]
        for _ in range(repeat):
            seq = self._engine.publish(decoded, rank, ts)
        return {"seq": seq}

    def op_publish_raw(
        self, seq: int, payload: str, topic: str = "", rank: int = 0
    ) -> dict[str, Any]:
        self._engine.publish_raw(topic, seq, base64.b64decode(payload, validate=True), rank)
        return {}

    def op_send_parts(self, parts: list[str], rank: int = 0) -> dict[str, Any]:
        self._engine.send_parts([base64.b64decode(p, validate=True) for p in parts], rank)
        return {}

    def op_garbage(self, kind: str, rank: int = 0) -> dict[str, Any]:
        self._engine.garbage(kind, rank)
        return {}

    def op_play(
        self, folder: str, rank: int = 0, src: str | None = None, first: int = 0, last: int = -1
    ) -> dict[str, Any]:
        """Publish lines `first..last` (inclusive, -1 = the end) of a capture."""
        frames = load_capture(folder, src)
        end = len(frames) if last < 0 else last + 1
        return {"frames": self._engine.play(frames[first:end], rank)}

    def op_run(
        self,
        tokens: list[int],
        rank: int = 0,
        output: Sequence[int] = (),
        salt: str | None = None,
        lora: Sequence[Any] | None = None,
        publish: bool = True,
    ) -> dict[str, Any]:
        """Serve a prompt from the rank's block pool, and publish the events as one batch."""
        adapter = (str(lora[0]), int(lora[1]), str(lora[2])) if lora else None
        reused = self._pools[rank].run(Prompt(tuple(tokens), salt, adapter), output)
        seq = self._flush(rank) if publish else None
        return {"reused": reused, "seq": seq}

    def op_resident(
        self, tokens: list[int], rank: int = 0, salt: str | None = None
    ) -> dict[str, Any]:
        prompt = Prompt(tuple(tokens), salt)
        pool = self._pools[rank]
        return {"resident": pool.resident(prompt), "attention_run": pool.attention_run(prompt)}

    def op_reset(self, rank: int = 0, publish: bool = False) -> dict[str, Any]:
        """Reset the pool; as with vLLM the event goes out with the next batch, unless told."""
        done = self._pools[rank].reset()
        return {"reset": done, "seq": self._flush(rank) if publish else None}

    def _flush(self, rank: int) -> int | None:
        events = self._pools[rank].take_events()
        return self._engine.publish(events, rank) if events else None

    def op_restart(self, rank: int | None = None) -> dict[str, Any]:
        for one in range(len(self._pools)) if rank is None else (rank,):
            self._pools[one].reset()
            self._pools[one].take_events()
        self._engine.restart(rank)
        return {}

    def op_drop_next(
        self, count: int = 1, rank: int = 0, replayable: bool = True
    ) -> dict[str, Any]:
        self._engine.drop_next(count, rank, replayable=replayable)
        return {}

    def op_duplicate_next(self, count: int = 1, rank: int = 0) -> dict[str, Any]:
        self._engine.duplicate_next(count, rank)
        return {}

    def op_swap_next(self, rank: int = 0) -> dict[str, Any]:
        self._engine.swap_next(rank)
        return {}

    def op_replay_mode(self, mode: str, rank: int = 0) -> dict[str, Any]:
        self._engine.replay_mode(mode, rank)
        return {}

    def op_replay_requests(self, rank: int = 0) -> dict[str, Any]:
        return {"starts": self._engine.replay_requests(rank)}

    def op_wait_subscribed(
        self, count: int = 1, rank: int | None = None, timeout: float = 10.0
    ) -> dict[str, Any]:
        self._engine.wait_subscribed(count, rank, timeout)
        return {}

    def op_state(self) -> dict[str, Any]:
        return {
            "next_seq": [one.next_seq for one in self._engine.ranks],
            "blocks_held": [pool.blocks_held for pool in self._pools],
        }


def serve(control: Control, commands: TextIO, answers: TextIO) -> None:
    """Until `stop` or the end of input."""
    for line in commands:
        stop = False
        try:
            command = json.loads(line)
            stop = command.get("op") == "stop"
            answer = {"ok": True, **({} if stop else control.carry_out(command))}
        except Exception as e:  # a bad command costs itself; the caller gets the reason
            answer = {"ok": False, "error": f"{type(e).__name__}: {e}"}
        print(json.dumps(answer), file=answers, flush=True)
        if stop:
            return


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m kvindexd.testing.engine",
        description="An engine stand-in on real sockets, driven by JSON lines on stdin.",
    )
    parser.add_argument("--port", type=int, default=0, help="events of rank 0; 0 = any free port")
    parser.add_argument(
        "--replay-port", type=int, default=0, help="replay of rank 0; 0 = any, -1 = no replay"
    )
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--dp-size", type=int, default=1)
    parser.add_argument("--topic", default="")
    parser.add_argument("--buffer-steps", type=int, default=10_000)
    parser.add_argument("--connect", action="store_true", help="connect to --port, do not bind it")
    parser.add_argument("--num-blocks", type=int, default=256, help="blocks in each rank's pool")
    parser.add_argument(
        "--groups",
        default='[{"kind": "full_attention"}]',
        help="JSON list of KV-cache groups: kind, block_size, window, chunk, sparse",
    )
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point of `python -m kvindexd.testing.engine`."""
    args = _parser().parse_args(argv)
    groups = [Group(**g) for g in json.loads(args.groups)]
    pools = [BlockPool(groups, args.num_blocks) for _ in range(args.dp_size)]
    with FakeEngine(
        port=args.port,
        replay_port=None if args.replay_port < 0 else args.replay_port,
        host=args.host,
        dp_size=args.dp_size,
        topic=args.topic,
        buffer_steps=args.buffer_steps,
        connect=args.connect,
    ) as engine:
        ready = {
            "ready": True,
            "pid": os.getpid(),
            "endpoints": [engine.endpoint(r) for r in range(args.dp_size)],
            "replay_endpoints": [engine.replay_endpoint(r) for r in range(args.dp_size)],
        }
        print(json.dumps(ready), flush=True)
        serve(Control(engine, pools), sys.stdin, sys.stdout)
