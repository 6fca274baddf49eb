"""Score by keys that the client computes itself, as docs/hash-spec.md says, with xxhash alone.

    python score_by_hash.py --address 127.0.0.1:50051 --model m --tokens prompt.json

Half a byte per token instead of four, and no prompt leaves the client. The same prompt is then
scored by its token ids: both answers must be equal.
"""

from __future__ import annotations

import argparse
import struct
import sys
from collections.abc import Sequence

import grpc
from common import (
    arguments,
    call_options,
    fail,
    open_channel,
    packed,
    read_prompts,
    score_rows,
    table,
)
from xxhash import xxh3_64_intdigest as xxh3

from kvindexd.v1 import index_pb2 as pb
from kvindexd.v1 import index_pb2_grpc as rpc

UNIT = 16
"""Tokens per key."""
Item = tuple[str, int]
"""A multimodal item: its identifier, and the token position where its placeholder begins."""


def msgpack(value: str | int | Sequence) -> bytes:
    """The little of msgpack that the specification needs, each in its shortest form."""
    if isinstance(value, str):
        text = value.encode()
        return _head(len(text), 0xA0, 32, ((0xD9, ">B"), (0xDA, ">H"), (0xDB, ">I"))) + text
    if isinstance(value, int):
        return _head(value, 0x00, 128, ((0xCC, ">B"), (0xCD, ">H"), (0xCE, ">I")))
    head = _head(len(value), 0x90, 16, ((0xDC, ">H"), (0xDD, ">I")))
    return head + b"".join(msgpack(part) for part in value)


def _head(number: int, short: int, below: int, longer: Sequence[tuple[int, str]]) -> bytes:
    if number < below:
        return bytes([short | number])
    for mark, form in longer:
        if number < 1 << 8 * struct.calcsize(form):
            return bytes([mark]) + struct.pack(form, number)
    raise ValueError(f"{number} is too large")


def chain_keys(
    tokens: Sequence[int],
    lora_name: str = "",
    cache_salt: str = "",
    items: Sequence[Item] = (),
    unit: int = UNIT,
) -> list[int]:
    """One key per full unit; a trailing partial unit has none."""
    key = xxh3(msgpack([lora_name, cache_salt])) if lora_name or cache_salt else 0
    body = packed(tokens)
    keys = []
    for start in range(0, len(tokens) - unit + 1, unit):
        pairs = [[name, at - start] for name, at in items if start <= at < start + unit]
        extras = msgpack(sorted(pairs, key=lambda pair: pair[1])) if pairs else b""
        key = xxh3(body[4 * start : 4 * (start + unit)] + extras, seed=key)
        keys.append(key)
    return keys


def lookahead(tokens: Sequence[int], keys: Sequence[int], unit: int = UNIT) -> list[int]:
    """For engines with EAGLE or MTP: at each boundary the hash of the token behind it, or 0."""
    ends = range(unit, len(tokens) + 1, unit)
    return [
        xxh3(struct.pack("<I", tokens[end]), seed=key) if end < len(tokens) else 0
        for end, key in zip(ends, keys, strict=True)
    ]


def by_hash(args: argparse.Namespace, tokens: Sequence[int]) -> pb.Prompt:
    """The prompt as keys. Adapter, salt and items are inside them already."""
    keys = chain_keys(tokens, args.lora, args.salt)
    ahead = lookahead(tokens, keys)
    chain = pb.ChainHashes(
        packed=struct.pack(f"<{len(keys)}Q", *keys),
        lookahead_packed=struct.pack(f"<{len(ahead)}Q", *ahead),
        unit=UNIT,
        tokens=len(tokens),
    )
    return pb.Prompt(model=args.model, chain=chain)


def main() -> int:
    """0 when both answers are equal, 1 when they are not or a call failed."""
    parser = arguments("Score a prompt by keys and by token ids.")
    parser.add_argument("--lora", default="", help="name of the adapter")
    parser.add_argument("--salt", default="", help="cache_salt of the request")
    args = parser.parse_args()
    tokens = read_prompts(args.tokens)[0]
    by_tokens = pb.Prompt(
        model=args.model, token_ids=packed(tokens), lora_name=args.lora, cache_salt=args.salt
    )
    # A worker whose page size is no multiple of UNIT answers 0 by keys; explain tells the reason.
    options = pb.ScoreOptions(explain=True)
    prompts = (by_hash(args, tokens), by_tokens)
    with open_channel(args) as channel:
        index = rpc.KVIndexStub(channel)
        try:
            hashed, plain = (
                index.ScoreWorkers(
                    pb.ScoreWorkersRequest(prompt=prompt, options=options), **call_options(args)
                )
                for prompt in prompts
            )
        except grpc.RpcError as e:
            return fail(e)
    sizes = [p.ByteSize() for p in prompts]
    print(f"{len(tokens)} tokens: {sizes[0]} bytes by keys, {sizes[1]} by token ids")
    table(score_rows(hashed.scores))
    return compared(hashed.scores, plain.scores)


def compared(hashed: Sequence[pb.WorkerScore], plain: Sequence[pb.WorkerScore]) -> int:
    """Whether both ways found the same for every worker; the exit status."""
    found = [{(s.worker_id, s.dp_rank): s for s in scores} for scores in (hashed, plain)]
    status = 0
    for who in sorted(found[0].keys() | found[1].keys()):
        one, other = (side.get(who, pb.WorkerScore()) for side in found)
        if one.reusable_tokens != other.reusable_tokens:
            print(
                f"{who[0]}: {one.reusable_tokens} by keys, {other.reusable_tokens} by token ids: "
                f"{one.reason}",
                file=sys.stderr,
            )
            status = 1
    if not status:
        print("the same by token ids")
    return status


if __name__ == "__main__":
    sys.exit(main())
