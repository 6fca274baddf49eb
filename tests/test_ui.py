"""The operators' page, in a real browser, over a live fleet. (That it can be turned off: see
test_dashboards.py, whose daemon has it off.)"""

from __future__ import annotations

import http.client
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import browser as chromium
import pytest
from daemon import Daemon, serving
from picks import fresh, hold, request, stored

from kvindexd.testing.engine import FakeEngine
from kvindexd.ui.history import RANK_SAMPLES, FleetHistory, RankHistory, Sample, columns
from kvindexd.v1 import index_pb2 as pb

STATIC = Path(__file__).parent.parent / "kvindexd" / "ui" / "static"
HOSTILE = "<img src=x onerror=\"window.hacked='id'\">"
"""A worker id, and with it everything that a worker may name: text, whatever it looks like."""
HEADERS = {
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cache-control": "no-store",
}


class Live(NamedTuple):
    daemon: Daemon
    prompt: list[int]

    @property
    def url(self) -> str:
        return f"http://{self.daemon.ready['metrics']}/ui"


def ask(
    daemon: Daemon, path: str, method: str = "GET", body: Any = None, **headers: str
) -> tuple[int, dict[str, str], bytes]:
    """(status, headers by lower-case name, body); header names with _ for -."""
    connection = http.client.HTTPConnection(daemon.ready["metrics"], timeout=10)
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    if isinstance(body, dict | list):
        body = json.dumps(body)
        named = {"Content-Type": "application/json"} | named
    connection.request(method, path, body, named)
    response = connection.getresponse()
    found = {name.lower(): value for name, value in response.getheaders()}
    got = (response.status, found, response.read())
    connection.close()
    return got


def ask_json(daemon: Daemon, path: str, **more: Any) -> Any:
    status, headers, body = ask(daemon, path, **more)
    assert status == 200, body
    assert headers["content-type"] == "application/json"
    return json.loads(body)


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """Two workers that hold a prompt, one of hybrid groups and one with a hostile name."""
    folder = str(tmp_path_factory.mktemp("store"))
    settings = {"index.data_dir": folder, "pick.prediction_ttl": 0}
    with serving(**settings) as daemon, FakeEngine() as plain, FakeEngine() as hybrid:
        prompt, part = fresh(24), 16 * 10
        daemon.register("w0", hybrid.endpoint(), labels={"rack": HOSTILE})
        daemon.register(HOSTILE, plain.endpoint(), address="evil.test:8000")
        for engine in (plain, hybrid):
            engine.wait_subscribed()
        whole = stored(prompt)
        names = whole["block_hashes"]
        state = {"group_idx": 1, "kv_cache_spec_kind": "mamba"}
        gone = {"type": "BlockRemoved", "block_hashes": names[15:18], "medium": "GPU"}
        hybrid.publish([whole])
        hybrid.publish([stored(prompt, block_hashes=names, **state)])
        seq = hybrid.publish([gone | {"group_idx": 0}])
        daemon.until_seq("w0", seq)
        hold(daemon, plain, HOSTILE, prompt[:part])
        for worker in ("w0", "w0", HOSTILE):
            picked = daemon.index.PickWorker(request(prompt, candidates=[worker]), timeout=10)
            done = pb.CompleteRequestRequest(request_id=picked.request_id)
            daemon.index.CompleteRequest(done, timeout=10)
        yield Live(daemon, prompt)


@pytest.fixture(scope="module")
def running() -> Iterator[chromium.Browser]:
    binary = chromium.find()
    if binary is None:
        pytest.skip(chromium.MISSING)
    with chromium.browser(binary) as started:
        yield started


def _rows(page: chromium.Page) -> list[list[str]]:
    rows = "[...document.querySelectorAll('#workers tbody tr')]"
    found: list[list[str]] = page.run(f"{rows}.map(r => [...r.cells].map(c => c.innerText))")
    return found


