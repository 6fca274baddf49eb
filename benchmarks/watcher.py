"""A replica in a process of its own that says how old each batch was when queries could see it.

    python -m benchmarks.watcher REDIS_URL

It prints `ready`, and upon a line on stdin the ages in seconds since then, as JSON.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time

import structlog
import uvloop

from kvindexd import registration as registrations
from kvindexd.records import decode_records
from kvindexd.registration import Registration
from kvindexd.replica.replica import Replica
from kvindexd.store import Store


async def run(url: str) -> None:
    """Follow the store until stdin closes."""
    ages: list[float] = []
    async with Store(url) as store:
        replica: Replica[Registration] = Replica(
            store,
            registrations.decode,
            decode_records,
            on_applied=lambda _worker, ts: ages.append(time.time() - ts),
        )
        following = asyncio.create_task(replica.run())
        while replica.not_ready():  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        print("ready", flush=True)
        while await asyncio.to_thread(sys.stdin.readline):
            print(json.dumps(ages), flush=True)
            ages.clear()
        following.cancel()


if __name__ == "__main__":
    structlog.configure(
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        wrapper_class=structlog.make_filtering_bound_logger(30),  # warnings
    )
    uvloop.run(run(sys.argv[1]))
