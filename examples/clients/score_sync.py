"""Score a prompt, pick a worker, and report the request's end: the whole life of a request.

python score_sync.py --address 127.0.0.1:50051 --model m --tokens prompt.json
"""

from __future__ import annotations

import sys
import uuid
from typing import Any

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

from kvindexd.v1 import index_pb2 as pb
from kvindexd.v1 import index_pb2_grpc as rpc


def main() -> int:
    """0 when all calls succeeded, 1 when one failed."""
    parser = arguments("Score a prompt, pick a worker, report the request's end.")
    parser.add_argument("--cached", type=int, help="tokens that the engine reported as reused")
    args = parser.parse_args()
    tokens = read_prompts(args.tokens)[0]
    prompt = pb.Prompt(model=args.model, token_ids=packed(tokens))
    asked = pb.ScoreWorkersRequest(prompt=prompt)
    options = call_options(args)
    with open_channel(args) as channel:
        index = rpc.KVIndexStub(channel)
        try:
            answer = index.ScoreWorkers(asked, **options)
            print(f"{answer.prompt_tokens} tokens, {answer.prompt_blocks} blocks")
            table(score_rows(answer.scores))
            serve(index, asked, args.cached, options)
        except grpc.RpcError as e:
            return fail(e)
    return 0


def serve(
    index: rpc.KVIndexStub,
    asked: pb.ScoreWorkersRequest,
    cached: int | None,
    options: dict[str, Any],
) -> None:
    """What a gateway does with one request."""
    # With an id of our own a retried pick replaces the first instead of counting as load twice.
    pick = index.PickWorker(
        pb.PickWorkerRequest(score=asked, request_id=uuid.uuid4().hex), **options
    )
    try:
        others = ", ".join(f.address for f in pick.fallbacks) or "nobody"
        print(f"picked {pick.worker.worker_id} at {pick.worker.address}, after it {others}")
        # Here the request goes to pick.worker.address, with header x-data-parallel-rank =
        # pick.worker.dp_rank where the engine has several, and the answer to the client.
    finally:
        # Whatever became of it, it is no load any more. `cached_tokens` of the engine's `usage`
        # lets kvindexd compare what it promised.
        end = pb.CompleteRequestRequest(request_id=pick.request_id)
        if cached is not None:
            end.cached_tokens, end.prompt_tokens = cached, pick.prompt_tokens
        index.CompleteRequest(end, **options)
        print(f"completed {pick.request_id}")


if __name__ == "__main__":
    sys.exit(main())