# -- in a browser ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def page(live: Live, running: chromium.Browser) -> chromium.Page:
    """The fleet's page once it shows the fleet; every test leaves it where it wants."""
    opened = running.open(live.url)
    opened.until("document.querySelectorAll('#workers .LIVE').length == 2", "two live rows")
    return opened


def _turn(page: chromium.Page, where: str, shown: str) -> None:
    page.run(f"location.hash = {json.dumps(where)}")
    page.until(f"!!document.querySelector({json.dumps(shown)})", f"{where} shows {shown}")


def test_the_fleet_is_shown_and_sorted(live: Live, page: chromium.Page) -> None:
    _turn(page, "#/fleet", "#workers tbody tr")
    found = {row[0].split("\n")[0]: row for row in _rows(page)}
    titles = page.run("[...document.querySelectorAll('#workers th')].map(t => t.innerText)")
    titles[0] = "Worker"  # it has the mark of the order
    w0 = dict(zip(titles, found["w0#0"], strict=True))
    shown = [w0[title] for title in ("State", "Model", "Device", "Gaps", "Picks", "Hit ratio")]
    assert shown == ["LIVE", "m", "24", "0", "2", "62.5 %"]  # 240 of 384 tokens
    assert "connected to tcp://" in w0["Worker"]
    page.run("[...document.querySelectorAll('#workers th button')].at(4).click()")
    assert [row[titles.index("Device")] for row in _rows(page)] == ["24", "10"]
    page.run(
        "const f = document.querySelector('#filter'); f.value = 'w0'; "
        "f.dispatchEvent(new Event('input'))"
    )
    assert [row[0].split("\n")[0] for row in _rows(page)] == ["w0#0"]
    page.run("document.querySelector('#filter').value = ''")


def test_charts_follow_the_traffic(live: Live, page: chromium.Page) -> None:
    _turn(page, "#/fleet", "#charts figure")
    label = "document.querySelector('#charts svg[aria-label^=\"Calls\"]').ariaLabel"
    page.until("document.querySelectorAll('#charts path').length == 5", "five lines")
    live.daemon.score(live.prompt)
    page.until(f"/calls [0-9]*[.1-9]/.test({label})", "a call in the chart")
    page.until(
        "document.querySelector('#charts svg[aria-label^=\"Hit\"]').ariaLabel"
        ".includes('best worker 62.5 %')",
        "its hit ratio: 240 of 384 tokens",
    )


def test_a_hostile_name_is_text(page: chromium.Page) -> None:
    _turn(page, "#/fleet", "#workers tbody tr")
    assert any(row[0].startswith(HOSTILE) for row in _rows(page))
    query = "[...document.querySelectorAll('#workers a')].find(a => a.innerText.includes('img'))"
    page.run(f"{query}.click()")
    page.until("!!document.querySelector('#groups')", "the hostile worker's page")
    assert HOSTILE in page.run("document.querySelector('#worker h2').innerText")
    assert page.run("document.images.length") == 0
    assert page.run("window.hacked") is None


def test_a_workers_page(page: chromium.Page) -> None:
    _turn(page, "#/worker?worker_id=w0&dp_rank=0&namespace=", "#groups")
    page.until(
        "document.querySelector('#worker').innerText.includes('event:BlockStored')", "counters"
    )
    shown = page.run("document.querySelector('#worker').innerText")
    for part in ("w0#0 LIVE", "full_attention", "mamba", "auxiliary", "w0.test:8000", HOSTILE[:8]):
        assert part in shown, shown
    assert page.run("document.images.length") == 0
    _turn(page, "#/worker?worker_id=nobody&dp_rank=0&namespace=", "#problem:not([hidden])")
    assert "nobody#0 is not registered" in page.run("document.querySelector('#problem').innerText")


