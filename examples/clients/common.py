"""What the Python examples share: the channel's retries, what an error asks for, and a table."""

from __future__ import annotations

import argparse
import json
import os
import struct
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grpc

from kvindexd.v1 import index_pb2 as pb

# gRPC itself retries by this, in every language. UNAVAILABLE: kvindexd restarts, or no worker is
# live just now. RESOURCE_EXHAUSTED: it sheds load and asks to be tried again in a few milliseconds.
RETRIES = {
    "methodConfig": [
        {
            "name": [{"service": "kvindexd.v1.KVIndex"}],
            "retryPolicy": {
                "maxAttempts": 4,
                "initialBackoff": "0.02s",
                "maxBackoff": "0.5s",
                "backoffMultiplier": 3,
                "retryableStatusCodes": ["UNAVAILABLE", "RESOURCE_EXHAUSTED"],
            },
        }
    ]
}
CHANNEL_OPTIONS = [("grpc.service_config", json.dumps(RETRIES))]

ADVICE = {
    grpc.StatusCode.NOT_FOUND: (
        "no worker of this model is registered; the message lists the models that are "
        "known: correct --model, or add the worker (kvindexd workers add)"
    ),
    grpc.StatusCode.UNAVAILABLE: (
        "nothing answers at --address, or no worker can take the request; see whether kvindexd "
        "runs and what `kvindexd workers list` says; a gateway now uses its own policy"
    ),
    grpc.StatusCode.RESOURCE_EXHAUSTED: (
        "still refused after 4 attempts: the prompt is longer than limits.max_prompt_tokens, or "
        "kvindexd is overloaded; the message says which; a gateway now uses its own policy"
    ),
    grpc.StatusCode.DEADLINE_EXCEEDED: (
        "no answer in time; a gateway now uses its own policy, a person may raise --deadline"
    ),
    grpc.StatusCode.INVALID_ARGUMENT: "the request is wrong; the message names the field",
    grpc.StatusCode.UNAUTHENTICATED: (
        "kvindexd wants to know who asks: set KVINDEXD_TOKEN to a token of role score"
    ),
    grpc.StatusCode.FAILED_PRECONDITION: (
        "kvindexd's configuration lacks something; the message says what"
    ),
}


def arguments(about: str) -> argparse.ArgumentParser:
    """The flags that all examples have."""
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--address", default="127.0.0.1:50051", help="where kvindexd serves gRPC")
    parser.add_argument(
        "--model",
        default="",
        help="as workers registered it; may be left out while there is only one",
    )
    parser.add_argument(
        "--tokens", required=True, metavar="FILE", help="token ids as JSON, - for standard input"
    )
    parser.add_argument(
        "--deadline",
        type=float,
        default=2.0,
        metavar="SECONDS",
        help="for each call; a gateway would take some 0.05",
    )
    parser.add_argument(
        "--ca",
        default="",
        metavar="FILE",
        help="connect with TLS; the authority of the server's certificate, PEM",
    )
    return parser


def credentials(args: argparse.Namespace) -> grpc.ChannelCredentials | None:
    """For TLS; None without it."""
    return grpc.ssl_channel_credentials(Path(args.ca).read_bytes()) if args.ca else None


def open_channel(args: argparse.Namespace) -> grpc.Channel:
    """A gateway keeps one for its life: connections are dear, channels are thread-safe."""
    if (tls := credentials(args)) is not None:
        return grpc.secure_channel(args.address, tls, CHANNEL_OPTIONS)
    return grpc.insecure_channel(args.address, CHANNEL_OPTIONS)


def call_options(args: argparse.Namespace) -> dict[str, Any]:
    """For every call: a deadline, and the token where kvindexd asks for one."""
    token = os.environ.get("KVINDEXD_TOKEN", "")
    metadata = [("authorization", f"Bearer {token}")] if token else []
    return {"timeout": args.deadline, "metadata": metadata}


def read_prompts(name: str) -> list[list[int]]:
    """The prompts of a file: one list of token ids, or a list of such lists. Raises SystemExit."""
    try:
        read = json.loads(sys.stdin.read() if name == "-" else Path(name).read_text())
    except (OSError, ValueError) as e:
        sys.exit(f"--tokens {name}: {e}; expected a file like [1, 2, 3] or [[1, 2], [3, 4]]")
    prompts = read if isinstance(read, list) and read and isinstance(read[0], list) else [read]
    for prompt in prompts:
        if not isinstance(prompt, list) or not all(
            isinstance(t, int) and 0 <= t < 1 << 32 for t in prompt
        ):
            sys.exit(f"--tokens {name}: expected token ids, integers in 0..2**32-1, like [1, 2, 3]")
    return prompts


def packed(tokens: Sequence[int]) -> bytes:
    """Token ids as little-endian uint32: what kvindexd reads fastest."""
    return struct.pack(f"<{len(tokens)}I", *tokens)


def fail(error: grpc.RpcError) -> int:
    """Say what went wrong and what to do; the exit status."""
    code = error.code()
    print(f"{code.name}: {error.details()}", file=sys.stderr)
    print(f"  {ADVICE.get(code, 'not expected; see the log of kvindexd')}", file=sys.stderr)
    return 1


def table(rows: Sequence[Sequence[object]]) -> None:
    """Print rows, the first of which is the head, in columns."""
    text = [[str(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*text, strict=True)]
    for row in text:
        print("  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip())


def score_rows(scores: Sequence[pb.WorkerScore]) -> list[list[object]]:
    """Head and one row per worker."""
    head: list[object] = ["worker", "rank", "address", "reusable", "active", "cost", "state"]
    return [head] + [
        [
            s.worker_id,
            s.dp_rank,
            s.address,
            s.reusable_tokens,
            s.active_blocks,
            f"{s.cost:.1f}",
            pb.WorkerState.Name(s.state),
        ]
        for s in scores
    ]
