"""Score many prompts from asyncio: as one stream, in batches, or by single calls.

    python score_async.py --address 127.0.0.1:50051 --model m --tokens prompts.json --by batch

A call costs kvindexd more than the scoring in it: batches are cheapest where prompts come together,
a stream where they come one by one over a long time.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Sequence
from typing import Any

import grpc
from common import (
    CHANNEL_OPTIONS,
    arguments,
    call_options,
    credentials,
    fail,
    packed,
    read_prompts,
    table,
)

from kvindexd.v1 import index_pb2 as pb
from kvindexd.v1 import index_pb2_grpc as rpc

BATCH = 32
AHEAD = 64
"""Requests of a stream that may wait for their answers."""
ATTEMPTS = 4
RETRYABLE = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED)
Requests = Sequence[pb.ScoreWorkersRequest]


async def by_calls(
    index: rpc.KVIndexStub, requests: Requests, options: dict[str, Any]
) -> list[pb.ScoreWorkersResponse]:
    """One call per prompt, at most AHEAD at once."""
    room = asyncio.Semaphore(AHEAD)

    async def one(request: pb.ScoreWorkersRequest) -> pb.ScoreWorkersResponse:
        async with room:
            return await index.ScoreWorkers(request, **options)

    return await together([one(request) for request in requests])


async def by_batch(
    index: rpc.KVIndexStub, requests: Requests, options: dict[str, Any]
) -> list[pb.ScoreWorkersResponse]:
    """One call per BATCH prompts; answers are in the order of the requests."""

    async def one(some: Requests) -> list[pb.ScoreWorkersResponse]:
        batch = pb.ScoreWorkersBatchRequest(requests=some)
        return list((await index.ScoreWorkersBatch(batch, **options)).responses)

    parts = [requests[at : at + BATCH] for at in range(0, len(requests), BATCH)]
    return [r for answers in await together([one(part) for part in parts]) for r in answers]


async def by_stream(
    index: rpc.KVIndexStub, requests: Requests, options: dict[str, Any]
) -> list[pb.ScoreWorkersResponse]:
    """One stream; answers come in the order of the requests. gRPC does not retry a stream that has
    brought an answer, so what is unanswered is asked again here."""
    answers: list[pb.ScoreWorkersResponse] = []
    attempt = 0
    while len(answers) < len(requests):
        before = len(answers)
        try:
            await one_stream(index, requests[before:], answers, options)
            if len(answers) == before:
                sys.exit("the server ended the stream without an answer: see its log")
        except grpc.aio.AioRpcError as e:
            if e.code() is grpc.StatusCode.INTERNAL:
                # So grpc.aio says that it could not write, and hides why the server ended the
                # stream. A call of its own tells, or brings the answer.
                answers.append(await index.ScoreWorkers(requests[len(answers)], **options))
                continue
            attempt = 1 if len(answers) > before else attempt + 1
            if e.code() not in RETRYABLE or attempt >= ATTEMPTS:
                raise
            await asyncio.sleep(0.02 * 3**attempt)
    return answers


async def one_stream(
    index: rpc.KVIndexStub,
    requests: Requests,
    answers: list[pb.ScoreWorkersResponse],
    options: dict[str, Any],
) -> None:
    """Append the answers as they come. The deadline is for each: the stream itself may be long."""
    room = asyncio.Semaphore(AHEAD)

    async def sending() -> AsyncIterator[pb.ScoreWorkersRequest]:
        for request in requests:
            await room.acquire()
            yield request

    call = index.ScoreWorkersStream(sending(), metadata=options["metadata"])
    try:
        for _ in requests:
            async with asyncio.timeout(options["timeout"]):
                answer = await call.read()
            if answer is grpc.aio.EOF:
                return
            answers.append(answer)
            room.release()
    finally:
        call.cancel()


async def together(work: Sequence) -> list:
    """All results in order; the first error ends the rest."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one) for one in work]
    except* grpc.aio.AioRpcError as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]


WAYS = {"stream": by_stream, "batch": by_batch, "calls": by_calls}


async def run() -> int:
    """0 when every prompt was scored, 1 when a call failed."""
    parser = arguments("Score many prompts; one line each with the worker to prefer.")
    parser.add_argument("--by", choices=WAYS, default="stream")
    args = parser.parse_args()
    prompts = read_prompts(args.tokens)
    requests = [
        # Nobody looks at more than the best here: top_k keeps the answer small.
        pb.ScoreWorkersRequest(
            prompt=pb.Prompt(model=args.model, token_ids=packed(tokens)),
            options=pb.ScoreOptions(top_k=1),
        )
        for tokens in prompts
    ]
    options, tls = call_options(args), credentials(args)
    made = (
        grpc.aio.secure_channel(args.address, tls, CHANNEL_OPTIONS)
        if tls
        else grpc.aio.insecure_channel(args.address, CHANNEL_OPTIONS)
    )
    async with made as channel:
        try:
            answers = await WAYS[args.by](rpc.KVIndexStub(channel), requests, options)
        except grpc.aio.AioRpcError as e:
            return fail(e)
        except TimeoutError:
            print(f"no answer within {args.deadline} s: raise --deadline", file=sys.stderr)
            return 1
    rows: list[list[object]] = [["prompt", "tokens", "best", "address", "reusable"]]
    for number, answer in enumerate(answers):
        for best in answer.scores[:1]:
            rows.append(
                [number, answer.prompt_tokens, best.worker_id, best.address, best.reusable_tokens]
            )
    table(rows)
    return 0


if __name__ == "__main__":
    sys.exit(asyncio.run(run()))