def test_the_form_explains_block_by_block(live: Live, page: chromium.Page) -> None:
    _turn(page, "#/explain", "#explain:not([hidden])")
    typed = json.dumps(", ".join(map(str, live.prompt)))
    page.run(f"document.querySelector('#prompt').value = {typed}")
    page.run("document.querySelector('#question button').click()")
    page.until("document.querySelectorAll('.explained').length == 2", "an answer per worker")
    strips = page.run("[...document.querySelectorAll('svg.strip')].map(s => s.ariaLabel)")
    assert strips == [
        "15 device, 3 missing, 6 device",
        "24 device",
        "10 device, 14 missing",
    ]
    shown = page.run("document.querySelector('#answer').innerText")
    assert "prompt of 384 tokens, 240 of them held somewhere" in shown
    assert "240 tokens reusable" in shown
    assert "group 0 (full_attention) stops the match at block 15" in shown
    assert (
        page.run("document.querySelectorAll('svg.strip')[0].querySelectorAll('rect').length") == 3
    )
    page.run("document.querySelector('#prompt').value = '1, x'")
    page.run("document.querySelector('#question button').click()")
    page.until("document.querySelector('#answer').innerText.includes('whole numbers')", "a hint")
    page.run("document.querySelector('#kind').value = 'text'")
    page.run("document.querySelector('#question button').click()")
    page.until("document.querySelector('#answer').innerText.includes('no tokenizer')", "why not")


def test_nothing_comes_from_elsewhere_and_nothing_complains(
    live: Live, page: chromium.Page
) -> None:
    asked = {url.split("?")[0] for url in page.requested()}
    assert all(url.startswith(f"{live.url}") for url in asked), asked
    expected = ("404 (Not Found)", "400 (Bad Request)")  # asked for above, on purpose
    assert not [c for c in page.complaints() if not any(e in c for e in expected)]


# -- over HTTP ------------------------------------------------------------------------------------


def test_every_answer_has_strict_headers(live: Live) -> None:
    for path in ("/ui", "/ui/app.js", "/ui/style.css", "/ui/api/fleet", "/ui/api/x", "/ui/../x"):
        _, headers, _ = ask(live.daemon, path)
        assert {k: headers.get(k) for k in HEADERS} == HEADERS, path
        policy = headers["content-security-policy"]
        assert "default-src 'self'" in policy
        assert "frame-ancestors 'none'" in policy
        assert "unsafe" not in policy


def test_only_reading_is_possible(live: Live) -> None:
    daemon = live.daemon
    for path in ("/ui", "/ui/api/fleet", "/ui/api/explain"):
        for method in ("PUT", "DELETE", "OPTIONS"):
            assert ask(daemon, path, method)[0] == 405
    assert ask(daemon, "/ui/api/fleet", "POST", {})[0] == 405
    assert ask(daemon, "/ui/api/explain")[0] == 405
    status, headers, body = ask(daemon, "/ui", "HEAD")
    assert (status, body) == (200, b"")
    assert int(headers["content-length"]) > 1000
    assert ask(daemon, "/ui/")[1]["location"] == "../ui"
    for path in ("/ui/../config", "/ui/%2e%2e/pages.py", "/ui/static/app.js", "/uix", "/ui/api/"):
        assert ask(daemon, path)[0] == 404


def test_the_form_refuses_what_it_should(live: Live) -> None:
    def explain(body: Any, **headers: str) -> tuple[int, str]:
        status, _, answer = ask(live.daemon, "/ui/api/explain", "POST", body, **headers)
        return status, json.loads(answer)["error"] if answer[:1] == b"{" else answer.decode()

    good = {"model": "m", "token_ids": live.prompt}
    assert explain(good, Content_Type="text/plain")[0] == 415
    assert explain(good, Sec_Fetch_Site="cross-site")[0] == 403
    for bad, words in [
        ("{", "truncated"),
        ({"token_ids": [1], "text": "x"}, "exactly one"),
        ({}, "exactly one"),
        ({"token_ids": [-1]}, ">= 0"),
        ({"token_ids": [1], "top_k": 51}, "<= 50"),
        ({"token_ids": [1], "surprise": 1}, "surprise"),
        ({"model": "m", "text": "x"}, "no tokenizer"),
    ]:
        status, error = explain(bad, Content_Type="application/json")
        assert status == 400, bad
        assert words in error
    assert explain(good | {"model": "other"})[0] == 404
    status, _, _ = ask(
        live.daemon,
        "/ui/api/explain",
        "POST",
        "x" * (1 << 20) + "y",
        Content_Type="application/json",
    )
    assert status == 413
    unknown = {"Content_Length": "9" * 5000, "Content_Type": "application/json"}
    assert ask(live.daemon, "/ui/api/explain", "POST", **unknown)[0] == 413
    chunked = {"Transfer_Encoding": "chunked", "Content_Type": "application/json"}
    assert ask(live.daemon, "/ui/api/explain", "POST", **chunked)[0] == 411


