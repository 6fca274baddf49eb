"""Makes docs/images/ui.png: python tests/picture_ui.py OUT.png [SECONDS]. Not a test."""

from __future__ import annotations

import random
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

import browser as chromium
from daemon import Daemon, serving
from picks import fresh, request, stored

from kvindexd.testing.engine import FakeEngine
from kvindexd.v1 import index_pb2 as pb

WORKERS = 6


def traffic(daemon: Daemon, engines: list[FakeEngine], seconds: float) -> None:
    """Conversations that come again and again, on whichever worker is picked."""
    source = random.Random(7)
    prompts = [fresh(source.randrange(20, 120)) for _ in range(400)]
    end, n = time.monotonic() + seconds, 0
    while time.monotonic() < end:
        prompt = prompts[min(399, int(source.expovariate(0.02)))]
        picked = daemon.index.PickWorker(request(prompt, model="llama"), timeout=10)
        daemon.score(prompt, model="llama")
        engine = engines[int(picked.worker.worker_id.rpartition("-")[2])]
        if picked.worker.reusable_tokens < len(prompt) - 32:
            if source.random() < 0.05:
                engine.drop_next()
            engine.publish([stored(prompt)])
        done = pb.CompleteRequestRequest(
            request_id=picked.request_id, cached_tokens=picked.worker.reusable_tokens
        )
        daemon.index.CompleteRequest(done, timeout=10)
        n += 1
        wave = 1.5 + (n % 400) / 200
        time.sleep(source.uniform(0.01, 0.04) * wave)


def main() -> int:
    """Run a fleet for a while and take the picture."""
    out, seconds = Path(sys.argv[1]), float(sys.argv[2]) if len(sys.argv) > 2 else 60.0
    binary = chromium.find()
    if binary is None:
        print(chromium.MISSING, file=sys.stderr)
        return 1
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        daemon = stack.enter_context(serving(index__data_dir=folder))
        engines = [stack.enter_context(FakeEngine()) for _ in range(WORKERS)]
        for i, engine in enumerate(engines):
            daemon.register(
                f"gpu-{i}",
                engine.endpoint(),
                model="llama",
                address=f"10.0.0.{i + 10}:8000",
                replay_endpoint=engine.replay_endpoint(),
            )
        for engine in engines:
            engine.wait_subscribed()
        running = stack.enter_context(chromium.browser(binary))
        traffic(daemon, engines, seconds - 6)
        request_draining = pb.DrainWorkerRequest(worker_id="gpu-5")
        daemon.admin.DrainWorker(request_draining, timeout=10)
        page = running.open(f"http://{daemon.ready['metrics']}/ui", 1320, 720)
        traffic(daemon, engines, 6)
        page.until("document.body.innerText.includes('DRAINING')", "the drained worker")
        out.write_bytes(page.picture())
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
