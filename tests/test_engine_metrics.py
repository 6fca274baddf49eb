"""The engines' own metrics pages: read, shown with their age, and counted where configured."""

from __future__ import annotations

import http.server
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from daemon import serving
from picks import complete, fresh, hold, pick

from kvindexd.ingest.engine_metrics import (
    EngineLoad,
    EngineMetricsError,
    parse_page,
    read_page,
)
from kvindexd.testing.engine import FakeEngine

VLLM = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_running{engine="1",model_name="m"} 5.0
vllm:num_requests_waiting{engine="0",model_name="m"} 7.0
vllm:num_requests_waiting{engine="1",model_name="m"} 1.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
vllm:kv_cache_usage_perc{engine="1",model_name="m"} 0.5
vllm:num_requests_waiting_by_reason{reason="capacity"} 99.0
"""


def test_pages_of_engines_new_and_old() -> None:
    assert parse_page(VLLM) == EngineLoad(3, 7, 0.25)
    assert parse_page(VLLM, dp_rank=1) == EngineLoad(5, 1, 0.5)
    old = 'vllm:num_requests_waiting{model_name="m"} 2\nvllm:gpu_cache_usage_perc 1.5e-1\n'
    assert parse_page(old, dp_rank=3) == EngineLoad(0, 2, 0.15)
    sglang = "sglang:num_running_reqs 4.0\nsglang:num_queue_reqs 6.0\nsglang:token_usage NaN\n"
    assert parse_page(sglang) == EngineLoad(4, 6, 0.0)
    with pytest.raises(EngineMetricsError, match="none of vllm:num_requests_running"):
        parse_page("up 1\nvllm:num_requests_running{broken 3\n")


class Page:
    """A page over real HTTP; `text` may be changed, None = status 503."""

    text: str | None = VLLM
    address = ""


@contextmanager
def serve_page() -> Iterator[Page]:
    page = Page()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            found = page.text is not None and self.path == "/metrics"
            self.send_response(200 if found else 503)
            self.end_headers()
            if found:
                self.wfile.write((page.text or "").encode())

        def log_message(self, *_: Any) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    page.address = f"127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield page
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


async def test_pages_that_cannot_be_read_say_why() -> None:
    with serve_page() as page:
        assert await read_page(page.address, "/metrics", 5.0) == VLLM
        with pytest.raises(EngineMetricsError, match="503"):
            await read_page(page.address, "/elsewhere", 5.0)
    with pytest.raises(EngineMetricsError, match="cannot connect"):
        await read_page(page.address, "/metrics", 5.0)
    with pytest.raises(EngineMetricsError, match="no port"):
        await read_page("host", "/metrics", 5.0)


def test_queue_of_an_engine_is_shown_with_its_age_and_counts(tmp_path: Any) -> None:
    settings = {"engine_metrics__interval": 0.1, "engine_metrics__waiting_weight": 2.0}
    with (
        serve_page() as page,
        FakeEngine() as a,
        FakeEngine() as b,
        serving(index__data_dir=str(tmp_path), **settings) as daemon,
    ):
        daemon.register("a", a.endpoint(), address=page.address)
        daemon.register("b", b.endpoint(), address="127.0.0.1:9")
        tokens = fresh(10)
        for name, engine in (("a", a), ("b", b)):
            engine.wait_subscribed()
            hold(daemon, engine, name, fresh(1))
        daemon.until(lambda: daemon.score(tokens)["a"].cost == 24, "7 waiting at 2 blocks each")
        assert daemon.score(tokens)["b"].cost == 10
        shown = daemon.worker("a").engine_load
        assert (shown.running, shown.waiting, shown.cache_usage) == (3, 7, 0.25)
        assert shown.age_ms < 10_000
        assert not daemon.worker("b").HasField("engine_load")
        got = pick(daemon, tokens)
        assert got.worker.worker_id == "b"
        complete(daemon, got.request_id)
        daemon.until(lambda: daemon.events("engine_metrics_unreadable"), "b cannot be read")
        assert {e["worker"] for e in daemon.events("engine_metrics_unreadable")} == {"b#0"}
        page.text = VLLM.replace(" 7.0", " 0.0")
        daemon.until(lambda: daemon.score(tokens)["a"].cost == 10, "the queue is empty")
        page.text = None
        daemon.until(lambda: daemon.worker("a").engine_load.age_ms > 400, "it grows old")
        assert len(daemon.events("engine_metrics_unreadable")) == 2