def test_the_form_gives_the_rpcs_answer(live: Live) -> None:
    asked = pb.ScoreWorkersRequest(
        prompt=pb.Prompt(model="m", tokens=pb.TokenIds(ids=live.prompt)),
        options=pb.ScoreOptions(explain=True),
    )
    answer = live.daemon.index.Explain(asked, timeout=10)
    body = {"token_ids": live.prompt}
    found = ask_json(live.daemon, "/ui/api/explain", method="POST", body=body)
    assert found["prompt_tokens"] == len(live.prompt)
    assert found["divergence"]["detail"] == answer.divergence.detail
    for expected, got in zip(answer.workers, found["workers"], strict=True):
        assert got["worker_id"] == expected.score.worker_id
        assert got["reusable_tokens"] == expected.score.reusable_tokens
        for group, shown in zip(expected.groups, got["groups"], strict=True):
            held = b"".join(bytes([code]) * n for code, n in shown["held"])
            assert (held, shown["why"]) == (group.held, group.why)


def test_history_goes_on_where_the_page_stopped(live: Live) -> None:
    first = ask_json(live.daemon, "/ui/api/history")
    assert len(first["time"]) == len(first["events"]) == len(first["lag_ms"]) > 0
    again = ask_json(live.daemon, f"/ui/api/history?since={first['next']}")
    assert len(again["time"]) == again["next"] - first["next"] <= 2
    beyond = ask_json(live.daemon, "/ui/api/history?since=999999")
    assert beyond["time"][0] == first["time"][0]
    for bad in ("x", "-1", "9" * 5000):
        assert ask(live.daemon, f"/ui/api/history?since={bad}")[0] == 400
    assert ask(live.daemon, "/ui/api/worker?worker_id=w0&dp_rank=-1")[0] == 400


# -- pure -----------------------------------------------------------------------------------------


def test_scripts_have_no_way_to_make_markup_of_text() -> None:
    for script in STATIC.glob("*.js"):
        found = re.findall(
            r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|Function\(|srcdoc",
            script.read_text(),
        )
        assert not found, script.name


def test_a_ranks_history_is_bounded_and_survives_new_counters() -> None:
    rank = RankHistory()
    for i in range(RANK_SAMPLES + 10):
        rank.add(2.0 * i, 20 * i, (1, i), 5)
    events, lag = rank.samples()
    assert len(events) == len(lag) == RANK_SAMPLES
    assert rank.rate == events[-1] == 10.0
    rank.add(2.0 * RANK_SAMPLES + 20, 0, (1, RANK_SAMPLES + 9), 5)
    assert rank.rate == 0.0  # registered anew
    assert rank.samples()[1][-1] is None  # no batch since


def test_the_fleets_history_numbers_its_samples() -> None:
    history = FleetHistory(3)
    for i in range(5):
        history.add(Sample(float(i), 0.0, None, None, None, 0.0, None))
    assert [s.time for s in history.since(0)[1]] == [2.0, 3.0, 4.0]
    assert history.since(4) == (5, [Sample(4.0, 0.0, None, None, None, 0.0, None)])
    assert history.since(5) == (5, [])
    assert len(history.since(6)[1]) == 3
    assert columns(history.since(4)[1])["time"] == [4.0]
